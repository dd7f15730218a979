//! Names of links and tables, and the mark that says whose a link is.

use drivers_api::{Error, ErrorKind, HostId, IfName, MacAddr, NetworkId, PortId, Result, Uuid};

/// What kind of object a link stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// A bridge.
    Network,
    /// A tap.
    Port,
}

impl Kind {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Network => "network",
            Self::Port => "port",
        }
    }
}

/// What a link's alias says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkMark {
    pub(crate) node: HostId,
    pub(crate) kind: Kind,
    pub(crate) object: Uuid,
}

impl LinkMark {
    /// The alias (`IFLA_IFALIAS`, at most 255 bytes): `bcd-node:NODE:KIND:UUID`.
    pub(crate) fn alias(self) -> String {
        format!("bcd-node:{}:{}:{}", self.node, self.kind.as_str(), self.object)
    }

    /// The mark of an alias; `None` for an alias of somebody else.
    pub(crate) fn parse(alias: &str) -> Option<Self> {
        let mut parts = alias.strip_prefix("bcd-node:")?.split(':');
        let node = parts.next()?.parse().ok()?;
        let kind = match parts.next()? {
            "network" => Kind::Network,
            "port" => Kind::Port,
            _ => return None,
        };
        let object = parts.next()?.parse().ok()?;
        parts.next().is_none().then_some(Self { node, kind, object })
    }
}

/// Makes the names of one agent's objects.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    pub(crate) node: HostId,
    prefix: String,
}

impl Names {
    pub(crate) fn new(node: HostId, prefix: &str) -> Self {
        Self { node, prefix: prefix.to_owned() }
    }

    /// The name of our nftables tables.
    pub(crate) fn table(&self) -> &str {
        &self.prefix
    }

    /// What all our taps and nobody else's links begin with.
    pub(crate) fn tap_prefix(&self) -> String {
        format!("{}t", self.prefix)
    }

    pub(crate) fn bridge(&self, network: NetworkId) -> Result<IfName> {
        self.derived("b", network.uuid())
    }

    pub(crate) fn tap(&self, port: PortId) -> Result<IfName> {
        self.derived("t", port.uuid())
    }

    fn derived(&self, kind: &str, id: Uuid) -> Result<IfName> {
        IfName::derived(&format!("{}{kind}", self.prefix), id).map_err(|error| {
            Error::new(ErrorKind::Internal, "name the link of", id, "the prefix is not usable")
                .with_source(error)
        })
    }

    pub(crate) const fn network_mark(&self, network: NetworkId) -> LinkMark {
        LinkMark { node: self.node, kind: Kind::Network, object: network.uuid() }
    }

    pub(crate) const fn port_mark(&self, port: PortId) -> LinkMark {
        LinkMark { node: self.node, kind: Kind::Port, object: port.uuid() }
    }
}

/// The bridge's own MAC address: fixed, so that it does not change with its ports, and derived, so that a bridge that was
/// made by a killed agent before it had its alias is known by it.
pub(crate) fn bridge_mac(network: NetworkId) -> [u8; 6] {
    MacAddr::derived(PortId::new(network.uuid())).octets()
}

/// The host's side of a tap: the guest's address with `fe` in front, which is higher than any other, so that a foreign
/// uplink bridge never takes it as its own.
pub(crate) fn tap_mac(guest: MacAddr) -> [u8; 6] {
    let [_, rest @ ..] = guest.octets();
    let [a, b, c, d, e] = rest;
    [0xfe, a, b, c, d, e]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> Uuid {
        text.parse().unwrap()
    }

    #[test]
    fn a_mark_survives_its_alias_and_nothing_else_is_one() {
        let names = Names::new(HostId::new(id("11111111-2222-4333-8444-555555555555")), "bcd");
        let mark = names.port_mark(PortId::new(id("aaaaaaaa-bbbb-4ccc-8ddd-000000000001")));
        assert_eq!(LinkMark::parse(&mark.alias()), Some(mark));
        for text in [
            "",
            "bcd-node",
            "bcd-node:x",
            "my tap",
            &format!("{}:more", mark.alias()),
            &mark.alias().replace("port", "vm"),
            &mark.alias().replace("bcd-node", "other"),
        ] {
            assert_eq!(LinkMark::parse(text), None, "{text}");
        }
        assert!(mark.alias().len() < 256);
    }

    #[test]
    fn the_hosts_side_of_a_tap_is_unicast_and_higher_than_the_guests() {
        let mac: MacAddr = "52:54:00:00:00:01".parse().unwrap();
        assert_eq!(tap_mac(mac), [0xfe, 0x54, 0, 0, 0, 1]);
    }
}
