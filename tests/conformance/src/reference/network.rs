//! The network driver over the reference host.

use std::collections::BTreeMap;

use async_trait::async_trait;
use drivers_api::{
    Change, Context, Direction, Error, ErrorKind, EventKind, EventStream, HostEvent, HostInfo,
    IpCidr, Network, NetworkId, NetworkSpec, NetworkStatus, NetworkType, NicHandle, ObjectRef,
    Outcome, PortId, PortSpec, PortStatus, Protocol, Result, SecurityGroupId, SecurityGroupSpec,
    Uuid,
};

use super::{
    Op,
    host::{Call, Host, State, refuse},
    links::{Links, NETWORK_PARTS, Object, PORT_PARTS, device},
};

/// The network driver over a [`Host`]. Made by [`Host::network`].
#[derive(Clone, Debug)]
pub struct ReferenceNetwork {
    host: Host,
}

impl ReferenceNetwork {
    pub(super) const fn new(host: Host) -> Self {
        Self { host }
    }

    fn refuse_foreign(state: &State, op: Op, prefix: &str, id: Uuid) -> Result<()> {
        match device(prefix, id).filter(|name| state.links.foreign.contains_key(name)) {
            None => Ok(()),
            Some(name) => {
                let reason = format!("the device {name} is there without our mark");
                Err(refuse(ErrorKind::Conflict, op, id, reason).with_remedy("remove the device"))
            }
        }
    }

    fn check_network(&self, spec: &NetworkSpec) -> Result<()> {
        let state = self.host.lock();
        Self::refuse_foreign(&state, Op::EnsureNetwork, "br", spec.uuid.uuid())?;
        let overlap = |range: &IpCidr| spec.ranges().any(|mine| mine.overlaps(range));
        if let Some(route) = state.links.routes.iter().find(|route| overlap(route)) {
            let reason = format!("the range overlaps the host's own route {route}");
            return Err(Error::invalid("cidr", reason));
        }
        for (id, other) in state.links.networks.iter().filter(|(id, _)| **id != spec.uuid) {
            let clash = other.spec.iter().flat_map(NetworkSpec::ranges).find(overlap);
            if let Some(range) = clash {
                let reason = format!("the range overlaps {range} of network {id}");
                return Err(Error::invalid("cidr", reason));
            }
        }
        Ok(())
    }

    /// Makes the missing parts of a network or port one after the other; answers whether there were any.
    async fn complete<I: Copy + Ord, T: Clone>(
        &self,
        call: &Call,
        pick: impl Fn(&mut Links) -> &mut BTreeMap<I, Object<T>>,
        id: I,
        parts: &[&'static str],
    ) -> Result<bool> {
        let mut changed = false;
        for part in parts {
            let made = {
                let mut state = self.host.lock();
                let object = pick(&mut state.links).get_mut(&id);
                let made = object.is_some_and(|object| object.parts.insert(part));
                if made {
                    state.wrote();
                }
                made
            };
            if made {
                changed = true;
                call.between().await?;
            }
        }
        Ok(changed)
    }

    /// Writes the spec beside an object; answers whether it differed.
    fn write_spec<I: Copy + Ord, T: Clone + PartialEq>(
        &self,
        pick: impl Fn(&mut Links) -> &mut BTreeMap<I, Object<T>>,
        id: I,
        spec: &T,
    ) -> bool {
        let mut state = self.host.lock();
        let Some(object) = pick(&mut state.links).get_mut(&id) else { return false };
        let differs = object.spec.as_ref() != Some(spec);
        if differs {
            object.spec = Some(spec.clone());
            state.wrote();
        }
        differs
    }

    /// Makes an empty object unless there is one; answers whether it made one.
    fn make<I: Copy + Ord, T: Clone>(
        &self,
        pick: impl Fn(&mut Links) -> &mut BTreeMap<I, Object<T>>,
        id: I,
    ) -> bool {
        let mut state = self.host.lock();
        let objects = pick(&mut state.links);
        if objects.contains_key(&id) {
            return false;
        }
        objects.insert(id, Object::half_made());
        state.wrote();
        true
    }

    /// Removes what is there of an object, the last part first.
    async fn unmake<I: Copy + Ord, T: Clone>(
        &self,
        call: &Call,
        pick: impl Fn(&mut Links) -> &mut BTreeMap<I, Object<T>>,
        id: I,
    ) -> Result<Change> {
        loop {
            let left = {
                let mut state = self.host.lock();
                let Some(object) = pick(&mut state.links).get_mut(&id) else {
                    return Ok(Change::Unchanged);
                };
                let left = object.parts.pop_last().is_some();
                if !left {
                    pick(&mut state.links).remove(&id);
                }
                state.wrote();
                left
            };
            if !left {
                return Ok(Change::Changed);
            }
            call.between().await?;
        }
    }

    fn check_port(&self, spec: &PortSpec) -> Result<()> {
        let op = Op::AttachPort;
        let object = format!("port {}", spec.uuid);
        let state = self.host.lock();
        Self::refuse_foreign(&state, op, "tap", spec.uuid.uuid())?;
        let network = state.links.networks.get(&spec.network_uuid);
        let Some(network) = network.and_then(|network| network.spec.as_ref()) else {
            let reason = format!("there is no network {}", spec.network_uuid);
            return Err(refuse(ErrorKind::NotFound, op, object, reason));
        };
        spec.validate(network)?;
        let others = state.links.ports.values().filter_map(|port| port.spec.as_ref());
        for other in others
            .filter(|other| other.uuid != spec.uuid && other.network_uuid == spec.network_uuid)
        {
            if other.mac == spec.mac {
                let reason = format!("port {} has the MAC {}", other.uuid, spec.mac);
                return Err(refuse(ErrorKind::Conflict, op, object, reason));
            }
            if let Some(address) = spec.addresses.iter().find(|a| other.addresses.contains(a)) {
                let reason = format!("port {} has the address {address}", other.uuid);
                return Err(refuse(ErrorKind::Conflict, op, object, reason));
            }
        }
        Ok(())
    }

    fn tell(&self, object: ObjectRef, kind: EventKind, message: &str) {
        self.host.lock().network_events.publish(HostEvent::new(object, kind, message));
    }
}

#[async_trait]
impl Network for ReferenceNetwork {
    fn types(&self) -> &[NetworkType] {
        &[NetworkType::Nat, NetworkType::Bridged, NetworkType::Isolated, NetworkType::Mesh]
    }

