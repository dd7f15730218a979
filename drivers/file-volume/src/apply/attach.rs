//! Gives a volume to a VM, and takes it back.

use std::sync::Arc;

use drivers_api::{
    AttachRequest, AttachedVolume, Backing, BackingKind, Change, DetachRequest, HostPath, Outcome,
};
use host::{fault, files};

use super::ensure;
use crate::{
    access,
    attachments::{self, Record},
    error::VolumeError,
    locks::{Held, Key},
    observe::{Live, observe},
    plan::{self, AttachPlan},
    pool::{Pool, with},
};

pub(crate) async fn attach(
    pool: Arc<Pool>,
    request: AttachRequest,
) -> Result<Outcome<AttachedVolume>, VolumeError> {
    if !request.accepts.contains(&BackingKind::File) {
        return Err(VolumeError::NoBacking);
    }
    if request.host_uuid != pool.node {
        return Err(VolumeError::OtherHost { node: pool.node });
    }
    let key = Key::volume(request.volume_uuid);
    let gate = pool.locks.gate(key).await;
    with(&pool, move |pool| {
        let held = pool.locks.hold(gate, key)?;
        let live = observe(&pool.layout, request.volume_uuid)?.live.ok_or(VolumeError::Absent)?;
        live.check_node(pool.node)?;
        let live = live.attachments_known()?.usable()?;
        give(&held, &live, &request)
    })
    .await
}

fn give(
    held: &Held,
    live: &Live,
    request: &AttachRequest,
) -> Result<Outcome<AttachedVolume>, VolumeError> {
    let plan = plan::attach(&live.records, request)?;
    let path = live.disk_path()?;
    let host_path: HostPath = path
        .to_str()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| VolumeError::Path { path: path.clone() })?;
    let wanted = Record::wanted(request);
    let mut records = live.records.clone();
    records.retain(|record| record.attachment.vm_uuid != request.vm_uuid);
    records.push(wanted);
    let mut change = match plan {
        AttachPlan::Keep => Change::Unchanged,
        AttachPlan::Replace => Change::Changed,
        AttachPlan::Add => Change::Created,
    };
    if change.wrote() {
        for temporary in &live.temporary {
            files::remove_file(temporary)?;
        }
        held.check()?;
        // First the record, then the access: who may open the volume is always known.
        attachments::write(&live.dir, &wanted)?;
        fault::point("file.attach.recorded")?;
    }
    // Also when the record is there: a crash may have come between the two.
    let opened = set_access(live, &records);
    if opened.is_err() && change.wrote() {
        undo(live, request);
    }
    if opened? {
        change = change.and(Change::Changed);
        fault::point("file.attach.opened")?;
    }
    // The last moment before a VM starts: its guest boots with the size that is wanted.
    change = change.and(Change::changed_if(ensure::catch_up(live)));
    let backing = Backing::File { path: host_path, format: live.sidecar.spec.format };
    Ok(Outcome::new(change, AttachedVolume::new(backing, request.read_only)))
}

/// After an attachment that could not be given its access: brings the records and the access back to what they were.
fn undo(live: &Live, request: &AttachRequest) {
    let before = live.records.iter().find(|record| record.attachment.vm_uuid == request.vm_uuid);
    let undone = match before {
        Some(record) => attachments::write(&live.dir, record),
        None => attachments::remove(&live.dir, request.vm_uuid),
    };
    // The error that is answered is the first one. What stays is an attachment of the VM that asked, which its detach ends.
    if let Err(error) = undone.and_then(|()| set_access(live, &live.records)) {
        tracing::warn!(error = %error, "the record of a failed attachment stays until it is detached");
    }
}

pub(crate) async fn detach(pool: Arc<Pool>, request: DetachRequest) -> Result<Change, VolumeError> {
    let key = Key::volume(request.volume_uuid);
    let gate = pool.locks.gate(key).await;
    with(&pool, move |pool| {
        let held = pool.locks.hold(gate, key)?;
        let live = match observe(&pool.layout, request.volume_uuid) {
            Ok(observed) => observed.live,
            // What has no mark has no attachment of ours.
            Err(VolumeError::Foreign { .. }) => None,
            Err(error) => return Err(error),
        };
        let Some(live) = live else { return Ok(Change::Unchanged) };
        live.check_node(pool.node)?;
        take(&held, &live, &request)
    })
    .await
}

fn take(held: &Held, live: &Live, request: &DetachRequest) -> Result<Change, VolumeError> {
    let ends = |record: &Record| {
        record.attachment.vm_uuid == request.vm_uuid
            && record.attachment.host_uuid == request.host_uuid
    };
    if !live.records.iter().any(ends) {
        return Ok(Change::Unchanged);
    }
    let left: Vec<Record> = live.records.iter().filter(|record| !ends(record)).copied().collect();
    held.check()?;
    // First the access, then the record: a crash between the two leaves the attachment to be released again.
    set_access(live, &left)?;
    fault::point("file.detach.closed")?;
    attachments::remove(&live.dir, request.vm_uuid)?;
    fault::point("file.detach.removed")?;
    Ok(Change::Changed)
}

/// Brings the access to the volume's files to what the attachments need.
fn set_access(live: &Live, records: &[Record]) -> Result<bool, VolumeError> {
    match &live.disk {
        Some(disk) => {
            access::apply(&live.dir, disk, live.base.as_ref(), &attachments::users(records))
        }
        // Nothing to open: a detach goes on, an attach was refused before.
        None => Ok(false),
    }
}
