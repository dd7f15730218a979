//! Makes a volume: in a directory beside, published by one rename.

use std::{
    fs::{self, DirBuilder, File},
    io::Write,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use drivers_api::{Change, Context, DiskFormat, VolumeSpec};
use host::{
    fault,
    files::{self, FileError},
    run::Run,
};
use rustix::{
    fs::{Advice, CWD, RenameFlags, fadvise, renameat_with},
    io::Errno,
};

use super::alone;
use crate::{
    bases, copy,
    error::VolumeError,
    image::{self, Below},
    layout::{SIDECAR, base_name, disk_name},
    locks::{Held, Key},
    observe::open_part,
    pool::{Pool, off, with},
    sidecar::Sidecar,
    source::Source,
};

/// How long a conversion may take when the caller's context has no deadline.
const CONVERT_LIMIT: Duration = Duration::from_secs(3600);

/// A volume in the making.
#[derive(Debug)]
pub(crate) struct Making {
    held: Arc<Held>,
    spec: VolumeSpec,
    /// The directory in which it is made.
    dir: PathBuf,
    next: Next,
}

/// What is missing.
#[derive(Debug)]
enum Next {
    /// Nothing but the publication.
    Publish,
    /// A base from another filesystem, then the overlay.
    Base(Source),
    /// The conversion of a qcow2 image into the file that becomes the disk.
    Convert(Source, PathBuf),
}

/// Does all that needs neither another lock nor a tool.
pub(crate) fn begin(
    pool: &Pool,
    cx: &Context,
    held: Arc<Held>,
    spec: VolumeSpec,
) -> Result<Making, VolumeError> {
    let source = Source::open(&spec)?;
    let dir = pool.layout.staging(spec.uuid);
    // What a crash left of an earlier attempt or of the removal of an earlier volume.
    files::remove_tree(&dir)?;
    files::remove_tree(&pool.layout.trash(spec.uuid))?;
    let made = stage(pool, cx, &dir, &spec, source);
    if made.is_err() {
        clear(&dir);
    }
    Ok(Making { held, spec, dir, next: made? })
}

fn stage(
    pool: &Pool,
    cx: &Context,
    dir: &Path,
    spec: &VolumeSpec,
    source: Option<Source>,
) -> Result<Next, VolumeError> {
    DirBuilder::new().mode(0o700).create(dir).map_err(FileError::of("make directory", dir))?;
    fault::point("file.create.directory-made")?;
    let overlay = source.as_ref().filter(|_| spec.format == DiskFormat::Qcow2);
    let base = overlay.map(|source| source.format);
    record(dir, &Sidecar::new(pool.node, spec.clone(), base))?;
    fault::point("file.create.recorded")?;
    let size = spec.size_gib.bytes();
    match (spec.format, source) {
        (DiskFormat::Qcow2, None) => write_image(dir, size, None)?,
        (DiskFormat::Qcow2, Some(source)) => {
            if !source.share(&dir.join(base_name(source.format)?))? {
                return Ok(Next::Base(source));
            }
            fault::point("file.create.base-linked")?;
            write_image(dir, size, Some(source.format))?;
        }
        (DiskFormat::Raw, None) => {
            let (disk, path) = raw_disk(dir)?;
            disk.set_len(size).map_err(FileError::of("size", &path))?;
        }
        (DiskFormat::Raw, Some(source)) if source.format == DiskFormat::Qcow2 => {
            // Under a name that no other attempt has: a tool that outlives a killed agent finds none of a later one.
            let path = files::temporary_beside(&dir.join(disk_name(DiskFormat::Raw)?));
            let file = files::create_new(&path)?;
            file.set_len(source.size).map_err(FileError::of("size", &path))?;
            return Ok(Next::Convert(source, path));
        }
        (DiskFormat::Raw, Some(source)) => {
            let (disk, path) = raw_disk(dir)?;
            let fail = || FileError::of("copy the image to", &path);
            copy::copy(cx, &source.file, &disk, source.size).map_err(fail())??;
            disk.set_len(size).map_err(fail())?;
        }
        _ => return Err(VolumeError::UnknownFormat),
    }
    Ok(Next::Publish)
}

/// Writes the record, which is synced when the volume is published.
fn record(dir: &Path, sidecar: &Sidecar) -> Result<(), VolumeError> {
    let path = dir.join(SIDECAR);
    let mut file = files::create_new(&path)?;
    file.write_all(&sidecar.bytes()?).map_err(FileError::of("write", &path))?;
    // A hint: the bytes start on their way to the disk now, so that the journal's commit for the disk's
    // file has them too, and the record's own sync finds nothing left to do. One commit is most of what a creation costs.
    if let Err(error) = fadvise(&file, 0, None, Advice::DontNeed) {
        tracing::trace!(%error, "the filesystem takes no hints");
    }
    Ok(())
}

/// Makes the file of a raw volume's disk, empty.
fn raw_disk(dir: &Path) -> Result<(File, PathBuf), VolumeError> {
    let path = dir.join(disk_name(DiskFormat::Raw)?);
    Ok((files::create_new(&path)?, path))
}

fn write_image(dir: &Path, size: u64, base: Option<DiskFormat>) -> Result<(), VolumeError> {
    let path = dir.join(disk_name(DiskFormat::Qcow2)?);
    let file = files::create_new(&path)?;
    let below = match base {
        Some(format) => Some(Below { name: base_name(format)?, format: format.as_str() }),
        None => None,
    };
    image::write(&file, size, below).map_err(FileError::of("write", &path))?;
    Ok(())
}

/// Does the rest and publishes. On an error nothing is left.
pub(crate) async fn finish(
    pool: Arc<Pool>,
    cx: Context,
    making: Making,
) -> Result<Change, VolumeError> {
    let unfinished = Unfinished(Some((making.dir.clone(), Arc::clone(&making.held))));
    let finished = complete(&pool, &cx, making).await;
    match &finished {
        Ok(_) => unfinished.forget(),
        Err(_) => unfinished.clear().await?,
    }
    finished
}

/// A volume in the making whose remains go away with the call that makes it. Work that still runs off the executor has the
/// lock too, so the remains are not removed under its hands but found by the next call.
struct Unfinished(Option<(PathBuf, Arc<Held>)>);

impl Unfinished {
    fn forget(mut self) {
        self.0 = None;
    }

    async fn clear(mut self) -> Result<(), VolumeError> {
        let Some((dir, held)) = self.0.take() else { return Ok(()) };
        off(move || {
            clear(&dir);
            drop(held);
            Ok(())
        })
        .await
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let Some((dir, held)) = self.0.take() else { return };
        // The call was dropped. Without work off the executor nobody else has the lock; a runtime that ends takes no task,
        // and the remains are found by the next call.
        let alone = Arc::strong_count(&held) == 1;
        if let (true, Ok(runtime)) = (alone, tokio::runtime::Handle::try_current()) {
            drop(runtime.spawn_blocking(move || {
                clear(&dir);
                drop(held);
            }));
        }
    }
}

async fn complete(pool: &Arc<Pool>, cx: &Context, making: Making) -> Result<Change, VolumeError> {
    let Making { held, spec, dir, next } = making;
    match next {
        Next::Publish => {}
        Next::Base(source) => {
            let key = Key::base(&source.copy_name()?);
            let gate = pool.locks.gate(key).await;
            let (cx, dir, held, size) =
                (cx.clone(), dir.clone(), Arc::clone(&held), spec.size_gib.bytes());
            with(pool, move |pool| {
                let to = dir.join(base_name(source.format)?);
                bases::link_copy(pool, &cx, gate, &source, &to)?;
                fault::point("file.create.base-linked")?;
                let written = write_image(&dir, size, Some(source.format));
                drop(held);
                written
            })
            .await?;
        }
        Next::Convert(source, converted) => {
            convert(pool, cx, &source, &converted).await?;
            fault::point("file.create.converted")?;
            let disk = dir.join(disk_name(DiskFormat::Raw)?);
            off(move || {
                Ok(fs::rename(&converted, &disk).map_err(FileError::of("rename onto", &disk))?)
            })
            .await?;
        }
    }
    with(pool, move |pool| publish(pool, &held, &spec, &dir)).await
}

fn publish(pool: &Pool, held: &Held, spec: &VolumeSpec, dir: &Path) -> Result<Change, VolumeError> {
    let disk = dir.join(disk_name(spec.format)?);
    let file = open_part(&disk, true)?;
    let fail = || FileError::of("sync", &disk);
    if spec.format == DiskFormat::Raw {
        // A converted image may be smaller than the volume.
        file.set_len(spec.size_gib.bytes()).map_err(fail())?;
    }
    file.sync_all().map_err(fail())?;
    let record = open_part(&dir.join(SIDECAR), false)?;
    record.sync_all().map_err(FileError::of("sync", dir))?;
    files::sync_parent(&disk)?;
    fault::point("file.create.disk-made")?;
    held.check()?;
    let to = pool.layout.volume(spec.uuid);
    rename_new(dir, &to)?;
    fault::point("file.create.published")?;
    files::sync_parent(&to)?;
    Ok(Change::Created)
}

/// Renames onto a name that is free. It was free when we looked; a stranger's directory of that name is not replaced.
fn rename_new(from: &Path, to: &Path) -> Result<(), VolumeError> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST | Errno::NOTEMPTY) => Err(VolumeError::Foreign { path: to.to_owned() }),
        // A filesystem without the flag: a directory that is not empty is not replaced either.
        Err(Errno::INVAL | Errno::NOSYS) => {
            Ok(fs::rename(from, to).map_err(FileError::of("rename onto", to))?)
        }
        Err(error) => Err(FileError::of("rename onto", to)(error.into()).into()),
    }
}

