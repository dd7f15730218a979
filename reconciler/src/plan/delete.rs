//! Deletions. They need no successful create, and what they remove may be half made. What could not be seen is not taken
//! for gone; what is there without our mark is not ours, so nothing of ours is there.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use drivers_api::{
    DetachRequest, Error, ImageRef, NetworkId, PortId, VmId, VmState, VolumeId, VolumeStatus,
};

use super::{
    Action, Drafter, Group, Memory, Op, Plan, Planned, Verdict, World,
    volume::{is_orphan, orphans},
};
use crate::{
    resolve::{
        Hold, image_driver, leftover_ports, network_driver, no_driver, port_id, volume_driver,
    },
    seen::{DriverId, Listing, Look},
    wanted::{ImageSpec, InstanceSpec, Key, Kind, NetworkSpec, VolumeSpec, Wanted, WantedSpec},
};

const WHY: &str = "wanted deleted";

pub(super) fn plan(world: &World<'_>, memory: &Memory, object: &Wanted) -> Plan {
    match &object.spec {
        WantedSpec::Image(spec) => image(world, object, spec),
        WantedSpec::Volume(spec) => volume(world, object, spec),
        WantedSpec::Network(spec) => network(world, object, spec),
        WantedSpec::Instance(spec) => instance(world, memory, object, spec),
    }
}

/// An object that still uses this one. Where only the outcome is asked for, those that are being deleted too do not count.
fn user(world: &World<'_>, key: &Key) -> Option<Key> {
    let mut users = world.index.users(key);
    let uses = |user: &&Key| {
        world.wanted.get(user).is_some_and(|object| {
            (!object.deleting || !world.assume) && object.references().contains(key)
        })
    };
    users.find(uses).cloned().or_else(|| (world.in_use)(key))
}

fn blocked(by: Option<Key>, why: impl Into<String>) -> Plan {
    Plan::only(Verdict::Blocked { by, why: why.into() })
}

fn used_by(by: Key) -> Plan {
    let why = format!("{by} uses it");
    blocked(Some(by), why)
}

