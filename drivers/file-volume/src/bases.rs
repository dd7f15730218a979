//! Copies of images from other filesystems, shared by the volumes that are overlays of them.
//!
//! An overlay's directory has a hard link to its base, so the kernel counts the users: a copy that has one link left, its
//! name in `bases/`, has none. A copy is made, linked and removed under the lock of its name, so none goes away between the
//! look at its count and the link of a new user.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
};

use drivers_api::Context;
use host::{
    fault,
    files::{self, FileError},
};
use tokio::sync::OwnedMutexGuard;

use crate::{
    copy,
    error::VolumeError,
    locks::Key,
    observe::open_regular,
    pool::Pool,
    source::{Source, link},
};

/// What the name of an unfinished copy ends with.
const PART: &str = ".part";

/// Makes `to` a link to the copy of `source`, which is made when it is not there. The caller has passed the gate of
/// `Key::base(name)`.
pub(crate) fn link_copy(
    pool: &Pool,
    cx: &Context,
    gate: OwnedMutexGuard<()>,
    source: &Source,
    to: &Path,
) -> Result<(), VolumeError> {
    let name = source.copy_name()?;
    let held = pool.locks.hold(gate, Key::base(&name))?;
    let bases = pool.layout.bases();
    files::private_dir(&bases)?;
    let path = bases.join(&name);
    let copied = match open_regular(&path, false) {
        Ok(copied) => copied,
        Err(error) if error.source.kind() == io::ErrorKind::NotFound => {
            let part = bases.join(format!("{name}{PART}"));
            let made = make_copy(cx, source, &part);
            if made.is_err() {
                // Best effort: the sweep of the next start finds what stays.
                drop(fs::remove_file(&part));
            }
            made?;
            fault::point("file.base.copied")?;
            held.check()?;
            fs::rename(&part, &path).map_err(FileError::of("rename onto", &path))?;
            files::sync_parent(&path)?;
            fault::point("file.base.published")?;
            open_regular(&path, false)?
        }
        Err(error) => return Err(error.into()),
    };
    if link(&copied, to)? {
        return Ok(());
    }
    let error = io::Error::other("the copy has as many links as the filesystem allows");
    Err(FileError::of("link", &path)(error).into())
}

fn make_copy(cx: &Context, source: &Source, part: &Path) -> Result<(), VolumeError> {
    files::remove_file(part)?;
    let to = files::create_new(part)?;
    let length = length(&source.file, &source.path)?;
    copy::copy(cx, &source.file, &to, length)
        .map_err(FileError::of("copy the image to", part))??;
    to.sync_all().map_err(FileError::of("sync", part))?;
    Ok(())
}

fn length(file: &File, path: &Path) -> Result<u64, VolumeError> {
    Ok(file.metadata().map_err(FileError::of("look at", path))?.len())
}

/// Removes the copies that no volume links to, and unfinished ones that nobody works on.
pub(crate) fn collect(pool: &Pool) -> Result<(), VolumeError> {
    let bases = pool.layout.bases();
    let entries = match fs::read_dir(&bases) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(FileError::of("read directory", &bases)(error).into()),
    };
    for entry in entries {
        let name = entry.map_err(FileError::of("read directory", &bases))?.file_name();
        let Some(name) = name.to_str() else { continue };
        let path = bases.join(name);
        if !name.ends_with(PART) && links(&path)? != Some(1) {
            continue;
        }
        let key = Key::base(name.strip_suffix(PART).unwrap_or(name));
        // Somebody who works on it now either links to it or collects it.
        let Some(gate) = pool.locks.try_gate(key) else { continue };
        let held = match pool.locks.hold(gate, key) {
            Ok(held) => held,
            Err(VolumeError::Busy) => continue,
            Err(error) => return Err(error),
        };
        if links(&path)? == Some(1) {
            files::remove_file(&path)?;
        }
        drop(held);
    }
    Ok(())
}

/// How many links a file has; `None` when it is not there.
fn links(path: &Path) -> Result<Option<u64>, VolumeError> {
    match fs::symlink_metadata(path) {
        Ok(meta) => Ok(Some(meta.nlink())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::of("look at", path)(error).into()),
    }
}
