//! The static state of a VM.

use drivers_api::{Change, Context, Error, ErrorKind, Result, VmSpec};
use host::{
    bound::check,
    fault,
    files::{self, FileError},
};

use crate::{
    boot,
    driver::Op,
    error::label,
    paths::NEW_PREFIX,
    record::{self, Devices, RecordError, VmRecord},
};

/// The most user data of a seed: the bound of a file of ours, less the rest of it.
const MAX_SEED_BYTES: usize = 4 << 20;

/// Checks what does not depend on the host's state.
pub(crate) fn check_spec(spec: &VmSpec) -> Result<()> {
    spec.boot.validate()?;
    let seed = spec.cloud_init.as_ref().map_or(0, |seed| {
        seed.user_data.len()
            + seed.meta_data.len()
            + seed.network_config.as_ref().map_or(0, String::len)
    });
    if seed > MAX_SEED_BYTES {
        return Err(Error::invalid("cloud_init", "wanted at most 4 MiB of data"));
    }
    Ok(())
}

/// Makes the VM, completes it, or keeps a changed spec.
pub(crate) async fn create(op: &Op, cx: &Context, spec: &VmSpec) -> Result<Change> {
    check_spec(spec)?;
    check(cx, "create", label(op.id()))?;
    let spec = spec.clone();
    op.blocking("create", move |op| ensure(op, &spec, None)).await
}

/// Makes sure that the VM is there with the spec, and with the devices where they are given. Blocking.
pub(crate) fn ensure(op: &Op, spec: &VmSpec, devices: Option<&Devices>) -> Result<Change> {
    if !op.is_there("create")? {
        return make(op, spec, devices.cloned().unwrap_or_default());
    }
    let (paths, config) = (op.paths(), &op.inner.config);
    let found = match VmRecord::load(paths) {
        Ok(found) => found,
        // Ours and damaged: the spec that is given replaces it.
        Err(error @ RecordError::Damaged { .. }) => {
            tracing::warn!(vm = %op.id(), %error, "the spec is written anew");
            None
        }
        Err(error) => return Err(error.into_error("create", op.id())),
    };
    let complete = found.as_ref().is_some_and(|record| boot::is_complete(paths, &record.spec));
    let wanted = VmRecord {
        spec: spec.clone(),
        devices: devices
            .cloned()
            .or_else(|| found.as_ref().map(|record| record.devices.clone()))
            .unwrap_or_default(),
    };
    if complete && found.as_ref() == Some(&wanted) {
        return Ok(Change::Unchanged);
    }
    let same_files = found.as_ref().is_some_and(|record| {
        record.spec.boot.files == spec.boot.files && record.spec.cloud_init == spec.cloud_init
    });
    if !(complete && same_files) {
        // A UEFI boot's variables belong to the VM and stay.
        boot::place(config, paths, spec)?;
        fault::point("qemu.create.files-replaced")?;
    }
    super::keep(op, "create", &wanted)?;
    fault::point("qemu.create.spec-replaced")?;
    Ok(if found.is_none() { Change::Created } else { Change::Changed })
}

/// Makes a VM aside and moves it into its place whole.
fn make(op: &Op, spec: &VmSpec, devices: Devices) -> Result<Change> {
    let fail = |error: FileError| error.into_error("create", label(op.id()));
    let as_error = |error: RecordError| error.into_error("create", op.id());
    let paths = op.paths();
    super::delete::sweep(op)?;
    let aside = paths.with_dir(paths.aside(NEW_PREFIX));
    files::private_dir(&aside.dir).map_err(fail)?;
    let made = (|| {
        record::write_mark(&aside, op.inner.config.node).map_err(as_error)?;
        fault::point("qemu.create.mark-written")?;
        boot::place(&op.inner.config, &aside, spec)?;
        fault::point("qemu.create.files-placed")?;
        VmRecord { spec: spec.clone(), devices }.store(&aside).map_err(as_error)?;
        fault::point("qemu.create.spec-written")?;
        std::fs::rename(&aside.dir, &paths.dir)
            .map_err(FileError::of("rename onto", &paths.dir))
            .map_err(|error| {
            if error.source.kind() == std::io::ErrorKind::DirectoryNotEmpty {
                let reason = "a directory of that name appeared meanwhile";
                return Error::new(ErrorKind::Conflict, "create", label(op.id()), reason);
            }
            fail(error)
        })?;
        files::sync_parent(&paths.dir).map_err(fail)
    })();
    if made.is_err() && aside.dir.exists() {
        drop(files::remove_tree(&aside.dir));
    }
    made?;
    fault::point("qemu.create.done")?;
    Ok(Change::Created)
}
