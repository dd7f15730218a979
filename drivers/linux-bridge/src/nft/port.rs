//! The chains of one port.
//!
//! Anti-spoof (`TAP.spoof` and what it goes to) holds for every port. `TAP.egress` and `TAP.ingress` hold the default
//! policy; the rules of security groups will stand in their place.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use drivers_api::{NetworkSpec, PortSpec};
use serde_json::{Value, json};

use super::{
    base::zones_of,
    detect::Mode,
    expr::{
        accept, any_of, began_in, counter, ct_state, drop, goto, hex, is, is_not, jump, mark_bit,
        payload, prefix, vmap_of,
    },
    ruleset::{Chain, ESTABLISHED, Family, INVALID, Part, Rule, has_own_bridge, rule},
};
use crate::netlink::link_local_of;

/// The chain of a port that an element of the verdict map of this name leads to.
pub(super) fn chain_name(tap: &str, map: &str) -> String {
    format!("{tap}.{map}")
}

/// The chains of a port whose network's connections begin in `zone`.
pub(super) fn chains(
    tap: &str,
    mode: Mode,
    port: &PortSpec,
    network: &NetworkSpec,
    zone: u16,
) -> Vec<Chain> {
    let zones = || zones_of(has_own_bridge(network.network_type), zone);
    let part = Part::Port(port.uuid);
    let chain = |what: &str, rules| Chain::new(part, Family::Bridge, chain_name(tap, what), rules);
    let mac = port.mac.to_string();
    // A port without addresses is one on a network that gives them itself: only its MAC address is known.
    let known = !port.addresses.is_empty();
    let v4 = port.addresses.iter().find_map(|address| match address {
        IpAddr::V4(v4) => Some(*v4),
        IpAddr::V6(_) => None,
    });
    let v6 = port.addresses.iter().find_map(|address| match address {
        IpAddr::V6(v6) => Some(*v6),
        IpAddr::V4(_) => None,
    });
    let ether_type = vmap_of(
        &payload("ether", "type"),
        vec![
            ("arp", goto(&chain_name(tap, "arp"))),
            ("ip", goto(&chain_name(tap, "ip4"))),
            ("ip6", goto(&chain_name(tap, "ip6"))),
        ],
    );
    vec![
        chain(
            "spoof",
            vec![
                rule("mac", [is_not(payload("ether", "saddr"), mac.as_str()), counter(), drop()]),
                rule("ether type", [ether_type]),
                rule("other ether type", [counter(), drop()]),
            ],
        ),
        chain("arp", arp(&mac, known, v4)),
        chain("ip4", ip4(known, v4)),
        chain("ip6", ip6(known, v6, link_local_of(port.mac.octets()))),
        chain("egress", egress(mode, zones())),
        chain("ingress", ingress(mode, network, zones())),
    ]
}

fn arp(mac: &str, known: bool, v4: Option<Ipv4Addr>) -> Vec<Rule> {
    let sender = payload("arp", "saddr ether");
    let mut rules = vec![rule("arp mac", [is_not(sender, mac), counter(), drop()])];
    if known {
        // 0.0.0.0: a probe for a duplicate (RFC 5227).
        let own = [Ipv4Addr::UNSPECIFIED].into_iter().chain(v4).map(|address| address.to_string());
        rules.push(rule("arp address", [is(payload("arp", "saddr ip"), any_of(own)), accept()]));
        rules.push(rule("other arp address", [counter(), drop()]));
    } else {
        rules.push(rule("arp", [accept()]));
    }
    rules
}

fn ip4(known: bool, v4: Option<Ipv4Addr>) -> Vec<Rule> {
    let mut rules = vec![rule("dhcp server", [is(payload("udp", "sport"), 67), counter(), drop()])];
    if !known {
        rules.push(rule("any address", [accept()]));
        return rules;
    }
    if let Some(own) = v4 {
        rules.push(rule("own address", [is(payload("ip", "saddr"), own.to_string()), accept()]));
    }
    rules.push(rule(
        "dhcp client",
        [
            is(payload("ip", "saddr"), "0.0.0.0"),
            is(payload("udp", "sport"), 68),
            is(payload("udp", "dport"), 67),
            accept(),
        ],
    ));
    rules.push(rule("other address", [counter(), drop()]));
    rules
}

