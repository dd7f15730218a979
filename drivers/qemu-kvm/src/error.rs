//! From what went wrong to the contract's error.

use drivers_api::{Error, ErrorKind, VmId};

/// How an error names a VM.
pub(crate) fn label(vm: VmId) -> String {
    format!("vm {vm}")
}

/// No such VM.
pub(crate) fn no_such_vm(operation: &'static str, vm: VmId) -> Error {
    Error::not_found(operation, label(vm))
}

/// Something that is not ours has the VM's place.
pub(crate) fn foreign(
    operation: &'static str,
    vm: VmId,
    dir: &std::path::Path,
    why: &str,
) -> Error {
    Error::new(
        ErrorKind::Conflict,
        operation,
        label(vm),
        format!("{} is there and is not ours: {why}", dir.display()),
    )
    .with_remedy("move it away; nothing of it was touched")
}

/// A VMM is there that does not answer.
pub(crate) fn silent(operation: &'static str, vm: VmId, pid: u32) -> Error {
    Error::new(
        ErrorKind::UnknownOutcome,
        operation,
        label(vm),
        format!("its VMM, process {pid}, does not answer on its monitor"),
    )
    .with_remedy("look at the process; a stop or delete of the VM ends it")
}
