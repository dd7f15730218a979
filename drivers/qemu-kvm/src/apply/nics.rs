//! NICs that come and go.

use drivers_api::{Change, Context, Error, ErrorKind, IfName, NicHandle, Result};
use host::{bound::check, fault};

use super::{
    COMMAND, Known, keep, keep_running, monitor, need, qmp_error,
    unplug::{Unplugged, unplug},
};
use crate::{
    devices,
    driver::Op,
    error::label,
    live::Live,
    qmp::Client,
    record::{NicEntry, Running, VmRecord},
    vmm,
};

/// Adds a NIC to the VM, at once where it runs.
pub(crate) async fn attach(op: &Op, cx: &Context, nic: &NicHandle) -> Result<Change> {
    const DOING: &str = "attach NIC to";
    check(cx, DOING, label(op.id()))?;
    settle(op, cx, &nic.device).await?;
    let Known { mut record, live } = need(op, DOING).await?;
    check_against(op, &record, live.as_ref().map(|(_, running)| running), nic)?;
    let known = record.devices.nics.iter().any(|entry| entry.nic == *nic);
    if !known {
        let other = live.as_ref().map(|(_, running)| &running.devices);
        let place = other.and_then(|devices| find(&devices.nics, &nic.device));
        let port = place.map_or_else(|| record.devices.free_port(other), |entry| entry.port);
        super::check_port(op, DOING, port, live.as_ref().map(|(_, running)| running.ports))?;
        record.devices.nics.push(NicEntry { nic: nic.clone(), port, detaching: false });
    }
    let Some((live, running)) = live else {
        if !known {
            op.blocking(DOING, move |op| keep(op, DOING, &record)).await?;
        }
        return Ok(Change::changed_if(!known));
    };
    let client = monitor(op, DOING, &live).await?;
    let ids = client.device_ids(COMMAND).await.map_err(|e| qmp_error(op, DOING, e))?;
    let there = ids.contains(&devices::nic_id(nic));
    if known && there {
        return Ok(Change::Unchanged);
    }
    let before = (!known).then(|| without(record.clone(), &nic.device));
    let kept = record.clone();
    op.blocking(DOING, move |op| keep(op, DOING, &kept)).await?;
    fault::point("qemu.attach-nic.recorded")?;
    if there {
        return Ok(Change::Changed);
    }
    let plugged = plug(op, &client, &record, running, nic).await;
    if let (Err(error), Some(before)) = (&plugged, before)
        && error.kind() != ErrorKind::UnknownOutcome
    {
        op.blocking(DOING, move |op| keep(op, DOING, &before)).await?;
    }
    plugged.map(|()| Change::Changed)
}

/// Finishes a pending removal of what is wanted again, if the guest lets go of it soon.
async fn settle(op: &Op, cx: &Context, device: &IfName) -> Result<()> {
    const DOING: &str = "attach NIC to";
    let Known { live, .. } = need(op, DOING).await?;
    let Some((live, running)) = live else { return Ok(()) };
    let Some(entry) = find(&running.devices.nics, device).filter(|entry| entry.detaching) else {
        return Ok(());
    };
    let name = entry.nic.name.clone();
    let nic = entry.nic.clone();
    let removal = pull(op, cx, &live, running, &nic);
    if let Ok(removed) = tokio::time::timeout(super::SOON, removal).await {
        return removed.map(drop);
    }
    let reason = format!("the removal of NIC {name} is pending");
    Err(Error::new(ErrorKind::Unavailable, DOING, label(op.id()), reason)
        .with_remedy("repeat when the guest has let go of it"))
}

fn find<'a>(nics: &'a [NicEntry], device: &IfName) -> Option<&'a NicEntry> {
    nics.iter().find(|entry| entry.nic.device == *device)
}

fn without(mut record: VmRecord, device: &IfName) -> VmRecord {
    record.devices.nics.retain(|entry| entry.nic.device != *device);
    record
}

/// Refuses what clashes with a NIC that is there.
fn check_against(
    op: &Op,
    record: &VmRecord,
    running: Option<&Running>,
    nic: &NicHandle,
) -> Result<()> {
    let fail = |kind, reason: String, remedy: &'static str| {
        Err(Error::new(kind, "attach NIC to", label(op.id()), reason).with_remedy(remedy))
    };
    let running = running.map(|running| running.devices.nics.as_slice()).unwrap_or_default();
    for entry in record.devices.nics.iter().chain(running) {
        let other = &entry.nic;
        let same_place = other.device == nic.device
            || other.name == nic.name
            || other.mac == nic.mac
            || other.port_uuid == nic.port_uuid;
        if same_place && other != nic {
            let reason = format!(
                "NIC {} on {} shares its name, device, port or MAC address with this one",
                other.name, other.device
            );
            return fail(ErrorKind::Conflict, reason, "detach it first");
        }
    }
    Ok(())
}

