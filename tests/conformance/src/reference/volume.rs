//! The volume driver over the reference host.

use std::collections::BTreeMap;

use async_trait::async_trait;
use drivers_api::{
    AttachRequest, AttachedVolume, Attachment, Backing, BackingKind, Change, Context,
    DetachRequest, Error, ErrorKind, EventKind, EventStream, HostEvent, HostId, HostInfo, HostPath,
    Mark, ObjectRef, Outcome, Result, Volume, VolumeId, VolumeSpec, VolumeStatus,
};

use super::{
    Op,
    devices::own_path,
    host::{Call, Host, State, refuse},
};
use crate::Census;

#[derive(Default)]
pub(super) struct Disks {
    volumes: BTreeMap<VolumeId, Disk>,
    foreign: BTreeMap<VolumeId, String>,
    /// How many bytes all volumes together may have; `None`: no bound.
    capacity: Option<u64>,
}

struct Disk {
    /// The spec as applied; `None` while it is half made.
    spec: Option<VolumeSpec>,
    bytes: u64,
    attachments: Vec<Attachment>,
}

impl Disks {
    /// Whether a backing is of this driver and its volume is not there.
    pub(super) fn is_missing(&self, backing: &Backing) -> bool {
        own_path(backing).is_some_and(|name| {
            name.parse::<VolumeId>().map_or(true, |volume| !self.volumes.contains_key(&volume))
        })
    }

    pub(super) fn size_of(&self, volume: VolumeId) -> u64 {
        self.volumes.get(&volume).map_or(0, |disk| disk.bytes)
    }

    pub(super) fn count(&self, census: &mut Census) {
        census.extend("volumes", self.volumes.keys());
        census.extend("foreign", self.foreign.keys());
        for (volume, disk) in &self.volumes {
            census.extend(
                "attachments",
                disk.attachments
                    .iter()
                    .map(|attachment| format!("{volume} {}", attachment.vm_uuid)),
            );
        }
    }

    fn status(&self, volume: VolumeId, node: HostId) -> Option<VolumeStatus> {
        let disk = self.volumes.get(&volume)?;
        let mark = Mark::new(node, volume.uuid());
        let mut status = VolumeStatus::new(volume, mark, disk.spec.clone(), disk.bytes, disk.bytes);
        status.attachments.clone_from(&disk.attachments);
        status.complete = disk.spec.is_some();
        if !status.complete {
            status.message = Some("the volume is half made".to_owned());
        }
        Some(status)
    }
}

/// The volume driver over a [`Host`]. Made by [`Host::volume`].
#[derive(Clone, Debug)]
pub struct ReferenceVolume {
    host: Host,
}

impl ReferenceVolume {
    pub(super) const fn new(host: Host) -> Self {
        Self { host }
    }

    fn refuse_foreign(state: &State, op: Op, volume: VolumeId) -> Result<()> {
        if state.disks.foreign.contains_key(&volume) {
            let reason = "a file of that name without our mark is there";
            let object = format!("volume {volume}");
            return Err(
                refuse(ErrorKind::Conflict, op, object, reason).with_remedy("move the file away")
            );
        }
        Ok(())
    }

    /// What is to be done: `None` where there is no such volume.
    fn check(state: &State, spec: &VolumeSpec) -> Result<Option<Change>> {
        let op = Op::EnsureVolume;
        let object = format!("volume {}", spec.uuid);
        Self::refuse_foreign(state, op, spec.uuid)?;
        let bytes = spec.size_gib.bytes();
        let used = |except| {
            let others = state.disks.volumes.iter().filter(|(id, _)| **id != except);
            others.map(|(_, disk)| disk.bytes).sum::<u64>()
        };
        if state.disks.capacity.is_some_and(|all| used(spec.uuid).saturating_add(bytes) > all) {
            let reason = format!("no room for {bytes} bytes");
            return Err(refuse(ErrorKind::Exhausted, op, object, reason)
                .with_remedy("remove volumes, or give the host more space"));
        }
        let Some(disk) = state.disks.volumes.get(&spec.uuid) else {
            if let Some(source) = &spec.source
                && !state.cache.has(&source.image, source.path.as_ref())
            {
                let reason = format!("the image {} is not in the cache", source.image);
                return Err(refuse(ErrorKind::NotFound, op, object, reason));
            }
            return Ok(None);
        };
        let Some(applied) = &disk.spec else { return Ok(Some(Change::Changed)) };
        if spec.format != applied.format {
            let reason = format!("the volume is {}", applied.format.as_str());
            return Err(Error::invalid("format", reason).during("ensure", object));
        }
        if bytes < disk.bytes {
            let reason = format!("the volume has {} GiB and is grow-only", applied.size_gib);
            return Err(Error::invalid("size_gib", reason).during("ensure", object));
        }
        // The source counts only when the volume is made.
        let wanted = VolumeSpecWithout(spec);
        Ok(Some(Change::changed_if(wanted != VolumeSpecWithout(applied))))
    }