    fn events(&self) -> Option<EventStream> {
        Some(self.host.subscribe(|state| &state.network_events))
    }

    async fn host_info(&self, cx: &Context) -> Result<HostInfo> {
        self.host.info(cx, "reference-network").await
    }

    async fn ensure_network(&self, cx: &Context, spec: &NetworkSpec) -> Result<Change> {
        let object = format!("network {}", spec.uuid);
        spec.validate().map_err(|error| error.during("ensure", object))?;
        let call = self.host.begin(cx, Op::EnsureNetwork, Some(spec.uuid.uuid())).await?;
        self.check_network(spec)?;
        let made = self.make(|links| &mut links.networks, spec.uuid);
        if made {
            call.between().await?;
        }
        let parts =
            self.complete(&call, |links| &mut links.networks, spec.uuid, &NETWORK_PARTS).await?;
        let changed = self.write_spec(|links| &mut links.networks, spec.uuid, spec);
        let change = if made { Change::Created } else { Change::changed_if(parts || changed) };
        if change.wrote() {
            self.tell(ObjectRef::Network(spec.uuid), EventKind::Appeared, "the network was made");
        }
        call.end(change).await
    }

    async fn destroy_network(&self, cx: &Context, network: NetworkId) -> Result<Change> {
        let op = Op::DestroyNetwork;
        let call = self.host.begin(cx, op, Some(network.uuid())).await?;
        {
            let state = self.host.lock();
            Self::refuse_foreign(&state, op, "br", network.uuid())?;
            let on_it = state.links.ports.iter().filter(|(_, port)| {
                port.spec.as_ref().is_some_and(|port| port.network_uuid == network)
            });
            let names: Vec<String> = on_it.map(|(id, _)| id.to_string()).collect();
            if !names.is_empty() {
                let reason = format!("ports are on it: {}", names.join(", "));
                let object = format!("network {network}");
                return Err(refuse(ErrorKind::Conflict, op, object, reason)
                    .with_remedy("detach the ports first"));
            }
        }
        let change = self.unmake(&call, |links| &mut links.networks, network).await?;
        if change.wrote() {
            self.tell(ObjectRef::Network(network), EventKind::Gone, "the network was removed");
        }
        call.end(change).await
    }

    async fn attach_port(&self, cx: &Context, spec: &PortSpec) -> Result<Outcome<NicHandle>> {
        let call = self.host.begin(cx, Op::AttachPort, Some(spec.uuid.uuid())).await?;
        let object = format!("port {}", spec.uuid);
        self.check_port(spec).map_err(|error| error.during("attach", &object))?;
        let made = self.make(|links| &mut links.ports, spec.uuid);
        if made {
            call.between().await?;
        }
        let parts = self.complete(&call, |links| &mut links.ports, spec.uuid, &PORT_PARTS).await?;
        let changed = self.write_spec(|links| &mut links.ports, spec.uuid, spec);
        let change = if made { Change::Created } else { Change::changed_if(parts || changed) };
        let nic = self.host.lock().links.handle(spec);
        let Some(nic) = nic else {
            let reason = "the network went away meanwhile";
            return Err(refuse(ErrorKind::NotFound, Op::AttachPort, object, reason));
        };
        if change.wrote() {
            self.tell(ObjectRef::Port(spec.uuid), EventKind::Appeared, "the port was attached");
        }
        call.end(Outcome::new(change, nic)).await
    }

