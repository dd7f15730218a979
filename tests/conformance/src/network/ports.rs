//! Ports.

use std::collections::BTreeSet;

use drivers_api::{Change, ErrorKind, Network, NetworkType, PortSpec};
use futures_util::future::join_all;

use super::Kit;
use crate::kit::{Check, expect, failed, not_applicable, same};

pub(super) async fn attach(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let network = kit.made(&*driver, 0).await?;
    let port = kit.port(&network, 0).await;
    expect(kit.get_port(&*driver, &port).await?.is_none(), "get_port: the port is there before")?;
    let before = kit.bench.census().await;
    let answer = kit.attach(&*driver, &port).await?;
    same("attach_port", &answer.change, &Change::Created)?;
    let nic = answer.value;
    same("the handle's name", &nic.name, &port.name)?;
    same("the handle's port", &nic.port_uuid, &port.uuid)?;
    same("the handle's MAC", &nic.mac, &port.mac)?;
    kit.port_whole(&*driver, &port, &nic).await?;
    let all = kit.run.ok("list_ports", driver.list_ports(&kit.run.cx())).await?;
    let listed = all.iter().filter(|other| other.uuid == port.uuid).count();
    same("how often list_ports has the port", &listed, &1)?;
    same("detach_port", &kit.detach(&*driver, &port).await?, &Change::Changed)?;
    kit.port_gone(&*driver, &port).await?;
    kit.unwritten(&before).await
}

pub(super) async fn attach_again(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let network = kit.made(&*driver, 0).await?;
    let port = kit.port(&network, 0).await;
    let first = kit.attach(&*driver, &port).await?;
    let before = kit.bench.census().await;
    for time in ["second", "third"] {
        let again = kit.attach(&*driver, &port).await?;
        same(format_args!("the {time} attach_port"), &again.change, &Change::Unchanged)?;
        same("its answer", &again.value, &first.value)?;
    }
    let network = kit.ensure(&*driver, &network).await?;
    same("ensure_network with a port on it", &network, &Change::Unchanged)?;
    kit.unwritten(&before).await
}

pub(super) async fn attach_at_once(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let network = kit.made(&*driver, 0).await?;
    let port = kit.port(&network, 0).await;
    let calls = (0..kit.run.options.parallel).map(|_| kit.attach(&*driver, &port));
    let answers = join_all(calls).await.into_iter().collect::<Check<Vec<_>>>()?;
    expect(answers.iter().any(|answer| answer.change.wrote()), "no call made the port")?;
    let again = kit.attach(&*driver, &port).await?;
    same("attach_port afterwards", &again.change, &Change::Unchanged)?;
    for answer in &answers {
        same("the answers of calls at once", &answer.value, &again.value)?;
    }
    kit.port_whole(&*driver, &port, &again.value).await
}

pub(super) async fn attach_many(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let network = kit.made(&*driver, 0).await?;
    let ports = join_all((0..8).map(|n| kit.port(&network, n))).await;
    let calls = ports.iter().map(|port| kit.attach(&*driver, port));
    let answers = join_all(calls).await.into_iter().collect::<Check<Vec<_>>>()?;
    let devices: BTreeSet<_> = answers.iter().map(|answer| &answer.value.device).collect();
    same("the number of devices of 8 ports", &devices.len(), &8)?;
    for (port, answer) in ports.iter().zip(&answers) {
        kit.port_whole(&*driver, port, &answer.value).await?;
    }
    for (n, port) in ports.iter().enumerate().filter(|(n, _)| n % 2 == 0) {
        let gone = kit.detach(&*driver, port).await?;
        same(format_args!("detach_port of port {n}"), &gone, &Change::Changed)?;
    }
    for (n, (port, answer)) in ports.iter().zip(&answers).enumerate() {
        if n % 2 == 0 {
            kit.port_gone(&*driver, port).await?;
        } else {
            kit.port_whole(&*driver, port, &answer.value).await?;
        }
    }
    Ok(())
}

