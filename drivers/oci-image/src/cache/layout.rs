//! The cache's directory: made, owned, locked.

use std::{
    fs::{self, DirBuilder, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use drivers_api::{Error, ErrorKind, HostId, Result};
use host::{
    files::{self, FileError},
    lock::{FileLock, LockError},
};
use serde::{Deserialize, Serialize};

/// The number of the layout that this version reads and writes.
const LAYOUT: u32 = 1;
/// The file that says whose cache it is.
const OWNER: &str = "cache.json";
/// How often a lock is tried that this process is about to let go.
const RELEASE_TRIES: u32 = 1000;
/// The lock file.
const LOCK: &str = "lock";
/// A VMM, which has a uid of its own, opens files of the cache by their whole path: it may pass through, not look around.
const PASS: u32 = 0o711;
/// What only the agent needs.
const PRIVATE: u32 = 0o700;

#[derive(Debug, Serialize, Deserialize)]
struct Owner {
    layout: u32,
    node: HostId,
}

/// Makes the root where it is not there; answers its canonical path.
pub(super) fn prepare(dir: &Path) -> Result<PathBuf> {
    if let Some(parent) = dir.parent()
        && !parent.exists()
    {
        files::private_dir(parent)
            .map_err(|error| error.into_error("open cache", dir.display()))?;
    }
    let fail = |error: FileError| error.into_error("open cache", dir.display());
    directory(dir, PASS).map_err(fail)?;
    dir.canonicalize().map_err(|error| fail(FileError::of("resolve", dir)(error)))
}

/// Takes the cache's lock. `again`: this process had it open before, and may be about to let it go.
pub(super) fn lock(root: &Path, again: bool) -> Result<FileLock> {
    let mut tries = if again { RELEASE_TRIES } else { 1 };
    loop {
        tries -= 1;
        match FileLock::try_exclusive(&root.join(LOCK)) {
            Ok(lock) => return Ok(lock),
            // Another thread drops the last user of the old one: that takes as long as closing a file.
            Err(LockError::Held { .. }) if tries > 0 => std::thread::yield_now(),
            Err(LockError::Held { holder, .. }) => {
                let reason = format!("{holder} has it open");
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    "open cache",
                    root.display(),
                    reason,
                )
                .with_remedy("one agent at a time uses a cache directory"));
            }
            Err(LockError::File(error)) => {
                return Err(error.into_error("open cache", root.display()));
            }
        }
    }
}

/// Makes what is missing, after the owner was checked; clears what an earlier process was building.
pub(super) fn make(root: &Path, node: HostId) -> Result<()> {
    let fail = |error: FileError| error.into_error("open cache", root.display());
    let owner = root.join(OWNER);
    if files::read_bounded(&owner, 4096).map_err(fail)?.is_none() {
        refuse_foreign(root)?;
        let text = serde_json::to_vec(&Owner { layout: LAYOUT, node })
            .map_err(|error| internal(root, error))?;
        files::write_atomic(&owner, &text).map_err(fail)?;
    }
    check_owner(root, node)?;
    directory(&root.join("content"), PASS).map_err(fail)?;
    for name in ["refs", "partial", "staging"] {
        directory(&root.join(name), PRIVATE).map_err(fail)?;
    }
    // The lock is ours, so nobody builds there any more.
    let staging = root.join("staging");
    let listing =
        fs::read_dir(&staging).map_err(|error| fail(FileError::of("list", &staging)(error)))?;
    for entry in listing {
        let path = entry.map_err(|error| fail(FileError::of("list", &staging)(error)))?.path();
        files::remove_tree(&path).map_err(fail)?;
    }
    Ok(())
}

/// Refuses a cache of another node or of a newer version.
pub(super) fn check_owner(root: &Path, node: HostId) -> Result<()> {
    let conflict = |reason: String| {
        Error::new(ErrorKind::Conflict, "open cache", root.display(), reason)
            .with_remedy("give this agent a cache directory of its own")
    };
    let bytes = files::read_bounded(&root.join(OWNER), 4096)
        .map_err(|error| error.into_error("open cache", root.display()))?
        .unwrap_or_default();
    let owner: Owner = serde_json::from_slice(&bytes)
        .map_err(|_| conflict("its cache.json cannot be understood".to_owned()))?;
    if owner.layout > LAYOUT {
        let layout = owner.layout;
        return Err(conflict(format!("it has layout {layout}, this version knows {LAYOUT}")));
    }
    if owner.node != node {
        let other = owner.node;
        return Err(conflict(format!("it belongs to node {other}, this is node {node}")));
    }
    Ok(())
}

/// A directory with files of somebody else is not taken over.
fn refuse_foreign(root: &Path) -> Result<()> {
    let fail = |error| FileError::of("list", root)(error).into_error("open cache", root.display());
    for entry in fs::read_dir(root).map_err(fail)? {
        let name = entry.map_err(fail)?.file_name();
        let name = name.to_string_lossy();
        if name != LOCK && !name.starts_with(".tmp-") {
            let reason = format!("it holds \"{}\" and no cache.json", name.escape_debug());
            return Err(Error::new(ErrorKind::Conflict, "open cache", root.display(), reason)
                .with_remedy("give the cache an empty directory"));
        }
    }
    Ok(())
}

/// Makes sure of a directory of ours with this mode. A link is refused.
pub(super) fn directory(path: &Path, mode: u32) -> std::result::Result<(), FileError> {
    let fail = || FileError::of("make directory", path);
    match DirBuilder::new().mode(mode).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(fail()(error)),
    }
    let found = fs::symlink_metadata(path).map_err(fail())?;
    if !found.is_dir() {
        return Err(fail()(io::Error::from(io::ErrorKind::NotADirectory)));
    }
    if found.uid() != rustix::process::geteuid().as_raw() {
        return Err(fail()(io::Error::from(io::ErrorKind::PermissionDenied)));
    }
    // The umask may have taken bits away.
    if found.mode() & 0o777 != mode {
        fs::set_permissions(path, Permissions::from_mode(mode)).map_err(fail())?;
    }
    Ok(())
}

fn internal(root: &Path, error: serde_json::Error) -> Error {
    Error::new(ErrorKind::Internal, "open cache", root.display(), "a record cannot be written")
        .with_source(error)
}
