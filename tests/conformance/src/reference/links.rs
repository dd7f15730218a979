//! The machine's links and rules, and what happens to them on their own.

use std::collections::{BTreeMap, BTreeSet};

use drivers_api::{
    EventKind, HostEvent, HostId, IfName, IpCidr, Mark, NetworkId, NetworkSpec, NetworkStatus,
    NicHandle, ObjectRef, PortId, PortSpec, PortStatus, SecurityGroupId, SecurityGroupSpec, Uuid,
};

use super::host::Host;
use crate::Census;

/// What a network has on the host, in the order in which it is made.
pub(super) const NETWORK_PARTS: [&str; 3] = ["bridge", "rules", "dhcp"];
/// What a port has on the host, in the order in which it is made.
pub(super) const PORT_PARTS: [&str; 3] = ["tap", "rules", "lease"];

#[derive(Default)]
pub(super) struct Links {
    pub(super) networks: BTreeMap<NetworkId, Object<NetworkSpec>>,
    pub(super) ports: BTreeMap<PortId, Object<PortSpec>>,
    pub(super) groups: BTreeMap<SecurityGroupId, SecurityGroupSpec>,
    pub(super) foreign: BTreeMap<IfName, String>,
    pub(super) routes: Vec<IpCidr>,
}

/// A network or port with what is there of it.
pub(super) struct Object<T> {
    pub(super) spec: Option<T>,
    pub(super) parts: BTreeSet<&'static str>,
}

impl<T: Clone> Object<T> {
    pub(super) const fn half_made() -> Self {
        Self { spec: None, parts: BTreeSet::new() }
    }

    fn messages(&self, all: &[&'static str]) -> Vec<String> {
        let missing = all.iter().filter(|part| !self.parts.contains(*part));
        let mut messages: Vec<String> = missing.map(|part| format!("{part} is missing")).collect();
        if self.spec.is_none() {
            messages.push("it is half made".to_owned());
        }
        messages
    }
}

impl Links {
    /// Whether a port that the host knows has no tap.
    pub(super) fn lacks_tap(&self, port: PortId) -> bool {
        self.ports.get(&port).is_some_and(|port| !port.parts.contains("tap"))
    }

    /// After a restart of the host no link and no rule is there; what was written to disk is.
    pub(super) fn reboot(&mut self) {
        for network in self.networks.values_mut() {
            network.parts.clear();
        }
        for port in self.ports.values_mut() {
            port.parts.clear();
        }
    }

    pub(super) fn count(&self, census: &mut Census) {
        census.extend("networks", self.networks.keys());
        census.extend("ports", self.ports.keys());
        census.extend("groups", self.groups.keys());
        census.extend("foreign", self.foreign.keys());
    }

    pub(super) fn network_status(&self, id: NetworkId, node: HostId) -> Option<NetworkStatus> {
        let network = self.networks.get(&id)?;
        let mark = Mark::new(node, id.uuid());
        let mut status = NetworkStatus::new(id, mark, network.spec.clone());
        status.messages = network.messages(&NETWORK_PARTS);
        status.healthy = status.messages.is_empty();
        status.device =
            if network.parts.contains("bridge") { device("br", id.uuid()) } else { None };
        Some(status)
    }

    pub(super) fn port_status(&self, id: PortId, node: HostId) -> Option<PortStatus> {
        let port = self.ports.get(&id)?;
        let nic = port.spec.as_ref().filter(|_| port.parts.contains("tap"));
        let nic = nic.and_then(|spec| self.handle(spec));
        let mut status = PortStatus::new(id, Mark::new(node, id.uuid()), port.spec.clone(), nic);
        status.messages = port.messages(&PORT_PARTS);
        status.healthy = status.messages.is_empty();
        Some(status)
    }

    pub(super) fn handle(&self, spec: &PortSpec) -> Option<NicHandle> {
        let device = device("tap", spec.uuid.uuid())?;
        let mut nic = NicHandle::new(spec.name.clone(), spec.uuid, device, spec.mac);
        let network = self.networks.get(&spec.network_uuid)?;
        nic.mtu_bytes = network.spec.as_ref().and_then(|spec| spec.mtu_bytes);
        Some(nic)
    }
}

pub(super) fn device(prefix: &str, id: Uuid) -> Option<IfName> {
    IfName::derived(prefix, id).ok()
}

/// What happens to links without a driver.
impl Host {
    /// Removes one part of a network: `bridge`, `rules` or `dhcp`. Answers whether it was there.
    pub fn remove_network_part(&self, network: NetworkId, part: &str) -> bool {
        let mut state = self.lock();
        let object = state.links.networks.get_mut(&network);
        let removed = object.is_some_and(|object| object.parts.remove(part));
        let message = format!("{part} was removed by hand");
        let event = HostEvent::new(ObjectRef::Network(network), EventKind::Gone, message);
        if removed {
            state.network_events.publish(event);
        }
        removed
    }

    /// Removes the bridge of a network. Answers whether it was there.
    pub fn remove_bridge(&self, network: NetworkId) -> bool {
        self.remove_network_part(network, "bridge")
    }

    /// Removes one part of a port: `tap`, `rules` or `lease`. Answers whether it was there.
    pub fn remove_port_part(&self, port: PortId, part: &str) -> bool {
        let mut state = self.lock();
        let object = state.links.ports.get_mut(&port);
        let removed = object.is_some_and(|object| object.parts.remove(part));
        let message = format!("{part} was removed by hand");
        let event = HostEvent::new(ObjectRef::Port(port), EventKind::Gone, message);
        if removed {
            state.network_events.publish(event);
        }
        removed
    }

    /// Removes the tap of a port. Answers whether it was there.
    pub fn remove_tap(&self, port: PortId) -> bool {
        self.remove_port_part(port, "tap")
    }

    /// A range that the host itself is in: no network may overlap it.
    pub fn add_route(&self, range: IpCidr) {
        self.lock().links.routes.push(range);
    }

    /// The rules of a group as applied.
    #[must_use]
    pub fn security_group(&self, group: SecurityGroupId) -> Option<SecurityGroupSpec> {
        self.lock().links.groups.get(&group).cloned()
    }

    /// Puts a device that is not ours on the host. `network_device` and `port_device` name those of an object.
    pub fn plant_foreign_device(&self, name: IfName) {
        self.lock().links.foreign.insert(name, "a device of somebody else".to_owned());
    }

    /// What [`Host::plant_foreign_device`] put there, if it is still as it was put.
    #[must_use]
    pub fn foreign_device(&self, name: &IfName) -> Option<String> {
        self.lock().links.foreign.get(name).cloned()
    }

    /// All devices that are not ours.
    #[must_use]
    pub fn foreign_devices(&self) -> Vec<(IfName, String)> {
        let state = self.lock();
        state.links.foreign.iter().map(|(name, text)| (name.clone(), text.clone())).collect()
    }

    /// Takes a foreign device away.
    pub fn remove_foreign_device(&self, name: &IfName) {
        self.lock().links.foreign.remove(name);
    }

    /// The name that the device of a network has.
    #[must_use]
    pub fn network_device(&self, network: NetworkId) -> Option<IfName> {
        device("br", network.uuid())
    }

    /// The name that the device of a port has.
    #[must_use]
    pub fn port_device(&self, port: PortId) -> Option<IfName> {
        device("tap", port.uuid())
    }
}
