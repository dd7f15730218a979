//! The network trait: networks and ports on a host.

use std::net::IpAddr;

use crate::{
    Change, DeviceName, DisplayName, Endpoint, Error, EventStream, HostInfo, IfName, IpCidr,
    MacAddr, Mark, MtuBytes, NetworkId, Outcome, PortId, PortNumber, ProjectId, Result,
    SecurityGroupId, VlanId, VmId, WireguardPublicKey,
};

/// What kind of network it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum NetworkType {
    /// A bridge of the host whose guests reach the outside behind the host's address.
    Nat,
    /// Guests are on an existing network of the host's uplink.
    Bridged,
    /// Guests reach each other and nothing else.
    Isolated,
    /// Guests of several hosts are on one network through WireGuard.
    Mesh,
}

/// A peer of a mesh network on another host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct MeshPeer {
    /// Its public key.
    pub public_key: WireguardPublicKey,
    /// Where it is reached; `None` when it calls first.
    pub endpoint: Option<Endpoint>,
    /// The addresses behind it.
    pub allowed_ips: Vec<IpCidr>,
    /// Seconds between keep-alives; `None` for none.
    pub persistent_keepalive_s: Option<u16>,
}

impl MeshPeer {
    /// A peer that calls first.
    #[must_use]
    pub const fn new(public_key: WireguardPublicKey, allowed_ips: Vec<IpCidr>) -> Self {
        Self { public_key, endpoint: None, allowed_ips, persistent_keepalive_s: None }
    }
}

/// A network as wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct NetworkSpec {
    /// The network's identity.
    pub uuid: NetworkId,
    /// The project that owns it.
    pub project_uuid: Option<ProjectId>,
    /// What people call it.
    pub name: DisplayName,
    /// What kind it is.
    pub network_type: NetworkType,
    /// Its range of addresses, of either family. Required unless the network is bridged.
    pub cidr: Option<IpCidr>,
    /// Its IPv6 range beside a v4 `cidr`.
    pub cidr6: Option<IpCidr>,
    /// The host's address in `cidr`, which guests use as their router; `None` for none.
    pub gateway: Option<IpAddr>,
    /// The host's address in `cidr6`.
    pub gateway6: Option<IpAddr>,
    /// The resolvers that guests are told; empty: the network's own.
    pub dns_servers: Vec<IpAddr>,
    /// Bridged only: the existing bridge of the host that leads outside.
    pub uplink: Option<IfName>,
    /// Bridged only: the VLAN tag on the uplink.
    pub vlan: Option<VlanId>,
    /// The MTU of the network; `None` for the driver's default.
    pub mtu_bytes: Option<MtuBytes>,
    /// Mesh only: the UDP port on which this host listens.
    pub mesh_listen_port: Option<PortNumber>,
    /// Mesh only: where other hosts reach this one.
    pub mesh_endpoint: Option<Endpoint>,
    /// Mesh only: the other hosts.
    pub mesh_peers: Vec<MeshPeer>,
}

impl NetworkSpec {
    /// A network without addresses.
    #[must_use]
    pub const fn new(uuid: NetworkId, name: DisplayName, network_type: NetworkType) -> Self {
        Self {
            uuid,
            project_uuid: None,
            name,
            network_type,
            cidr: None,
            cidr6: None,
            gateway: None,
            gateway6: None,
            dns_servers: Vec::new(),
            uplink: None,
            vlan: None,
            mtu_bytes: None,
            mesh_listen_port: None,
            mesh_endpoint: None,
            mesh_peers: Vec::new(),
        }
    }

