//! The NICs of an instance: its ports on the host, and what its VM has of them.

use std::{collections::BTreeMap, sync::Arc};

use drivers_api::{Error, NetworkId, NicHandle, PortId, PortSpec, PortStatus};

use super::{
    Action, Group, NicPlan, Op,
    devices::{Devices, Plug, Scene},
    of_another_node,
};
use crate::{
    resolve::{Hold, leftover_ports, network_driver, port_id, port_spec},
    seen::{DriverId, Look},
    wanted::{Key, Kind, Nic, WantedSpec},
};

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
        // One that is taken away to come back otherwise is missing then, whatever its port will be.
        let moved =
            wanted.iter().any(|now| now.current.is_some() && !now.is_kept(scene, plug.running));
        moved
            || status.nics.len() != devices.all.len()
            || !devices.all.iter().zip(&status.nics).all(same)
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
