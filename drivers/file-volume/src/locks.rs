//! Locks of a pool: one object, one worker, in this process and among processes.
//!
//! Within the process an asynchronous gate per object: its waiters hold no thread and end with their context. Gates belong
//! to the pool's directory, not to a driver instance, so two instances over one pool wait for each other.
//!
//! Among processes an open file description lock (fcntl(2), `F_OFD_SETLK`) on one byte of `POOL/.lock` that stands for
//! the object. The kernel releases it when the process ends, however it ends. It is tried, never waited for: who finds it
//! held answers `Unavailable`, and the caller retries.

use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
};

use drivers_api::VolumeId;
use host::files::FileError;
use tokio::sync::OwnedMutexGuard;

use crate::error::VolumeError;

/// Which byte of the lock file stands for an object. The kinds have ranges of their own, so that nobody who holds a
/// volume and wants a base waits for itself. Two objects of one kind on one byte only wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(i64);

impl Key {
    /// The pool itself: its marker and its temporary files.
    pub(crate) const POOL: Self = Self(0);

    pub(crate) fn volume(id: VolumeId) -> Self {
        Self::in_range(1 << 60, id.uuid().as_bytes())
    }

    pub(crate) fn base(name: &str) -> Self {
        Self::in_range(1 << 61, name.as_bytes())
    }

    /// FNV-1a (RFC 9923) over the name, 60 bits of it.
    fn in_range(start: i64, name: &[u8]) -> Self {
        let hash = name.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self(start | i64::try_from(hash >> 4).unwrap_or_default())
    }
}

type Gate = tokio::sync::Mutex<()>;
/// Device and inode of the pool, and the object.
type GateKey = (u64, u64, Key);

static GATES: Mutex<Option<HashMap<GateKey, Weak<Gate>>>> = Mutex::new(None);

/// The locks of one pool.
#[derive(Debug)]
pub(crate) struct Locks {
    pool: PathBuf,
    file: PathBuf,
    device: u64,
    inode: u64,
}

/// The right to change one object until it is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    /// Dropped first: the next in this process must not find the kernel's lock still held.
    kernel: KernelLock,
    _gate: Option<OwnedMutexGuard<()>>,
}

impl Held {
    /// Fails when the lock file was replaced meanwhile: the exclusion among processes is then lost.
    pub(crate) fn check(&self) -> Result<(), VolumeError> {
        if self.kernel.is_current() { Ok(()) } else { Err(VolumeError::Busy) }
    }
}

impl Locks {
    pub(crate) fn new(pool: &Path, file: PathBuf) -> Result<Self, VolumeError> {
        let pool_meta = std::fs::metadata(pool).map_err(FileError::of("look at", pool))?;
        Ok(Self { pool: pool.to_owned(), file, device: pool_meta.dev(), inode: pool_meta.ino() })
    }

    /// Fails when the pool's directory is no longer the one that was opened: its filesystem was unmounted, or it was moved
    /// away. What is not in another directory was not seen to be absent.
    pub(crate) fn check_pool(&self) -> Result<(), VolumeError> {
        let meta = std::fs::metadata(&self.pool).map_err(FileError::of("look at", &self.pool))?;
        if (meta.dev(), meta.ino()) == (self.device, self.inode) {
            return Ok(());
        }
        Err(VolumeError::PoolReplaced { path: self.pool.clone() })
    }

    /// Waits for the gate of an object. Cancel-safe.
    pub(crate) async fn gate(&self, key: Key) -> OwnedMutexGuard<()> {
        self.gate_of(key).lock_owned().await
    }

    /// Passes the gate if nobody is in it.
    pub(crate) fn try_gate(&self, key: Key) -> Option<OwnedMutexGuard<()>> {
        self.gate_of(key).try_lock_owned().ok()
    }

    fn gate_of(&self, key: Key) -> Arc<Gate> {
        let mut gates = GATES.lock().unwrap_or_else(PoisonError::into_inner);
        let gates = gates.get_or_insert_default();
        let name = (self.device, self.inode, key);
        if let Some(gate) = gates.get(&name).and_then(Weak::upgrade) {
            return gate;
        }
        // Seldom reached, so the dead entries are removed here and the map stays as small as the work at hand.
        gates.retain(|_, gate| gate.strong_count() > 0);
        let gate = Arc::new(Gate::new(()));
        gates.insert(name, Arc::downgrade(&gate));
        gate
    }

    /// Takes the kernel's lock of an object whose gate is passed.
    pub(crate) fn hold(&self, gate: OwnedMutexGuard<()>, key: Key) -> Result<Held, VolumeError> {
        self.check_pool()?;
        match KernelLock::try_take(&self.file, key)? {
            Some(kernel) => Ok(Held { kernel, _gate: Some(gate) }),
            None => Err(VolumeError::Busy),
        }
    }

    /// Takes the kernel's lock of an object for which this process has other means of turn-taking.
    pub(crate) fn hold_ungated(&self, key: Key) -> Result<Held, VolumeError> {
        match KernelLock::try_take(&self.file, key)? {
            Some(kernel) => Ok(Held { kernel, _gate: None }),
            None => Err(VolumeError::Busy),
        }
    }
}

/// A byte of the lock file that this open file has locked.
#[derive(Debug)]
struct KernelLock {
    file: File,
    path: PathBuf,
}

