//! A whole instance in one call.

use std::time::Duration;

use drivers_api::{Change, Context, InstanceSpec, Result, VmPower};
use host::bound::{check, remaining};

use super::{create, disks, nics, power};
use crate::{
    devices,
    driver::{Held, Op},
    error::label,
    plan,
    record::{RecordError, Running, VmRecord},
};

/// How long a guest may take to shut down where the caller sets no deadline.
const GRACE: Duration = Duration::from_secs(60);
/// What is kept of a deadline for the forced end of a VMM.
const RESERVE: Duration = Duration::from_secs(5);

/// Brings a VM to a whole spec.
pub(crate) async fn ensure(op: &Op, cx: &Context, spec: &InstanceSpec) -> Result<Change> {
    spec.validate()?;
    create::check_spec(&spec.vm)?;
    for (at, disk) in spec.disks.iter().enumerate() {
        devices::check_disk(disk).map_err(|error| {
            let field = error.field().unwrap_or("disk").to_owned();
            error.with_field(format!("disks[{at}].{field}"))
        })?;
    }
    check(cx, "ensure", label(op.id()))?;
    let wanted = spec.clone();
    let (recorded, runs) = op.blocking("ensure", move |op| record(op, &wanted)).await?;
    let mut change = recorded;
    if let Some(running) = runs {
        change = change.and(apply_live(op, cx, &running, spec).await?);
    }
    change = change.and(match spec.power {
        VmPower::Running => power::start(op, cx).await?,
        VmPower::Stopped => {
            let grace = remaining(cx).map_or(GRACE, |left| left.saturating_sub(RESERVE));
            power::stop(op, cx, grace).await?
        }
        _ => Change::Unchanged,
    });
    Ok(change)
}

/// Writes down the static part, with the devices where the VM does not run; what runs is answered. Blocking.
///
/// A running VM's devices go through attach and detach, which keep the record themselves. Those that are there with other
/// properties are replaced in the record alone.
fn record(op: &Op, spec: &InstanceSpec) -> Result<(Change, Option<Running>)> {
    let as_error = |error: RecordError| error.into_error("ensure", op.id());
    let there = op.is_there("ensure")?;
    let had = if there { VmRecord::load(op.paths()).ok().flatten() } else { None };
    let had = had.map(|record| record.devices).unwrap_or_default();
    let held = if there { op.hold("ensure")? } else { Held::Nothing };
    let running = match held {
        Held::Nothing | Held::Ending(_) => None,
        Held::BeingStarted => return Err(crate::vmm::being_started("ensure", op.id())),
        Held::Live(_) => Running::load(op.paths()).map_err(as_error)?,
    };
    let runs = running.as_ref().map(|running| &running.devices);
    let mut wanted = plan::merge(&had, runs, &spec.disks, &spec.nics);
    for port in wanted.ports() {
        super::check_port(op, "ensure", port, None)?;
    }
    if let Some(runs) = runs {
        // New ones are recorded when they are attached; those that are to go stay recorded until they are detached.
        wanted.disks.retain(|entry| {
            runs.disks.iter().any(|has| has.disk.volume_uuid == entry.disk.volume_uuid)
        });
        wanted.nics.retain(|entry| runs.nics.iter().any(|has| has.nic.device == entry.nic.device));
    }
    let change = create::ensure(op, &spec.vm, Some(&wanted))?;
    Ok((change, running))
}

async fn apply_live(
    op: &Op,
    cx: &Context,
    running: &Running,
    spec: &InstanceSpec,
) -> Result<Change> {
    let plan = plan::live(&running.devices, &spec.disks, &spec.nics);
    let mut change = Change::Unchanged;
    for volume in plan.detach_disks {
        change = change.and(disks::detach(op, cx, volume).await?);
    }
    for device in &plan.detach_nics {
        change = change.and(nics::detach(op, cx, device).await?);
    }
    for disk in &plan.attach_disks {
        change = change.and(disks::attach(op, cx, disk).await?);
    }
    for nic in &plan.attach_nics {
        change = change.and(nics::attach(op, cx, nic).await?);
    }
    Ok(change)
}
