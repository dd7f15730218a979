//! The disks and NICs of an instance beside what its VM has.

use std::{collections::BTreeMap, sync::Arc};

use drivers_api::{
    AttachRequest, DetachRequest, DiskSpec, Error, ErrorKind, NetworkId, NicHandle, PortId,
    PortSpec, PortStatus, VmId, VmStatus, VolumeId,
};

use super::{
    Action, DiskPlan, Drafter, Group, Memory, NicPlan, Op, Planned, World, delete::volume_name,
    of_another_node,
};
use crate::{
    resolve::{Hold, leftover_ports, network_driver, port_id, port_spec, volume_driver},
    seen::{DriverId, Look},
    wanted::{Disk, InstanceSpec, Key, Kind, Nic, Wanted, WantedSpec},
};

/// What may be done to the devices of the VM now.
#[derive(Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "four facts that do not depend on each other")]
pub(super) struct Plug {
    /// The VM is there.
    pub(super) exists: bool,
    /// It runs, and goes on running through this plan.
    pub(super) running: bool,
    /// The devices of the kind may come and go while it runs.
    pub(super) hot: bool,
    /// The whole spec is applied when it is started.
    pub(super) whole: bool,
}

impl Plug {
    /// Whether a device can be taken from, or given to, the VM now.
    const fn possible(self) -> bool {
        !self.running || self.hot
    }

    /// Whether it is done by a step of its own; else the whole spec does it.
    const fn stepwise(self) -> bool {
        self.exists && self.possible() && (self.hot || !self.whole)
    }
}

/// The steps of one kind of device, by when they are due.
pub(super) struct Devices<T> {
    /// Takes away what is not wanted.
    pub(super) remove: Vec<Planned>,
    /// Makes the host's side ready.
    pub(super) wire: Vec<Planned>,
    /// Gives it to the VM.
    pub(super) plug: Vec<Planned>,
    /// What the VM is to have.
    pub(super) all: Vec<T>,
    /// Why some of it cannot be done.
    pub(super) holds: Vec<Hold>,
    /// What only a restart applies.
    pub(super) restart: Vec<String>,
    /// Whether the VM's list differs from what is wanted.
    pub(super) differs: bool,
}

impl<T> Devices<T> {
    const fn new() -> Self {
        Self {
            remove: Vec::new(),
            wire: Vec::new(),
            plug: Vec::new(),
            all: Vec::new(),
            holds: Vec::new(),
            restart: Vec::new(),
            differs: false,
        }
    }
}

/// What plans for devices are made from.
#[derive(Clone, Copy)]
pub(super) struct Scene<'a> {
    pub(super) world: &'a World<'a>,
    pub(super) memory: &'a Memory,
    pub(super) object: &'a Wanted,
    pub(super) spec: &'a InstanceSpec,
    pub(super) driver: &'a str,
    pub(super) vm: VmId,
    pub(super) status: Option<&'a VmStatus>,
}

impl Scene<'_> {
    pub(super) fn draft(&self) -> Drafter {
        Drafter { key: self.object.key() }
    }

    fn is_detaching(&self, name: &drivers_api::DeviceName) -> bool {
        self.status.is_some_and(|status| status.detaching.contains(name))
    }
}

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
            let mine =
                |one: &&drivers_api::Attachment| one.vm_uuid == scene.vm && one.host_uuid == host;
            now.growth_due = status.size_bytes < spec.size_gib.bytes();
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

/// A wanted NIC beside what the host shows.
struct NicNow<'a> {
    nic: &'a Nic,
    id: PortId,
    /// `None`: the network's document is not there.
    port: Option<(PortSpec, &'a str)>,
    /// What the host shows of the port.
    status: Option<Arc<PortStatus>>,
    /// What the VM has of it.
    current: Option<&'a NicHandle>,
    hold: Option<Hold>,
}

