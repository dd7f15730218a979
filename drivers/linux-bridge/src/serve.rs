//! The DHCP server of a network, as its records want it.

use std::net::IpAddr;

use drivers_api::{PortId, Result};

use crate::{
    dnsmasq::{self, Plan, State},
    driver::Inner,
    error::During,
    netlink::helper_address,
    network::own_link,
    records::NetworkRecord,
    validate,
};

/// The address that the DHCP server of a v4 network without a gateway has.
pub(crate) fn helper(record: &NetworkRecord) -> Option<std::net::Ipv4Addr> {
    let has_v4 = record.spec.cidr.is_some_and(|range| !range.is_v6());
    (has_v4 && record.spec.gateway.is_none()).then(|| helper_address(record.zone))
}

/// What the network's dnsmasq is to do.
pub(crate) fn dhcp_plan(inner: &Inner, record: &NetworkRecord, index: u32) -> Result<Plan> {
    let device = inner.names.bridge(record.spec.uuid)?.as_str().to_owned();
    Ok(Plan { device, index, spec: record.spec.clone(), helper: helper(record) })
}

/// Has the server run with what is wanted; answers whether it was started.
pub(crate) async fn ensure_dhcp(inner: &Inner, record: &NetworkRecord, index: u32) -> Result<bool> {
    let id = record.spec.uuid;
    let object = validate::object(id);
    let plan = dhcp_plan(inner, record, index)?;
    let look = plan.clone();
    if inner.dhcp("serve", &object, move |dnsmasq| dnsmasq.state(id, &look)).await? == State::Runs {
        return Ok(false);
    }
    start_dhcp(inner, record, &plan, Vec::new()).await?;
    Ok(true)
}

async fn start_dhcp(
    inner: &Inner,
    record: &NetworkRecord,
    plan: &Plan,
    forget: Vec<IpAddr>,
) -> Result<()> {
    let id = record.spec.uuid;
    let records = inner.records("serve").await?;
    let hosts: Vec<(PortId, String)> = records
        .ports_of(id)
        .filter_map(|port| Some((port.spec.uuid, dnsmasq::host_line(&port.spec)?)))
        .collect();
    inner.dnsmasq.start(id, plan, hosts, forget).await.during("serve", validate::object(id))
}

/// Starts the network's DHCP server anew, without its leases of these addresses.
pub(crate) async fn serve_anew(
    inner: &Inner,
    record: &NetworkRecord,
    forget: Vec<IpAddr>,
) -> Result<()> {
    let link = own_link(inner, record.spec.uuid).await?;
    let plan = dhcp_plan(inner, record, link.map_or(0, |link| link.index))?;
    start_dhcp(inner, record, &plan, forget).await
}
