//! The disks of an instance beside what its VM has and what it has open.

use drivers_api::{AttachRequest, Attachment, DetachRequest, DiskSpec, VolumeId};

use super::{
    Action, DiskPlan, Group, Op,
    delete::volume_name,
    devices::{Devices, Plug, Scene},
};
use crate::{
    resolve::{Hold, volume_driver},
    seen::Look,
    wanted::{Disk, Key, Kind, WantedSpec},
};

/// A wanted disk beside what the host shows.
struct DiskNow<'a> {
    disk: &'a Disk,
    key: Key,
    /// `None`: the volume's document is not there.
    volume: Option<(VolumeId, &'a str, u64)>,
    /// What the VM has of that volume.
    current: Option<&'a DiskSpec>,
    /// How this VM has it open on the host: whether only for reading.
    attached: Option<bool>,
    /// The backend has recorded a growth that the volume itself has not seen yet.
    growth_due: bool,
    /// Why it cannot be attached now.
    hold: Option<Hold>,
}

impl DiskNow<'_> {
    fn is_kept(&self, scene: &Scene<'_>) -> bool {
        self.current.is_some_and(|current| {
            let disk = self.disk;
            self.volume.is_none()
                || (current.name == disk.name
                    && current.bus == disk.bus
                    && current.read_only == disk.read_only
                    && !scene.is_detaching(&disk.name))
        })
    }

    fn plan(&self, backing: bool) -> Option<DiskPlan> {
        let disk = self.disk;
        let (volume, bytes) = match (self.volume, self.current) {
            (Some((volume, _, bytes)), _) => (volume, self.hold.is_none().then_some(bytes)),
            (None, Some(current)) => (current.volume_uuid, None),
            (None, None) => return None,
        };
        let backing = self.current.filter(|_| backing).map(|current| current.backing.clone());
        Some(DiskPlan {
            name: disk.name.clone(),
            volume,
            bus: disk.bus,
            read_only: disk.read_only,
            boot: disk.boot,
            bytes,
            growth_due: self.growth_due,
            backing,
        })
    }
}

fn disk_now<'a>(scene: &Scene<'a>, disk: &'a Disk) -> Result<DiskNow<'a>, Hold> {
    let world = scene.world;
    let key = Key::new(Kind::Volume, disk.volume.clone());
    let disks = scene.status.map(|status| status.disks.as_slice()).unwrap_or_default();
    let found = world.wanted.get(&key);
    let spec = found.and_then(|object| match &object.spec {
        WantedSpec::Volume(spec) => Some((object, spec)),
        WantedSpec::Image(_) | WantedSpec::Network(_) | WantedSpec::Instance(_) => None,
    });
    let Some((object, spec)) = spec else {
        let current = disks.iter().find(|current| current.name == disk.name);
        let hold = Some(Hold::Blocked(key.clone(), format!("{key} is not there")));
        return Ok(DiskNow {
            disk,
            key,
            volume: None,
            current,
            attached: None,
            growth_due: false,
            hold,
        });
    };
    let id = VolumeId::new(object.uuid);
    let driver = volume_driver(world, spec)?;
    let current = disks.iter().find(|current| current.volume_uuid == id);
    let mut now = DiskNow {
        disk,
        volume: Some((id, driver, spec.size_gib.bytes())),
        current,
        attached: None,
        growth_due: false,
        hold: None,
        key,
    };
    match world.seen.volume(driver, &id) {
        Look::Unknown(error) => return Err(Hold::Unknown(error)),
        Look::Foreign(error) => now.hold = Some(Hold::Stuck(error)),
        Look::Absent => {}
        Look::There(status) => {
            let host = world.settings.host;
            let mine = |one: &&Attachment| one.vm_uuid == scene.vm && one.host_uuid == host;
            // What is not recorded yet the volume's own step grows.
            let recorded = status.spec.as_ref().is_some_and(|old| old.size_gib == spec.size_gib);
            now.growth_due = recorded && status.size_bytes < spec.size_gib.bytes();
            now.attached = status.attachments.iter().find(mine).map(|one| one.read_only);
            // Somebody else of ours who has it, and lets go of it in time: waiting is better than a failure.
            let other = status.attachments.iter().find(|one| {
                !mine(one) && one.host_uuid == host && !(one.read_only && disk.read_only)
            });
            let owner = other.and_then(|one| world.index.owner(one.vm_uuid.uuid()));
            if let Some(owner) = owner.filter(|_| !world.assume) {
                let why = format!("{owner} has {} open", now.key);
                now.hold = Some(Hold::Blocked(owner.clone(), why));
            }
        }
    }
    if now.hold.is_none() && object.deleting {
        now.hold = Some(Hold::Blocked(now.key.clone(), format!("{} is being deleted", now.key)));
    } else if now.hold.is_none() && !(world.ready)(&now.key) {
        now.hold = Some(Hold::Blocked(now.key.clone(), format!("{} is not ready", now.key)));
    }
    Ok(now)
}