impl NicNow<'_> {
    /// Whether the port must go before it can be made: it is on another network.
    fn moves(&self) -> bool {
        let wanted = self.port.as_ref().map(|(spec, _)| spec.network_uuid);
        let applied = self.status.as_ref().and_then(|status| status.spec.as_ref());
        let applied = applied.map(|spec| spec.network_uuid);
        wanted.is_some() && applied.is_some() && wanted != applied
    }

    /// Why the port is not as wanted.
    fn difference(&self) -> Option<String> {
        let (spec, _) = self.port.as_ref()?;
        let Some(status) = &self.status else { return Some("missing".to_owned()) };
        match &status.spec {
            None => Some("half made".to_owned()),
            Some(applied) if applied != spec => Some(port_difference(applied, spec)),
            Some(_) if status.nic.is_none() => Some("drifted: the device is gone".to_owned()),
            Some(_) if !status.healthy => Some(format!("drifted: {}", status.messages.join("; "))),
            Some(_) => None,
        }
    }

    /// Whether the VM keeps the NIC as it has it. A VMM has a tap open by descriptor: of one that was removed nothing
    /// comes through any more, even after it is made anew.
    fn is_kept(&self, scene: &Scene<'_>, running: bool) -> bool {
        let Some(current) = self.current else { return false };
        let Some((spec, _)) = &self.port else { return true };
        let device = self.status.as_ref().and_then(|status| status.nic.as_ref());
        let same_device = match device {
            Some(handle) => handle == current,
            None => !running,
        };
        current.name == spec.name
            && current.mac == spec.mac
            && same_device
            && !self.moves()
            && !scene.is_detaching(&self.nic.name)
    }
}

fn port_difference(applied: &PortSpec, wanted: &PortSpec) -> String {
    if applied.addresses != wanted.addresses {
        format!("differs: addresses {:?} -> {:?}", applied.addresses, wanted.addresses)
    } else if applied.mac != wanted.mac {
        format!("differs: mac {} -> {}", applied.mac, wanted.mac)
    } else if applied.network_uuid != wanted.network_uuid {
        "differs: network".to_owned()
    } else {
        "differs".to_owned()
    }
}

fn nic_now<'a>(scene: &Scene<'a>, nic: &'a Nic) -> Result<NicNow<'a>, Hold> {
    let world = scene.world;
    let key = Key::new(Kind::Network, nic.network.clone());
    let Some(id) = port_id(scene.object.uuid, &nic.name) else {
        return Err(Error::invalid("spec.nics", "no port can be derived").into());
    };
    let nics = scene.status.map(|status| status.nics.as_slice()).unwrap_or_default();
    let current = nics.iter().find(|current| current.port_uuid == id);
    let mut now = NicNow { nic, id, port: None, status: None, current, hold: None };
    let found = world.wanted.get(&key);
    let spec = found.and_then(|object| match &object.spec {
        WantedSpec::Network(spec) => Some((object, spec)),
        WantedSpec::Image(_) | WantedSpec::Volume(_) | WantedSpec::Instance(_) => None,
    });
    let Some((object, spec)) = spec else {
        now.hold = Some(Hold::Blocked(key.clone(), format!("{key} is not there")));
        return Ok(now);
    };
    let driver = network_driver(world, spec)?;
    match world.seen.port(driver, &id) {
        Look::Unknown(error) => return Err(Hold::Unknown(error)),
        Look::Foreign(error) => now.hold = Some(Hold::Stuck(error)),
        Look::Absent => {}
        Look::There(status) if status.mark.node != world.settings.host => {
            now.hold = Some(of_another_node(&scene.object.key(), status.mark));
        }
        Look::There(status) => now.status = Some(status),
    }
    let addresses = match &scene.memory.addresses {
        Ok(all) => all.get(&id).map(Vec::as_slice).unwrap_or_default(),
        Err(error) => {
            now.hold = Some(Hold::Stuck(Arc::clone(error)));
            &[]
        }
    };
    let owner = world.drivers.find_hypervisor(Some(scene.driver));
    let owner = owner.and_then(|(_, hypervisor)| hypervisor.vmm_uid(scene.vm));
    let network = NetworkId::new(object.uuid);
    now.port = Some((port_spec(scene.object, nic, network, addresses, owner)?, driver));
    if now.hold.is_none() && object.deleting {
        now.hold = Some(Hold::Blocked(key.clone(), format!("{key} is being deleted")));
    } else if now.hold.is_none() && !(world.ready)(&key) {
        now.hold = Some(Hold::Blocked(key.clone(), format!("{key} is not ready")));
    }
    Ok(now)
}

