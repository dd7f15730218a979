//! Changes to a VM, each under its lock and each repeatable from where a crash left it.

pub(crate) mod create;
pub(crate) mod delete;
pub(crate) mod disks;
pub(crate) mod nics;
pub(crate) mod power;
pub(crate) mod resize;
mod unplug;
pub(crate) mod whole;

use std::{sync::Arc, time::Duration};

use crate::{
    driver::{Held, Op},
    error::{label, no_such_vm, silent},
    live::Live,
    qmp::{Client, QmpError},
    record::{RecordError, Running, VmRecord},
};
use drivers_api::{Error, ErrorKind, Result};

/// How long a monitor may take for one command. The context ends the whole call before, where it allows less.
pub(crate) const COMMAND: Duration = Duration::from_secs(10);

/// How long a device that is wanted again is waited for, when its removal is pending.
pub(crate) const SOON: Duration = Duration::from_secs(5);

/// A VM that is there: its record, and what it runs as.
pub(crate) struct Known {
    pub(crate) record: VmRecord,
    /// Its VMM, and what that has.
    pub(crate) live: Option<(Arc<Live>, Running)>,
}

/// Reads a VM for a change of it; `None` when it is not there. Blocking.
pub(crate) fn known(op: &Op, operation: &'static str) -> Result<Option<Known>> {
    if !op.is_there(operation)? {
        return Ok(None);
    }
    let as_error = |error: RecordError| error.into_error(operation, op.id());
    let record = VmRecord::load(op.paths()).map_err(as_error)?;
    let Some(record) = record else { return Ok(None) };
    let live = match op.hold(operation)? {
        Held::Nothing | Held::Ending(_) => None,
        Held::BeingStarted => return Err(crate::vmm::being_started(operation, op.id())),
        Held::Live(live) => {
            let running = Running::load(op.paths()).map_err(as_error)?;
            let running = running.ok_or_else(|| {
                let reason = "its run directory is gone, and with it the way to its VMM";
                Error::new(ErrorKind::Unavailable, operation, label(op.id()), reason)
                    .with_remedy("stop the VM and start it again")
            })?;
            Some((live, running))
        }
    };
    Ok(Some(Known { record, live }))
}

/// As [`known`], where the absence is an error.
pub(crate) async fn need(op: &Op, operation: &'static str) -> Result<Known> {
    let found = op.blocking(operation, move |op| known(op, operation)).await?;
    found.ok_or_else(|| no_such_vm(operation, op.id()))
}

/// The monitor of a running VM.
pub(crate) async fn monitor(op: &Op, operation: &'static str, live: &Live) -> Result<Arc<Client>> {
    live.client(COMMAND).await.map_err(|_| silent(operation, op.id(), live.identity.pid()))
}

/// A failed command as an error of the contract.
pub(crate) fn qmp_error(op: &Op, operation: &'static str, error: QmpError) -> Error {
    let (kind, reason) = match &error {
        QmpError::Silent { .. } | QmpError::Closed | QmpError::Io { .. } => {
            (ErrorKind::UnknownOutcome, "its VMM does not answer")
        }
        QmpError::Malformed { .. } => (ErrorKind::Internal, "its VMM answers nonsense"),
        QmpError::Refused { description, .. } => (refusal_kind(description), "QEMU refused"),
    };
    Error::new(kind, operation, label(op.id()), reason).with_source(error)
}

/// QEMU has one class for nearly all errors, so the texts of errno and of its image locks decide.
fn refusal_kind(description: &str) -> ErrorKind {
    let has = |text: &str| description.contains(text);
    if has("No such file or directory") {
        ErrorKind::NotFound
    } else if has("Permission denied") {
        ErrorKind::Denied
    } else if has("No space left") || has("Cannot allocate memory") {
        ErrorKind::Exhausted
    } else if has("lock") || has("busy") || has("in use") {
        ErrorKind::Conflict
    } else {
        ErrorKind::Unavailable
    }
}

/// Keeps the record. Blocking.
pub(crate) fn keep(op: &Op, operation: &'static str, record: &VmRecord) -> Result<()> {
    record.store(op.paths()).map_err(|error| error.into_error(operation, op.id()))
}

/// Keeps what runs. Blocking.
pub(crate) fn keep_running(op: &Op, operation: &'static str, running: &Running) -> Result<()> {
    running.store(op.paths()).map_err(|error| error.into_error(operation, op.id()))
}

/// Refuses a device for which there is no port: none at all, or none in the VMM that runs.
pub(crate) fn check_port(
    op: &Op,
    operation: &'static str,
    port: u16,
    running: Option<u16>,
) -> Result<()> {
    let most = running.unwrap_or(crate::argv::MAX_PORTS);
    if port < most {
        return Ok(());
    }
    let reason = format!("all {most} PCIe ports of the VM are taken");
    Err(Error::new(ErrorKind::Exhausted, operation, label(op.id()), reason)
        .with_remedy("detach a device, or restart the VM with more ports"))
}