pub(super) async fn taken(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let network = kit.made(&*driver, 0).await?;
    let first = kit.port(&network, 0).await;
    let nic = kit.attach(&*driver, &first).await?.value;
    let before = kit.bench.census().await;
    let mut same_mac = kit.port(&network, 1).await;
    same_mac.mac = first.mac;
    let mut same_address = kit.port(&network, 1).await;
    same_address.addresses.clone_from(&first.addresses);
    let mut wrong = vec![("MAC", same_mac)];
    if !first.addresses.is_empty() {
        wrong.push(("address", same_address));
    }
    for (what, port) in wrong {
        let cx = kit.run.cx();
        let call = driver.attach_port(&cx, &port);
        let name = format!("attach_port with the {what} of another port");
        kit.run.fails(&name, &[ErrorKind::Conflict], call).await?;
        expect(kit.get_port(&*driver, &port).await?.is_none(), "the refused port is there")?;
    }
    kit.port_whole(&*driver, &first, &nic).await?;
    kit.unwritten(&before).await
}

pub(super) async fn invalid(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let network = kit.made(&*driver, 0).await?;
    let Some(range) = network.cidr else {
        return not_applicable("the network has no range");
    };
    let before = kit.bench.census().await;
    let port = kit.port(&network, 0).await;
    let outside: Vec<std::net::IpAddr> = "192.0.2.9".parse().into_iter().collect();
    let two: Vec<_> = (20..22).filter_map(|n| range.nth(n)).collect();
    let wrong = [
        ("the network's address", vec![range.address()]),
        ("the gateway", network.gateway.into_iter().collect()),
        ("the broadcast address", range.broadcast().map(Into::into).into_iter().collect()),
        ("an address outside", outside),
        ("two addresses of a family", two),
    ];
    for (what, addresses) in wrong {
        if addresses.is_empty() {
            continue;
        }
        let mut port = port.clone();
        port.addresses = addresses;
        let cx = kit.run.cx();
        let call = driver.attach_port(&cx, &port);
        let name = format!("attach_port with {what}");
        kit.run.fails(&name, &[ErrorKind::InvalidSpec], call).await?;
        expect(kit.get_port(&*driver, &port).await?.is_none(), "the refused port is there")?;
    }
    kit.unwritten(&before).await
}

pub(super) async fn detach(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let network = kit.made(&*driver, 0).await?;
    let before = kit.bench.census().await;
    for _ in 0..3 {
        let port = kit.port(&network, 0).await;
        let made = kit.attach(&*driver, &port).await?;
        same("attach_port", &made.change, &Change::Created)?;
        same("detach_port", &kit.detach(&*driver, &port).await?, &Change::Changed)?;
        same("detach_port again", &kit.detach(&*driver, &port).await?, &Change::Unchanged)?;
    }
    kit.whole(&*driver, &network).await?;
    kit.unwritten(&before).await
}

pub(super) async fn destroy_in_use(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let network = kit.made(&*driver, 0).await?;
    let port = kit.port(&network, 0).await;
    let nic = kit.attach(&*driver, &port).await?.value;
    let cx = kit.run.cx();
    let call = driver.destroy_network(&cx, network.uuid);
    let what = "destroy_network with a port on it";
    let error = kit.run.fails(what, &[ErrorKind::Conflict], call).await?;
    let text = error.chain();
    expect(
        text.contains(&port.uuid.to_string()),
        format_args!("the conflict does not name the port: {text}"),
    )?;
    kit.whole(&*driver, &network).await?;
    kit.port_whole(&*driver, &port, &nic).await?;
    let _ = kit.detach(&*driver, &port).await?;
    same("destroy_network", &kit.destroy(&*driver, &network).await?, &Change::Changed)
}

pub(super) async fn fresh_start(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let network = kit.made(&*driver, 0).await?;
    let port = kit.port(&network, 0).await;
    let first = kit.attach(&*driver, &port).await?;
    let before = kit.port_status(&*driver, &port).await?;
    drop(driver);
    let driver = kit.open().await?;
    let all = kit.run.ok("list_ports", driver.list_ports(&kit.run.cx())).await?;
    let Some(listed) = all.into_iter().find(|other| other.uuid == port.uuid) else {
        return failed("list_ports of a new instance does not have the port");
    };
    same("the port after a fresh start", &listed, &before)?;
    let again = kit.attach(&*driver, &port).await?;
    same("attach_port after a fresh start", &again.change, &Change::Unchanged)?;
    same("its answer", &again.value, &first.value)?;
    let mut other = kit.port(&network, 1).await;
    other.mac = port.mac;
    let cx = kit.run.cx();
    let call = driver.attach_port(&cx, &other);
    let what = "attach_port with a MAC taken before a fresh start";
    kit.run.fails(what, &[ErrorKind::Conflict], call).await?;
    Ok(())
}

