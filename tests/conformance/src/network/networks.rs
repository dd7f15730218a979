//! A network's life: made, changed, removed; and each again.

use std::sync::Arc;

use drivers_api::{
    Change, Direction, ErrorKind, Network, NetworkSpec, NetworkType, Protocol, RulePeer,
    SecurityGroupId, SecurityGroupSpec, SecurityRule, Uuid,
};
use futures_util::future::join_all;

use super::Kit;
use crate::{
    kit::{Check, expect, failed, not_applicable, same},
    odd::ODD_NAMES,
};

pub(super) async fn ensure(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.network(0).await;
    expect(kit.get(&*driver, &spec).await?.is_none(), "get: the network is there before")?;
    let before = kit.bench.census().await;
    same("ensure_network", &kit.ensure(&*driver, &spec).await?, &Change::Created)?;
    kit.whole(&*driver, &spec).await?;
    let all = kit.run.ok("list", driver.list(&kit.run.cx())).await?;
    let listed = all.iter().filter(|network| network.uuid == spec.uuid).count();
    same("how often list has the network", &listed, &1)?;
    same("destroy_network", &kit.destroy(&*driver, &spec).await?, &Change::Changed)?;
    kit.gone(&*driver, &spec).await?;
    kit.unwritten(&before).await
}

pub(super) async fn ensure_again(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.made(&*driver, 0).await?;
    let before = kit.bench.census().await;
    for time in ["second", "third"] {
        let again = kit.ensure(&*driver, &spec).await?;
        same(format_args!("the {time} ensure_network"), &again, &Change::Unchanged)?;
    }
    kit.unwritten(&before).await
}

pub(super) async fn ensure_at_once(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.network(0).await;
    let calls = (0..kit.run.options.parallel).map(|_| kit.ensure(&*driver, &spec));
    let changes = join_all(calls).await.into_iter().collect::<Check<Vec<_>>>()?;
    expect(changes.iter().any(|change| change.wrote()), "no call says that it made the network")?;
    kit.whole(&*driver, &spec).await?;
    same("ensure_network afterwards", &kit.ensure(&*driver, &spec).await?, &Change::Unchanged)
}

pub(super) async fn ensure_changed(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.made(&*driver, 0).await?;
    let mut changed = spec.clone();
    let (Ok(name), Ok(server)) = ("renamed".parse(), "192.0.2.53".parse()) else {
        return failed("the kit's own values are invalid");
    };
    changed.name = name;
    changed.dns_servers = vec![server];
    same("ensure_network, changed", &kit.ensure(&*driver, &changed).await?, &Change::Changed)?;
    kit.whole(&*driver, &changed).await?;
    same("ensure_network again", &kit.ensure(&*driver, &changed).await?, &Change::Unchanged)
}

pub(super) async fn invalid(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.network(0).await;
    if spec.network_type == NetworkType::Bridged {
        return not_applicable("a bridged network has no range of its own");
    }
    let before = kit.bench.census().await;
    let Some(range) = spec.cidr else { return failed("the bench's network has no range") };
    let wrong = [
        ("without a range", None, spec.gateway),
        ("with the range's own address as gateway", spec.cidr, Some(range.address())),
        ("with a gateway outside", spec.cidr, "192.0.2.1".parse().ok()),
    ];
    for (what, cidr, gateway) in wrong {
        let mut spec = spec.clone();
        (spec.cidr, spec.gateway) = (cidr, gateway);
        let cx = kit.run.cx();
        let call = driver.ensure_network(&cx, &spec);
        let name = format!("ensure_network {what}");
        kit.run.fails(&name, &[ErrorKind::InvalidSpec], call).await?;
        expect(kit.get(&*driver, &spec).await?.is_none(), "get: the refused network is there")?;
    }
    kit.unwritten(&before).await
}

pub(super) async fn overlap(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let first = kit.made(&*driver, 0).await?;
    let mut second = kit.network(1).await;
    if first.network_type == NetworkType::Bridged || first.cidr.is_none() {
        return not_applicable("a bridged network has no range of its own");
    }
    let before = kit.bench.census().await;
    (second.cidr, second.gateway) = (first.cidr, first.gateway);
    (second.cidr6, second.gateway6) = (first.cidr6, first.gateway6);
    let cx = kit.run.cx();
    let call = driver.ensure_network(&cx, &second);
    let kinds = &[ErrorKind::InvalidSpec];
    kit.run.fails("ensure_network with another network's range", kinds, call).await?;
    expect(kit.get(&*driver, &second).await?.is_none(), "get: the refused network is there")?;
    kit.whole(&*driver, &first).await?;
    kit.unwritten(&before).await
}

