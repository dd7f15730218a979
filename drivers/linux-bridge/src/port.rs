//! Wires and unwires a port.

use std::sync::Arc;

use drivers_api::{
    Change, Error, ErrorKind, IfName, MtuBytes, NetworkId, NicHandle, Outcome, PortId, PortSpec,
    Result,
};
use host::{bound, fault};

use crate::{
    dnsmasq::{self, Put},
    driver::Inner,
    error::During,
    names::tap_mac,
    netlink::{Link, LinkChange, LinkKind, tap::Tap},
    network::check_owner,
    nft::{Wish, has_own_bridge},
    plan::{Owner, TapStep, TapWanted, owner_of, tap_steps},
    records::{Entry, NetworkRecord, PortRecord, Records},
    serve::serve_anew,
    sysctl, validate,
};

pub(crate) fn object(port: PortId) -> String {
    format!("port {port}")
}

/// Brings the port to its spec.
pub(crate) async fn attach(inner: &Inner, spec: PortSpec) -> Result<Outcome<NicHandle>> {
    let id = spec.uuid;
    let object = object(id);
    let (record, network, admitted) = admit(inner, spec).await?;
    fault::point("linux-bridge.port.recorded")?;
    let mut change = admitted;
    // Rules first: until they are there, the tap's name is dropped both ways.
    let ruled = inner.firewall.sync(Wish::Port(id)).await.during("write the rules of", &object)?;
    change = change.and(Change::changed_if(ruled));
    fault::point("linux-bridge.port.ruled")?;
    let told = put_dhcp(inner, &record, &network).await?;
    change = change.and(Change::changed_if(told));
    fault::point("linux-bridge.port.dhcp")?;
    let bridge = bridge_of(inner, &network, &object).await?;
    let wanted = tap_wanted(inner, &record, &bridge);
    let plugged = ensure_tap(inner, id, &wanted).await?;
    change = change.and(Change::changed_if(plugged));
    Ok(Outcome::new(change, handle(&record.spec, &network, inner.names.tap(id)?, &bridge)))
}

/// Checks the spec against everything else and writes it down.
async fn admit(
    inner: &Inner,
    spec: PortSpec,
) -> Result<(Arc<PortRecord>, Arc<NetworkRecord>, Change)> {
    let id = spec.uuid;
    let admission = inner.shared.admission.lock().await;
    let records = inner.shared.with_admitted(inner.records("check").await?);
    let network =
        Arc::clone(records.network(spec.network_uuid).ok_or_else(|| no_network(&spec, &records))?);
    if inner.shared.is_leaving(spec.network_uuid) {
        return Err(no_network(&spec, &Records::default()));
    }
    spec.validate(&network.spec)?;
    validate::against_ports(&spec, &records)?;
    let old = match records.ports.get(&id) {
        None => None,
        Some(Entry::Good(old)) if old.node == inner.names.node => Some(Arc::clone(old)),
        Some(Entry::Good(old)) => {
            return Err(conflict(id, format!("it belongs to the agent of node {}", old.node)));
        }
        Some(Entry::Bad(why)) => {
            return Err(conflict(id, format!("its record cannot be used: {why}")).with_remedy(
                "repair the file, run the agent that wrote it, or detach the port first",
            ));
        }
    };
    if let Some(old) = old.as_ref().filter(|old| old.spec == spec) {
        return Ok((Arc::clone(old), network, Change::Unchanged));
    }
    let record = Arc::new(PortRecord::new(inner.names.node, spec));
    let admitted = inner.shared.admit(&record);
    drop(admission);
    let seen_as = old.as_ref().map_or(&record.spec, |old| &old.spec);
    let link = own_link(inner, id, seen_as).await?;
    if let Some(old) = old.as_ref().filter(|old| old.spec.network_uuid != record.spec.network_uuid)
    {
        remove_dhcp(inner, id, Some(old.spec.network_uuid)).await?;
    }
    let kept = Arc::clone(&record);
    inner.store("record", id.uuid(), move |store| store.put_port(&kept)).await?;
    drop(admitted);
    let change = if old.is_some() || link.is_some() { Change::Changed } else { Change::Created };
    Ok((record, network, change))
}

fn no_network(spec: &PortSpec, records: &Records) -> Error {
    let network = validate::object(spec.network_uuid);
    match records.networks.get(&spec.network_uuid) {
        Some(Entry::Bad(why)) => Error::new(
            ErrorKind::Unavailable,
            "attach to",
            network,
            format!("its record cannot be used: {why}"),
        ),
        Some(Entry::Good(_)) | None => Error::new(
            ErrorKind::NotFound,
            "attach to",
            &network,
            format!("{network} is not on this host"),
        )
        .with_remedy("make the network first"),
    }
}

fn conflict(port: PortId, reason: String) -> Error {
    Error::new(ErrorKind::Conflict, "attach", object(port), reason)
}

