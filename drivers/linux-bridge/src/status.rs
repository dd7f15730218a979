//! What is there, and what of it is missing.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use drivers_api::{Mark, NetworkId, NetworkStatus, NetworkType, PortId, PortStatus, Result};
use host::bound;

use crate::{
    dnsmasq::{self, State},
    driver::Inner,
    error::During,
    forwarding::forwards,
    names::{Kind, LinkMark, bridge_mac, tap_mac},
    netlink::{Address, Link},
    network::{self, bridge_wanted, check_owner},
    nft::{ForeignDrop, Mode, Part, View, has_own_bridge},
    plan::{bridge_steps, tap_steps},
    port,
    records::{Entry, NetworkRecord, PortRecord, Records},
    serve::dhcp_plan,
    sysctl, validate,
};

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    All,
    Network(NetworkId),
    Port(PortId),
}

impl Scope {
    fn has_network(self, id: NetworkId) -> bool {
        self == Self::All || self == Self::Network(id)
    }

    fn has_port(self, id: PortId) -> bool {
        self == Self::All || self == Self::Port(id)
    }
}

/// The host at one moment, as far as it is asked for.
struct Seen {
    records: Arc<Records>,
    links: HashMap<String, Link>,
    addresses: Vec<Address>,
    view: Arc<View>,
    mode: Mode,
    /// Whether every bridge passes its frames to the inet hooks.
    calls_iptables: bool,
    /// What of the forwarding switches is missing for v4 and v6.
    switches: (Vec<String>, Vec<String>),
    /// How the DHCP servers are.
    servers: HashMap<NetworkId, State>,
    /// The ports whose DHCP entry is missing.
    unserved: HashSet<PortId>,
}

/// The links that are asked for: all in one dump, or the one object's and its bridge's.
async fn links(inner: &Inner, scope: Scope, records: &Records) -> Result<HashMap<String, Link>> {
    let names = match scope {
        Scope::All => {
            let links = inner.netlink.links().await.during("list", "links")?;
            return Ok(links.into_iter().map(|link| (link.name.clone(), link)).collect());
        }
        Scope::Network(id) => match records.network(id) {
            Some(record) => vec![port::bridge_name(inner, record)?],
            None => vec![inner.names.bridge(id)?],
        },
        Scope::Port(id) => {
            let network = records.port(id).and_then(|port| records.network(port.spec.network_uuid));
            let bridge = network.map(|network| port::bridge_name(inner, network)).transpose()?;
            bridge.into_iter().chain([inner.names.tap(id)?]).collect()
        }
    };
    let mut links = HashMap::new();
    for name in names {
        if let Some(link) = inner.netlink.link(name.as_str()).await.during("look at", &name)? {
            links.insert(link.name.clone(), link);
        }
    }
    Ok(links)
}

/// The state of DHCP as far as it is asked for.
async fn dhcp(
    inner: &Inner,
    scope: Scope,
    records: &Records,
    links: &HashMap<String, Link>,
) -> Result<(HashMap<NetworkId, State>, HashSet<PortId>)> {
    let mut plans = Vec::new();
    for record in records.good_networks() {
        if scope.has_network(record.spec.uuid) && has_own_bridge(record.spec.network_type) {
            let name = inner.names.bridge(record.spec.uuid)?;
            let index = links.get(name.as_str()).map_or(0, |link| link.index);
            plans.push((record.spec.uuid, dhcp_plan(inner, record, index)?));
        }
    }
    let mut lines = Vec::new();
    for port in records.good_ports().filter(|port| scope.has_port(port.spec.uuid)) {
        let network = records.network(port.spec.network_uuid);
        if network.is_some_and(|network| has_own_bridge(network.spec.network_type))
            && let Some(line) = dnsmasq::host_line(&port.spec)
        {
            lines.push((port.spec.network_uuid, port.spec.uuid, line));
        }
    }
    inner
        .dhcp("look at", "DHCP", move |dnsmasq| {
            let mut states = HashMap::new();
            for (network, plan) in &plans {
                states.insert(*network, dnsmasq.state(*network, plan)?);
            }
            let mut unserved = HashSet::new();
            for (network, port, line) in &lines {
                if !dnsmasq.has_host(*network, *port, line)? {
                    unserved.insert(*port);
                }
            }
            Ok((states, unserved))
        })
        .await
}

async fn look(inner: &Inner, scope: Scope, what: &'static str) -> Result<Seen> {
    let records = inner.records("list").await?;
    let links = links(inner, scope, &records).await?;
    let (servers, unserved) = dhcp(inner, scope, &records, &links).await?;
    let addresses = inner.netlink.addresses().await.during("list", what)?;
    let mode = inner.firewall.mode().await.during("list", what)?;
    let view = inner.firewall.view().await.during("list", what)?;
    let (calls_iptables, switches) = bound::blocking("list", || {
        let missing = |v4, v6| match sysctl::missing(v4, v6) {
            Ok(missing) => missing.iter().map(sysctl::Wanted::describe).collect(),
            Err(error) => vec![format!("the kernel's forwarding settings cannot be read: {error}")],
        };
        Ok((sysctl::bridges_call_iptables(), (missing(true, false), missing(false, true))))
    })
    .await?;
    Ok(Seen { records, links, addresses, view, mode, calls_iptables, switches, servers, unserved })
}