    /// All ranges of the network.
    pub fn ranges(&self) -> impl Iterator<Item = IpCidr> + '_ {
        self.cidr.into_iter().chain(self.cidr6)
    }

    /// The gateways of the network.
    pub fn gateways(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.gateway.into_iter().chain(self.gateway6)
    }

    /// Checks what does not depend on the host. Overlap with the host's routes and with other networks is the driver's.
    ///
    /// A `/31` is refused: it has no room for a port beside the gateway under the rules of this contract, which keep the
    /// first address of a range for the network.
    ///
    /// # Errors
    /// `InvalidSpec` with the field.
    pub fn validate(&self) -> Result<()> {
        if self.cidr.is_none() && self.network_type != NetworkType::Bridged {
            return Err(Error::invalid("cidr", "a network of this type needs a range"));
        }
        check_range("cidr", self.cidr, "gateway", self.gateway)?;
        check_range("cidr6", self.cidr6, "gateway6", self.gateway6)?;
        if let Some(second) = self.cidr6 {
            if !second.is_v6() {
                return Err(Error::invalid("cidr6", "wanted an IPv6 range"));
            }
            if self.cidr.is_none_or(|first| first.is_v6()) {
                return Err(Error::invalid("cidr6", "a v6-only network has its range in cidr"));
            }
        }
        if self.network_type == NetworkType::Nat && self.gateway.is_none() {
            return Err(Error::invalid(
                "gateway",
                "a nat network needs the host's address as gateway",
            ));
        }
        if self.dns_servers.iter().any(|server| server.is_unspecified() || server.is_multicast()) {
            return Err(Error::invalid("dns_servers", "a resolver has a unicast address"));
        }
        self.validate_type()
    }

    fn validate_type(&self) -> Result<()> {
        let bridged = self.network_type == NetworkType::Bridged;
        if bridged && self.uplink.is_none() {
            return Err(Error::invalid(
                "uplink",
                "a bridged network needs the bridge of the host's uplink",
            ));
        }
        if !bridged && (self.uplink.is_some() || self.vlan.is_some()) {
            return Err(Error::invalid(
                "uplink",
                "only a bridged network has an uplink and a VLAN",
            ));
        }
        let mesh_fields = self.mesh_listen_port.is_some()
            || self.mesh_endpoint.is_some()
            || !self.mesh_peers.is_empty();
        if mesh_fields && self.network_type != NetworkType::Mesh {
            return Err(Error::invalid("mesh_listen_port", "only a mesh network has mesh fields"));
        }
        Ok(())
    }
}

fn check_range(
    field: &str,
    range: Option<IpCidr>,
    gateway_field: &str,
    gateway: Option<IpAddr>,
) -> Result<()> {
    let Some(range) = range else {
        return match gateway {
            Some(_) => Err(Error::invalid(gateway_field, format!("there is no {field} for it"))),
            None => Ok(()),
        };
    };
    if range.host_addresses() < 2 {
        return Err(Error::invalid(field, "the range has no room for a gateway and a port"));
    }
    match gateway {
        Some(gateway) if !range.is_host_address(gateway) => Err(Error::invalid(
            gateway_field,
            format!(
                "{gateway} is no host address of {range} (the network's and broadcast addresses are none)"
            ),
        )),
        Some(_) | None => Ok(()),
    }
}

/// A port as wanted: one NIC of one VM on one network.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct PortSpec {
    /// The port's identity: derived from the instance's and the NIC's name, so that it survives a lost store.
    pub uuid: PortId,
    /// The project that owns it.
    pub project_uuid: Option<ProjectId>,
    /// The VM.
    pub vm_uuid: VmId,
    /// The network.
    pub network_uuid: NetworkId,
    /// The NIC's name within the VM.
    pub name: DeviceName,
    /// The guest's MAC address. The caller allocates it ([`MacAddr::derived`]).
    pub mac: MacAddr,
    /// The guest's addresses, at most one of a family. The caller allocates them.
    pub addresses: Vec<IpAddr>,
    /// The name by which the network's resolver knows the guest.
    pub hostname: Option<String>,
    /// Mesh only: the port's own key, where the guest itself is a peer.
    pub wireguard_pub_key: Option<WireguardPublicKey>,
    /// Mesh only: where that peer is reached, in place of the network's.
    pub mesh_endpoint: Option<Endpoint>,
    /// The security groups whose rules hold, resolved by the caller. `None`: the network's default policy, in which a
    /// port that has no rules receives nothing unasked. `Some` of an empty list: no groups, the same.
    pub effective_security_groups: Option<Vec<SecurityGroupId>>,
    /// The uid of the VMM that will open the device.
    pub owner_uid: Option<u32>,
}

impl PortSpec {
    /// A port without addresses.
    #[must_use]
    pub const fn new(
        uuid: PortId,
        vm_uuid: VmId,
        network_uuid: NetworkId,
        name: DeviceName,
        mac: MacAddr,
    ) -> Self {
        Self {
            uuid,
            project_uuid: None,
            vm_uuid,
            network_uuid,
            name,
            mac,
            addresses: Vec::new(),
            hostname: None,
            wireguard_pub_key: None,
            mesh_endpoint: None,
            effective_security_groups: None,
            owner_uid: None,
        }
    }

    /// Checks the port's addresses against its network.
    ///
    /// # Errors
    /// `InvalidSpec` with the field: an address outside the ranges, a network's, broadcast or gateway address, two of a
    /// family. Whether another port has it is the driver's to see.
    pub fn validate(&self, network: &NetworkSpec) -> Result<()> {
        for (at, address) in self.addresses.iter().enumerate() {
            let field = || format!("addresses[{at}]");
            if self.addresses.iter().take(at).any(|other| other.is_ipv4() == address.is_ipv4()) {
                return Err(Error::invalid(field(), "a port has at most one address of a family"));
            }
            let has_range = network.ranges().next().is_some();
            if has_range && !network.ranges().any(|range| range.is_host_address(*address)) {
                return Err(Error::invalid(
                    field(),
                    format!("{address} is no host address of the network's ranges"),
                ));
            }
            if network.gateways().any(|gateway| gateway == *address) {
                return Err(Error::invalid(field(), format!("{address} is the network's gateway")));
            }
        }
        Ok(())
    }
}

