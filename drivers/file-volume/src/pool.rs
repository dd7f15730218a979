//! A pool: a directory of volumes that belongs to one node.

use std::{
    error::Error as _,
    ffi::OsString,
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use drivers_api::{HostId, VolumeId, VolumeStatus};
use host::files::{self, FileError};
use serde::{Deserialize, Serialize};

use crate::{
    bases,
    error::VolumeError,
    layout::{self, Layout, PoolEntry, pool_entry},
    locks::{Key, Locks},
    observe::{self, Observed},
};

/// VMMs of other users pass the directory to their volumes; what they may not pass they cannot list.
const POOL_MODE: u32 = 0o711;
/// The marker is far below a page.
const MARKER_LIMIT: u64 = 4096;

/// What the driver's calls work with.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) layout: Layout,
    pub(crate) node: HostId,
    pub(crate) locks: Locks,
    pub(crate) qemu_img: PathBuf,
}

/// What `pool.json` holds: whose pool it is.
#[derive(Serialize, Deserialize)]
struct Marker {
    schema: u32,
    node: HostId,
}

impl Pool {
    /// Makes or adopts the pool in `dir` and removes what earlier crashes left of removals and copies.
    pub(crate) fn open(dir: &Path, node: HostId, qemu_img: PathBuf) -> Result<Self, VolumeError> {
        // Two drivers of one process open one pool in turn; the kernel's lock would refuse the second.
        static OPENING: Mutex<()> = Mutex::new(());
        let _turn = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        make_dir(dir)?;
        // Absolute and without links: what a VMM is told to open.
        let dir = fs::canonicalize(dir).map_err(FileError::of("resolve", dir))?;
        if dir.to_str().is_none() {
            return Err(VolumeError::Path { path: dir });
        }
        let layout = Layout::new(dir);
        check_empty(&layout)?;
        let locks = Locks::new(layout.pool(), layout.lock_file())?;
        let held = locks.hold_ungated(Key::POOL)?;
        claim(&layout, node)?;
        let pool = Self { layout, node, locks, qemu_img };
        // What cannot be removed now must not keep the other volumes from being served.
        if let Err(error) = pool.sweep() {
            tracing::warn!(error = %error, cause = ?error.source(), "remains of earlier work stay in the pool");
        }
        drop(held);
        Ok(pool)
    }

    /// Removes the remains of removals, unused copies and temporary files. Volumes in the making are left: they are shown
    /// by `list` until their creation is repeated or they are destroyed.
    fn sweep(&self) -> Result<(), VolumeError> {
        for (name, entry) in entries(self.layout.pool())? {
            match entry {
                // Only the marker is written here, under the lock that is held now.
                PoolEntry::Temporary => drop(files::remove_file(&self.layout.pool().join(name))?),
                PoolEntry::Trash(id) => {
                    let key = Key::volume(id);
                    let Some(gate) = self.locks.try_gate(key) else { continue };
                    match self.locks.hold(gate, key) {
                        Ok(_held) => drop(files::remove_tree(&self.layout.trash(id))?),
                        // Another process removes it now.
                        Err(VolumeError::Busy) => {}
                        Err(error) => return Err(error),
                    }
                }
                PoolEntry::Volume(_) | PoolEntry::Staging(_) | PoolEntry::Other => {}
            }
        }
        bases::collect(self)
    }

    /// All volumes with an agent's mark, and those in the making.
    pub(crate) fn list(&self) -> Result<Vec<VolumeStatus>, VolumeError> {
        self.locks.check_pool()?;
        let mut found = Vec::new();
        for (_, entry) in entries(self.layout.pool())? {
            match entry {
                PoolEntry::Volume(id) => match observe::live(&self.layout.volume(id), id) {
                    Ok(Some(live)) => {
                        self.remove_temporary(&live);
                        found.push(live.status());
                    }
                    // Removed meanwhile, or never an agent's.
                    Ok(None) | Err(VolumeError::Foreign { .. }) => {}
                    // One broken volume hides no other.
                    Err(error) => found.push(observe::unreadable_status(self.node, id, &error)),
                },
                PoolEntry::Staging(id) if !self.layout.volume(id).exists() => {
                    found.push(observe::staged_status(&self.layout, self.node, id));
                }
                PoolEntry::Staging(_)
                | PoolEntry::Trash(_)
                | PoolEntry::Temporary
                | PoolEntry::Other => {}
            }
        }
        found.sort_by_key(|status| status.uuid);
        Ok(found)
    }

