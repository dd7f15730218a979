//! Where things are in a pool.
//!
//! ```text
//! POOL/                    0711
//!   pool.json              whose pool it is
//!   .lock                  byte ranges of it are locked, its content is nothing
//!   UUID/                  a volume; here from its publishing rename to its unpublishing one
//!     volume.json          our mark and the spec as applied
//!     disk.qcow2|disk.raw  the disk
//!     base.qcow2|base.raw  what a qcow2 disk is an overlay of: a hard link
//!     vm-UUID              an attachment: a symbolic link whose target is the record
//!   .new-UUID/             a volume in the making, half-made after a crash
//!   .del-UUID/             a volume in the removing
//!   bases/KEY.FORMAT       copies of images from other filesystems, while a volume links to them
//! ```

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
};

use drivers_api::{DiskFormat, VmId, VolumeId};

use crate::error::VolumeError;

/// The sidecar's name within a volume's directory.
pub(crate) const SIDECAR: &str = "volume.json";
/// What the name of an attachment begins with.
pub(crate) const ATTACHMENT: &str = "vm-";
/// What the name of a temporary file begins with (`host::files::temporary_beside`).
pub(crate) const TEMPORARY: &str = ".tmp-";
const STAGING: &str = ".new-";
const TRASH: &str = ".del-";
const BASES: &str = "bases";
const LOCK: &str = ".lock";
const MARKER: &str = "pool.json";

/// The paths of a pool.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pool: PathBuf,
}

/// What a name in the pool's directory stands for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PoolEntry {
    Volume(VolumeId),
    Staging(VolumeId),
    Trash(VolumeId),
    Temporary,
    Other,
}

/// What a name in a volume's directory stands for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum VolumeEntry {
    Part,
    Attachment(VmId),
    Temporary,
    Stranger,
}

impl Layout {
    pub(crate) const fn new(pool: PathBuf) -> Self {
        Self { pool }
    }

    pub(crate) fn pool(&self) -> &Path {
        &self.pool
    }

    pub(crate) fn volume(&self, id: VolumeId) -> PathBuf {
        self.pool.join(id.to_string())
    }

    pub(crate) fn staging(&self, id: VolumeId) -> PathBuf {
        self.pool.join(format!("{STAGING}{id}"))
    }

    pub(crate) fn trash(&self, id: VolumeId) -> PathBuf {
        self.pool.join(format!("{TRASH}{id}"))
    }

    pub(crate) fn bases(&self) -> PathBuf {
        self.pool.join(BASES)
    }

    pub(crate) fn lock_file(&self) -> PathBuf {
        self.pool.join(LOCK)
    }

    pub(crate) fn marker(&self) -> PathBuf {
        self.pool.join(MARKER)
    }
}

/// Sorts a name in the pool's directory. Only the one spelling of a UUID that we write is ours.
pub(crate) fn pool_entry(name: &OsStr) -> PoolEntry {
    let Some(name) = name.to_str() else { return PoolEntry::Other };
    if name.starts_with(TEMPORARY) {
        return PoolEntry::Temporary;
    }
    if let Some(id) = name.strip_prefix(STAGING).and_then(own_spelling) {
        return PoolEntry::Staging(id);
    }
    if let Some(id) = name.strip_prefix(TRASH).and_then(own_spelling) {
        return PoolEntry::Trash(id);
    }
    own_spelling(name).map_or(PoolEntry::Other, PoolEntry::Volume)
}

/// Whether a name that is no volume's may be in a pool's directory: what we make beside volumes, and what a filesystem has
/// in its root.
pub(crate) fn is_own_name(name: &OsStr) -> bool {
    [BASES, LOCK, MARKER, "lost+found"].iter().any(|own| name == *own)
}

fn own_spelling(text: &str) -> Option<VolumeId> {
    text.parse().ok().filter(|id: &VolumeId| id.to_string() == text)
}

/// Sorts a name in a volume's directory.
pub(crate) fn volume_entry(name: &OsStr) -> VolumeEntry {
    let Some(name) = name.to_str() else { return VolumeEntry::Stranger };
    match name {
        SIDECAR | "disk.raw" | "disk.qcow2" | "base.raw" | "base.qcow2" => VolumeEntry::Part,
        _ if name.starts_with(TEMPORARY) => VolumeEntry::Temporary,
        _ => name
            .strip_prefix(ATTACHMENT)
            .and_then(|vm| vm.parse().ok())
            .map_or(VolumeEntry::Stranger, VolumeEntry::Attachment),
    }
}

/// The name of the disk's file.
pub(crate) fn disk_name(format: DiskFormat) -> Result<&'static str, VolumeError> {
    match format {
        DiskFormat::Raw => Ok("disk.raw"),
        DiskFormat::Qcow2 => Ok("disk.qcow2"),
        _ => Err(VolumeError::UnknownFormat),
    }
}

/// The name of the file below an overlay. It stands in the overlay's header, relative to the overlay's directory, so a
/// pool that is mounted elsewhere still works.
pub(crate) fn base_name(format: DiskFormat) -> Result<&'static str, VolumeError> {
    match format {
        DiskFormat::Raw => Ok("base.raw"),
        DiskFormat::Qcow2 => Ok("base.qcow2"),
        _ => Err(VolumeError::UnknownFormat),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_spelling_of_a_uuid_is_a_volume() {
        let lower = "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b";
        let id: VolumeId = lower.parse().unwrap();
        assert_eq!(pool_entry(OsStr::new(lower)), PoolEntry::Volume(id));
        assert_eq!(pool_entry(OsStr::new(&lower.to_uppercase())), PoolEntry::Other);
        assert_eq!(pool_entry(OsStr::new(&format!(".new-{lower}"))), PoolEntry::Staging(id));
        assert_eq!(pool_entry(OsStr::new(&format!(".del-{lower}"))), PoolEntry::Trash(id));
        assert_eq!(pool_entry(OsStr::new("bases")), PoolEntry::Other);
    }

    #[test]
    fn files_that_we_do_not_make_are_strangers() {
        assert_eq!(volume_entry(OsStr::new("disk.raw")), VolumeEntry::Part);
        assert_eq!(volume_entry(OsStr::new("disk.raw.bak")), VolumeEntry::Stranger);
        assert_eq!(volume_entry(OsStr::new("vm-x")), VolumeEntry::Stranger);
    }
}
