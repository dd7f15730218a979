//! The chains that all networks share.

use std::{collections::BTreeMap, sync::Arc};

use drivers_api::NetworkType;
use serde_json::Value;

use super::{
    detect::Mode,
    expr::{
        accept, any_of, began_in, counter, ct_state, drop, family, is, is_not, jump,
        keep_mark_bits, masquerade, meta, notrack, payload, prefix, set_mark_bit, set_zone, vmap,
    },
    ruleset::{Chain, ESTABLISHED, Family, INVALID, Part, Rule, has_own_bridge, mark_chain, rule},
};
use crate::{names::Names, records::NetworkRecord};

/// A network's device as the rules name it.
struct Net<'a> {
    device: String,
    zone: u16,
    record: &'a NetworkRecord,
}

impl Net<'_> {
    const fn is_own(&self) -> bool {
        has_own_bridge(self.record.spec.network_type)
    }

    fn is_nat(&self) -> bool {
        self.record.spec.network_type == NetworkType::Nat
    }
}

fn devices<'a>(nets: impl IntoIterator<Item = &'a Net<'a>>) -> Value {
    let mut names: Vec<&str> = nets.into_iter().map(|net| net.device.as_str()).collect();
    // Two networks may share an uplink bridge.
    names.dedup();
    any_of(names)
}

/// The bridge of a network. The prefix of names was checked when the driver was opened, so it has one.
pub(super) fn device_of(names: &Names, record: &NetworkRecord) -> Option<String> {
    match &record.spec.uplink {
        Some(uplink) => Some(uplink.as_str().to_owned()),
        None => names.bridge(record.spec.uuid).ok().map(|name| name.as_str().to_owned()),
    }
}

pub(super) fn chains(
    names: &Names,
    mode: Mode,
    networks: &[Arc<NetworkRecord>],
    zones: &BTreeMap<String, u16>,
) -> Vec<Chain> {
    let mut nets: Vec<Net<'_>> = networks
        .iter()
        .filter_map(|record| {
            let device = device_of(names, record)?;
            let zone = *zones.get(&device)?;
            Some(Net { device, zone, record })
        })
        .collect();
    nets.sort_by(|a, b| a.device.cmp(&b.device));
    let mark = mark_chain(names);
    let mut chains = vec![
        Chain::new(Part::Base, Family::Bridge, mark.clone(), Vec::new()),
        Chain::new(Part::Base, Family::Inet, mark, Vec::new()),
    ];
    chains.extend(bridge_chains(&names.tap_prefix(), mode, &nets));
    let own: Vec<&Net<'_>> = nets.iter().filter(|net| net.is_own()).collect();
    chains.extend(inet_chains(mode, &nets, &own));
    chains
}