pub(super) async fn foreign(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let network = kit.made(&*driver, 0).await?;
    // Not a port that is cleared: the driver must refuse to remove it.
    let port = kit.bench.port(&network, 990).await;
    kit.bench.plant_foreign_port(&port).await.check()?;
    let before = kit.bench.fingerprint_foreign().await;
    let touched = touch_foreign(kit, &*driver, &port).await;
    let after = kit.bench.fingerprint_foreign().await;
    kit.bench.remove_foreign().await;
    touched?;
    expect(!before.is_empty(), "the bench has no fingerprint of what it planted")?;
    same("the foreign object", &after, &before)
}

async fn touch_foreign(kit: &Kit<'_>, driver: &dyn Network, port: &PortSpec) -> Check {
    let conflict = &[ErrorKind::Conflict];
    let cx = kit.run.cx();
    let call = driver.attach_port(&cx, port);
    kit.run.fails("attach_port over a foreign device", conflict, call).await?;
    let call = driver.get_port(&cx, port.uuid);
    kit.run.fails("get_port of a foreign device", conflict, call).await?;
    // Removing what is ours of it may succeed; touching the device may not.
    match kit.run.call("detach_port", driver.detach_port(&cx, port.uuid)).await? {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::Conflict => {}
        Err(error) => return failed(format_args!("detach_port of a foreign device: {error:?}")),
    }
    let all = kit.run.ok("list_ports", driver.list_ports(&cx)).await?;
    expect(!all.iter().any(|other| other.uuid == port.uuid), "list_ports has the foreign port")
}

pub(super) async fn rotate_other(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let network = kit.made(&*driver, 0).await?;
    if network.network_type == NetworkType::Mesh {
        return not_applicable("the bench's networks are meshes");
    }
    let port = kit.port(&network, 0).await;
    let _ = kit.attach(&*driver, &port).await?;
    let cx = kit.run.cx();
    let call = driver.rotate_mesh_peer(&cx, &port);
    let kinds = &[ErrorKind::NotApplicable];
    kit.run.fails("rotate_mesh_peer on a network that is no mesh", kinds, call).await?;
    Ok(())
}

pub(super) async fn rotate(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let network = kit.made(&*driver, 0).await?;
    if network.network_type != NetworkType::Mesh {
        return not_applicable("the bench's networks are no meshes");
    }
    let mut port = kit.port(&network, 0).await;
    let nic = kit.attach(&*driver, &port).await?.value;
    let Ok(key) = "a2l0IGtleSBvZiBjb25mb3JtYW5jZSAwMDAwMDAwMDE=".parse() else {
        return failed("the kit's own key is invalid");
    };
    port.wireguard_pub_key = Some(key);
    let cx = kit.run.cx();
    let change = kit.run.ok("rotate_mesh_peer", driver.rotate_mesh_peer(&cx, &port)).await?;
    same("rotate_mesh_peer", &change, &Change::Changed)?;
    kit.port_whole(&*driver, &port, &nic).await?;
    let again = kit.run.ok("rotate_mesh_peer", driver.rotate_mesh_peer(&cx, &port)).await?;
    same("rotate_mesh_peer again", &again, &Change::Unchanged)?;
    let mut other = kit.port(&network, 1).await;
    let _ = kit.attach(&*driver, &other).await?;
    other.wireguard_pub_key.clone_from(&port.wireguard_pub_key);
    let call = driver.rotate_mesh_peer(&cx, &other);
    let what = "rotate_mesh_peer to the key of another port";
    kit.run.fails(what, &[ErrorKind::Conflict], call).await?;
    kit.port_whole(&*driver, &port, &nic).await
}
