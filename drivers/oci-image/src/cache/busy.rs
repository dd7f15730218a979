//! Whether anybody on the host has a file open.
//!
//! The kernel knows: it grants a write lease on a file only when nobody else has it open (fcntl(2), `F_SETLEASE`). So a
//! clone that reads a cached file is seen without a word from whoever reads. A file that has a second name by a hard link
//! is not asked about: its bytes stay under the other name.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
};

use host::files::FileError;

use crate::error::Result;

/// Whether anybody has a file of this directory open. A directory that is not there is not read.
pub(crate) fn is_read(dir: &Path) -> Result<bool> {
    let listing = match fs::read_dir(dir) {
        Ok(listing) => listing,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(FileError::of("list", dir)(error).into()),
    };
    for entry in listing {
        let path = entry.map_err(FileError::of("list", dir))?.path();
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = match OpenOptions::new().read(true).custom_flags(flags).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(FileError::of("open", &path)(error).into()),
        };
        let found = file.metadata().map_err(FileError::of("look at", &path))?;
        if found.is_file() && found.nlink() == 1 && has_other_reader(&file) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the file is open somewhere else than here.
fn has_other_reader(file: &File) -> bool {
    match lease::write_lease(file) {
        Ok(()) => false,
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => true,
        // A file system without leases: an open file keeps its bytes when its name goes, so nothing breaks.
        Err(error) => {
            tracing::debug!(%error, "this file system has no leases");
            false
        }
    }
}

#[expect(unsafe_code, reason = "no safe crate of ours wraps F_SETLEASE")]
mod lease {
    use std::{fs::File, io, os::fd::AsRawFd};

    /// `F_SETSIG` of `include/uapi/asm-generic/fcntl.h`, which the libc crate lacks on some targets.
    const F_SETSIG: libc::c_int = 10;

    /// Takes a write lease and gives it back.
    pub(super) fn write_lease(file: &File) -> io::Result<()> {
        let fd = file.as_raw_fd();
        // An open by somebody else in this moment makes the kernel send a signal: SIGURG is ignored by default, where
        // SIGIO would end the process.
        // SAFETY: fcntl on a descriptor that `file` keeps open; all arguments are plain numbers.
        if unsafe { libc::fcntl(fd, F_SETSIG, libc::SIGURG) } == -1 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: as above.
        if unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) } == -1 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: as above. Fails only when the lease is gone already.
        unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_while_somebody_has_it_open_unless_it_has_a_second_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, b"x").unwrap();
        assert!(!is_read(dir.path()).unwrap());
        let reader = File::open(&path).unwrap();
        assert!(is_read(dir.path()).unwrap());
        let other = tempfile::tempdir().unwrap();
        std::fs::hard_link(&path, other.path().join("g")).unwrap();
        assert!(!is_read(dir.path()).unwrap());
        std::fs::remove_file(other.path().join("g")).unwrap();
        assert!(is_read(dir.path()).unwrap());
        drop(reader);
        assert!(!is_read(dir.path()).unwrap());
        assert!(!is_read(&dir.path().join("absent")).unwrap());
    }
}