fn bridge_chains(tap_prefix: &str, mode: Mode, nets: &[Net<'_>]) -> Vec<Chain> {
    let any_tap = format!("{tap_prefix}*");
    let chain = |name: &str, rules| Chain::new(Part::Base, Family::Bridge, name, rules);
    let mut spoof = Vec::new();
    if mode == Mode::Mark {
        // A guest's frames come without a mark; what another bridge port had set is not ours to trust.
        spoof.push(rule("clear", [keep_mark_bits(!(ESTABLISHED | INVALID))]));
    }
    spoof.push(rule("ports", [vmap(&meta("iifname"), "spoof")]));
    spoof.push(rule("no rules", [is(meta("iifname"), any_tap.as_str()), counter(), drop()]));
    let ingress = vec![
        rule("ports", [vmap(&meta("oifname"), "ingress")]),
        rule("no rules", [is(meta("oifname"), any_tap.as_str()), counter(), drop()]),
    ];
    let mut chains = vec![
        chain(
            "control-in",
            control(
                &[
                    "nd-neighbor-solicit",
                    "nd-neighbor-advert",
                    "nd-router-advert",
                    "mld-listener-query",
                    "mld-listener-report",
                    "mld2-listener-report",
                ],
                (67, 68),
                (547, 546),
            ),
        ),
        chain(
            "control-out",
            control(
                &[
                    "nd-neighbor-solicit",
                    "nd-neighbor-advert",
                    "nd-router-solicit",
                    "mld-listener-report",
                    "mld-listener-done",
                    "mld2-listener-report",
                ],
                (68, 67),
                (546, 547),
            ),
        ),
        chain("pre-spoof", spoof).hooked("filter", "prerouting", -250),
        // After br_netfilter (priority 0) has run the inet hooks, and with them connection tracking.
        chain("pre-egress", vec![rule("ports", [vmap(&meta("iifname"), "egress")])]).hooked(
            "filter",
            "prerouting",
            10,
        ),
        chain("post-ingress", ingress).hooked("filter", "postrouting", 10),
    ];
    if mode == Mode::Native {
        chains.push(chain("pre-zone", zones("ibrname", nets)).hooked("filter", "prerouting", -300));
    }
    chains
}

/// The control traffic without which no address works: ARP, neighbour discovery, DHCP.
fn control(icmp6: &[&str], dhcp4: (u16, u16), dhcp6: (u16, u16)) -> Vec<Rule> {
    let udp = |note, (from, to): (u16, u16)| {
        rule(note, [is(payload("udp", "sport"), from), is(payload("udp", "dport"), to), accept()])
    };
    vec![
        rule("arp", [is(payload("ether", "type"), "arp"), accept()]),
        rule("nd", [is(payload("icmpv6", "type"), any_of(icmp6.iter().copied())), accept()]),
        udp("dhcp", dhcp4),
        udp("dhcp6", dhcp6),
    ]
}

fn inet_chains(mode: Mode, nets: &[Net<'_>], own: &[&Net<'_>]) -> Vec<Chain> {
    let chain = |name: &str, rules| Chain::new(Part::Base, Family::Inet, name, rules);
    let mut chains = Vec::new();
    if mode == Mode::Mark {
        chains.push(chain("pre-zone", zones("iifname", nets)).hooked("filter", "prerouting", -300));
        let mut pre = known("iifname", nets);
        let from = is(meta("iifname"), devices(nets));
        pre.push(rule("invalid", [from, ct_state(&["invalid"]), set_mark_bit(INVALID)]));
        chains.push(chain("pre-mark", pre).hooked("filter", "prerouting", -150));
        // Packets that the host sends or routes to a network do not pass its bridge's prerouting: they are marked where
        // their way is known, and no other packet of the host is touched.
        for (name, hook) in [("out-mark", "output"), ("forward-mark", "forward")] {
            chains.push(chain(name, known("oifname", nets)).hooked("filter", hook, -150));
        }
    }
    if own.is_empty() {
        return chains;
    }
    chains.push(chain("forward", forward(own)).hooked("filter", "forward", 0));
    chains.push(
        chain(
            "input",
            vec![rule("guests", [is(meta("iifname"), own_devices(own)), jump("guest-to-host")])],
        )
        .hooked("filter", "input", 0),
    );
    chains.push(chain("guest-to-host", guest_to_host()));
    chains.push(chain("snat", snat(own)).hooked("nat", "postrouting", 100));
    chains
}

/// Puts what begins on each network's device into its zone.
///
/// DHCP requests stay untracked: all are from 0.0.0.0:68 to 255.255.255.255:67, and a zone of the original direction leaves
/// their reply tuples in one zone, so that a second network's would clash with the first's and be lost for 30 seconds.
fn zones(key: &str, nets: &[Net<'_>]) -> Vec<Rule> {
    let requests = [
        is(meta(key), devices(nets)),
        is(payload("udp", "sport"), 68),
        is(payload("udp", "dport"), 67),
        notrack(),
        accept(),
    ];
    let zone =
        |net: &Net<'_>| rule("zone", [is(meta(key), net.device.as_str()), set_zone(net.zone)]);
    let untracked = (!nets.is_empty()).then(|| rule("dhcp", requests));
    untracked.into_iter().chain(one_a_device(nets).map(zone)).collect()
}

/// Marks what belongs to a connection of each network's device.
fn known(key: &str, nets: &[Net<'_>]) -> Vec<Rule> {
    let mark = |net: &Net<'_>| {
        rule(
            "known",
            [
                is(meta(key), net.device.as_str()),
                ct_state(&["established", "related"]),
                began_in(zones_of(net.is_own(), net.zone)),
                set_mark_bit(ESTABLISHED),
            ],
        )
    };
    one_a_device(nets).map(mark).collect()
}

fn one_a_device<'a, 'b>(nets: &'a [Net<'b>]) -> impl Iterator<Item = &'a Net<'b>> {
    let is_first = |at: usize, net: &Net<'b>| {
        at.checked_sub(1)
            .and_then(|before| nets.get(before))
            .is_none_or(|before| before.device != net.device)
    };
    nets.iter().enumerate().filter(move |(at, net)| is_first(*at, net)).map(|(_, net)| net)
}