fn image(world: &World<'_>, object: &Wanted, spec: &ImageSpec) -> Plan {
    let key = object.key();
    if let Some(user) = user(world, &key) {
        return used_by(user);
    }
    let driver = match image_driver(world, spec) {
        Ok(driver) => driver,
        Err(error) => return Hold::from(error).into(),
    };
    if shares_entry(world, &key, driver, &spec.r#ref) {
        return Plan::only(Verdict::Clear);
    }
    match world.seen.image(driver, &spec.r#ref) {
        Look::Absent | Look::Foreign(_) => Plan::only(Verdict::Clear),
        Look::Unknown(error) => Hold::Unknown(error).into(),
        Look::There(_) => {
            let call = (Action::RemoveImage, Op::RemoveImage(spec.r#ref.clone()));
            let step = Drafter { key }.step(driver, call, spec.r#ref.as_str(), WHY);
            Plan::new(vec![step], Verdict::Clear)
        }
    }
}

/// Whether another Image wants the same entry of the cache.
fn shares_entry(world: &World<'_>, key: &Key, driver: &str, reference: &ImageRef) -> bool {
    world.wanted.of_kind(Kind::Image).any(|other| match &other.spec {
        WantedSpec::Image(spec) => {
            !other.deleting
                && other.name != key.name
                && spec.r#ref == *reference
                && image_driver(world, spec).is_ok_and(|other| other == driver)
        }
        WantedSpec::Volume(_) | WantedSpec::Network(_) | WantedSpec::Instance(_) => false,
    })
}

fn volume(world: &World<'_>, object: &Wanted, spec: &VolumeSpec) -> Plan {
    let key = object.key();
    if let Some(user) = user(world, &key) {
        return used_by(user);
    }
    let driver = match volume_driver(world, spec) {
        Ok(driver) => driver,
        Err(error) => return Hold::from(error).into(),
    };
    let id = VolumeId::new(object.uuid);
    let status = match world.seen.volume(driver, &id) {
        Look::Absent | Look::Foreign(_) => return Plan::only(Verdict::Clear),
        Look::Unknown(error) => return Hold::Unknown(error).into(),
        Look::There(status) => status,
    };
    if let Some(plan) = opened(world, &status) {
        return plan;
    }
    let mut steps = orphans(world, &key, driver, &status);
    let call = (Action::DestroyVolume, Op::DestroyVolume(id));
    let target = format!("volume {}", object.name);
    steps.push(Drafter { key }.step(driver, call, target, WHY).in_group(Group::Own, &[Group::Own]));
    Plan::new(steps, Verdict::Clear)
}

/// Whether a VM of this host still has the volume open, and which.
fn opened(world: &World<'_>, status: &VolumeStatus) -> Option<Plan> {
    let here = status.attachments.iter().filter(|one| one.host_uuid == world.settings.host);
    let mut open = here.map(|one| one.vm_uuid).filter(|vm| !is_orphan(world, *vm));
    open.find_map(|vm| vm_holds(world, vm, "has it open"))
}

/// What a deletion waits for while a VM holds on to the object; `None` where only the outcome is asked for and the VM goes
/// too.
fn vm_holds(world: &World<'_>, vm: VmId, how: &str) -> Option<Plan> {
    let Some(owner) = world.index.owner(vm.uuid()) else {
        return Some(blocked(None, format!("vm {vm}, which nobody wants, {how}")));
    };
    let goes = world.wanted.get(owner).is_some_and(|object| object.deleting);
    (!world.assume || !goes).then(|| blocked(Some(owner.clone()), format!("{owner} {how}")))
}

fn network(world: &World<'_>, object: &Wanted, spec: &NetworkSpec) -> Plan {
    let key = object.key();
    if let Some(user) = user(world, &key) {
        return used_by(user);
    }
    let driver = match network_driver(world, spec) {
        Ok(driver) => driver,
        Err(error) => return Hold::from(error).into(),
    };
    let id = NetworkId::new(object.uuid);
    match world.seen.network(driver, &id) {
        Look::Absent | Look::Foreign(_) => return Plan::only(Verdict::Clear),
        Look::Unknown(error) => return Hold::Unknown(error).into(),
        Look::There(_) => {}
    }
    if let Some(error) = world.seen.unlisted(Listing::Ports, driver) {
        return Hold::Unknown(error).into();
    }
    let mut steps = Vec::new();
    let draft = Drafter { key };
    for (port, vm) in world.seen.ports_on(id) {
        if is_orphan(world, *vm) {
            let call = (Action::DetachPort, Op::DetachPort(*port));
            let reason = "its VM is gone and not wanted";
            steps.push(draft.step(driver, call, format!("port {port} of vm {vm}"), reason));
        } else if let Some(plan) = vm_holds(world, *vm, "has a port on it") {
            return plan;
        }
    }
    let call = (Action::DestroyNetwork, Op::DestroyNetwork(id));
    let target = format!("network {}", object.name);
    steps.push(draft.step(driver, call, target, WHY).in_group(Group::Own, &[Group::Own]));
    Plan::new(steps, Verdict::Clear)
}

/// The VM goes first; its ports and attachments only when it is gone.
fn instance(world: &World<'_>, memory: &Memory, object: &Wanted, spec: &InstanceSpec) -> Plan {
    let Some((driver, _)) = world.drivers.find_hypervisor(spec.driver.as_deref()) else {
        return Hold::from(no_driver("hypervisor", spec.driver.as_deref())).into();
    };
    let draft = Drafter { key: object.key() };
    let vm = VmId::new(object.uuid);
    let mut unknown = None;
    let mut steps = machine(world, object, spec, driver, &mut unknown);
    for (port, driver) in ports(world, memory, object, spec, &mut unknown) {
        let call = (Action::DetachPort, Op::DetachPort(port));
        let step = draft.step(&driver, call, format!("port {port}"), WHY);
        steps.push(step.in_group(Group::Nics, &[Group::Vm]));
    }
    for (volume, driver) in volumes(world, object, spec, &mut unknown) {
        let request = DetachRequest::new(volume, world.settings.host, vm);
        let call = (Action::DetachVolume, Op::DetachVolume(request));
        let step = draft.step(&driver, call, volume_name(world, volume), WHY);
        steps.push(step.in_group(Group::Disks, &[Group::Vm]));
    }
    let verdict = unknown.map_or(Verdict::Clear, Verdict::Unknown);
    Plan::new(steps, verdict)
}

/// The steps that end the VM. One that cannot be seen is deleted all the same: that is wished, and asks for nothing.
fn machine(
    world: &World<'_>,
    object: &Wanted,
    spec: &InstanceSpec,
    driver: &str,
    unknown: &mut Option<Arc<Error>>,
) -> Vec<Planned> {
    let draft = Drafter { key: object.key() };
    let vm = VmId::new(object.uuid);
    let name = format!("vm {}", object.name);
    let mut steps = Vec::new();
    let reason = match world.seen.vm(driver, &vm) {
        Look::Absent | Look::Foreign(_) => return steps,
        Look::Unknown(error) => {
            *unknown = Some(error);
            "wanted deleted; it cannot be seen"
        }
        Look::There(status) => {
            if matches!(status.state, VmState::Running | VmState::Stopping) {
                let grace = Duration::from_secs(spec.stop_grace_seconds.into());
                let call = (Action::StopVm, Op::StopVm(vm, grace));
                let step = draft.step(driver, call, name.clone(), WHY);
                steps.push(step.in_group(Group::Power, &[]));
            }
            WHY
        }
    };
    let call = (Action::DeleteVm, Op::DeleteVm(vm));
    steps.push(draft.step(driver, call, name, reason).in_group(Group::Vm, &[]));
    steps
}

/// The ports of the VM: those that the host shows, and those of its NICs that are not seen to be gone.
fn ports(
    world: &World<'_>,
    memory: &Memory,
    object: &Wanted,
    spec: &InstanceSpec,
    unknown: &mut Option<Arc<Error>>,
) -> BTreeMap<PortId, DriverId> {
    let vm = VmId::new(object.uuid);
    let mut ports: BTreeMap<PortId, DriverId> =
        world.seen.ports_of(vm).map(|(port, driver)| (*port, Arc::clone(driver))).collect();
    for nic in &spec.nics {
        let key = Key::new(Kind::Network, nic.network.clone());
        let Some(port) = port_id(object.uuid, &nic.name) else { continue };
        let network = world.wanted.get(&key).and_then(|network| match &network.spec {
            WantedSpec::Network(spec) => network_driver(world, spec).ok(),
            WantedSpec::Image(_) | WantedSpec::Volume(_) | WantedSpec::Instance(_) => None,
        });
        // The network's document is gone or its driver is: then any driver may have the port.
        let drivers: Vec<&str> = network
            .map_or_else(|| world.drivers.networks().map(|(id, _)| id).collect(), |id| vec![id]);
        for driver in drivers {
            match world.seen.port(driver, &port) {
                Look::There(_) => drop(ports.insert(port, driver.into())),
                Look::Unknown(error) => *unknown = Some(error),
                Look::Absent | Look::Foreign(_) => {}
            }
        }
    }
    for (port, driver, look) in leftover_ports(world, &memory.ports, object) {
        if look.there().is_some() {
            ports.insert(port, driver);
        }
    }
    ports
}

/// The volumes that the VM has open here.
fn volumes(
    world: &World<'_>,
    object: &Wanted,
    spec: &InstanceSpec,
    unknown: &mut Option<Arc<Error>>,
) -> BTreeMap<VolumeId, DriverId> {
    let vm = VmId::new(object.uuid);
    for disk in &spec.disks {
        let key = Key::new(Kind::Volume, disk.volume.clone());
        let volume = world.wanted.get(&key).and_then(|volume| match &volume.spec {
            WantedSpec::Volume(spec) => {
                Some((VolumeId::new(volume.uuid), volume_driver(world, spec).ok()?))
            }
            WantedSpec::Image(_) | WantedSpec::Network(_) | WantedSpec::Instance(_) => None,
        });
        let error = match volume {
            Some((volume, driver)) => world.seen.volume(driver, &volume).unknown().cloned(),
            None => world
                .drivers
                .volumes()
                .find_map(|(id, _)| world.seen.unlisted(Listing::Volumes, id)),
        };
        if error.is_some() {
            *unknown = error;
        }
    }
    world.seen.volumes_of(vm).map(|(volume, driver)| (*volume, Arc::clone(driver))).collect()
}

/// A volume as people know it.
pub(super) fn volume_name(world: &World<'_>, volume: VolumeId) -> String {
    world
        .index
        .owner(volume.uuid())
        .map_or_else(|| format!("volume {volume}"), |key| format!("volume {}", key.name))
}