/// The steps of the NICs.
pub(super) fn nics(scene: &Scene<'_>, plug: Plug) -> Result<Devices<NicPlan>, Hold> {
    let mut devices = Devices::new();
    let mut wanted = Vec::new();
    for nic in &scene.spec.nics {
        wanted.push(nic_now(scene, nic)?);
    }
    remove_nics(scene, plug, &wanted, &mut devices);
    let draft = scene.draft();
    for now in &wanted {
        let kept = now.is_kept(scene, plug.running);
        let target = format!("nic {} (network {})", now.nic.name, now.nic.network);
        if !kept && !plug.possible() && now.current.is_none() {
            devices.restart.push(format!("nic {}: added", now.nic.name));
            continue;
        }
        let difference = now.difference();
        let known = now.status.as_ref().and_then(|status| status.nic.clone());
        if let Some(reason) = &difference {
            if let Some(hold) = &now.hold {
                devices.holds.push(hold.clone());
            } else if let Some((spec, driver)) = &now.port {
                let call = (Action::AttachPort, Op::AttachPort(spec.clone()));
                let step = draft.step(driver, call, target.clone(), reason.clone());
                devices.wire.push(step.in_group(Group::Nics, &[Group::Nics]));
            }
        } else if now.port.is_none() && !kept {
            devices.holds.extend(now.hold.clone());
        }
        let blocked = now.hold.is_some() && difference.is_some();
        let handle = if now.port.is_none() { now.current.cloned() } else { known };
        let plan = NicPlan { port: now.id, handle: handle.filter(|_| difference.is_none()) };
        if !kept && !blocked && plug.possible() && (plug.stepwise() || !plug.whole) {
            let call = (Action::AttachNic, Op::AttachNic(scene.vm, plan.clone()));
            let step = draft.step(scene.driver, call, target, "missing");
            devices.plug.push(step.in_group(Group::Nics, &[Group::Nics, Group::Vm]));
        }
        devices.all.push(plan);
    }
    devices.differs = scene.status.is_some_and(|status| {
        let same = |(plan, current): (&NicPlan, &NicHandle)| {
            plan.handle.as_ref().is_none_or(|handle| handle == current)
                && plan.port == current.port_uuid
        };
        status.nics.len() != devices.all.len() || !devices.all.iter().zip(&status.nics).all(same)
    });
    Ok(devices)
}

/// Takes away NICs of the VM that are not wanted so, and ports that belong to no wanted NIC.
fn remove_nics(
    scene: &Scene<'_>,
    plug: Plug,
    wanted: &[NicNow<'_>],
    devices: &mut Devices<NicPlan>,
) {
    let draft = scene.draft();
    let current = scene.status.map(|status| status.nics.as_slice()).unwrap_or_default();
    let mut stays = Vec::new();
    for nic in current {
        let owner = wanted.iter().find(|now| now.id == nic.port_uuid);
        if owner.is_some_and(|now| now.is_kept(scene, plug.running)) {
            continue;
        }
        if !plug.possible() {
            let what = if owner.is_some() { "changed" } else { "removed" };
            devices.restart.push(format!("nic {}: {what}", nic.name));
            stays.push(nic.port_uuid);
            continue;
        }
        if plug.stepwise() {
            let reason = if owner.is_some() { "differs" } else { "not wanted" };
            let call = (Action::DetachNic, Op::DetachNic(scene.vm, nic.device.clone()));
            let step = draft.step(scene.driver, call, format!("nic {}", nic.name), reason);
            devices.remove.push(step.in_group(Group::Nics, &[Group::Power]));
        }
    }
    let ports = scene.world.seen.ports_of(scene.vm);
    let leftover = ports.filter(|(port, _)| !stays.contains(port)).filter_map(|(port, driver)| {
        let owner = wanted.iter().find(|now| now.id == *port);
        let why = match owner {
            None => "not wanted",
            Some(now) if now.moves() && now.hold.is_none() => "differs: network",
            Some(_) => return None,
        };
        Some((*port, DriverId::clone(driver), why))
    });
    let mut leftover: BTreeMap<PortId, (DriverId, &str)> =
        leftover.map(|(port, driver, why)| (port, (driver, why))).collect();
    // A half-made port may not say whose it is.
    for (port, driver, look) in leftover_ports(scene.world, &scene.memory.ports, scene.object) {
        let kept = stays.contains(&port) || wanted.iter().any(|now| now.id == port);
        if look.there().is_some() && !kept {
            leftover.entry(port).or_insert((driver, "not wanted"));
        }
    }
    for (port, (driver, reason)) in leftover {
        let call = (Action::DetachPort, Op::DetachPort(port));
        let step = draft.step(&driver, call, format!("port {port}"), reason);
        devices.remove.push(step.in_group(Group::Nics, &[Group::Power, Group::Nics]));
    }
}

/// An error of a VM that is there and does not answer.
pub(super) fn silent(status: &VmStatus) -> Arc<Error> {
    let reason = status.message.as_deref().unwrap_or("its VMM does not answer");
    let object = format!("vm {}", status.uuid);
    let error = Error::new(ErrorKind::Unavailable, "look at", object, reason)
        .with_remedy("nothing is started or stopped beside it; delete the instance to end it");
    Arc::new(error)
}
