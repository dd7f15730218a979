//! A disk that has grown.

use drivers_api::{Change, Error, ErrorKind, Result, VolumeId};

use super::{COMMAND, Known, monitor, need, qmp_error};
use crate::{devices, driver::Op, error::label};

const DOING: &str = "resize disk of";

/// Tells the guest that a disk has grown.
pub(crate) async fn disk(op: &Op, volume: VolumeId, bytes: u64) -> Result<Change> {
    let Known { record, live } = need(op, DOING).await?;
    let has = |disks: &[crate::record::DiskEntry]| {
        disks.iter().any(|entry| entry.disk.volume_uuid == volume)
    };
    let absent = || Error::not_found(DOING, format!("disk of volume {volume}"));
    let Some((live, running)) = live else {
        return if has(&record.devices.disks) { Ok(Change::Unchanged) } else { Err(absent()) };
    };
    if !has(&running.devices.disks) {
        return Err(absent());
    }
    let client = monitor(op, DOING, &live).await?;
    let fail = |error| qmp_error(op, DOING, error);
    let node = devices::node_name(volume);
    let nodes = client.block_nodes(COMMAND).await.map_err(fail)?;
    let found = nodes.iter().find(|found| found.name.as_deref() == Some(node.as_str()));
    let has = found.ok_or_else(absent)?.image.virtual_size;
    if bytes == has {
        return Ok(Change::Unchanged);
    }
    if bytes < has {
        let reason = format!("the guest has {has} bytes, and {bytes} are fewer: grow-only");
        return Err(
            Error::new(ErrorKind::InvalidSpec, DOING, label(op.id()), reason).with_field("bytes")
        );
    }
    client.block_resize(&node, bytes, COMMAND).await.map_err(fail)?;
    Ok(Change::Changed)
}