    async fn ensure(&self, call: &Call, spec: &VolumeSpec) -> Result<Change> {
        let change = {
            let mut state = self.host.lock();
            match Self::check(&state, spec)? {
                Some(Change::Unchanged) => return Ok(Change::Unchanged),
                Some(change) => change,
                None => {
                    let disk = Disk { spec: None, bytes: 0, attachments: Vec::new() };
                    state.disks.volumes.insert(spec.uuid, disk);
                    state.wrote();
                    Change::Created
                }
            }
        };
        call.between().await?;
        let bytes = spec.size_gib.bytes();
        self.write(spec.uuid, |disk| disk.bytes = disk.bytes.max(bytes));
        call.between().await?;
        self.write(spec.uuid, |disk| {
            let mut applied = spec.clone();
            if let Some(before) = disk.spec.take() {
                applied.source = before.source;
            }
            disk.spec = Some(applied);
        });
        self.tell(spec.uuid, EventKind::Appeared, "the volume was made");
        Ok(change)
    }

    fn write(&self, volume: VolumeId, change: impl FnOnce(&mut Disk)) {
        let mut state = self.host.lock();
        if let Some(disk) = state.disks.volumes.get_mut(&volume) {
            change(disk);
            state.wrote();
        }
    }

    fn tell(&self, volume: VolumeId, kind: EventKind, message: &str) {
        let event = HostEvent::new(ObjectRef::Volume(volume), kind, message);
        self.host.lock().volume_events.publish(event);
    }

    fn attach(&self, request: &AttachRequest) -> Result<Outcome<AttachedVolume>> {
        let op = Op::AttachVolume;
        let volume = request.volume_uuid;
        let object = format!("volume {volume}");
        let mut state = self.host.lock();
        Self::refuse_foreign(&state, op, volume)?;
        let disk = state.disks.volumes.get_mut(&volume);
        let Some((disk, spec)) = disk.and_then(|disk| disk.spec.clone().map(|spec| (disk, spec)))
        else {
            return Err(refuse(ErrorKind::NotFound, op, object, "there is no such volume"));
        };
        if !request.accepts.contains(&BackingKind::File) {
            let reason = "the hypervisor opens no files";
            return Err(refuse(ErrorKind::Unsupported, op, object, reason));
        }
        let wanted = Attachment::new(request.host_uuid, request.vm_uuid, request.read_only);
        let mine = |other: &Attachment| {
            other.vm_uuid == wanted.vm_uuid && other.host_uuid == wanted.host_uuid
        };
        let mut others = disk.attachments.iter().filter(|other| !mine(other));
        if let Some(other) = others.find(|other| !(other.read_only && wanted.read_only)) {
            let reason = format!("vm {} on host {} has it open", other.vm_uuid, other.host_uuid);
            return Err(refuse(ErrorKind::Conflict, op, object, reason)
                .with_remedy("stop that VM, or detach the volume from it"));
        }
        let path: HostPath = format!("/reference/volumes/{volume}").parse().map_err(
            |error: drivers_api::ParseError| {
                refuse(ErrorKind::Internal, op, &object, "its path is none").with_source(error)
            },
        )?;
        let backing = Backing::File { path, format: spec.format };
        let answer = AttachedVolume::new(backing, request.read_only);
        if disk.attachments.contains(&wanted) {
            return Ok(Outcome::new(Change::Unchanged, answer));
        }
        disk.attachments.retain(|other| !mine(other));
        disk.attachments.push(wanted);
        state.wrote();
        Ok(Outcome::new(Change::Created, answer))
    }
}

/// Compares two specs but for their source.
struct VolumeSpecWithout<'a>(&'a VolumeSpec);

impl PartialEq for VolumeSpecWithout<'_> {
    fn eq(&self, other: &Self) -> bool {
        let plain = |spec: &VolumeSpec| {
            let mut spec = spec.clone();
            spec.source = None;
            spec
        };
        plain(self.0) == plain(other.0)
    }
}

#[async_trait]
impl Volume for ReferenceVolume {
    fn name(&self) -> &str {
        "reference"
    }

    fn local(&self) -> bool {
        true
    }

    fn backings(&self) -> &[BackingKind] {
        &[BackingKind::File]
    }

    fn events(&self) -> Option<EventStream> {
        Some(self.host.subscribe(|state| &state.volume_events))
    }

    async fn host_info(&self, cx: &Context) -> Result<HostInfo> {
        self.host.info(cx, "reference-volume").await
    }

    async fn ensure_volume(&self, cx: &Context, spec: &VolumeSpec) -> Result<Change> {
        let call = self.host.begin(cx, Op::EnsureVolume, Some(spec.uuid.uuid())).await?;
        let change = self.ensure(&call, spec).await?;
        call.end(change).await
    }