    async fn detach_port(&self, cx: &Context, port: PortId) -> Result<Change> {
        let op = Op::DetachPort;
        let call = self.host.begin(cx, op, Some(port.uuid())).await?;
        Self::refuse_foreign(&self.host.lock(), op, "tap", port.uuid())?;
        let change = self.unmake(&call, |links| &mut links.ports, port).await?;
        if change.wrote() {
            self.tell(ObjectRef::Port(port), EventKind::Gone, "the port was removed");
        }
        call.end(change).await
    }

    async fn rotate_mesh_peer(&self, cx: &Context, spec: &PortSpec) -> Result<Change> {
        let op = Op::RotateMeshPeer;
        let call = self.host.begin(cx, op, Some(spec.uuid.uuid())).await?;
        let object = format!("port {}", spec.uuid);
        {
            let state = self.host.lock();
            let network = state.links.networks.get(&spec.network_uuid);
            let kind = network.and_then(|n| n.spec.as_ref()).map(|spec| spec.network_type);
            if kind != Some(NetworkType::Mesh) {
                return Err(Error::not_applicable("rotate a mesh peer with", object));
            }
            if !state.links.ports.contains_key(&spec.uuid) {
                return Err(refuse(ErrorKind::NotFound, op, object, "there is no such port"));
            }
            let mut others = state.links.ports.values().filter_map(|port| port.spec.as_ref());
            let key = &spec.wireguard_pub_key;
            if key.is_some() && others.any(|o| o.uuid != spec.uuid && o.wireguard_pub_key == *key) {
                return Err(refuse(ErrorKind::Conflict, op, object, "another port has the key"));
            }
        }
        let changed = self.write_spec(|links| &mut links.ports, spec.uuid, spec);
        call.end(Change::changed_if(changed)).await
    }

    async fn ensure_security_group(
        &self,
        cx: &Context,
        spec: &SecurityGroupSpec,
    ) -> Result<Change> {
        for (at, rule) in spec.rules.iter().enumerate() {
            let (Direction::Ingress | Direction::Egress) = rule.direction;
            if let Protocol::Tcp { from_port, to_port } | Protocol::Udp { from_port, to_port } =
                rule.protocol
                && from_port > to_port
            {
                let field = format!("rules[{at}].from_port");
                return Err(Error::invalid(field, "the first port is beyond the last"));
            }
        }
        let call = self.host.begin(cx, Op::EnsureSecurityGroup, Some(spec.uuid.uuid())).await?;
        let change = {
            let mut state = self.host.lock();
            let before = state.links.groups.insert(spec.uuid, spec.clone());
            let change = match before {
                None => Change::Created,
                Some(before) => Change::changed_if(before != *spec),
            };
            if change.wrote() {
                state.wrote();
            }
            change
        };
        call.end(change).await
    }

    async fn destroy_security_group(&self, cx: &Context, group: SecurityGroupId) -> Result<Change> {
        let call = self.host.begin(cx, Op::DestroySecurityGroup, Some(group.uuid())).await?;
        let removed = {
            let mut state = self.host.lock();
            let removed = state.links.groups.remove(&group).is_some();
            if removed {
                state.wrote();
            }
            removed
        };
        call.end(Change::changed_if(removed)).await
    }

    async fn list(&self, cx: &Context) -> Result<Vec<NetworkStatus>> {
        let call = self.host.begin(cx, Op::ListNetworks, None).await?;
        let node = self.host.node();
        let all = {
            let links = &self.host.lock().links;
            links.networks.keys().filter_map(|id| links.network_status(*id, node)).collect()
        };
        call.end(all).await
    }

    async fn get(&self, cx: &Context, network: NetworkId) -> Result<Option<NetworkStatus>> {
        let op = Op::GetNetwork;
        let call = self.host.begin(cx, op, Some(network.uuid())).await?;
        let node = self.host.node();
        let status = {
            let state = self.host.lock();
            Self::refuse_foreign(&state, op, "br", network.uuid())?;
            state.links.network_status(network, node)
        };
        call.end(status).await
    }

    async fn list_ports(&self, cx: &Context) -> Result<Vec<PortStatus>> {
        let call = self.host.begin(cx, Op::ListPorts, None).await?;
        let node = self.host.node();
        let all = {
            let links = &self.host.lock().links;
            links.ports.keys().filter_map(|id| links.port_status(*id, node)).collect()
        };
        call.end(all).await
    }

    async fn get_port(&self, cx: &Context, port: PortId) -> Result<Option<PortStatus>> {
        let op = Op::GetPort;
        let call = self.host.begin(cx, op, Some(port.uuid())).await?;
        let node = self.host.node();
        let status = {
            let state = self.host.lock();
            Self::refuse_foreign(&state, op, "tap", port.uuid())?;
            state.links.port_status(port, node)
        };
        call.end(status).await
    }
}