/// Where a connection of a network begins: in its own zone, or on the host, where that is on the network.
pub(super) fn zones_of(is_own: bool, zone: u16) -> impl Iterator<Item = u16> {
    is_own.then_some(0).into_iter().chain([zone])
}

fn own_devices(own: &[&Net<'_>]) -> Value {
    devices(own.iter().copied())
}

/// What crosses the host: within one network everything (`br_netfilter` shows bridged frames here), from a nat network to
/// the outside, and replies. Never from one network to another, and never unasked from outside.
fn forward(own: &[&Net<'_>]) -> Vec<Rule> {
    let mut rules: Vec<Rule> = own
        .iter()
        .map(|net| {
            let device = net.device.as_str();
            rule("within", [is(meta("iifname"), device), is(meta("oifname"), device), accept()])
        })
        .collect();
    rules.push(rule("replies", [ct_state(&["established", "related"]), accept()]));
    for net in own.iter().filter(|net| net.is_nat()) {
        let out = is_not(meta("oifname"), own_devices(own));
        rules.push(rule("nat", [is(meta("iifname"), net.device.as_str()), out, accept()]));
    }
    rules.push(rule("isolated", [is(meta("iifname"), own_devices(own)), counter(), drop()]));
    rules.push(rule("inbound", [is(meta("oifname"), own_devices(own)), counter(), drop()]));
    rules
}

/// What guests may have of the host: replies, pings, addresses and names.
fn guest_to_host() -> Vec<Rule> {
    let port = |note, protocol: &str, ports: Value| {
        rule(note, [is(payload(protocol, "dport"), ports), accept()])
    };
    vec![
        rule("replies", [ct_state(&["established", "related"]), accept()]),
        rule("icmp", [is(meta("l4proto"), "icmp"), accept()]),
        rule("icmpv6", [is(meta("l4proto"), "ipv6-icmp"), accept()]),
        port("dhcp and dns", "udp", any_of([53, 67, 547])),
        port("dns", "tcp", 53.into()),
        rule("other services", [counter(), drop()]),
    ]
}

fn snat(own: &[&Net<'_>]) -> Vec<Rule> {
    let mut rules = Vec::new();
    for net in own.iter().filter(|net| net.is_nat()) {
        for range in net.record.spec.ranges() {
            let protocol = family(range.address());
            rules.push(rule(
                "nat",
                [
                    is(payload(protocol, "saddr"), prefix(range)),
                    is_not(payload(protocol, "daddr"), prefix(range)),
                    // br_netfilter shows bridged frames here too.
                    is_not(meta("oifname"), own_devices(own)),
                    masquerade(),
                ],
            ));
        }
    }
    rules
}
