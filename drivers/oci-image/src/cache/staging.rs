//! Where images are built, and where they are moved to be removed.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use drivers_api::{Digest, DiskFormat};
use host::{
    fault,
    files::{self, FileError},
};

use super::{Cache, EntryRecord, FileRecord, allocated, record, record::Entry};
use crate::{
    error::{ImageError, Result, shown},
    media::Role,
};

/// What a VMM with a uid of its own must be able to read, and nobody to write.
const FILE_MODE: u32 = 0o444;
/// The sector of a raw disk: QEMU rounds its size up to this.
const SECTOR: u64 = 512;

/// A directory of our own under `staging`. Removed with all that is in it when dropped.
#[derive(Debug)]
pub(crate) struct Staging {
    dir: PathBuf,
    cache: Arc<Cache>,
    /// Whether it was moved away.
    gone: bool,
}

/// A name under `staging` that nobody uses.
fn free_name(cache: &Cache) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let unique = NEXT.fetch_add(1, Ordering::Relaxed);
    cache.root().join("staging").join(format!("{}-{unique}", std::process::id()))
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        let dir = std::mem::take(&mut self.dir);
        // Keeps the cache, and so its lock, until the files are gone.
        let cache = Arc::clone(&self.cache);
        let remove = move || {
            if let Err(error) = files::remove_tree(&dir) {
                tracing::warn!(%error, "what a pull or delete left cannot be removed; the next start does");
            }
            drop(cache);
        };
        // Dropped by a future: freeing gigabytes must not hold the executor.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(remove)),
            Err(_) => remove(),
        }
    }
}

/// Moves a content directory away; what is answered removes it when dropped. Its catalogue lock must be held.
pub(crate) fn take_away(cache: &Arc<Cache>, dir: &Path) -> Result<Option<Staging>> {
    let target = free_name(cache);
    match fs::rename(dir, &target) {
        Ok(()) => {
            // Made first: whatever fails from here on, the files go.
            let trash = Staging { dir: target, cache: Arc::clone(cache), gone: false };
            files::sync_parent(dir)?;
            fault::point("image.delete.content-moved")?;
            Ok(Some(trash))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::of("move away", dir)(error).into()),
    }
}

impl Staging {
    /// Removes it now. For blocking code.
    pub(crate) fn remove(mut self) -> Result<()> {
        self.gone = true;
        files::remove_tree(&self.dir)?;
        Ok(())
    }

    /// An empty one.
    pub(crate) fn new(cache: &Arc<Cache>) -> Result<Self> {
        let dir = free_name(cache);
        DirBuilder::new()
            .mode(0o700)
            .create(&dir)
            .map_err(FileError::of("make directory", &dir))?;
        Ok(Self { dir, cache: Arc::clone(cache), gone: false })
    }

    /// Where the file of a role is built.
    pub(crate) fn file(&self, role: Role) -> PathBuf {
        self.dir.join(role.as_str())
    }

    /// Checks a finished file, makes it unchangeable and durable, and answers its record.
    pub(crate) fn seal(
        &self,
        role: Role,
        claim: Option<DiskFormat>,
        digest: &str,
    ) -> Result<FileRecord> {
        let path = self.file(role);
        let file = File::open(&path).map_err(FileError::of("open", &path))?;
        let size = file.metadata().map_err(FileError::of("look at", &path))?.len();
        if size == 0 {
            return Err(ImageError::malformed(role.as_str(), "it is empty"));
        }
        let (format, virtual_size) = match role {
            Role::Disk => {
                let (format, bytes) = disk(&file, claim, size)?;
                (Some(format), Some(bytes))
            }
            Role::Uki => {
                check_pe(&file)?;
                (None, None)
            }
            Role::Kernel | Role::Initrd => (None, None),
        };
        file.set_permissions(Permissions::from_mode(FILE_MODE))
            .and_then(|()| file.sync_all())
            .map_err(FileError::of("sync", &path))?;
        let found = file.metadata().map_err(FileError::of("look at", &path))?;
        let digest =
            digest.parse::<Digest>().map_err(|error| ImageError::Internal(error.to_string()))?;
        let mtime = record::mtime(&found);
        Ok(FileRecord { role, digest, size, mtime, format, virtual_size })
    }

