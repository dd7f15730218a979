//! The removal of a VM, whatever of it is there.

use std::time::Duration;

use drivers_api::{Change, Context, Result};
use host::{
    fault,
    files::{self, FileError},
};
use tokio::time::Instant;

use super::power;
use crate::{
    driver::{Held, Op},
    error::label,
    paths::{DEL_PREFIX, NEW_PREFIX},
    vmm,
};

/// How long a lock without a process may take to go, and when it is looked at again.
const SETTLES: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_millis(20);

/// Ends the VMM and removes all state.
pub(crate) async fn delete(op: &Op, cx: &Context) -> Result<Change> {
    let there = op.blocking("delete", |op| op.is_there("delete")).await?;
    if there {
        // Without a record too: a VMM may have been started before it was damaged.
        match settled(op).await? {
            Held::Nothing | Held::Ending(_) => {}
            Held::BeingStarted => return Err(vmm::being_started("delete", op.id())),
            Held::Live(live) => power::end(op, cx, "delete", &live).await?,
        }
        fault::point("qemu.delete.ended")?;
    }
    op.blocking("delete", move |op| remove(op, there)).await
}

/// What holds the VM, once that is clear.
///
/// The right to change the VM is ours, so no agent starts it. A lock without a process is then that of a VMM that is ending,
/// or a copy of it in a child of ours between its fork and its exec: it goes in a moment, and the kernel tells nobody when.
async fn settled(op: &Op) -> Result<Held> {
    let begun = Instant::now();
    loop {
        match op.blocking("delete", |op| op.hold("delete")).await? {
            Held::BeingStarted if begun.elapsed() < SETTLES => tokio::time::sleep(AGAIN).await,
            held @ (Held::Nothing | Held::Live(_) | Held::Ending(_) | Held::BeingStarted) => {
                return Ok(held);
            }
        }
    }
}

fn remove(op: &Op, there: bool) -> Result<Change> {
    let fail = |error: FileError| error.into_error("delete", label(op.id()));
    let paths = op.paths();
    let mut changed = there;
    if there {
        let aside = paths.aside(DEL_PREFIX);
        std::fs::rename(&paths.dir, &aside)
            .map_err(FileError::of("rename", &paths.dir))
            .and_then(|()| files::sync_parent(&aside))
            .map_err(fail)?;
        fault::point("qemu.delete.set-aside")?;
    }
    changed |= sweep(op)?;
    fault::point("qemu.delete.swept")?;
    if paths.run.exists() {
        vmm::clear_ended(paths)?;
        changed = true;
    }
    fault::point("qemu.delete.done")?;
    Ok(Change::changed_if(changed))
}

/// Removes what an interrupted creation or removal of this VM left; answers whether there was anything. Blocking.
pub(crate) fn sweep(op: &Op) -> Result<bool> {
    let prefixes = [NEW_PREFIX, DEL_PREFIX].map(|prefix| format!("{prefix}{}-", op.id()));
    sweep_where(&op.inner.config.state_dir, |name| {
        prefixes.iter().any(|prefix| name.starts_with(prefix.as_str()))
    })
}

/// Removes the directories in the making and on their way out whose name matches.
pub(crate) fn sweep_where(state: &std::path::Path, matches: impl Fn(&str) -> bool) -> Result<bool> {
    let fail = |error: FileError| error.into_error("clear", "half-made VMs");
    let entries = std::fs::read_dir(state).map_err(FileError::of("read", state)).map_err(fail)?;
    let mut changed = false;
    for entry in entries {
        let entry = entry.map_err(FileError::of("read", state)).map_err(fail)?;
        if entry.file_name().to_str().is_some_and(&matches) {
            changed |= files::remove_tree(&entry.path()).map_err(fail)?;
        }
    }
    Ok(changed)
}