fn ip6(known: bool, v6: Option<Ipv6Addr>, link_local: Ipv6Addr) -> Vec<Rule> {
    let icmp = || payload("icmpv6", "type");
    let mut rules = vec![
        rule(
            "router",
            [is(icmp(), any_of(["nd-router-advert", "nd-redirect"])), counter(), drop()],
        ),
        rule("dhcp6 server", [is(payload("udp", "sport"), 547), counter(), drop()]),
    ];
    if !known {
        rules.push(rule("any address", [accept()]));
        return rules;
    }
    let own = || [link_local].into_iter().chain(v6);
    // The target of a neighbour advertisement: bytes 8 to 23 of the ICMPv6 header (RFC 4861 section 4.4). nft 1.0.6 has no
    // name for it.
    let target = json!({ "payload": { "base": "th", "offset": 64, "len": 128 } });
    rules.push(rule(
        "neighbour",
        [
            is(icmp(), "nd-neighbor-advert"),
            is_not(target, any_of(own().map(hex))),
            counter(),
            drop(),
        ],
    ));
    let sources = any_of(own().map(|address| address.to_string()));
    rules.push(rule("own address", [is(payload("ip6", "saddr"), sources), accept()]));
    // The unspecified source: duplicate address detection and what comes before the first address.
    let early = any_of(["nd-neighbor-solicit", "nd-router-solicit", "mld2-listener-report"]);
    rules.push(rule(
        "no address yet",
        [is(payload("ip6", "saddr"), "::"), is(icmp(), early), accept()],
    ));
    rules.push(rule("other address", [counter(), drop()]));
    rules
}

/// The rules that know connections, where the kernel can tell.
fn stateful(mode: Mode, zones: impl Iterator<Item = u16>) -> Option<(Vec<Value>, Value)> {
    match mode {
        Mode::Native => Some((
            vec![ct_state(&["established", "related"]), began_in(zones)],
            ct_state(&["invalid"]),
        )),
        Mode::Mark => Some((vec![mark_bit(ESTABLISHED)], mark_bit(INVALID))),
        Mode::Stateless => None,
    }
}

fn egress(mode: Mode, zones: impl Iterator<Item = u16>) -> Vec<Rule> {
    let mut rules = vec![rule("control", [jump("control-out")])];
    if let Some((known, invalid)) = stateful(mode, zones) {
        rules.push(rule("known", known.into_iter().chain([accept()])));
        rules.push(rule("invalid", [invalid, drop()]));
    }
    rules.push(rule("default", [accept()]));
    rules
}

/// The default policy: replies, and what comes from the network itself; see `docs/decisions/0003-default-port-policy.md`.
fn ingress(mode: Mode, network: &NetworkSpec, zones: impl Iterator<Item = u16>) -> Vec<Rule> {
    let mut rules = vec![rule("control", [jump("control-in")])];
    let Some((known, invalid)) = stateful(mode, zones) else {
        // The inet table's forward chain, which always knows connections, keeps the outside away.
        rules.push(rule("stateless", [accept()]));
        return rules;
    };
    rules.push(rule("known", known.into_iter().chain([accept()])));
    rules.push(rule("invalid", [invalid, drop()]));
    for range in network.ranges() {
        let protocol = if range.is_v6() { "ip6" } else { "ip" };
        rules.push(rule("network", [is(payload(protocol, "saddr"), prefix(range)), accept()]));
    }
    if network.ranges().any(|range| range.is_v6()) {
        let link_local = json!({ "prefix": { "addr": "fe80::", "len": 10 } });
        rules.push(rule("link-local", [is(payload("ip6", "saddr"), link_local), accept()]));
    }
    rules.push(rule("default", [counter(), drop()]));
    rules
}
