//! Disks that come and go.

use drivers_api::{Change, Context, DiskSpec, Error, ErrorKind, Result, VolumeId};
use host::{bound::check, fault};

use super::{
    COMMAND, Known, keep, keep_running, monitor, need, qmp_error,
    unplug::{Unplugged, close_node, unplug},
};
use crate::{
    devices,
    driver::Op,
    error::label,
    live::Live,
    qmp::Client,
    record::{DiskEntry, Running, VmRecord},
};

/// Adds a disk to the VM, at once where it runs.
pub(crate) async fn attach(op: &Op, cx: &Context, disk: &DiskSpec) -> Result<Change> {
    const DOING: &str = "attach disk to";
    devices::check_disk(disk)?;
    check(cx, DOING, label(op.id()))?;
    settle(op, cx, disk.volume_uuid).await?;
    let Known { mut record, live } = need(op, DOING).await?;
    check_against(op, &record, live.as_ref().map(|(_, running)| running), disk)?;
    let known = record.devices.disks.iter().any(|entry| entry.disk == *disk);
    if !known {
        let other = live.as_ref().map(|(_, running)| &running.devices);
        // One that runs already keeps its place: the record is only behind.
        let place = other.and_then(|devices| find(&devices.disks, disk.volume_uuid));
        let port = place.map_or_else(|| record.devices.free_port(other), |entry| entry.port);
        super::check_port(op, DOING, port, live.as_ref().map(|(_, running)| running.ports))?;
        record.devices.disks.push(DiskEntry { disk: disk.clone(), port, detaching: false });
    }
    let recorded = Change::changed_if(!known);
    let Some((live, running)) = live else {
        if !known {
            op.blocking(DOING, move |op| keep(op, DOING, &record)).await?;
        }
        return Ok(recorded);
    };
    let client = monitor(op, DOING, &live).await?;
    let ids = client.device_ids(COMMAND).await.map_err(|e| qmp_error(op, DOING, e))?;
    let there = ids.contains(&devices::disk_id(disk.volume_uuid));
    if known && there {
        return Ok(Change::Unchanged);
    }
    // The record first: whatever is plugged then has a record, and a crash leaves what a repeat finishes.
    let before = (!known).then(|| without(record.clone(), disk.volume_uuid));
    let kept = record.clone();
    op.blocking(DOING, move |op| keep(op, DOING, &kept)).await?;
    fault::point("qemu.attach-disk.recorded")?;
    if there {
        return Ok(Change::Changed);
    }
    let plugged = plug(op, &client, &record, running, disk).await;
    if let (Err(error), Some(before)) = (&plugged, before)
        && error.kind() != ErrorKind::UnknownOutcome
    {
        op.blocking(DOING, move |op| keep(op, DOING, &before)).await?;
    }
    plugged.map(|()| Change::Changed)
}

/// Finishes a pending removal of what is wanted again, if the guest lets go of it soon.
async fn settle(op: &Op, cx: &Context, volume: VolumeId) -> Result<()> {
    const DOING: &str = "attach disk to";
    let Known { live, .. } = need(op, DOING).await?;
    let Some((live, running)) = live else { return Ok(()) };
    let Some(entry) = find(&running.devices.disks, volume).filter(|entry| entry.detaching) else {
        return Ok(());
    };
    let name = entry.disk.name.clone();
    let removal = pull(op, cx, &live, running, volume);
    if let Ok(removed) = tokio::time::timeout(super::SOON, removal).await {
        return removed.map(drop);
    }
    let reason = format!("the removal of disk {name} is pending");
    Err(Error::new(ErrorKind::Unavailable, DOING, label(op.id()), reason)
        .with_remedy("repeat when the guest has let go of it"))
}

fn find(disks: &[DiskEntry], volume: VolumeId) -> Option<&DiskEntry> {
    disks.iter().find(|entry| entry.disk.volume_uuid == volume)
}

fn without(mut record: VmRecord, volume: VolumeId) -> VmRecord {
    record.devices.disks.retain(|entry| entry.disk.volume_uuid != volume);
    record
}

/// Refuses what clashes with a disk that is there.
fn check_against(
    op: &Op,
    record: &VmRecord,
    running: Option<&Running>,
    disk: &DiskSpec,
) -> Result<()> {
    let conflict = |reason: String| {
        Err(Error::new(ErrorKind::Conflict, "attach disk to", label(op.id()), reason))
    };
    let running = running.map(|running| running.devices.disks.as_slice()).unwrap_or_default();
    for entry in record.devices.disks.iter().chain(running) {
        let other = &entry.disk;
        if other.volume_uuid == disk.volume_uuid {
            if other != disk {
                return conflict(format!(
                    "volume {} is attached in another way, as disk {}; detach it first",
                    disk.volume_uuid, other.name
                ));
            }
        } else if other.name == disk.name {
            return conflict(format!(
                "the name {} is that of the disk of volume {}",
                disk.name, other.volume_uuid
            ));
        } else if other.boot && disk.boot {
            return conflict(format!("disk {} is the boot disk", other.name));
        }
    }
    Ok(())
}

