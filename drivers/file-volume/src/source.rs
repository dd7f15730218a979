//! The image that a volume is made from.

use std::{
    fs::File,
    io,
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

use drivers_api::{DiskFormat, VolumeSpec};
use host::{files::FileError, qcow2};
use rustix::{
    fs::{AtFlags, CWD, linkat},
    io::Errno,
};

use crate::{copy, error::VolumeError, observe::open_regular};

/// A source that was checked: an open file whose header is one that we take.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    pub(crate) format: DiskFormat,
    /// The size that a guest sees.
    pub(crate) size: u64,
}

impl Source {
    /// Opens and checks the source of a spec; `None` when it has none. Has no effect.
    pub(crate) fn open(spec: &VolumeSpec) -> Result<Option<Self>, VolumeError> {
        let Some(wanted) = &spec.source else { return Ok(None) };
        let refuse = |reason| VolumeError::Source { reason, source: None };
        let path = wanted.path.as_ref().ok_or_else(|| refuse("its path is not given"))?.as_path();
        let file = open_regular(path, false).map_err(|error| {
            if error.source.kind() == io::ErrorKind::NotFound {
                return VolumeError::NoSource { path: path.to_owned() };
            }
            // A link in the file's place is ELOOP (open(2), O_NOFOLLOW).
            if error.source.kind() == io::ErrorKind::InvalidInput
                || error.source.raw_os_error() == Some(libc::ELOOP)
            {
                return refuse("it is no regular file");
            }
            error.into()
        })?;
        let size = match wanted.format {
            DiskFormat::Raw => file.metadata().map_err(FileError::of("look at", path))?.len(),
            DiskFormat::Qcow2 => {
                let checked = qcow2::inspect(&file)
                    .and_then(|info| info.check_standalone().map(|()| info.virtual_size));
                checked.map_err(|source| VolumeError::Source {
                    reason: "its header",
                    source: Some(source),
                })?
            }
            _ => return Err(VolumeError::UnknownFormat),
        };
        if size == 0 {
            return Err(refuse("it is empty"));
        }
        if size > spec.size_gib.bytes() {
            return Err(VolumeError::TooSmall { wanted: spec.size_gib.bytes(), needs: size });
        }
        Ok(Some(Self { file, path: path.to_owned(), format: wanted.format, size }))
    }

    /// Makes `to` the image without a copy of its bytes: as a hard link, else as a file that shares its blocks. Either
    /// survives the removal of the source. False when the filesystem can do neither.
    pub(crate) fn share(&self, to: &Path) -> Result<bool, VolumeError> {
        if link(&self.file, to)? {
            return Ok(true);
        }
        let file = host::files::create_new(to)?;
        if copy::share(&self.file, &file) {
            file.sync_all().map_err(FileError::of("sync", to))?;
            return Ok(true);
        }
        host::files::remove_file(to)?;
        Ok(false)
    }

    /// A name for a copy of this image that no other image gets: while the file exists its device and inode, and to tell it
    /// from a later file of the same inode its birth (or, where that is not kept, its last change), length and time.
    pub(crate) fn copy_name(&self) -> Result<String, VolumeError> {
        let meta = self.file.metadata().map_err(FileError::of("look at", &self.path))?;
        let born = meta
            .created()
            .ok()
            .and_then(|born| born.duration_since(std::time::UNIX_EPOCH).ok())
            .map_or_else(
                || format!("c{}.{}", meta.ctime(), meta.ctime_nsec()),
                |born| format!("b{}.{}", born.as_secs(), born.subsec_nanos()),
            );
        Ok(format!(
            "{:x}-{:x}-{:x}-{}.{}-{born}.{}",
            meta.dev(),
            meta.ino(),
            meta.len(),
            meta.mtime(),
            meta.mtime_nsec(),
            self.format.as_str()
        ))
    }
}

/// Makes `to` a hard link to an open file; false when that cannot be: another filesystem, too many links, no support.
pub(crate) fn link(file: &File, to: &Path) -> Result<bool, VolumeError> {
    // By its descriptor, so that the file that was checked is the file that is linked.
    let from = format!("/proc/self/fd/{}", file.as_raw_fd());
    match linkat(CWD, &from, CWD, to, AtFlags::SYMLINK_FOLLOW) {
        Ok(()) => Ok(true),
        Err(Errno::XDEV | Errno::MLINK | Errno::PERM | Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(FileError::of("link", to)(error.into()).into()),
    }
}
