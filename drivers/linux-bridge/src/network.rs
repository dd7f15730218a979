//! Makes and removes the host's side of a network.

use std::{
    net::IpAddr,
    sync::{Arc, PoisonError},
};

use drivers_api::{Change, Error, ErrorKind, NetworkId, NetworkSpec, Result};
use host::{bound, fault};

use crate::{
    driver::Inner,
    error::During,
    forwarding::{restore_forwarding, switch_forwarding},
    names::{LinkMark, bridge_mac},
    netlink::{Link, LinkChange, LinkKind},
    nft::{Mode, Wish, has_own_bridge},
    plan::{BridgeStep, BridgeWanted, Owner, bridge_steps, owner_of},
    records::{Entry, NetworkRecord, Records},
    serve::{ensure_dhcp, helper},
    sysctl, validate,
};

/// The MTU of a bridge whose network names none.
const DEFAULT_MTU: u32 = 1500;

/// Brings the network to its spec.
pub(crate) async fn ensure(inner: &Inner, spec: NetworkSpec) -> Result<Change> {
    let (record, admitted) = admit(inner, spec).await?;
    fault::point("linux-bridge.network.recorded")?;
    let mut change = admitted;
    let id = record.spec.uuid;
    let object = validate::object(id);
    let ruled =
        inner.firewall.sync(Wish::Network(id)).await.during("write the rules of", &object)?;
    change = change.and(Change::changed_if(ruled));
    fault::point("linux-bridge.network.ruled")?;
    if has_own_bridge(record.spec.network_type) {
        let (index, made) = ensure_bridge(inner, &record).await?;
        change = change.and(Change::changed_if(made));
        let switched = switch_forwarding(inner, &record).await?;
        change = change.and(Change::changed_if(switched));
        fault::point("linux-bridge.network.switched")?;
        let served = ensure_dhcp(inner, &record, index).await?;
        change = change.and(Change::changed_if(served));
    }
    Ok(change)
}

/// Checks the spec against everything else and writes it down.
async fn admit(inner: &Inner, spec: NetworkSpec) -> Result<(Arc<NetworkRecord>, Change)> {
    let _admission = inner.shared.admission.lock().await;
    let records = inner.shared.with_admitted(inner.records("check").await?);
    let id = spec.uuid;
    let old = match records.networks.get(&id) {
        None => None,
        Some(Entry::Good(old)) => Some(Arc::clone(old)),
        Some(Entry::Bad(why)) => return Err(unreadable(id, why)),
    };
    if let Some(old) = &old {
        own_record(inner, old)?;
    }
    let link = if has_own_bridge(spec.network_type) {
        own_link(inner, id).await?
    } else {
        check_uplink(inner, &spec).await?;
        None
    };
    let is_new_range = old.as_ref().is_none_or(|old| !old.spec.ranges().eq(spec.ranges()));
    if is_new_range {
        validate::against_networks(&spec, &records)?;
        let routes = inner.netlink.routes().await.during("check", validate::object(id))?;
        validate::against_routes(&spec, &routes, link.as_ref().map(|link| link.index))?;
    }
    if let Some(old) = &old {
        if old.spec == spec {
            return Ok((Arc::clone(old), Change::Unchanged));
        }
        validate::change(old, &spec, &records)?;
        if validate::is_rebuilt(&old.spec, &spec) {
            take_apart(inner, id).await?;
        }
    }
    let zone = match &old {
        Some(old) => old.zone,
        None => free_zone(&records)?,
    };
    let record = NetworkRecord::new(inner.names.node, zone, spec);
    let kept = record.clone();
    inner.store("record", id.uuid(), move |store| store.put_network(&kept)).await?;
    let change = if old.is_some() || link.is_some() { Change::Changed } else { Change::Created };
    Ok((Arc::new(record), change))
}

fn unreadable(network: NetworkId, why: &str) -> Error {
    Error::new(
        ErrorKind::Conflict,
        "change",
        validate::object(network),
        format!("its record cannot be used: {why}"),
    )
    .with_remedy("repair the file, run the agent that wrote it, or remove the network first")
}

