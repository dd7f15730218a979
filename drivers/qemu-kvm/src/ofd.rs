//! A lock that belongs to an open file, and so to every process that has inherited it.
//!
//! The agent locks the file and the VMM inherits the descriptor. From then on the lock lives exactly as long as the VMM,
//! whoever started it and whatever was killed meanwhile: an agent that finds the lock held knows that a VMM is there, even
//! when nobody wrote down which. Open file description locks (`fcntl_locking(2)`) are used because they can be asked for
//! without being taken.

use std::{fs::File, io, os::fd::AsRawFd};

/// Takes the lock of the whole file; `false` when another open file holds it.
pub(crate) fn try_hold(file: &File) -> io::Result<bool> {
    let mut lock = whole_file();
    match ofd_lock(file, libc::F_OFD_SETLK, &mut lock) {
        Ok(()) => Ok(true),
        // fcntl_locking(2): either number, depending on the system.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Whether another open file holds the lock.
pub(crate) fn is_held(file: &File) -> io::Result<bool> {
    let mut lock = whole_file();
    ofd_lock(file, libc::F_OFD_GETLK, &mut lock)?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

fn whole_file() -> libc::flock {
    libc::flock {
        l_type: i16::try_from(libc::F_WRLCK).unwrap_or_default(),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: 0,
        l_len: 0,
        // Must be zero for open file description locks.
        l_pid: 0,
    }
}

#[expect(unsafe_code, reason = "rustix has the locks of processes only, not of open files")]
fn ofd_lock(file: &File, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: the descriptor is open for the call, and `lock` is a whole `flock` that the kernel reads and may write.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(lock)) };
    if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_lives_as_long_as_any_copy_of_its_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let open =
            || File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let first = open().unwrap();
        let second = open().unwrap();
        assert!(try_hold(&first).unwrap());
        assert!(is_held(&second).unwrap() && !try_hold(&second).unwrap());
        let inherited = first.try_clone().unwrap();
        drop(first);
        assert!(is_held(&second).unwrap(), "the copy holds it on");
        drop(inherited);
        assert!(!is_held(&second).unwrap() && try_hold(&second).unwrap());
    }
}