/// The port's tap, if it is there; a link of its name that is not ours is a conflict.
async fn own_link(inner: &Inner, port: PortId, spec: &PortSpec) -> Result<Option<Link>> {
    let name = inner.names.tap(port)?;
    let Some(link) = inner.netlink.link(name.as_str()).await.during("look at", object(port))?
    else {
        return Ok(None);
    };
    check_owner(&link, inner.names.port_mark(port), Some(tap_mac(spec.mac)), &object(port))?;
    match link.kind {
        LinkKind::Tun { .. } => Ok(Some(link)),
        LinkKind::Bridge { .. } | LinkKind::Other => {
            Err(conflict(port, format!("the link {} has its mark, but is no tap", link.name)))
        }
    }
}

/// The name of the bridge that a network's ports are in.
pub(crate) fn bridge_name(inner: &Inner, network: &NetworkRecord) -> Result<IfName> {
    match &network.spec.uplink {
        Some(uplink) => Ok(uplink.clone()),
        None => inner.names.bridge(network.spec.uuid),
    }
}

async fn bridge_of(inner: &Inner, network: &NetworkRecord, object: &str) -> Result<Link> {
    let name = bridge_name(inner, network)?;
    inner.netlink.link(name.as_str()).await.during("look at", object)?.ok_or_else(|| {
        Error::new(
            ErrorKind::Unavailable,
            "attach",
            object,
            format!("the bridge {name} of {} is missing", validate::object(network.spec.uuid)),
        )
        .with_remedy("make the network again")
    })
}

/// The tap as the record wants it.
pub(crate) fn tap_wanted(inner: &Inner, record: &PortRecord, bridge: &Link) -> TapWanted {
    TapWanted {
        mark: inner.names.port_mark(record.spec.uuid),
        mac: tap_mac(record.spec.mac),
        // The bridge's own: a port with less would lower the MTU of an uplink bridge.
        mtu: bridge.mtu,
        owner: record.spec.owner_uid,
        bridge: bridge.index,
    }
}

/// What the hypervisor is told.
pub(crate) fn handle(
    spec: &PortSpec,
    network: &NetworkRecord,
    tap: IfName,
    bridge: &Link,
) -> NicHandle {
    let mut nic = NicHandle::new(spec.name.clone(), spec.uuid, tap, spec.mac);
    let of_uplink =
        || network.spec.uplink.as_ref().and_then(|_| MtuBytes::new(bridge.mtu.into()).ok());
    nic.mtu_bytes = network.spec.mtu_bytes.or_else(of_uplink).filter(|mtu| mtu.get() != 1500);
    nic
}

async fn ensure_tap(inner: &Inner, port: PortId, wanted: &TapWanted) -> Result<bool> {
    let object = object(port);
    let name = inner.names.tap(port)?.as_str().to_owned();
    let mut link = inner.netlink.link(&name).await.during("look at", &object)?;
    let steps = tap_steps(wanted, link.as_ref());
    for step in &steps {
        if *step == TapStep::Make {
            make_tap(inner, &name, wanted, &object).await?;
            link = inner.netlink.link(&name).await.during("look at", &object)?;
            continue;
        }
        let Some(there) = &link else {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "attach",
                &object,
                "the tap was removed while it was made",
            ));
        };
        let change = match step {
            TapStep::Make => continue,
            TapStep::Owner => {
                set_owner(&name, wanted.owner, &object).await?;
                continue;
            }
            TapStep::Dress => dress(wanted),
            TapStep::Join => {
                LinkChange { controller: Some(wanted.bridge), up: true, ..LinkChange::default() }
            }
        };
        inner.netlink.change(there.index, &name, change).await.during("wire", &object)?;
    }
    Ok(!steps.is_empty())
}

fn dress(wanted: &TapWanted) -> LinkChange {
    LinkChange {
        alias: Some(wanted.mark.alias()),
        mac: Some(wanted.mac),
        mtu: Some(wanted.mtu),
        ..LinkChange::default()
    }
}

/// Makes a tap, marks it, and only then keeps it: a crash before leaves no tap.
async fn make_tap(inner: &Inner, name: &str, wanted: &TapWanted, object: &str) -> Result<()> {
    let (owner, device) = (wanted.owner, name.to_owned());
    let what = object.to_owned();
    let tap = bound::blocking("make the tap of", move || {
        let tap = Tap::make(&device).during("make the tap of", &what)?;
        if let Some(uid) = owner {
            tap.set_owner(uid).during("make the tap of", &what)?;
        }
        // The host has no business with its side: no IPv6 address, and none of the packets that come with one.
        sysctl::set_own(&format!("net/ipv6/conf/{device}/disable_ipv6"), "1")
            .during("make the tap of", &what)?;
        Ok(tap)
    })
    .await?;
    fault::point("linux-bridge.tap.made")?;
    let link = inner.netlink.link(name).await.during("look at", object)?.ok_or_else(|| {
        Error::new(
            ErrorKind::Unavailable,
            "attach",
            object,
            "the tap was removed while it was made",
        )
    })?;
    inner
        .netlink
        .change(link.index, name, dress(wanted))
        .await
        .during("mark the tap of", object)?;
    fault::point("linux-bridge.tap.marked")?;
    let what = object.to_owned();
    bound::blocking("keep the tap of", move || tap.persist().during("keep the tap of", what))
        .await?;
    fault::point("linux-bridge.tap.kept")
}