/// Plugs a NIC into a running VM.
async fn plug(
    op: &Op,
    client: &Client,
    record: &VmRecord,
    mut running: Running,
    nic: &NicHandle,
) -> Result<()> {
    const DOING: &str = "attach NIC to";
    let Some(entry) = find(&record.devices.nics, &nic.device).cloned() else { return Ok(()) };
    let id = devices::nic_id(nic);
    let fail = |error| qmp_error(op, DOING, error);
    // A back-end without its device was left by a crash, and holds the tap.
    match client.netdev_del(&id, COMMAND).await {
        Err(error) if error.is_open() => return Err(fail(error)),
        Ok(()) | Err(_) => {}
    }
    let (device, vm) = (nic.device.clone(), op.id());
    let (tap, vhost) = op.blocking(DOING, move |_| vmm::open_tap(&device, vm, DOING)).await?;
    if !running.devices.nics.contains(&entry) {
        running.devices.nics.push(entry.clone());
        let kept = running.clone();
        op.blocking(DOING, move |op| keep_running(op, DOING, &kept)).await?;
    }
    let vhost_name = vhost.as_ref().map(|_| format!("{id}-vhost"));
    let work = async {
        if let (Some(vhost), Some(name)) = (vhost, &vhost_name) {
            client.getfd(name, vhost.into(), COMMAND).await?;
        }
        client.getfd(&id, tap.into(), COMMAND).await?;
        client.netdev_add(devices::netdev(nic, &id, vhost_name.as_deref()), COMMAND).await?;
        client.device_add(devices::nic_device(&entry), COMMAND).await
    };
    match work.await {
        Ok(()) => fault::point("qemu.attach-nic.plugged"),
        Err(error) if error.is_open() => Err(fail(error)),
        Err(error) => {
            let error = fail(error);
            // What is not there is no matter.
            drop(client.netdev_del(&id, COMMAND).await);
            forget(op, DOING, running, &nic.device).await?;
            Err(error)
        }
    }
}

async fn forget(
    op: &Op,
    operation: &'static str,
    mut running: Running,
    device: &IfName,
) -> Result<()> {
    running.devices.nics.retain(|entry| entry.nic.device != *device);
    op.blocking(operation, move |op| keep_running(op, operation, &running)).await
}

/// Removes a NIC from the VM; waits for the guest to let go.
pub(crate) async fn detach(op: &Op, cx: &Context, device: &IfName) -> Result<Change> {
    const DOING: &str = "detach NIC from";
    check(cx, DOING, label(op.id()))?;
    let found = op.blocking(DOING, |op| super::known(op, DOING)).await?;
    let Some(Known { record, live }) = found else { return Ok(Change::Unchanged) };
    let recorded = find(&record.devices.nics, device).is_some();
    if recorded {
        let kept = without(record, device);
        op.blocking(DOING, move |op| keep(op, DOING, &kept)).await?;
        fault::point("qemu.detach-nic.recorded")?;
    }
    let Some((live, running)) = live else { return Ok(Change::changed_if(recorded)) };
    let Some(entry) = find(&running.devices.nics, device).cloned() else {
        return Ok(Change::changed_if(recorded));
    };
    pull(op, cx, &live, running, &entry.nic).await
}

async fn pull(
    op: &Op,
    cx: &Context,
    live: &Live,
    mut running: Running,
    nic: &NicHandle,
) -> Result<Change> {
    const DOING: &str = "detach NIC from";
    let client = monitor(op, DOING, live).await?;
    let id = devices::nic_id(nic);
    let ids = client.device_ids(COMMAND).await.map_err(|e| qmp_error(op, DOING, e))?;
    if ids.contains(&id) {
        set_detaching(op, &mut running, &nic.device, true).await?;
        fault::point("qemu.detach-nic.marked")?;
        if unplug(op, cx, DOING, live, &client, &id).await? == Unplugged::Refused {
            set_detaching(op, &mut running, &nic.device, false).await?;
            let reason = format!("the guest does not let go of the NIC on {}", nic.device);
            return Err(Error::new(ErrorKind::Unavailable, DOING, label(op.id()), reason)
                .with_remedy("stop the VM"));
        }
        fault::point("qemu.detach-nic.unplugged")?;
    }
    if live.exit().is_none() {
        match client.netdev_del(&id, COMMAND).await {
            Ok(()) => {}
            Err(error) if error.is_absent() => {}
            Err(_) if live.exit().is_some() => {}
            Err(error) => return Err(qmp_error(op, DOING, error)),
        }
        forget(op, DOING, running, &nic.device).await?;
    }
    Ok(Change::Changed)
}

async fn set_detaching(
    op: &Op,
    running: &mut Running,
    device: &IfName,
    detaching: bool,
) -> Result<()> {
    const DOING: &str = "detach NIC from";
    let mut changed = false;
    for entry in &mut running.devices.nics {
        if entry.nic.device == *device && entry.detaching != detaching {
            entry.detaching = detaching;
            changed = true;
        }
    }
    if changed {
        let kept = running.clone();
        op.blocking(DOING, move |op| keep_running(op, DOING, &kept)).await?;
    }
    Ok(())
}