fn own_record(inner: &Inner, record: &NetworkRecord) -> Result<()> {
    if record.node == inner.names.node {
        return Ok(());
    }
    let object = validate::object(record.spec.uuid);
    Err(Error::new(
        ErrorKind::Conflict,
        "change",
        object,
        format!("it belongs to the agent of node {}", record.node),
    ))
}

/// The lowest zone that no network has.
fn free_zone(records: &Records) -> Result<u16> {
    let taken: std::collections::BTreeSet<u16> =
        records.good_networks().map(|record| record.zone).collect();
    // 13 bits: a zone is also the host part of a helper address.
    (1..0x2000).find(|zone| !taken.contains(zone)).ok_or_else(|| {
        Error::new(ErrorKind::Exhausted, "make", "network", "the host has 8191 networks already")
    })
}

/// The network's bridge, if it is there; a link of its name that is not ours is a conflict.
pub(crate) async fn own_link(inner: &Inner, network: NetworkId) -> Result<Option<Link>> {
    let name = inner.names.bridge(network)?;
    let object = validate::object(network);
    let Some(link) = inner.netlink.link(name.as_str()).await.during("look at", &object)? else {
        return Ok(None);
    };
    check_owner(&link, inner.names.network_mark(network), Some(bridge_mac(network)), &object)?;
    if matches!(link.kind, LinkKind::Bridge { .. }) {
        Ok(Some(link))
    } else {
        Err(taken(&link, &object, "it is no bridge"))
    }
}

fn taken(link: &Link, object: &str, why: &str) -> Error {
    Error::new(
        ErrorKind::Conflict,
        "use",
        object,
        format!("the name of its link, {}, is taken: {why}", link.name),
    )
    .with_remedy("rename or remove that link")
}

/// Refuses a link that is not ours.
pub(crate) fn check_owner(
    link: &Link,
    mark: LinkMark,
    mac: Option<[u8; 6]>,
    object: &str,
) -> Result<()> {
    match owner_of(link, mark, mac) {
        Owner::Ours | Owner::Unmarked => Ok(()),
        Owner::OtherNode(other) => {
            Err(taken(link, object, &format!("it belongs to the agent of node {}", other.node)))
        }
        Owner::Foreign => Err(taken(link, object, "it has not this agent's mark")),
    }
}

/// Refuses a bridged network whose uplink cannot serve it.
async fn check_uplink(inner: &Inner, spec: &NetworkSpec) -> Result<()> {
    let Some(uplink) = &spec.uplink else { return Ok(()) };
    let object = validate::object(spec.uuid);
    let Some(link) = inner.netlink.link(uplink.as_str()).await.during("look at", &object)? else {
        return Err(Error::new(
            ErrorKind::Unavailable,
            "make",
            &object,
            format!("the uplink bridge {uplink} is not there"),
        )
        .with_remedy("make the bridge of the host's uplink, or name another"));
    };
    let LinkKind::Bridge { nf_call, .. } = link.kind else {
        return Err(Error::invalid("uplink", format!("{uplink} is no bridge")));
    };
    if let Some(mtu) = spec.mtu_bytes.filter(|mtu| u32::from(mtu.get()) > link.mtu) {
        return Err(Error::invalid(
            "mtu_bytes",
            format!("{mtu} is more than {} of the uplink {uplink}", link.mtu),
        ));
    }
    let mode = inner.firewall.mode().await.during("check", &object)?;
    let calls = || bound::blocking("check", || Ok(sysctl::bridges_call_iptables()));
    let knows_connections = match mode {
        Mode::Native => true,
        Mode::Mark => nf_call || calls().await?,
        Mode::Stateless => false,
    };
    if knows_connections {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        "make",
        &object,
        format!("replies to guests on {uplink} cannot be told from unasked traffic: the kernel has no nf_conntrack_bridge, and the bridge's frames do not pass br_netfilter"),
    )
    .with_remedy("load nf_conntrack_bridge, or set net.bridge.bridge-nf-call-iptables and -ip6tables to 1"))
}