pub(super) async fn odd_names(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    for name in ODD_NAMES {
        let mut spec = kit.network(0).await;
        spec.name = match name.parse() {
            Ok(name) => name,
            Err(error) => return failed(error),
        };
        match kit.run.call("ensure_network", driver.ensure_network(&kit.run.cx(), &spec)).await? {
            Ok(_) => kit.whole(&*driver, &spec).await?,
            Err(error) if error.kind() == ErrorKind::InvalidSpec => {}
            Err(error) => return failed(format_args!("ensure_network named {name:?}: {error:?}")),
        }
    }
    Ok(())
}

pub(super) async fn lifecycle_of_absent(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.network(0).await;
    let port = kit.port(&spec, 0).await;
    let before = kit.bench.census().await;
    for _ in 0..2 {
        let gone = kit.destroy(&*driver, &spec).await?;
        same("destroy_network of an absent network", &gone, &Change::Unchanged)?;
        let gone = kit.detach(&*driver, &port).await?;
        same("detach_port of an absent port", &gone, &Change::Unchanged)?;
        let cx = kit.run.cx();
        let call = driver.destroy_security_group(&cx, group()?);
        let gone = kit.run.ok("destroy_security_group", call).await?;
        same("destroy_security_group of an absent group", &gone, &Change::Unchanged)?;
    }
    kit.unwritten(&before).await
}

pub(super) async fn lookup_of_absent(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.network(0).await;
    let port = kit.port(&spec, 0).await;
    expect(kit.get(&*driver, &spec).await?.is_none(), "get: an absent network is there")?;
    expect(kit.get_port(&*driver, &port).await?.is_none(), "get_port: an absent port is there")?;
    let before = kit.bench.census().await;
    let cx = kit.run.cx();
    let call = driver.attach_port(&cx, &port);
    kit.run.fails("attach_port to an absent network", &[ErrorKind::NotFound], call).await?;
    expect(kit.get_port(&*driver, &port).await?.is_none(), "get_port: the refused port is there")?;
    kit.unwritten(&before).await
}

pub(super) async fn create_after_destroy(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    for _ in 0..3 {
        let spec = kit.network(0).await;
        same("ensure_network", &kit.ensure(&*driver, &spec).await?, &Change::Created)?;
        let _ = kit.destroy(&*driver, &spec).await?;
    }
    Ok(())
}

pub(super) async fn side_by_side(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let made = (0..kit.run.options.parallel.min(4)).map(|n| {
        let driver = Arc::clone(&driver);
        async move {
            let network = kit.made(&*driver, n).await?;
            let port = kit.port(&network, n).await;
            let nic = kit.attach(&*driver, &port).await?.value;
            Ok((network, port, nic))
        }
    });
    let made = join_all(made).await.into_iter().collect::<Check<Vec<_>>>()?;
    let Some(((network, port, _), rest)) = made.split_first() else { return Ok(()) };
    let _ = kit.detach(&*driver, port).await?;
    let _ = kit.destroy(&*driver, network).await?;
    kit.port_gone(&*driver, port).await?;
    kit.gone(&*driver, network).await?;
    for (network, port, nic) in rest {
        kit.whole(&*driver, network).await?;
        kit.port_whole(&*driver, port, nic).await?;
    }
    Ok(())
}

pub(super) async fn fresh_start(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.made(&*driver, 0).await?;
    let before = kit.status(&*driver, &spec).await?;
    drop(driver);
    let driver = kit.open().await?;
    let all = kit.run.ok("list", driver.list(&kit.run.cx())).await?;
    let Some(listed) = all.into_iter().find(|network| network.uuid == spec.uuid) else {
        return failed("list of a new instance does not have the network");
    };
    same("the network after a fresh start", &listed, &before)?;
    same("its spec as applied", &listed.spec, &Some(spec.clone()))?;
    let census = kit.bench.census().await;
    same("ensure_network", &kit.ensure(&*driver, &spec).await?, &Change::Unchanged)?;
    kit.unwritten(&census).await
}

pub(super) async fn foreign(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    // Not among the numbers that are cleared: the driver must refuse to remove it.
    let spec = kit.bench.network(990).await;
    kit.bench.plant_foreign_network(&spec).await.check()?;
    let before = kit.bench.fingerprint_foreign().await;
    let touched = touch_foreign(kit, &*driver, &spec).await;
    let after = kit.bench.fingerprint_foreign().await;
    kit.bench.remove_foreign().await;
    touched?;
    expect(!before.is_empty(), "the bench has no fingerprint of what it planted")?;
    same("the foreign object", &after, &before)
}