/// The steps of the disks.
pub(super) fn disks(scene: &Scene<'_>, plug: Plug) -> Result<Devices<DiskPlan>, Hold> {
    let mut devices = Devices::new();
    let mut wanted = Vec::new();
    for disk in &scene.spec.disks {
        wanted.push(disk_now(scene, disk)?);
    }
    remove_disks(scene, plug, &wanted, &mut devices);
    let (draft, host) = (scene.draft(), scene.world.settings.host);
    let hypervisor = scene.world.drivers.find_hypervisor(Some(scene.driver));
    for now in &wanted {
        let kept = now.is_kept(scene);
        if !kept && !plug.possible() {
            if now.current.is_none() {
                devices.restart.push(format!("disk {}: added", now.disk.name));
            }
            continue;
        }
        let usable = kept && now.attached == Some(now.disk.read_only);
        // Attaching before a start is when a backend makes up for a growth that a running VM kept it from.
        let late = now.growth_due && !plug.running && now.hold.is_none();
        let target = format!("disk {} (volume {})", now.disk.name, now.disk.volume);
        if !usable || late {
            if let Some(hold) = &now.hold {
                devices.holds.push(hold.clone());
            } else if let Some((volume, driver, _)) = now.volume {
                let accepts = hypervisor.map(|(_, h)| h.abilities().backings).unwrap_or_default();
                let mut request = AttachRequest::new(volume, host, scene.vm, accepts);
                request.read_only = now.disk.read_only;
                request.owner_uid = hypervisor.and_then(|(_, h)| h.vmm_uid(scene.vm));
                let reason = match (kept, now.attached) {
                    (true, _) if usable => "a growth is due",
                    (true, None) => "drifted: not attached",
                    (true, Some(_)) => "differs: read_only",
                    (false, _) => "missing",
                };
                let call = (Action::AttachVolume, Op::AttachVolume(request));
                let step = draft.step(driver, call, target.clone(), reason);
                devices.wire.push(step.in_group(Group::Disks, &[Group::Disks]));
            }
        }
        let Some(plan) = now.plan(usable) else { continue };
        let adds = !kept && now.hold.is_none() && (plug.stepwise() || !plug.whole);
        if adds {
            let call = (Action::AttachDisk, Op::AttachDisk(scene.vm, plan.clone()));
            let step = draft.step(scene.driver, call, target, "missing");
            devices.plug.push(step.in_group(Group::Disks, &[Group::Disks, Group::Vm]));
        }
        devices.all.push(plan);
    }
    devices.differs = scene.status.is_some_and(|status| {
        let same = |(plan, current): (&DiskPlan, &DiskSpec)| {
            plan.backing.is_some() && plan.spec(current.backing.clone()) == *current
        };
        status.disks.len() != devices.all.len() || !devices.all.iter().zip(&status.disks).all(same)
    });
    boot_flags(scene, plug, &wanted, &mut devices);
    Ok(devices)
}

/// A boot mark or an order that a running VM cannot take on.
fn boot_flags(
    scene: &Scene<'_>,
    plug: Plug,
    wanted: &[DiskNow<'_>],
    devices: &mut Devices<DiskPlan>,
) {
    for now in wanted.iter().filter(|now| plug.running && now.is_kept(scene)) {
        if now.current.is_some_and(|current| current.boot != now.disk.boot) {
            devices.restart.push(format!("disk {}: boot -> {}", now.disk.name, now.disk.boot));
        }
    }
}

/// Takes away disks of the VM that are not wanted so, and attachments that belong to no wanted disk.
fn remove_disks(
    scene: &Scene<'_>,
    plug: Plug,
    wanted: &[DiskNow<'_>],
    devices: &mut Devices<DiskPlan>,
) {
    let (draft, host) = (scene.draft(), scene.world.settings.host);
    let current = scene.status.map(|status| status.disks.as_slice()).unwrap_or_default();
    let mut stays = Vec::new();
    for disk in current {
        let owner = wanted
            .iter()
            .find(|now| now.current.is_some_and(|c| c.volume_uuid == disk.volume_uuid));
        if owner.is_some_and(|now| now.is_kept(scene)) {
            stays.push(disk.volume_uuid);
            continue;
        }
        if !plug.possible() {
            let what = if owner.is_some() { "changed" } else { "removed" };
            devices.restart.push(format!("disk {}: {what}", disk.name));
            stays.push(disk.volume_uuid);
            continue;
        }
        if plug.stepwise() {
            let name = volume_name(scene.world, disk.volume_uuid);
            let reason = if owner.is_some() { "differs" } else { "not wanted" };
            let call = (Action::DetachDisk, Op::DetachDisk(scene.vm, disk.volume_uuid));
            let target = format!("disk {} ({name})", disk.name);
            let step = draft.step(scene.driver, call, target, reason);
            devices.remove.push(step.in_group(Group::Disks, &[Group::Power]));
        }
    }
    if wanted.iter().any(|now| now.volume.is_none()) {
        // A name that leads nowhere: what the VM has may be it, so nothing is taken for a leftover.
        return;
    }
    for (volume, driver) in scene.world.seen.volumes_of(scene.vm) {
        let now = wanted.iter().find(|now| now.volume.is_some_and(|(id, ..)| id == *volume));
        let in_mode = now.is_some_and(|now| now.attached == Some(now.disk.read_only));
        if in_mode || stays.contains(volume) {
            continue;
        }
        let request = DetachRequest::new(*volume, host, scene.vm);
        let call = (Action::DetachVolume, Op::DetachVolume(request));
        let reason = if now.is_some() { "differs: read_only" } else { "not wanted" };
        let step = draft.step(driver, call, volume_name(scene.world, *volume), reason);
        devices.remove.push(step.in_group(Group::Disks, &[Group::Power, Group::Disks]));
    }
}