/// The bridge as the record wants it.
pub(crate) fn bridge_wanted(inner: &Inner, record: &NetworkRecord, mode: Mode) -> BridgeWanted {
    let spec = &record.spec;
    let mut addresses: Vec<(IpAddr, u8)> = Vec::new();
    for (range, gateway) in [(spec.cidr, spec.gateway), (spec.cidr6, spec.gateway6)] {
        if let (Some(range), Some(gateway)) = (range, gateway) {
            addresses.push((gateway, range.prefix_len()));
        }
    }
    if let Some(helper) = helper(record) {
        addresses.push((helper.into(), 32));
    }
    BridgeWanted {
        mark: inner.names.network_mark(spec.uuid),
        mac: bridge_mac(spec.uuid),
        mtu: spec.mtu_bytes.map_or(DEFAULT_MTU, |mtu| u32::from(mtu.get())),
        nf_call: mode == Mode::Mark,
        addresses,
    }
}

async fn ensure_bridge(inner: &Inner, record: &NetworkRecord) -> Result<(u32, bool)> {
    let id = record.spec.uuid;
    let object = validate::object(id);
    let mode = inner.firewall.mode().await.during("make", &object)?;
    let wanted = bridge_wanted(inner, record, mode);
    let mut link = own_link(inner, id).await?;
    let addresses = match link {
        Some(_) => inner.netlink.addresses().await.during("look at", &object)?,
        None => Vec::new(),
    };
    let steps = bridge_steps(&wanted, link.as_ref(), &addresses);
    for step in &steps {
        apply(inner, &wanted, &mut link, id, step).await?;
    }
    let index = link.map(|link| link.index).ok_or_else(|| {
        Error::new(ErrorKind::Internal, "make", &object, "a bridge without a link was planned")
    })?;
    Ok((index, !steps.is_empty()))
}

async fn apply(
    inner: &Inner,
    wanted: &BridgeWanted,
    link: &mut Option<Link>,
    id: NetworkId,
    step: &BridgeStep,
) -> Result<()> {
    let object = validate::object(id);
    let name = inner.names.bridge(id)?;
    let name = name.as_str();
    if *step == BridgeStep::Make {
        inner.netlink.add_bridge(name, wanted.mac, wanted.nf_call).await.during("make", &object)?;
        *link = inner.netlink.link(name).await.during("look at", &object)?;
        fault::point("linux-bridge.bridge.made")?;
        quieten(name).await?;
        return Ok(());
    }
    let Some(there) = link.as_ref() else {
        return Err(Error::new(
            ErrorKind::Unavailable,
            "make",
            &object,
            "the bridge was removed while it was made",
        ));
    };
    let change = |change: LinkChange| inner.netlink.change(there.index, name, change);
    match step {
        BridgeStep::Make => {}
        BridgeStep::Mark => {
            change(LinkChange { alias: Some(wanted.mark.alias()), ..LinkChange::default() })
                .await
                .during("mark", &object)?;
            fault::point("linux-bridge.bridge.marked")?;
        }
        BridgeStep::Mac => {
            change(LinkChange { mac: Some(wanted.mac), ..LinkChange::default() })
                .await
                .during("change", &object)?;
        }
        BridgeStep::Mtu => {
            // Only a real change of the MTU sticks; see `bridge_steps`. Never below 1280, where IPv6 would end.
            for mtu in [wanted.mtu + 1, wanted.mtu] {
                change(LinkChange { mtu: Some(mtu), ..LinkChange::default() })
                    .await
                    .during("change", &object)?;
            }
        }
        BridgeStep::NfCall => inner.netlink.set_nf_call(name).await.during("change", &object)?,
        BridgeStep::Up => {
            change(LinkChange { up: true, ..LinkChange::default() })
                .await
                .during("start", &object)?;
        }
        BridgeStep::Add(address, length) => {
            inner
                .netlink
                .add_address(there.index, name, (*address, *length))
                .await
                .during("address", &object)?;
            fault::point("linux-bridge.network.addressed")?;
        }
        BridgeStep::Remove(address) => {
            inner.netlink.remove_address(name, *address).await.during("address", &object)?;
        }
    }
    Ok(())
}