async fn touch_foreign(kit: &Kit<'_>, driver: &dyn Network, spec: &NetworkSpec) -> Check {
    let conflict = &[ErrorKind::Conflict];
    let cx = kit.run.cx();
    let call = driver.ensure_network(&cx, spec);
    kit.run.fails("ensure_network over a foreign device", conflict, call).await?;
    let call = driver.get(&cx, spec.uuid);
    kit.run.fails("get of a foreign device", conflict, call).await?;
    // Removing what is ours of it, which is nothing, may succeed; touching the device may not.
    match kit.run.call("destroy_network", driver.destroy_network(&cx, spec.uuid)).await? {
        Ok(Change::Unchanged) => {}
        Err(error) if error.kind() == ErrorKind::Conflict => {}
        other => return failed(format_args!("destroy_network of a foreign device: {other:?}")),
    }
    let all = kit.run.ok("list", driver.list(&cx)).await?;
    expect(!all.iter().any(|network| network.uuid == spec.uuid), "list has the foreign network")
}

fn group() -> Check<SecurityGroupId> {
    match Uuid::from_bytes(*b"conformance-sg-0") {
        Some(uuid) => Ok(SecurityGroupId::new(uuid)),
        None => failed("the kit's own UUID is nil"),
    }
}

pub(super) async fn security_group(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let Ok(name) = "conformance".parse() else { return failed("the kit's own name is invalid") };
    let mut spec = SecurityGroupSpec::new(group()?, name);
    let web = Protocol::Tcp { from_port: 80, to_port: 80 };
    spec.rules.push(SecurityRule::new(Direction::Ingress, web, RulePeer::Any));
    let before = kit.bench.census().await;
    let cx = kit.run.cx();
    match kit.run.call("ensure_security_group", driver.ensure_security_group(&cx, &spec)).await? {
        Ok(change) => same("ensure_security_group", &change, &Change::Created)?,
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            return not_applicable("the driver has no security groups");
        }
        Err(error) => return failed(format_args!("ensure_security_group: {error:?}")),
    }
    let ended = change_group(kit, &*driver, &mut spec).await;
    let call = driver.destroy_security_group(&cx, spec.uuid);
    let removed = kit.run.ok("destroy_security_group", call).await?;
    ended?;
    same("destroy_security_group", &removed, &Change::Changed)?;
    kit.unwritten(&before).await
}

async fn change_group(kit: &Kit<'_>, driver: &dyn Network, spec: &mut SecurityGroupSpec) -> Check {
    let cx = kit.run.cx();
    let call = driver.ensure_security_group(&cx, spec);
    let again = kit.run.ok("ensure_security_group", call).await?;
    same("ensure_security_group again", &again, &Change::Unchanged)?;
    spec.members.extend("192.0.2.7".parse::<std::net::IpAddr>());
    let call = driver.ensure_security_group(&cx, spec);
    let changed = kit.run.ok("ensure_security_group", call).await?;
    same("ensure_security_group with a member", &changed, &Change::Changed)?;
    let reversed = Protocol::Tcp { from_port: 9, to_port: 8 };
    let mut wrong = spec.clone();
    wrong.rules.push(SecurityRule::new(Direction::Ingress, reversed, RulePeer::Any));
    let call = driver.ensure_security_group(&cx, &wrong);
    kit.run.fails("ensure_security_group, ports reversed", &[ErrorKind::InvalidSpec], call).await?;
    Ok(())
}

pub(super) async fn backend_down(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.network(0).await;
    kit.bench.break_backend().await.check()?;
    let seen = unavailable(kit, &*driver, &spec).await;
    kit.bench.mend().await;
    seen?;
    let gone = kit.destroy(&*driver, &spec).await?;
    same("destroy_network after the repair", &gone, &Change::Unchanged)
}

async fn unavailable(kit: &Kit<'_>, driver: &dyn Network, spec: &NetworkSpec) -> Check {
    let kinds = &[ErrorKind::Unavailable];
    let cx = kit.run.cx();
    kit.run.fails("list with the back-end down", kinds, driver.list(&cx)).await?;
    kit.run.fails("list_ports with the back-end down", kinds, driver.list_ports(&cx)).await?;
    kit.run.fails("get with the back-end down", kinds, driver.get(&cx, spec.uuid)).await?;
    let call = driver.destroy_network(&cx, spec.uuid);
    kit.run.fails("destroy_network with the back-end down", kinds, call).await?;
    Ok(())
}
