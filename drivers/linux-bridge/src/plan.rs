//! What has to be done to a link, decided without touching the host.

use std::{fmt, net::IpAddr};

use crate::{
    names::LinkMark,
    netlink::{Address, Link, LinkKind},
};

/// Whose a link of one of our names is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// It has our mark.
    Ours,
    /// It has no alias, but the MAC address that only we give: a killed agent had not marked it yet, or somebody cleared
    /// the alias.
    Unmarked,
    /// It is another agent's.
    OtherNode(LinkMark),
    /// It is somebody else's.
    Foreign,
}

/// Whose the link is that has the name of the object of `mark`. `mac` is the address that we give it.
pub(crate) fn owner_of(link: &Link, mark: LinkMark, mac: Option<[u8; 6]>) -> Owner {
    match link.alias.as_deref() {
        Some(alias) if !alias.is_empty() => match LinkMark::parse(alias) {
            Some(found) if found == mark => Owner::Ours,
            Some(found) if found.node != mark.node => Owner::OtherNode(found),
            Some(_) | None => Owner::Foreign,
        },
        Some(_) | None if mac.is_some() && link.mac == mac => Owner::Unmarked,
        Some(_) | None => Owner::Foreign,
    }
}

/// A bridge as wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BridgeWanted {
    pub(crate) mark: LinkMark,
    pub(crate) mac: [u8; 6],
    pub(crate) mtu: u32,
    pub(crate) nf_call: bool,
    pub(crate) addresses: Vec<(IpAddr, u8)>,
}

/// One thing to do to a bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BridgeStep {
    Make,
    Mark,
    Mac,
    Mtu,
    NfCall,
    Up,
    Add(IpAddr, u8),
    Remove(Address),
}

impl fmt::Display for BridgeStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Make => write!(f, "the bridge is missing"),
            Self::Mark => write!(f, "the bridge's alias is missing"),
            Self::Mac => write!(f, "the bridge has another MAC address"),
            Self::Mtu => write!(f, "the bridge has another MTU"),
            Self::NfCall => write!(f, "the bridge does not show its frames to connection tracking"),
            Self::Up => write!(f, "the bridge is down"),
            Self::Add(address, length) => {
                write!(f, "the bridge lacks the address {address}/{length}")
            }
            Self::Remove(address) => {
                write!(
                    f,
                    "the bridge has the foreign address {}/{}",
                    address.address, address.prefix_len
                )
            }
        }
    }
}

/// The steps from the bridge that is there (`None`: none) to the one that is wanted.
pub(crate) fn bridge_steps(
    wanted: &BridgeWanted,
    link: Option<&Link>,
    addresses: &[Address],
) -> Vec<BridgeStep> {
    let mut steps = Vec::new();
    let Some(link) = link else {
        // The MTU is set also where it is the default: a bridge takes the least of its ports until it was changed once.
        steps.extend([BridgeStep::Make, BridgeStep::Mark, BridgeStep::Mtu, BridgeStep::Up]);
        steps.extend(
            wanted.addresses.iter().map(|(address, length)| BridgeStep::Add(*address, *length)),
        );
        return steps;
    };
    let mut add = |is_wrong: bool, step| {
        if is_wrong {
            steps.push(step);
        }
    };
    add(link.alias.as_deref() != Some(wanted.mark.alias().as_str()), BridgeStep::Mark);
    add(link.mac != Some(wanted.mac), BridgeStep::Mac);
    add(link.mtu != wanted.mtu, BridgeStep::Mtu);
    add(
        wanted.nf_call && !matches!(link.kind, LinkKind::Bridge { nf_call: true, .. }),
        BridgeStep::NfCall,
    );
    add(!link.up, BridgeStep::Up);
    let here = || addresses.iter().filter(|address| address.index == link.index);
    for address in here() {
        // The kernel's own link-local IPv6 address stays.
        let is_kernels = address.link_local && address.address.is_ipv6();
        let is_wanted = wanted.addresses.contains(&(address.address, address.prefix_len));
        add(!is_kernels && !is_wanted, BridgeStep::Remove(*address));
    }
    for (address, length) in &wanted.addresses {
        let is_there = here().any(|there| there.address == *address && there.prefix_len == *length);
        add(!is_there, BridgeStep::Add(*address, *length));
    }
    steps
}

/// A tap as wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TapWanted {
    pub(crate) mark: LinkMark,
    pub(crate) mac: [u8; 6],
    pub(crate) mtu: u32,
    pub(crate) owner: Option<u32>,
    /// The index of its bridge.
    pub(crate) bridge: u32,
}

/// One thing to do to a tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TapStep {
    Make,
    /// Alias, MAC address and MTU, in one request.
    Dress,
    Owner,
    /// Into its bridge, and up.
    Join,
}