/// All networks, or one.
pub(crate) async fn networks(inner: &Inner, scope: Scope) -> Result<Vec<NetworkStatus>> {
    let seen = look(inner, scope, "networks").await?;
    let mut found = Vec::new();
    for (id, entry) in seen.records.networks.iter().filter(|(id, _)| scope.has_network(**id)) {
        found.push(match entry {
            Entry::Good(record) => network_status(inner, &seen, record)?,
            Entry::Bad(why) => {
                let mut status =
                    NetworkStatus::new(*id, Mark::new(inner.names.node, id.uuid()), None);
                status.healthy = false;
                status.messages.push(format!("the network's record cannot be used: {why}"));
                status
            }
        });
    }
    for mark in strays(&seen, Kind::Network) {
        let id = NetworkId::new(mark.object);
        if scope.has_network(id) && !seen.records.networks.contains_key(&id) {
            let mut status = NetworkStatus::new(id, Mark::new(mark.node, mark.object), None);
            status.healthy = false;
            status.device = inner.names.bridge(id).ok();
            status.messages.push(stray_text(inner, mark));
            found.push(status);
        }
    }
    Ok(found)
}

/// The marks of links of a kind.
fn strays(seen: &Seen, kind: Kind) -> impl Iterator<Item = LinkMark> + '_ {
    let marks = seen.links.values().filter_map(|link| LinkMark::parse(link.alias.as_deref()?));
    marks.filter(move |mark| mark.kind == kind)
}

fn stray_text(inner: &Inner, mark: LinkMark) -> String {
    if mark.node == inner.names.node {
        "there is a link with its mark, but no record of it".to_owned()
    } else {
        format!("it belongs to the agent of node {}", mark.node)
    }
}

/// One network.
pub(crate) async fn network(inner: &Inner, id: NetworkId) -> Result<Option<NetworkStatus>> {
    let found = networks(inner, Scope::Network(id)).await?.into_iter().next();
    let is_bridged = found
        .as_ref()
        .and_then(|status| status.spec.as_ref())
        .is_some_and(|spec| spec.network_type == NetworkType::Bridged);
    if found.as_ref().is_none_or(|status| status.mark.node == inner.names.node) && !is_bridged {
        // A foreign link of the network's name is the caller's to know.
        network::own_link(inner, id).await?;
    }
    Ok(found)
}

fn network_status(inner: &Inner, seen: &Seen, record: &NetworkRecord) -> Result<NetworkStatus> {
    let spec = &record.spec;
    let mark = Mark::new(record.node, spec.uuid.uuid());
    let mut status = NetworkStatus::new(spec.uuid, mark, Some(spec.clone()));
    let name = port::bridge_name(inner, record)?;
    let link = seen.links.get(name.as_str());
    let mut faults = Vec::new();
    if has_own_bridge(spec.network_type) {
        faults.extend(bridge_faults(inner, seen, record, link)?);
    } else if link.is_none() {
        faults.push(format!("the uplink bridge {name} is missing"));
    }
    if seen.view.broken.contains(&Part::Base) {
        faults.extend(seen.view.faults.iter().map(|fault| format!("firewall: {fault}")));
    }
    let (v4, v6) = forwards(spec);
    faults.extend(seen.switches.0.iter().filter(|_| v4).cloned());
    faults.extend(seen.switches.1.iter().filter(|_| v6).cloned());
    status.device = link.map(|_| name);
    status.healthy = faults.is_empty();
    status.messages = faults;
    status.messages.extend(foreign_messages(seen, record));
    Ok(status)
}

fn bridge_faults(
    inner: &Inner,
    seen: &Seen,
    record: &NetworkRecord,
    link: Option<&Link>,
) -> Result<Vec<String>> {
    let id = record.spec.uuid;
    let wanted = bridge_wanted(inner, record, seen.mode);
    if let Some(link) = link
        && let Err(error) =
            check_owner(link, wanted.mark, Some(bridge_mac(id)), &validate::object(id))
    {
        return Ok(vec![error.reason().to_owned()]);
    }
    let mut faults: Vec<String> =
        bridge_steps(&wanted, link, &seen.addresses).iter().map(ToString::to_string).collect();
    match seen.servers.get(&id) {
        Some(State::Runs) => {}
        Some(State::Outdated) => faults.push("dnsmasq runs with other settings".to_owned()),
        Some(State::Ended) | None => faults.push("dnsmasq does not run".to_owned()),
    }
    Ok(faults)
}