/// Plugs a disk into a running VM.
async fn plug(
    op: &Op,
    client: &Client,
    record: &VmRecord,
    mut running: Running,
    disk: &DiskSpec,
) -> Result<()> {
    const DOING: &str = "attach disk to";
    let Some(entry) = find(&record.devices.disks, disk.volume_uuid).cloned() else { return Ok(()) };
    if !running.devices.disks.contains(&entry) {
        running.devices.disks.push(entry.clone());
        let kept = running.clone();
        op.blocking(DOING, move |op| keep_running(op, DOING, &kept)).await?;
    }
    let node = devices::node_name(disk.volume_uuid);
    let fail = |error| qmp_error(op, DOING, error);
    // A node without its device was left by a crash, or by a device that has just gone.
    let id = devices::disk_id(disk.volume_uuid);
    close_node(client, &id, &node).await.map_err(fail)?;
    if let Err(error) = client.blockdev_add(devices::blockdev(disk)?, COMMAND).await {
        forget(op, DOING, running, disk.volume_uuid).await?;
        return Err(fail(error));
    }
    fault::point("qemu.attach-disk.opened")?;
    for device in devices::disk_devices(&entry) {
        if let Err(error) = client.device_add(device, COMMAND).await {
            if error.is_open() {
                return Err(fail(error));
            }
            let error = fail(error);
            // A controller that was added before its disk goes too; what is not there is no matter.
            drop(client.device_del(&id, COMMAND).await);
            drop(client.blockdev_del(&node, COMMAND).await);
            forget(op, DOING, running, disk.volume_uuid).await?;
            return Err(error);
        }
        fault::point("qemu.attach-disk.plugged")?;
    }
    Ok(())
}

async fn forget(
    op: &Op,
    operation: &'static str,
    mut running: Running,
    volume: VolumeId,
) -> Result<()> {
    running.devices.disks.retain(|entry| entry.disk.volume_uuid != volume);
    op.blocking(operation, move |op| keep_running(op, operation, &running)).await
}

/// Removes a disk from the VM; waits for the guest to let go.
pub(crate) async fn detach(op: &Op, cx: &Context, volume: VolumeId) -> Result<Change> {
    const DOING: &str = "detach disk from";
    check(cx, DOING, label(op.id()))?;
    let found = op.blocking(DOING, |op| super::known(op, DOING)).await?;
    let Some(Known { record, live }) = found else { return Ok(Change::Unchanged) };
    let recorded = find(&record.devices.disks, volume).is_some();
    if recorded {
        // The next start has it no more, whatever becomes of this one.
        let kept = without(record, volume);
        // Before the record of what runs is marked, a crash leaves a disk that is plugged and not wanted: a repeat finds it
        // in `running`.
        op.blocking(DOING, move |op| keep(op, DOING, &kept)).await?;
        fault::point("qemu.detach-disk.recorded")?;
    }
    let Some((live, running)) = live else { return Ok(Change::changed_if(recorded)) };
    if find(&running.devices.disks, volume).is_none() {
        return Ok(Change::changed_if(recorded));
    }
    pull(op, cx, &live, running, volume).await
}

async fn pull(
    op: &Op,
    cx: &Context,
    live: &Live,
    mut running: Running,
    volume: VolumeId,
) -> Result<Change> {
    const DOING: &str = "detach disk from";
    let client = monitor(op, DOING, live).await?;
    let id = devices::disk_id(volume);
    let ids = client.device_ids(COMMAND).await.map_err(|e| qmp_error(op, DOING, e))?;
    if ids.contains(&id) {
        set_detaching(op, &mut running, volume, true).await?;
        fault::point("qemu.detach-disk.marked")?;
        if unplug(op, cx, DOING, live, &client, &id).await? == Unplugged::Refused {
            set_detaching(op, &mut running, volume, false).await?;
            let reason = format!("the guest does not let go of the disk of volume {volume}");
            return Err(Error::new(ErrorKind::Unavailable, DOING, label(op.id()), reason)
                .with_remedy("unmount it in the guest, or stop the VM"));
        }
        fault::point("qemu.detach-disk.unplugged")?;
    }
    if live.exit().is_none() {
        let node = devices::node_name(volume);
        match close_node(&client, &id, &node).await {
            Ok(()) => {}
            Err(_) if live.exit().is_some() => {}
            Err(error) => return Err(qmp_error(op, DOING, error)),
        }
        forget(op, DOING, running, volume).await?;
    }
    Ok(Change::Changed)
}

async fn set_detaching(
    op: &Op,
    running: &mut Running,
    volume: VolumeId,
    detaching: bool,
) -> Result<()> {
    const DOING: &str = "detach disk from";
    let mut changed = false;
    for entry in &mut running.devices.disks {
        if entry.disk.volume_uuid == volume && entry.detaching != detaching {
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