/// Removes a volume in the making after an error.
fn clear(dir: &Path) {
    if let Err(error) = files::remove_tree(dir) {
        tracing::warn!(
            path = %dir.display(),
            error = %error.source,
            "a half-made volume stays until the next ensure or destroy"
        );
    }
}

/// Writes the bytes of a qcow2 image into the raw disk, which is there and a hole of the image's size.
///
/// The format of both is given, no backing file is opened whatever the header says, and the target is never made by the
/// tool: one that outlives a killed agent can write into no later attempt.
async fn convert(
    pool: &Pool,
    cx: &Context,
    source: &Source,
    disk: &Path,
) -> Result<(), VolumeError> {
    let converted = Run::new(&pool.qemu_img)
        .args(["convert", "-q", "-n", "--target-is-zero", "-O", "raw", "--"])
        .arg(alone(&source.path)?)
        .arg(disk)
        .limit(CONVERT_LIMIT)
        .success(cx)
        .await;
    // A missing tool and a failed one keep their cause; the caller's context ends with its own kind.
    if converted.is_err() {
        host::bound::check(cx, "convert", "image")?;
    }
    converted?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_strangers_directory_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir(&from).unwrap();
        fs::create_dir(&to).unwrap();
        assert!(matches!(rename_new(&from, &to), Err(VolumeError::Foreign { .. })));
        let missing = rename_new(&dir.path().join("absent"), &dir.path().join("new"));
        let Err(VolumeError::File(error)) = missing else { panic!("{missing:?}") };
        assert_eq!(error.source.kind(), io::ErrorKind::NotFound);
    }
}