    /// Moves the complete image to its place. One that is there already and whole wins; a damaged one is replaced.
    pub(crate) fn publish(
        mut self,
        key: &str,
        files: Vec<FileRecord>,
        cmdline: Option<String>,
    ) -> Result<Entry> {
        let size_bytes = allocated(&self.dir)?;
        let record = EntryRecord {
            node: self.cache.node(),
            driver: "oci-image".to_owned(),
            files,
            cmdline,
            size_bytes,
        };
        files::write_new(&self.dir.join(record::ENTRY), &record.to_json()?)?;
        fs::set_permissions(&self.dir, Permissions::from_mode(0o711))
            .and_then(|()| File::open(&self.dir)?.sync_all())
            .map_err(FileError::of("sync", &self.dir))?;
        fault::point("image.pull.staged")?;
        let cache = Arc::clone(&self.cache);
        let target = cache.content(key);
        let held = cache.catalogue();
        if let Some(entry) = cache.entry(key)? {
            return Ok(entry);
        }
        let damaged = take_away(&cache, &target)?;
        fs::rename(&self.dir, &target).map_err(FileError::of("publish", &target))?;
        self.gone = true;
        files::sync_parent(&target)?;
        drop(held);
        if let Some(damaged) = damaged {
            damaged.remove()?;
        }
        fault::point("image.pull.published")?;
        cache.entry(key)?.ok_or_else(|| {
            ImageError::unavailable(key, "the image was changed or removed right after its pull")
        })
    }
}

/// The format of a disk and the size that a guest sees.
///
/// A claim binds. Without one the header decides, read by our own parser: only a clean qcow2 image is one, all else is
/// plain bytes.
fn disk(file: &File, claim: Option<DiskFormat>, size: u64) -> Result<(DiskFormat, u64)> {
    let refuse = |error: &host::qcow2::Qcow2Error| {
        ImageError::malformed(
            "disk",
            format!("no qcow2 image that is taken: {}", shown(&error.to_string())),
        )
    };
    let format = match claim {
        Some(format) => format,
        None if has_magic(file)? => DiskFormat::Qcow2,
        None => DiskFormat::Raw,
    };
    match format {
        DiskFormat::Qcow2 => {
            let info = host::qcow2::inspect(file).map_err(|error| refuse(&error))?;
            info.check_standalone().map_err(|error| refuse(&error))?;
            Ok((DiskFormat::Qcow2, info.virtual_size))
        }
        DiskFormat::Raw => Ok((DiskFormat::Raw, size.div_ceil(SECTOR).saturating_mul(SECTOR))),
        _ => Err(ImageError::Internal("an unknown disk format".to_owned())),
    }
}

fn has_magic(file: &File) -> Result<bool> {
    Ok(start_of(file)? == host::qcow2::MAGIC)
}

/// A UKI is a PE file (UEFI specification section 2.1.1), which begins with the two letters of DOS.
fn check_pe(file: &File) -> Result<()> {
    if start_of(file)?.starts_with(b"MZ") {
        return Ok(());
    }
    Err(ImageError::malformed("uki", "it is no PE file"))
}

/// The first four bytes, zeros where the file is shorter.
fn start_of(file: &File) -> Result<[u8; 4]> {
    use std::os::unix::fs::FileExt;
    let mut start = [0; 4];
    let count = file
        .read_at(&mut start, 0)
        .map_err(FileError::of("read", Path::new("the start of an image")))?;
    start.iter_mut().skip(count).for_each(|byte| *byte = 0);
    Ok(start)
}

/// Moves a checked blob to its place in the image: no copy.
pub(crate) fn adopt(blob: &Path, target: &Path) -> Result<()> {
    fs::rename(blob, target).map_err(FileError::of("move to", target))?;
    let found = fs::symlink_metadata(target).map_err(FileError::of("look at", target))?;
    if found.nlink() == 1 {
        Ok(())
    } else {
        Err(ImageError::Internal("a blob has two names".to_owned()))
    }
}