/// What `attach_port` answers and a hypervisor plugs into its VM.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct NicHandle {
    /// The NIC's name within the VM.
    pub name: DeviceName,
    /// The port.
    pub port_uuid: PortId,
    /// The host's device: a tap.
    pub device: IfName,
    /// The guest's MAC address.
    pub mac: MacAddr,
    /// The MTU that the guest is told; `None` for 1500.
    pub mtu_bytes: Option<MtuBytes>,
}

impl NicHandle {
    /// A NIC with the default MTU.
    #[must_use]
    pub const fn new(name: DeviceName, port_uuid: PortId, device: IfName, mac: MacAddr) -> Self {
        Self { name, port_uuid, device, mac, mtu_bytes: None }
    }
}

/// A network as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct NetworkStatus {
    /// The network's identity.
    pub uuid: NetworkId,
    /// Who made it.
    pub mark: Mark,
    /// The spec as applied; `None` when it is half made or unreadable.
    pub spec: Option<NetworkSpec>,
    /// Whether every part is as applied: link, addresses, rules, DHCP. If not, `ensure_network` mends it.
    pub healthy: bool,
    /// The host's device, where there is one.
    pub device: Option<IfName>,
    /// Mesh only: this host's public key.
    pub public_key: Option<WireguardPublicKey>,
    /// What a person should know: what is missing, whose firewall drops our traffic.
    pub messages: Vec<String>,
}

impl NetworkStatus {
    /// A healthy network.
    #[must_use]
    pub const fn new(uuid: NetworkId, mark: Mark, spec: Option<NetworkSpec>) -> Self {
        Self {
            uuid,
            mark,
            spec,
            healthy: true,
            device: None,
            public_key: None,
            messages: Vec::new(),
        }
    }
}

/// A port as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct PortStatus {
    /// The port's identity.
    pub uuid: PortId,
    /// Who made it.
    pub mark: Mark,
    /// The spec as applied; `None` when it is half made or unreadable.
    pub spec: Option<PortSpec>,
    /// What `attach_port` answers for it, while the device is there.
    pub nic: Option<NicHandle>,
    /// Whether every part is as applied: device, bridge membership, rules, DHCP entry. If not, `attach_port` mends it.
    pub healthy: bool,
    /// What a person should know.
    pub messages: Vec<String>,
}

impl PortStatus {
    /// A healthy port.
    #[must_use]
    pub const fn new(
        uuid: PortId,
        mark: Mark,
        spec: Option<PortSpec>,
        nic: Option<NicHandle>,
    ) -> Self {
        Self { uuid, mark, spec, nic, healthy: true, messages: Vec::new() }
    }
}

/// Which way a rule's traffic goes, seen from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum Direction {
    /// To the guest.
    Ingress,
    /// From the guest.
    Egress,
}

/// What traffic a rule allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase", tag = "protocol"))]
#[non_exhaustive]
pub enum Protocol {
    /// All of it.
    Any,
    /// TCP to these ports, both included.
    Tcp {
        /// The first port.
        from_port: u16,
        /// The last port.
        to_port: u16,
    },
    /// UDP to these ports, both included.
    Udp {
        /// The first port.
        from_port: u16,
        /// The last port.
        to_port: u16,
    },
    /// ICMP of this type; `None` for all types.
    Icmp {
        /// The type (IANA, "ICMP Type Numbers").
        icmp_type: Option<u8>,
    },
    /// ICMPv6 of this type; `None` for all types.
    Icmp6 {
        /// The type (IANA, "ICMPv6 type Numbers").
        icmp_type: Option<u8>,
    },
}

/// With whom a rule allows traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum RulePeer {
    /// Anybody.
    Any,
    /// These addresses.
    Cidr(IpCidr),
    /// The members of a group: their addresses come with that group's own spec.
    Group(SecurityGroupId),
}

/// One rule: allows traffic. What no rule allows is dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct SecurityRule {
    /// Which way.
    pub direction: Direction,
    /// What.
    pub protocol: Protocol,
    /// With whom.
    pub peer: RulePeer,
}

impl SecurityRule {
    /// A rule.
    #[must_use]
    pub const fn new(direction: Direction, protocol: Protocol, peer: RulePeer) -> Self {
        Self { direction, protocol, peer }
    }
}

/// A security group as wanted: rules, and who is in it. Stateful: replies to what is allowed are allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct SecurityGroupSpec {
    /// The group's identity.
    pub uuid: SecurityGroupId,
    /// The project that owns it.
    pub project_uuid: Option<ProjectId>,
    /// What people call it.
    pub name: DisplayName,
    /// Its rules.
    pub rules: Vec<SecurityRule>,
    /// The addresses of its members on all hosts, for rules that name the group as peer.
    pub members: Vec<IpAddr>,
}

