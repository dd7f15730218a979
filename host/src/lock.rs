//! Locks that the kernel holds and a crash releases.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    event::Timespec,
    fs::{FlockOperation, flock},
};

use crate::{files::FileError, process::Identity};

/// A lock file that this process holds. The kernel releases it when the process ends, however it ends.
#[derive(Debug)]
pub struct FileLock {
    file: File,
    path: PathBuf,
}

/// Why a lock was not taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has it.
    #[error("{} is locked by {holder}", path.display())]
    Held {
        /// The lock file.
        path: PathBuf,
        /// What the holder wrote into it: its pid, as a hint for people.
        holder: String,
    },
    /// The file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
}

impl FileLock {
    /// Takes the lock at once or not at all. The file is made (0600) when it is not there, and never removed: a second
    /// process that waits on a removed file would hold a lock that nobody else sees.
    ///
    /// # Errors
    /// [`LockError::Held`] when another process, or this one, has it.
    pub fn try_exclusive(path: &Path) -> Result<Self, LockError> {
        // Again when the file was replaced between open and lock: the lock would be on an inode that nobody else opens.
        for _ in 0..16 {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(path)
                .map_err(FileError::of("open lock", path))?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    let holder = std::fs::read_to_string(path).unwrap_or_default();
                    let holder = match holder.trim() {
                        "" => "another process".to_owned(),
                        pid => format!("process {pid}"),
                    };
                    return Err(LockError::Held { path: path.to_owned(), holder });
                }
                Err(error) => return Err(FileError::of("lock", path)(error.into()).into()),
            }
            let lock = Self {
                file: file.try_clone().map_err(FileError::of("lock", path))?,
                path: path.to_owned(),
            };
            if lock.is_current() {
                file.set_len(0).map_err(FileError::of("write", path))?;
                write!(file, "{}", std::process::id()).map_err(FileError::of("write", path))?;
                return Ok(lock);
            }
        }
        let error = io::Error::other("the lock file is replaced again and again");
        Err(FileError::of("lock", path)(error).into())
    }

    /// As [`FileLock::try_exclusive`], but waits for a lock whose owner is dead: a child that it forked at that moment holds
    /// a copy of the descriptor until its exec, and on a busy host that outlasts a quick restart. Blocks, at most `limit`.
    ///
    /// # Errors
    /// As [`FileLock::try_exclusive`]; at once when the process that the file names lives.
    pub fn exclusive_after_crash(path: &Path, limit: Duration) -> Result<Self, LockError> {
        let begun = tokio::time::Instant::now();
        loop {
            match Self::try_exclusive(path) {
                Err(LockError::Held { .. }) if owner_is_dead(path) && begun.elapsed() < limit => {
                    // Nothing tells of an exec in another process: look again soon.
                    let pause = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
                    // Interrupted is as good as over.
                    rustix::event::poll(&mut [], Some(&pause)).ok();
                }
                other => return other,
            }
        }
    }

    /// Whether the file that is locked is still the one at the path. A holder that finds it replaced has lost its
    /// exclusion and must stop.
    #[must_use]
    pub fn is_current(&self) -> bool {
        match (self.file.metadata(), std::fs::metadata(&self.path)) {
            (Ok(held), Ok(there)) => held.dev() == there.dev() && held.ino() == there.ino(),
            _ => false,
        }
    }
}

/// Whether the process that the lock file names is gone. A file that names none has an owner that is about to write.
fn owner_is_dead(path: &Path) -> bool {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.trim().parse::<u32>().is_ok_and(|pid| Identity::of(pid).is_none())
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Not left to the closing of the descriptor: a child that another thread forked at this moment holds a copy of it
        // until its exec, and with it the lock (flock(2)).
        if let Err(error) = flock(&self.file, FlockOperation::Unlock) {
            tracing::warn!(path = %self.path.display(), %error, "a lock could not be released; it ends with the process");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_outlasts_its_dead_owner_in_a_child_is_waited_for_and_a_live_owners_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let held = FileLock::try_exclusive(&path).unwrap();
        let limit = Duration::from_secs(20);
        let begun = tokio::time::Instant::now();
        FileLock::exclusive_after_crash(&path, limit).unwrap_err();
        assert!(begun.elapsed() < limit / 2, "the owner lives: at once");

        // What a crash between fork and exec looks like: the owner is no more, and another process has its descriptor.
        drop(held);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
        // Above the kernel's limit for pids (2^22): nobody's.
        std::fs::write(&path, "4194305").unwrap();
        let mut child = crate::daemon::Daemon::new("sleep").arg("0.5");
        child.pass(file.into());
        child.start().unwrap();
        assert!(matches!(FileLock::try_exclusive(&path), Err(LockError::Held { .. })));
        FileLock::exclusive_after_crash(&path, limit).unwrap();
    }

    #[test]
    fn a_held_lock_names_its_holder_and_a_dropped_one_is_free() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let held = FileLock::try_exclusive(&path).unwrap();
        let error = FileLock::try_exclusive(&path).unwrap_err().to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        drop(held);
        FileLock::try_exclusive(&path).unwrap();
    }

    #[test]
    fn a_holder_sees_that_its_file_was_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let held = FileLock::try_exclusive(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(!held.is_current());
        let second = FileLock::try_exclusive(&path).unwrap();
        assert!(second.is_current() && !held.is_current());
    }
}