async fn set_owner(name: &str, owner: Option<u32>, object: &str) -> Result<()> {
    let Some(uid) = owner else { return Ok(()) };
    let (name, what) = (name.to_owned(), object.to_owned());
    bound::blocking("give to its user", move || {
        Tap::attach(&name).and_then(|tap| tap.set_owner(uid)).during("give to its user", what)
    })
    .await
}

/// Writes the port's DHCP entry; answers whether it was another.
async fn put_dhcp(inner: &Inner, record: &PortRecord, network: &NetworkRecord) -> Result<bool> {
    let (id, of) = (record.spec.uuid, network.spec.uuid);
    if !has_own_bridge(network.spec.network_type) {
        return Ok(false);
    }
    let object = object(id);
    let Some(line) = dnsmasq::host_line(&record.spec) else {
        return inner
            .dhcp("tell DHCP of", &object, move |dnsmasq| dnsmasq.remove_host(of, id))
            .await;
    };
    let put = inner.dhcp("tell DHCP of", &object, move |dnsmasq| dnsmasq.put_host(of, id, &line));
    match put.await? {
        Put::Same => Ok(false),
        Put::Written => Ok(true),
        Put::Leased => {
            // The network's lock: its own call may be starting the server now. That call takes no port's lock.
            let _network = inner.shared.locks.lock(of.uuid()).await;
            let addresses = record.spec.addresses.clone();
            serve_anew(inner, network, addresses).await?;
            Ok(true)
        }
        Put::NoServer => {
            let reason = format!("the DHCP of {} is missing", validate::object(of));
            Err(Error::new(ErrorKind::Unavailable, "attach", &object, reason)
                .with_remedy("make the network again"))
        }
    }
}

/// Removes the port's DHCP entry, from all networks when its own is not known.
async fn remove_dhcp(inner: &Inner, port: PortId, network: Option<NetworkId>) -> Result<bool> {
    let networks = match network {
        Some(network) => vec![network],
        None => inner.records("look at").await?.networks.keys().copied().collect(),
    };
    let mut changed = false;
    for network in networks {
        changed |= inner
            .dhcp("tell DHCP of", &object(port), move |dnsmasq| dnsmasq.remove_host(network, port))
            .await?;
    }
    Ok(changed)
}

/// Removes the port.
pub(crate) async fn detach(inner: &Inner, port: PortId) -> Result<Change> {
    let object = object(port);
    let records = inner.records("look at").await?;
    let entry = records.ports.get(&port);
    let record = entry.and_then(Entry::good);
    if let Some(other) = record.filter(|record| record.node != inner.names.node) {
        return Err(Error::new(
            ErrorKind::Conflict,
            "detach",
            &object,
            format!("it belongs to the agent of node {}", other.node),
        ));
    }
    let mut changed = unplug(inner, port, record.map(|record| tap_mac(record.spec.mac))).await?;
    fault::point("linux-bridge.port.unplugged")?;
    if entry.is_none() && !changed {
        return Ok(Change::Unchanged);
    }
    changed |=
        inner.firewall.sync(Wish::NoPort(port)).await.during("remove the rules of", &object)?
            && entry.is_some();
    fault::point("linux-bridge.port.unruled")?;
    changed |= remove_dhcp(inner, port, record.map(|record| record.spec.network_uuid)).await?;
    fault::point("linux-bridge.port.undhcp")?;
    changed |= inner.store("forget", port.uuid(), move |store| store.remove_port(port)).await?;
    Ok(Change::changed_if(changed))
}

async fn unplug(inner: &Inner, port: PortId, mac: Option<[u8; 6]>) -> Result<bool> {
    let object = object(port);
    let name = inner.names.tap(port)?;
    let Some(link) = inner.netlink.link(name.as_str()).await.during("look at", &object)? else {
        return Ok(false);
    };
    let mark = inner.names.port_mark(port);
    match owner_of(&link, mark, mac) {
        Owner::Ours | Owner::Unmarked => {
            inner.netlink.delete(link.index, name.as_str()).await.during("detach", &object)
        }
        Owner::OtherNode(_) => check_owner(&link, mark, None, &object).map(|()| false),
        Owner::Foreign => {
            tracing::info!(link = name.as_str(), "a foreign link of this name is left alone");
            Ok(false)
        }
    }
}
