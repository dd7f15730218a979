//! What is refused before any effect.

use drivers_api::{
    Error, ErrorKind, IpCidr, NetworkId, NetworkSpec, NetworkType, PortSpec, Result,
};

use crate::{
    dnsmasq::valid_hostname,
    netlink::Route,
    records::{NetworkRecord, Records},
};

/// Checks a network's spec by itself.
pub(crate) fn network(spec: &NetworkSpec) -> Result<()> {
    if spec.network_type == NetworkType::Mesh {
        return Err(Error::not_applicable("make a mesh network with", "linux-bridge")
            .with_remedy("mesh networks are another driver's"));
    }
    spec.validate()?;
    if let Some(vlan) = spec.vlan {
        return Err(Error::unsupported("tag frames with", "linux-bridge")
            .with_field("vlan")
            .with_remedy(format!("give an uplink bridge that is on VLAN {vlan} already")));
    }
    let has_v6 = spec.ranges().any(|range| range.is_v6());
    if has_v6 && spec.mtu_bytes.is_some_and(|mtu| mtu.get() < 1280) {
        return Err(Error::invalid("mtu_bytes", "IPv6 needs 1280 bytes"));
    }
    Ok(())
}

/// Checks a port's spec by itself.
pub(crate) fn port(spec: &PortSpec) -> Result<()> {
    if spec.effective_security_groups.as_ref().is_some_and(|groups| !groups.is_empty()) {
        return Err(Error::unsupported("attach a port with security groups with", "linux-bridge")
            .with_field("effective_security_groups"));
    }
    if spec.wireguard_pub_key.is_some() || spec.mesh_endpoint.is_some() {
        return Err(Error::invalid(
            "wireguard_pub_key",
            "only a port of a mesh network has mesh fields",
        ));
    }
    if spec.hostname.as_deref().is_some_and(|name| !valid_hostname(name)) {
        return Err(Error::invalid(
            "hostname",
            "wanted one DNS label: 1 to 63 letters, digits and hyphens, starting with a letter",
        ));
    }
    Ok(())
}

/// Checks a network's ranges against the other networks. A bridged network's range is its uplink's, so it does not count.
pub(crate) fn against_networks(spec: &NetworkSpec, records: &Records) -> Result<()> {
    if spec.network_type == NetworkType::Bridged {
        return Ok(());
    }
    for other in records.good_networks() {
        if other.spec.uuid == spec.uuid || other.spec.network_type == NetworkType::Bridged {
            continue;
        }
        for (field, range) in fields(spec) {
            if let Some(taken) = other.spec.ranges().find(|taken| taken.overlaps(&range)) {
                return Err(Error::invalid(
                    field,
                    format!(
                        "{range} overlaps {taken} of network \"{}\" ({})",
                        other.spec.name, other.spec.uuid
                    ),
                ));
            }
        }
    }
    Ok(())
}

/// Checks a network's ranges against the host's routes and addresses. `own` is the index of its own bridge.
pub(crate) fn against_routes(spec: &NetworkSpec, routes: &[Route], own: Option<u32>) -> Result<()> {
    if spec.network_type == NetworkType::Bridged {
        return Ok(());
    }
    for (field, range) in fields(spec) {
        let taken = routes
            .iter()
            .find(|route| route.to.overlaps(&range) && (own.is_none() || route.output != own));
        if let Some(taken) = taken {
            return Err(Error::invalid(
                field,
                format!("{range} overlaps the host's own route to {}", taken.to),
            ));
        }
    }
    Ok(())
}

fn fields(spec: &NetworkSpec) -> impl Iterator<Item = (&'static str, IpCidr)> {
    let first = spec.cidr.map(|range| ("cidr", range));
    first.into_iter().chain(spec.cidr6.map(|range| ("cidr6", range)))
}

/// Checks whether a network that is there can become what the spec says.
pub(crate) fn change(old: &NetworkRecord, new: &NetworkSpec, records: &Records) -> Result<()> {
    let refuse = |reason: String| {
        Err(Error::new(ErrorKind::Conflict, "change", object(new.uuid), reason)
            .with_remedy("detach the ports first"))
    };
    let ports: Vec<_> = records.ports_of(new.uuid).collect();
    let is_rebuilt = is_rebuilt(&old.spec, new);
    if is_rebuilt && !ports.is_empty() {
        let names: Vec<String> = ports.iter().map(|port| port.spec.uuid.to_string()).collect();
        return refuse(format!(
            "its type or uplink cannot change under its ports: {}",
            names.join(", ")
        ));
    }
    for port in ports {
        if let Err(error) = port.spec.validate(new) {
            return refuse(format!("port {} does not fit: {}", port.spec.uuid, error.reason()));
        }
    }
    Ok(())
}

/// Whether the host's side has to be made anew.
pub(crate) fn is_rebuilt(old: &NetworkSpec, new: &NetworkSpec) -> bool {
    old.network_type != new.network_type || old.uplink != new.uplink || old.vlan != new.vlan
}

/// Checks that no other port has the port's addresses, or its MAC address.
pub(crate) fn against_ports(spec: &PortSpec, records: &Records) -> Result<()> {
    for other in records.good_ports().filter(|other| other.spec.uuid != spec.uuid) {
        let shared = spec.addresses.iter().find(|address| {
            other.spec.network_uuid == spec.network_uuid && other.spec.addresses.contains(address)
        });
        let taken = match shared {
            Some(address) => address.to_string(),
            None if other.spec.mac == spec.mac => spec.mac.to_string(),
            None => continue,
        };
        return Err(Error::new(
            ErrorKind::Conflict,
            "attach",
            format!("port {}", spec.uuid),
            format!("port {} of vm {} has {taken}", other.spec.uuid, other.spec.vm_uuid),
        ));
    }
    Ok(())
}

pub(crate) fn object(network: NetworkId) -> String {
    format!("network {network}")
}