/// Whose firewall drops the network's traffic. It is not ours to change, so the network counts as healthy.
fn foreign_messages(seen: &Seen, record: &NetworkRecord) -> Vec<String> {
    let is_own = has_own_bridge(record.spec.network_type);
    let sees_bridged = seen.calls_iptables || (is_own && seen.mode == Mode::Mark);
    let is_routed = record.spec.network_type == NetworkType::Nat;
    seen.view
        .foreign_drops
        .iter()
        .filter_map(|chain| {
            let bridged = chain.family == "bridge" || sees_bridged;
            let what = match (bridged, is_routed && chain.family != "bridge") {
                (true, true) => "traffic between guests and to the outside",
                (true, false) => "traffic between guests",
                (false, true) => "traffic to the outside",
                (false, false) => return None,
            };
            Some(foreign_text(chain, what, seen.calls_iptables && chain.family != "bridge"))
        })
        .collect()
}

fn foreign_text(chain: &ForeignDrop, what: &str, by_sysctl: bool) -> String {
    let ForeignDrop { family, table, chain } = chain;
    let why = if by_sysctl {
        "; net.bridge.bridge-nf-call-iptables is 1, so bridged frames pass it too"
    } else {
        ""
    };
    format!(
        "the chain {chain} of table {family} {table} (hook forward, policy drop) is not ours and drops {what}, unless a rule there accepts it{why}"
    )
}

/// All ports, or one.
pub(crate) async fn ports(inner: &Inner, scope: Scope) -> Result<Vec<PortStatus>> {
    let seen = look(inner, scope, "ports").await?;
    let mut found = Vec::new();
    for (id, entry) in seen.records.ports.iter().filter(|(id, _)| scope.has_port(**id)) {
        found.push(match entry {
            Entry::Good(record) => port_status(inner, &seen, record)?,
            Entry::Bad(why) => {
                let text = format!("the port's record cannot be used: {why}");
                broken_port(*id, Mark::new(inner.names.node, id.uuid()), text)
            }
        });
    }
    for mark in strays(&seen, Kind::Port) {
        let id = PortId::new(mark.object);
        if scope.has_port(id) && !seen.records.ports.contains_key(&id) {
            found.push(broken_port(id, Mark::new(mark.node, mark.object), stray_text(inner, mark)));
        }
    }
    Ok(found)
}

fn broken_port(id: PortId, mark: Mark, message: String) -> PortStatus {
    let mut status = PortStatus::new(id, mark, None, None);
    status.healthy = false;
    status.messages.push(message);
    status
}

/// One port.
pub(crate) async fn port(inner: &Inner, id: PortId) -> Result<Option<PortStatus>> {
    let found = ports(inner, Scope::Port(id)).await?.into_iter().next();
    if found.as_ref().is_none_or(|status| status.mark.node == inner.names.node) {
        let name = inner.names.tap(id)?;
        let spec = found.as_ref().and_then(|status| status.spec.as_ref());
        if let Some(link) =
            inner.netlink.link(name.as_str()).await.during("look at", port::object(id))?
        {
            let mac = spec.map(|spec| tap_mac(spec.mac));
            check_owner(&link, inner.names.port_mark(id), mac, &port::object(id))?;
        }
    }
    Ok(found)
}

fn port_status(inner: &Inner, seen: &Seen, record: &PortRecord) -> Result<PortStatus> {
    let spec = &record.spec;
    let id = spec.uuid;
    let tap = inner.names.tap(id)?;
    let mark = Mark::new(record.node, id.uuid());
    let mut status = PortStatus::new(id, mark, Some(spec.clone()), None);
    let mut faults = Vec::new();
    if seen.view.broken.contains(&Part::Port(id)) || seen.view.broken.contains(&Part::Base) {
        faults.push("the port's firewall rules are not as written".to_owned());
    }
    match seen.records.network(spec.network_uuid) {
        None => faults.push(format!("{} is not on this host", validate::object(spec.network_uuid))),
        Some(network) => {
            if seen.unserved.contains(&id) {
                faults.push("the port's DHCP entry is missing".to_owned());
            }
            let name = port::bridge_name(inner, network)?;
            match seen.links.get(name.as_str()) {
                None => faults.push(format!("the bridge {name} is missing")),
                Some(bridge) => {
                    let link = seen.links.get(tap.as_str());
                    faults.extend(tap_faults(inner, record, bridge, link));
                    status.nic = link.map(|_| port::handle(spec, network, tap, bridge));
                }
            }
        }
    }
    status.healthy = faults.is_empty();
    status.messages = faults;
    Ok(status)
}

fn tap_faults(
    inner: &Inner,
    record: &PortRecord,
    bridge: &Link,
    link: Option<&Link>,
) -> Vec<String> {
    let wanted = port::tap_wanted(inner, record, bridge);
    let owned: Result<()> = link.map_or(Ok(()), |link| {
        check_owner(link, wanted.mark, Some(wanted.mac), &port::object(record.spec.uuid))
    });
    match owned {
        Err(error) => vec![error.reason().to_owned()],
        Ok(()) => tap_steps(&wanted, link).iter().map(ToString::to_string).collect(),
    }
}
