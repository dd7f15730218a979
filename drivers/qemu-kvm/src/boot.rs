//! The VM's own copies of what it boots from, so that an emptied cache breaks no VM.

use std::{
    fs::{self, File, Permissions},
    io,
    os::unix::fs::{PermissionsExt, chown},
    path::Path,
};

use drivers_api::{BootFiles, Error, ErrorKind, Result, VmSpec};
use host::files::{self, FileError};

use crate::{argv, config::QemuConfig, error::label, paths::VmPaths, seed};

/// Whether everything is there that a start of `spec` opens. Blocking.
pub(crate) fn is_complete(paths: &VmPaths, spec: &VmSpec) -> bool {
    let boot = match &spec.boot.files {
        Some(BootFiles::Kernel { initrd, .. }) => {
            paths.boot("kernel").is_file() && (initrd.is_none() || paths.boot("initrd").is_file())
        }
        Some(BootFiles::Uki { .. }) => paths.boot("uki").is_file(),
        _ => true,
    };
    let nvram = !argv::needs_firmware(spec.boot.files.as_ref()) || paths.nvram().is_file();
    boot && nvram && (spec.cloud_init.is_none() || paths.seed().is_file())
}

/// Puts everything in place that a start of `spec` opens. Blocking.
pub(crate) fn place(config: &QemuConfig, paths: &VmPaths, spec: &VmSpec) -> Result<()> {
    let fail = |error: FileError| error.into_error("create", label(paths.id));
    let uid = config.uids.map(|uids| uids.uid_of(paths.id));
    files::private_dir(&paths.boot("")).map_err(fail)?;
    match &spec.boot.files {
        Some(BootFiles::Kernel { kernel, initrd }) => {
            own(kernel.as_path(), &paths.boot("kernel"), uid, "boot.files.kernel")?;
            if let Some(initrd) = initrd {
                own(initrd.as_path(), &paths.boot("initrd"), uid, "boot.files.initrd")?;
            }
        }
        Some(BootFiles::Uki { path }) => {
            own(path.as_path(), &paths.boot("uki"), uid, "boot.files.path")?;
        }
        _ => {}
    }
    if argv::needs_firmware(spec.boot.files.as_ref()) {
        place_nvram(config, paths)?;
    }
    place_seed(paths, spec, uid)
}

/// The UEFI variables: a copy of the template, made once and kept.
pub(crate) fn place_nvram(config: &QemuConfig, paths: &VmPaths) -> Result<()> {
    if paths.nvram().is_file() {
        return Ok(());
    }
    let uid = config.uids.map(|uids| uids.uid_of(paths.id));
    copy(&config.firmware_vars, &paths.nvram(), uid).map_err(|error| {
        let missing = error.source.kind() == io::ErrorKind::NotFound;
        let error = error.into_error("create", label(paths.id));
        if missing { error.with_remedy("install the package ovmf") } else { error }
    })
}

fn place_seed(paths: &VmPaths, spec: &VmSpec, uid: Option<u32>) -> Result<()> {
    let fail = |error: FileError| error.into_error("create", label(paths.id));
    let Some(cloud_init) = &spec.cloud_init else {
        return files::remove_file(&paths.seed()).map(drop).map_err(fail);
    };
    let bytes = seed::image(cloud_init).map_err(|error| {
        let reason = "the NoCloud seed cannot be made";
        Error::new(ErrorKind::Internal, "create", label(paths.id), reason).with_source(error)
    })?;
    files::write_atomic(&paths.seed(), &bytes).map_err(fail)?;
    give(&paths.seed(), uid).map_err(fail)
}

/// Makes `to` the VM's own: a hard link where the VMM runs as our user and the file system is the same, else a copy.
fn own(from: &Path, to: &Path, uid: Option<u32>, field: &'static str) -> Result<()> {
    let invalid = |reason: String| Error::invalid(field, reason);
    match fs::metadata(from) {
        Ok(found) if found.is_file() => {}
        Ok(_) => return Err(invalid(format!("{} is no regular file", from.display()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // Retried, unlike a spec that is wrong: the caller resolves the reference anew.
            let reason = format!("{} is not there", from.display());
            return Err(Error::new(ErrorKind::NotFound, "create", "vm", reason).with_field(field));
        }
        Err(error) => return Err(FileError::of("look at", from)(error).into_error("create", field)),
    }
    let fail = |error: FileError| error.into_error("create", field);
    if uid.is_none() {
        let temporary = files::temporary_beside(to);
        let linked = rustix::fs::linkat(
            rustix::fs::CWD,
            from,
            rustix::fs::CWD,
            &temporary,
            rustix::fs::AtFlags::SYMLINK_FOLLOW,
        );
        if linked.is_ok() {
            let renamed = fs::rename(&temporary, to).map_err(FileError::of("rename onto", to));
            // A rename of one link onto another of the same file does nothing and leaves both.
            files::remove_file(&temporary).map_err(fail)?;
            return renamed.and_then(|()| files::sync_parent(to)).map_err(fail);
        }
    }
    copy(from, to, uid).map_err(fail)
}

/// Copies so that `to` is whole or absent; shares the blocks where the file system can.
fn copy(from: &Path, to: &Path, uid: Option<u32>) -> std::result::Result<(), FileError> {
    let temporary = files::temporary_beside(to);
    let copied = copy_to(from, &temporary)
        .and_then(|()| give(&temporary, uid))
        .and_then(|()| fs::rename(&temporary, to).map_err(FileError::of("rename onto", to)))
        .and_then(|()| files::sync_parent(to));
    if copied.is_err() {
        drop(fs::remove_file(&temporary));
    }
    copied
}

fn copy_to(from: &Path, to: &Path) -> std::result::Result<(), FileError> {
    let mut source = File::open(from).map_err(FileError::of("open", from))?;
    let mut target = files::create_new(to)?;
    if rustix::fs::ioctl_ficlone(&target, &source).is_err() {
        io::copy(&mut source, &mut target).map_err(FileError::of("copy to", to))?;
    }
    target.sync_all().map_err(FileError::of("sync", to))
}

/// Makes the file readable and writable for the VMM's user alone.
fn give(path: &Path, uid: Option<u32>) -> std::result::Result<(), FileError> {
    if let Some(uid) = uid {
        chown(path, Some(uid), Some(uid)).map_err(FileError::of("give away", path))?;
        fs::set_permissions(path, Permissions::from_mode(0o600))
            .map_err(FileError::of("set the mode of", path))?;
    }
    Ok(())
}