impl SecurityGroupSpec {
    /// A group without rules and members.
    #[must_use]
    pub const fn new(uuid: SecurityGroupId, name: DisplayName) -> Self {
        Self { uuid, project_uuid: None, name, rules: Vec::new(), members: Vec::new() }
    }
}

driver_trait! {
    /// Materialises networks and ports on one host. Different types may be served by different drivers; the caller routes
    /// by [`Network::types`].
    ///
    /// # Guarantees
    /// * A port's rules are in place before its link is up, and stay so while they are changed.
    /// * A port without rules receives nothing unasked: firewalls fail closed.
    /// * Allocation of addresses is the caller's; the driver keeps them on the host, so that a lost store renumbers nobody.
    pub trait Network {
        sync {
            /// The types of network that it serves.
            fn types(&self) -> &[NetworkType];

            /// A subscription to links, rules and helpers that came, changed or went.
            fn events(&self) -> Option<EventStream> {
                None
            }
        }

        /// Where the driver works.
        ///
        /// # Errors
        /// `Unavailable` when the host cannot be asked.
        async fn host_info(&self, cx: &Context, []) -> Result<HostInfo>;

        /// Makes the host's side of the network: a bridge, a WireGuard device, its addresses, its helpers. Puts back what
        /// is missing. The same spec again, all there: unchanged.
        ///
        /// # Errors
        /// `InvalidSpec`, among others for a range that overlaps the host's routes or another network; `Conflict` when the
        /// device's name is taken by what is not ours.
        async fn ensure_network(&self, cx: &Context, [], spec: &NetworkSpec) -> Result<Change>;

        /// Removes the host's side of the network, whatever of it is there. Not there: unchanged.
        ///
        /// # Errors
        /// `Conflict` while ports are on it, naming them.
        async fn destroy_network(&self, cx: &Context, [network: NetworkId]) -> Result<Change>;

        /// Wires a VM's NIC to the network: device, rules, DHCP entry, in this order, link-up last. Puts back what is
        /// missing. The same spec again, all there: unchanged, the same answer.
        ///
        /// # Errors
        /// `InvalidSpec`; `NotFound` without the network; `Conflict` for an address or MAC of another port, or a device of
        /// that name that is not ours.
        async fn attach_port(&self, cx: &Context, [], spec: &PortSpec) -> Result<Outcome<NicHandle>>;

        /// Removes the host's side of the port, whatever of it is there. Not there: unchanged.
        ///
        /// # Errors
        /// Anything but "not found".
        async fn detach_port(&self, cx: &Context, [port: PortId]) -> Result<Change>;

        /// Changes the mesh peer of a port to the spec's key without dropping the sessions of others.
        ///
        /// # Errors
        /// `NotApplicable` for a network that is no mesh; `Conflict` when another peer has the key or the addresses.
        async fn rotate_mesh_peer(&self, cx: &Context, [], spec: &PortSpec) -> Result<Change>
            = Err(Error::not_applicable("rotate a mesh peer with", "this driver"));

        /// Makes or changes a group's rules for all ports that name it, in one transaction.
        ///
        /// # Errors
        /// `InvalidSpec`; `Unsupported` where the driver has no groups.
        async fn ensure_security_group(&self, cx: &Context, [], spec: &SecurityGroupSpec) -> Result<Change>
            = Err(Error::unsupported("make a security group with", "this driver"));

        /// Removes a group. Not there: unchanged. Ports that still name it keep dropping what no other group allows.
        ///
        /// # Errors
        /// Anything but "not found".
        async fn destroy_security_group(&self, cx: &Context, [group: SecurityGroupId]) -> Result<Change>
            = Ok(Change::Unchanged);

        /// All networks with an agent's mark, half-made ones included.
        ///
        /// # Errors
        /// `Unavailable` when the host cannot be asked; never a part of the list.
        async fn list(&self, cx: &Context, []) -> Result<Vec<NetworkStatus>>;

        /// One network; `None` when it was seen not to be there.
        ///
        /// # Errors
        /// As `list`; `Conflict` when its device is there without our mark.
        async fn get(&self, cx: &Context, [network: NetworkId]) -> Result<Option<NetworkStatus>>;

        /// All ports with an agent's mark, half-made ones included.
        ///
        /// # Errors
        /// As `list`.
        async fn list_ports(&self, cx: &Context, []) -> Result<Vec<PortStatus>>;

        /// One port; `None` when it was seen not to be there.
        ///
        /// # Errors
        /// As `list`; `Conflict` when its device is there without our mark.
        async fn get_port(&self, cx: &Context, [port: PortId]) -> Result<Option<PortStatus>>;
    }
}