    /// One volume, or one in the making; `None` when it was seen not to be there.
    pub(crate) fn get(&self, id: VolumeId) -> Result<Option<VolumeStatus>, VolumeError> {
        self.locks.check_pool()?;
        match observe::observe(&self.layout, id) {
            Ok(Observed { live: Some(live), .. }) => {
                live.check_node(self.node)?;
                Ok(Some(live.status()))
            }
            Ok(Observed { staged, .. }) => {
                Ok(staged.then(|| observe::staged_status(&self.layout, self.node, id)))
            }
            Err(error @ VolumeError::Unreadable { .. }) => {
                Ok(Some(observe::unreadable_status(self.node, id, &error)))
            }
            Err(error) => Err(error),
        }
    }

    /// Removes what a crash in the middle of a write left beside a volume's record, unless somebody writes there now.
    fn remove_temporary(&self, live: &observe::Live) {
        if live.temporary.is_empty() || live.sidecar.node != self.node {
            return;
        }
        let key = Key::volume(live.sidecar.volume);
        let held = self.locks.try_gate(key).map(|gate| self.locks.hold(gate, key));
        let Some(Ok(_held)) = held else { return };
        for path in &live.temporary {
            if let Err(error) = files::remove_file(path) {
                tracing::warn!(path = %path.display(), error = %error.source, "a temporary file stays");
            }
        }
    }
}

/// Makes the pool's directory, and parents that are missing, passable for all and readable for the agent alone.
fn make_dir(dir: &Path) -> Result<(), VolumeError> {
    let fail = || FileError::of("make directory", dir);
    if let Some(parent) = dir.parent()
        && !parent.as_os_str().is_empty()
        && !parent.exists()
    {
        make_dir(parent)?;
    }
    match DirBuilder::new().mode(POOL_MODE).create(dir) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(fail()(error).into()),
    }
    let meta = fs::metadata(dir).map_err(fail())?;
    if !meta.is_dir() {
        let error = io::Error::new(io::ErrorKind::NotADirectory, "something else is there");
        return Err(fail()(error).into());
    }
    if meta.uid() != rustix::process::geteuid().as_raw() {
        let error = io::Error::new(io::ErrorKind::PermissionDenied, "another user owns it");
        return Err(fail()(error).into());
    }
    Ok(())
}

/// Refuses to take a directory with other things in it for a pool: a slip in the configuration must change nothing.
fn check_empty(layout: &Layout) -> Result<(), VolumeError> {
    if layout.marker().exists() {
        return Ok(());
    }
    for (name, entry) in entries(layout.pool())? {
        if entry == PoolEntry::Other && !layout::is_own_name(&name) {
            return Err(VolumeError::NoPool { path: layout.pool().to_owned() });
        }
    }
    Ok(())
}

fn entries(pool: &Path) -> Result<Vec<(OsString, PoolEntry)>, VolumeError> {
    let fail = || FileError::of("read directory", pool);
    let mut entries = Vec::new();
    for entry in fs::read_dir(pool).map_err(fail())? {
        let name = entry.map_err(fail())?.file_name();
        let sorted = pool_entry(&name);
        entries.push((name, sorted));
    }
    Ok(entries)
}

/// Makes the pool ours, or checks that it is.
fn claim(layout: &Layout, node: HostId) -> Result<(), VolumeError> {
    let path = layout.marker();
    let unreadable = |reason: String| VolumeError::Unreadable { path: path.clone(), reason };
    let Some(bytes) = files::read_bounded(&path, MARKER_LIMIT)? else {
        let bytes = serde_json::to_vec(&Marker { schema: 1, node })
            .map_err(|error| unreadable(error.to_string()))?;
        files::write_atomic(&path, &bytes)?;
        return passable(layout.pool());
    };
    let marker: Marker =
        serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))?;
    if marker.node == node {
        return passable(layout.pool());
    }
    Err(VolumeError::OtherNode { path: layout.pool().to_owned(), node: marker.node })
}

fn passable(pool: &Path) -> Result<(), VolumeError> {
    let fail = || FileError::of("set mode of", pool);
    if fs::metadata(pool).map_err(fail())?.mode() & 0o777 != POOL_MODE {
        fs::set_permissions(pool, fs::Permissions::from_mode(POOL_MODE)).map_err(fail())?;
    }
    Ok(())
}

/// Runs work on files off the executor. It goes on when the caller's context ends, so long work looks at the context.
pub(crate) async fn off<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, VolumeError> + Send + 'static,
) -> Result<T, VolumeError> {
    host::bound::blocking("work on files", || Ok(work())).await?
}

/// As [`off`], with the pool.
pub(crate) async fn with<T: Send + 'static>(
    pool: &Arc<Pool>,
    work: impl FnOnce(&Pool) -> Result<T, VolumeError> + Send + 'static,
) -> Result<T, VolumeError> {
    let pool = Arc::clone(pool);
    off(move || work(&pool)).await
}