/// Has the host take no router advertisement of its own guests.
async fn quieten(bridge: &str) -> Result<()> {
    let name = format!("net/ipv6/conf/{bridge}/accept_ra");
    let object = bridge.to_owned();
    bound::blocking("set up", move || sysctl::set_own(&name, "0").during("set up", object)).await
}

/// Removes the network.
pub(crate) async fn destroy(inner: &Inner, network: NetworkId) -> Result<Change> {
    let object = validate::object(network);
    let records = inner.records("look at").await?;
    let entry = records.networks.get(&network);
    if let Some(Entry::Good(record)) = entry {
        own_record(inner, record)?;
    }
    {
        let _admission = inner.shared.admission.lock().await;
        let records = inner.shared.with_admitted(inner.records("look at").await?);
        refuse_ports(inner, network, &records).await?;
        if entry.is_some() {
            // From here on no port is admitted to it.
            let mut leaving = inner.shared.leaving.lock().unwrap_or_else(PoisonError::into_inner);
            leaving.networks.insert(network);
        }
    }
    let mut changed = take_apart(inner, network).await?;
    changed |= inner
        .firewall
        .sync(Wish::NoNetwork(network))
        .await
        .during("remove the rules of", &object)?
        && entry.is_some();
    fault::point("linux-bridge.network.unruled")?;
    changed |= restore_forwarding(inner, network).await?;
    fault::point("linux-bridge.network.unswitched")?;
    if entry.is_some() {
        changed |= inner
            .store("forget", network.uuid(), move |store| store.remove_network(network))
            .await?;
    }
    Ok(Change::changed_if(changed))
}

/// Refuses while ports are on the network: those of records, and taps of ours in its bridge that have none.
async fn refuse_ports(inner: &Inner, network: NetworkId, records: &Records) -> Result<()> {
    let mut names: Vec<String> =
        records.ports_of(network).map(|port| port.spec.uuid.to_string()).collect();
    if names.is_empty()
        && let Some(bridge) = inner
            .netlink
            .link(inner.names.bridge(network)?.as_str())
            .await
            .during("look at", validate::object(network))?
    {
        let links = inner.netlink.links().await.during("look at", validate::object(network))?;
        let taps = links.iter().filter(|link| link.controller == Some(bridge.index));
        let marks = taps.filter_map(|link| LinkMark::parse(link.alias.as_deref()?));
        names.extend(marks.map(|mark| mark.object.to_string()));
    }
    if names.is_empty() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Conflict,
        "remove",
        validate::object(network),
        format!("ports are on it: {}", names.join(", ")),
    )
    .with_remedy("detach the ports first"))
}

/// Removes DHCP and the bridge; answers whether there was something.
async fn take_apart(inner: &Inner, network: NetworkId) -> Result<bool> {
    let object = validate::object(network);
    let mut changed = inner.dnsmasq.remove(network).await.during("end the DHCP of", &object)?;
    fault::point("linux-bridge.network.undhcp")?;
    let name = inner.names.bridge(network)?;
    if let Some(link) = inner.netlink.link(name.as_str()).await.during("look at", &object)? {
        match owner_of(&link, inner.names.network_mark(network), Some(bridge_mac(network))) {
            Owner::Ours | Owner::Unmarked => {
                changed |= inner
                    .netlink
                    .delete(link.index, name.as_str())
                    .await
                    .during("remove", &object)?;
            }
            other @ Owner::OtherNode(_) => {
                tracing::debug!(?other, link = name.as_str(), "left alone");
                check_owner(&link, inner.names.network_mark(network), None, &object)?;
            }
            Owner::Foreign => {
                tracing::info!(link = name.as_str(), "a foreign link of this name is left alone");
            }
        }
    }
    fault::point("linux-bridge.network.unplugged")?;
    Ok(changed)
}