impl fmt::Display for TapStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Make => "the tap is missing",
            Self::Dress => "the tap's alias, MAC address or MTU is another",
            Self::Owner => "the tap belongs to another user",
            Self::Join => "the tap is not in its bridge, or down",
        })
    }
}

/// The steps from the tap that is there (`None`: none) to the one that is wanted.
pub(crate) fn tap_steps(wanted: &TapWanted, link: Option<&Link>) -> Vec<TapStep> {
    // Making a tap dresses it and gives it its owner before it stays.
    let Some(link) = link else { return vec![TapStep::Make, TapStep::Join] };
    let mut steps = Vec::new();
    if link.alias.as_deref() != Some(wanted.mark.alias().as_str())
        || link.mac != Some(wanted.mac)
        || link.mtu != wanted.mtu
    {
        steps.push(TapStep::Dress);
    }
    if wanted.owner.is_some() && link.kind != (LinkKind::Tun { owner: wanted.owner }) {
        steps.push(TapStep::Owner);
    }
    if link.controller != Some(wanted.bridge) || !link.up {
        steps.push(TapStep::Join);
    }
    steps
}

#[cfg(test)]
mod tests {
    use drivers_api::{HostId, Uuid};

    use super::*;
    use crate::names::Kind;

    fn mark() -> LinkMark {
        let id: Uuid = "11111111-2222-4333-8444-555555555555".parse().unwrap();
        LinkMark { node: HostId::new(id), kind: Kind::Network, object: id }
    }

    fn wanted() -> BridgeWanted {
        let addresses = vec![("10.0.0.1".parse().unwrap(), 24)];
        BridgeWanted { mark: mark(), mac: [2; 6], mtu: 1500, nf_call: true, addresses }
    }

    fn link() -> Link {
        Link {
            index: 7,
            name: "b".to_owned(),
            alias: Some(mark().alias()),
            mac: Some([2; 6]),
            mtu: 1500,
            up: true,
            controller: None,
            kind: LinkKind::Bridge { nf_call: true, vlan_filtering: false },
        }
    }

    fn address(text: &str, link_local: bool) -> Address {
        Address { index: 7, address: text.parse().unwrap(), prefix_len: 24, link_local }
    }

    #[test]
    fn a_bridge_as_wanted_needs_nothing_and_keeps_the_kernels_own_address() {
        let addresses = [address("10.0.0.1", false), address("fe80::1", true)];
        assert_eq!(bridge_steps(&wanted(), Some(&link()), &addresses), []);
    }

    #[test]
    fn each_difference_of_a_bridge_is_one_step() {
        let addresses = [address("10.0.0.1", false)];
        let cases = [
            (Link { alias: None, ..link() }, BridgeStep::Mark),
            (Link { mac: None, ..link() }, BridgeStep::Mac),
            (Link { mtu: 1499, ..link() }, BridgeStep::Mtu),
            (Link { up: false, ..link() }, BridgeStep::Up),
            (
                Link { kind: LinkKind::Bridge { nf_call: false, vlan_filtering: false }, ..link() },
                BridgeStep::NfCall,
            ),
        ];
        for (link, step) in cases {
            assert_eq!(bridge_steps(&wanted(), Some(&link), &addresses), [step]);
        }
        let foreign = address("10.0.0.2", false);
        assert_eq!(
            bridge_steps(&wanted(), Some(&link()), &[foreign]),
            [BridgeStep::Remove(foreign), BridgeStep::Add("10.0.0.1".parse().unwrap(), 24)]
        );
    }

    #[test]
    fn a_link_is_ours_by_its_alias_or_by_the_address_that_only_we_give() {
        let other = LinkMark {
            node: HostId::new("99999999-2222-4333-8444-555555555555".parse().unwrap()),
            ..mark()
        };
        let another = LinkMark { object: other.node.uuid(), ..mark() };
        let of = |alias: Option<String>, mac| {
            owner_of(&Link { alias, mac, ..link() }, mark(), Some([2; 6]))
        };
        assert_eq!(of(Some(mark().alias()), None), Owner::Ours);
        assert_eq!(of(None, Some([2; 6])), Owner::Unmarked);
        assert_eq!(of(Some(String::new()), Some([2; 6])), Owner::Unmarked);
        assert_eq!(of(None, Some([3; 6])), Owner::Foreign);
        assert_eq!(of(None, None), Owner::Foreign);
        assert_eq!(of(Some("mine".to_owned()), Some([2; 6])), Owner::Foreign);
        assert_eq!(of(Some(another.alias()), Some([2; 6])), Owner::Foreign);
        assert_eq!(of(Some(other.alias()), Some([2; 6])), Owner::OtherNode(other));
        assert_eq!(
            owner_of(&Link { alias: None, mac: None, ..link() }, mark(), None),
            Owner::Foreign
        );
    }
}