impl KernelLock {
    fn try_take(path: &Path, key: Key) -> Result<Option<Self>, VolumeError> {
        // Again when the file was replaced between open and lock: the lock would be on an inode that nobody else opens.
        for _ in 0..16 {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(path)
                .map_err(FileError::of("open lock", path))?;
            if !try_lock(&file, key.0, 1).map_err(FileError::of("lock", path))? {
                return Ok(None);
            }
            let lock = Self { file, path: path.to_owned() };
            if lock.is_current() {
                return Ok(Some(lock));
            }
        }
        let error = io::Error::other("the lock file is replaced again and again");
        Err(FileError::of("lock", path)(error).into())
    }

    fn is_current(&self) -> bool {
        match (self.file.metadata(), std::fs::metadata(&self.path)) {
            (Ok(held), Ok(there)) => held.dev() == there.dev() && held.ino() == there.ino(),
            _ => false,
        }
    }
}

impl Drop for KernelLock {
    fn drop(&mut self) {
        unlock(&self.file);
    }
}

/// A whole image file that is locked against all VMMs and tools.
#[derive(Debug)]
pub(crate) struct ImageLock<'a>(&'a File);

impl Drop for ImageLock<'_> {
    fn drop(&mut self) {
        unlock(self.0);
    }
}

/// Locks a whole image file against all VMMs and tools; `None` when one has it open.
///
/// QEMU and `qemu-img` hold open file description locks on bytes 100 to 299 of each image that they have open
/// (`RAW_LOCK_PERM_BASE` and `RAW_LOCK_SHARED_BASE` in QEMU's `block/file-posix.c`), Cloud Hypervisor on the image, so an
/// exclusive lock on all bytes conflicts with each.
pub(crate) fn try_lock_image(file: &File) -> io::Result<Option<ImageLock<'_>>> {
    Ok(try_lock(file, 0, 0)?.then_some(ImageLock(file)))
}

/// Tries an exclusive lock on `length` bytes from `start`; `length` 0 is to the end of all files.
fn try_lock(file: &File, start: i64, length: i64) -> io::Result<bool> {
    match set_lock(file, libc::F_WRLCK, start, length) {
        Ok(()) => Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => Ok(false),
            _ => Err(error),
        },
    }
}

/// Releases all locks of an open file. To close it is not enough: a child that another thread has forked and that has not
/// yet come to its exec has the same open file, and would keep the lock for that time.
fn unlock(file: &File) {
    if let Err(error) = set_lock(file, libc::F_UNLCK, 0, 0) {
        tracing::warn!(%error, "a lock stays until its file is closed");
    }
}

/// Sets or clears an open file description lock, without waiting.
#[expect(unsafe_code, reason = "rustix has whole-file process locks only")]
fn set_lock(file: &File, kind: libc::c_int, start: i64, length: i64) -> io::Result<()> {
    let wanted = libc::flock {
        l_type: i16::try_from(kind).unwrap_or_default(),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: start,
        l_len: length,
        // Must be zero for open file description locks (fcntl(2)).
        l_pid: 0,
    };
    // SAFETY: the descriptor is open as long as `file` is borrowed; `F_OFD_SETLK` reads a `flock`, which `wanted` is, and
    // keeps no pointer to it.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const wanted) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locks(dir: &Path) -> Locks {
        Locks::new(dir, dir.join(".lock")).unwrap()
    }

    fn id(last: u8) -> VolumeId {
        format!("3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a{last:02x}").parse().unwrap()
    }

    #[tokio::test]
    async fn one_volume_has_one_worker_and_another_volume_does_not_wait() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (locks(dir.path()), locks(dir.path()));
        let held = one.hold(one.gate(Key::volume(id(1))).await, Key::volume(id(1))).unwrap();
        assert!(two.try_gate(Key::volume(id(1))).is_none(), "gates belong to the pool");
        two.hold(two.gate(Key::volume(id(2))).await, Key::volume(id(2))).unwrap();
        drop(held);
        two.hold(two.gate(Key::volume(id(1))).await, Key::volume(id(1))).unwrap();
    }

    #[tokio::test]
    async fn the_kernel_keeps_out_who_did_not_pass_the_gate() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key::volume(id(1));
        let locks = locks(dir.path());
        let held = locks.hold(locks.gate(key).await, key).unwrap();
        assert!(KernelLock::try_take(&locks.file, key).unwrap().is_none());
        held.check().unwrap();
        std::fs::remove_file(&locks.file).unwrap();
        assert!(held.check().is_err(), "a holder notices that its lock file was replaced");
    }

    #[test]
    fn a_released_lock_is_free_although_a_copy_of_its_descriptor_is_open() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".lock");
        let held = KernelLock::try_take(&path, Key::POOL).unwrap().unwrap();
        // What a forked child has until its exec.
        let copy = held.file.try_clone().unwrap();
        drop(held);
        assert!(KernelLock::try_take(&path, Key::POOL).unwrap().is_some());
        drop(copy);
    }

    #[test]
    fn the_ranges_of_the_kinds_do_not_meet() {
        for last in 0..=255 {
            let (volume, base) = (Key::volume(id(last)).0, Key::base(&last.to_string()).0);
            assert!((1 << 60..1 << 61).contains(&volume), "{volume:#x}");
            assert!((1 << 61..1 << 62).contains(&base), "{base:#x}");
        }
    }
}