    async fn destroy_volume(&self, cx: &Context, volume: VolumeId) -> Result<Change> {
        let op = Op::DestroyVolume;
        let call = self.host.begin(cx, op, Some(volume.uuid())).await?;
        let there = {
            let state = self.host.lock();
            Self::refuse_foreign(&state, op, volume)?;
            let object = format!("volume {volume}");
            let disk = state.disks.volumes.get(&volume);
            if let Some(user) = disk.and_then(|disk| disk.attachments.first()) {
                let reason = format!("vm {} on host {} has it open", user.vm_uuid, user.host_uuid);
                return Err(
                    refuse(ErrorKind::Conflict, op, object, reason).with_remedy("detach it first")
                );
            }
            disk.is_some()
        };
        if !there {
            return call.end(Change::Unchanged).await;
        }
        self.write(volume, |disk| disk.spec = None);
        call.between().await?;
        {
            let mut state = self.host.lock();
            if state.disks.volumes.remove(&volume).is_some() {
                state.wrote();
            }
        }
        self.tell(volume, EventKind::Gone, "the volume was removed");
        call.end(Change::Changed).await
    }

    async fn attach_volume(
        &self,
        cx: &Context,
        request: &AttachRequest,
    ) -> Result<Outcome<AttachedVolume>> {
        let object = request.volume_uuid.uuid();
        let call = self.host.begin(cx, Op::AttachVolume, Some(object)).await?;
        let answer = self.attach(request)?;
        call.end(answer).await
    }

    async fn detach_volume(&self, cx: &Context, request: &DetachRequest) -> Result<Change> {
        let op = Op::DetachVolume;
        let volume = request.volume_uuid;
        let call = self.host.begin(cx, op, Some(volume.uuid())).await?;
        let changed = {
            let mut state = self.host.lock();
            Self::refuse_foreign(&state, op, volume)?;
            let disk = state.disks.volumes.get_mut(&volume);
            let before = disk.as_ref().map_or(0, |disk| disk.attachments.len());
            let after = disk.map_or(0, |disk| {
                disk.attachments.retain(|other| {
                    other.vm_uuid != request.vm_uuid || other.host_uuid != request.host_uuid
                });
                disk.attachments.len()
            });
            if before != after {
                state.wrote();
            }
            before != after
        };
        call.end(Change::changed_if(changed)).await
    }

    async fn list(&self, cx: &Context) -> Result<Vec<VolumeStatus>> {
        let call = self.host.begin(cx, Op::ListVolumes, None).await?;
        let node = self.host.node();
        let all = {
            let disks = &self.host.lock().disks;
            disks.volumes.keys().filter_map(|id| disks.status(*id, node)).collect()
        };
        call.end(all).await
    }

    async fn get(&self, cx: &Context, volume: VolumeId) -> Result<Option<VolumeStatus>> {
        let op = Op::GetVolume;
        let call = self.host.begin(cx, op, Some(volume.uuid())).await?;
        let node = self.host.node();
        let status = {
            let state = self.host.lock();
            Self::refuse_foreign(&state, op, volume)?;
            state.disks.status(volume, node)
        };
        call.end(status).await
    }
}

/// What happens to volumes without a driver.
impl Host {
    /// Removes a volume's file by hand, attachments and all. Answers whether it was there.
    pub fn remove_volume(&self, volume: VolumeId) -> bool {
        let mut state = self.lock();
        let removed = state.disks.volumes.remove(&volume).is_some();
        let event = HostEvent::new(ObjectRef::Volume(volume), EventKind::Gone, "removed by hand");
        if removed {
            state.volume_events.publish(event);
        }
        removed
    }

    /// How many bytes all volumes together may have; `None`: no bound.
    pub fn set_volume_capacity(&self, bytes: Option<u64>) {
        self.lock().disks.capacity = bytes;
    }

    /// The size of a volume.
    #[must_use]
    pub fn volume_bytes(&self, volume: VolumeId) -> u64 {
        self.lock().disks.size_of(volume)
    }

    /// Puts a half-made volume on the host, as a make that was killed leaves it.
    pub fn plant_half_made_volume(&self, volume: VolumeId) {
        let disk = Disk { spec: None, bytes: 0, attachments: Vec::new() };
        self.lock().disks.volumes.insert(volume, disk);
    }

    /// Puts a file that is not ours where the volume would be.
    pub fn plant_foreign_volume(&self, volume: VolumeId) {
        self.lock().disks.foreign.insert(volume, "a file of somebody else".to_owned());
    }

    /// What [`Host::plant_foreign_volume`] put there, if it is still as it was put.
    #[must_use]
    pub fn foreign_volume(&self, volume: VolumeId) -> Option<String> {
        self.lock().disks.foreign.get(&volume).cloned()
    }

    /// Takes a foreign volume away.
    pub fn remove_foreign_volume(&self, volume: VolumeId) {
        self.lock().disks.foreign.remove(&volume);
    }
}
