//! Files that are whole or absent after a crash, in directories that only their owner can enter.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

/// What could not be done with which path.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {}", path.display())]
pub struct FileError {
    /// What was tried.
    pub operation: &'static str,
    /// On what.
    pub path: PathBuf,
    /// Why it failed.
    #[source]
    pub source: io::Error,
}

impl FileError {
    /// For `map_err`: the error of an operation on a path.
    pub fn of(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { operation, path, source }
    }

    /// As an error of the contract: no space is `Exhausted`, permission `Denied`, else `Unavailable`.
    #[must_use]
    pub fn into_error(
        self,
        operation: &'static str,
        object: impl std::fmt::Display,
    ) -> drivers_api::Error {
        use drivers_api::ErrorKind;
        #[expect(
            clippy::wildcard_enum_match_arm,
            reason = "a foreign enumeration of dozens; the rest is retried"
        )]
        let kind = match self.source.kind() {
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge => ErrorKind::Exhausted,
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                ErrorKind::Denied
            }
            _ => ErrorKind::Unavailable,
        };
        let reason = self.to_string();
        drivers_api::Error::new(kind, operation, object, reason).with_source(self.source)
    }
}

/// Makes sure that `path` is a directory that only its owner can enter (0700). Parents are made the same way. A
/// directory that is there must be owned by us and gets its mode set; a symbolic link is refused.
///
/// # Errors
/// When it cannot be made, or something else is there.
pub fn private_dir(path: &Path) -> Result<(), FileError> {
    let fail = || FileError::of("make directory", path);
    if let Some(parent) = path.parent()
        && !parent.as_os_str().is_empty()
        && !parent.exists()
    {
        private_dir(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let found = fs::symlink_metadata(path).map_err(fail())?;
            if !found.is_dir() {
                return Err(fail()(io::Error::new(
                    io::ErrorKind::NotADirectory,
                    "something else is there",
                )));
            }
            if found.uid() != rustix::process::geteuid().as_raw() {
                return Err(fail()(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    "another user owns it",
                )));
            }
            if found.mode() & 0o777 != 0o700 {
                fs::set_permissions(path, Permissions::from_mode(0o700)).map_err(fail())?;
            }
            Ok(())
        }
        Err(error) => Err(fail()(error)),
    }
}

/// Replaces the content of `path` with `bytes` so that a crash leaves the old content or the new, never a mixture. The
/// file has mode 0600; its directory must be there. Durable when the call returns.
///
/// # Errors
/// When a step fails; the old content is then untouched and no temporary file is left.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let temporary = temporary_beside(path);
    let written = write_new(&temporary, bytes)
        .and_then(|()| fs::rename(&temporary, path).map_err(FileError::of("rename onto", path)))
        .and_then(|()| sync_parent(path));
    if written.is_err() {
        // Best effort: the name is ours alone, and a collector of `.tmp-` files finds what stays.
        drop(fs::remove_file(&temporary));
    }
    written
}

/// Creates `path` (0600, it must not be there) with `bytes`, synced.
///
/// # Errors
/// When it is there already, or a step fails.
pub fn write_new(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let mut file = create_new(path)?;
    file.write_all(bytes).map_err(FileError::of("write", path))?;
    file.sync_all().map_err(FileError::of("sync", path))
}

/// Creates an empty file (0600) that must not be there.
///
/// # Errors
/// When it is there already or cannot be made.
pub fn create_new(path: &Path) -> Result<File, FileError> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(FileError::of("create", path))
}

/// Removes the temporary files that writes which a crash cut short left in a directory. The caller holds whatever keeps
/// others from writing there.
///
/// # Errors
/// When the directory cannot be read or a file not removed. A directory that is not there has none.
pub fn sweep_temporaries(dir: &Path) -> Result<(), FileError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(FileError::of("read", dir)(error)),
    };
    for entry in entries {
        let entry = entry.map_err(FileError::of("read", dir))?;
        if entry.file_name().to_string_lossy().starts_with(".tmp-") {
            remove_file(&entry.path())?;
        }
    }
    Ok(())
}

/// A name beside `path` that nobody else uses: `.tmp-PID-N-NAME`.
#[must_use]
pub fn temporary_beside(path: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let unique = NEXT.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!(".tmp-{}-{unique}-{name}", std::process::id()))
}

/// Makes a rename or removal in the directory of `path` durable.
///
/// # Errors
/// When the directory cannot be opened or synced.
pub fn sync_parent(path: &Path) -> Result<(), FileError> {
    let parent = path.parent().unwrap_or_else(|| Path::new("/"));
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(FileError::of("sync", parent))
}

/// Reads a whole file of at most `limit` bytes; `None` when it is not there.
///
/// # Errors
/// When it is larger, no regular file (a symbolic link is not followed), or cannot be read.
pub fn read_bounded(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, FileError> {
    let fail = || FileError::of("read", path);
    // O_NONBLOCK: a FIFO somebody planted must not hang the agent.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).unwrap_or_default();
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(fail()(error)),
    };
    if !file.metadata().map_err(fail())?.is_file() {
        return Err(fail()(io::Error::new(io::ErrorKind::InvalidInput, "no regular file")));
    }
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(fail())?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > limit {
        return Err(fail()(io::Error::new(
            io::ErrorKind::FileTooLarge,
            "larger than is sensible for such a file",
        )));
    }
    Ok(Some(bytes))
}

/// Removes a file; answers whether it was there.
///
/// # Errors
/// When it is there and cannot be removed.
pub fn remove_file(path: &Path) -> Result<bool, FileError> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(FileError::of("remove", path)(error)),
    }
}

/// Removes a directory with all that is in it, without following links; answers whether it was there.
///
/// # Errors
/// When a part of it cannot be removed.
pub fn remove_tree(path: &Path) -> Result<bool, FileError> {
    match fs::remove_dir_all(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(FileError::of("remove", path)(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_writes_that_were_cut_short_left_is_swept_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(temporary_beside(&dir.path().join("record")), "half").unwrap();
        fs::write(dir.path().join("record"), "whole").unwrap();
        sweep_temporaries(dir.path()).unwrap();
        let left: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|one| one.unwrap().file_name()).collect();
        assert_eq!(left, ["record"]);
        sweep_temporaries(&dir.path().join("absent")).unwrap();
    }

    #[test]
    fn a_private_file_is_readable_by_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let private = dir.path().join("a/b");
        private_dir(&private).unwrap();
        assert_eq!(fs::metadata(&private).unwrap().mode() & 0o777, 0o700);
        let file = private.join("f");
        write_atomic(&file, b"one").unwrap();
        write_atomic(&file, b"two").unwrap();
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
        assert_eq!(read_bounded(&file, 10).unwrap().unwrap(), b"two");
        assert_eq!(fs::read_dir(&private).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn a_link_in_place_of_a_private_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/tmp", dir.path().join("link")).unwrap();
        assert!(private_dir(&dir.path().join("link")).is_err());
    }

    #[test]
    fn reading_never_follows_a_link_and_never_hangs_on_a_fifo() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc/hostname", dir.path().join("link")).unwrap();
        assert!(read_bounded(&dir.path().join("link"), 100).is_err());
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .unwrap();
        assert!(read_bounded(&fifo, 100).is_err());
        assert!(read_bounded(&dir.path().join("absent"), 100).unwrap().is_none());
    }
}
