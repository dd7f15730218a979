//! Whatever somebody removes or changes is seen, told and put back.

use drivers_api::{Change, EventKind, Network, NetworkType, ObjectRef};
use testbed::netns::{in_netns, tool, try_tool};

use crate::common::{Host, event_about, network, port, quiet, ruleset};

/// Damages the host, and expects the damage to be told for the object, seen in its status, and mended by one call.
async fn put_back(host: &Host, what: &str, object: ObjectRef, damage: impl FnOnce()) {
    let (net, one) = (network(1, NetworkType::Nat), port(1, 1));
    let mut events = host.driver.events().unwrap();
    quiet(&mut events).await;
    damage();
    event_about(&mut events, object).await;
    let sick = if object == ObjectRef::Network(net.uuid) {
        host.is_healthy(net.uuid).await
    } else {
        host.is_port_healthy(one.uuid).await
    };
    assert!(sick.is_err(), "{what}: the status does not show it");
    let changed = host.network(&net).await.and(host.port(&one).await);
    assert_eq!(changed, Change::Changed, "{what}");
    host.is_healthy(net.uuid).await.unwrap_or_else(|why| panic!("{what}: {why}"));
    host.is_port_healthy(one.uuid).await.unwrap_or_else(|why| panic!("{what}: {why}"));
    assert_eq!(host.network(&net).await.and(host.port(&one).await), Change::Unchanged, "{what}");
    assert!(quiet(&mut events).await < 10, "{what}: our own work tells of itself without end");
    assert_eq!(quiet(&mut events).await, 0, "{what}");
}

#[test]
fn each_part_of_a_network_that_is_removed_is_told_and_put_back() {
    in_netns(|| async {
        let host = Host::new();
        let (net, one) = (network(1, NetworkType::Nat), port(1, 1));
        host.has_network(&net).await;
        let tap = host.tap(&one).await;
        let device = host.driver.get(&host.cx, net.uuid).await.unwrap().unwrap().device.unwrap();
        let bridge = device.as_str();
        let object = ObjectRef::Network(net.uuid);
        let before = ruleset();
        put_back(&host, "address", object, || {
            tool(&["ip", "addr", "del", "10.1.0.1/24", "dev", bridge]);
        })
        .await;
        put_back(&host, "down", object, || {
            tool(&["ip", "link", "set", bridge, "down"]);
        })
        .await;
        put_back(&host, "bridge", object, || {
            tool(&["ip", "link", "del", bridge]);
        })
        .await;
        let pid =
            std::fs::read_to_string(host.dir.path().join(format!("run/{}/pid", net.uuid))).unwrap();
        put_back(&host, "dnsmasq", object, || {
            tool(&["kill", "-9", pid.trim()]);
        })
        .await;
        put_back(&host, "rules", object, || {
            tool(&["nft", "flush", "ruleset"]);
        })
        .await;
        put_back(&host, "flushed table", object, || {
            tool(&["nft", "flush", "table", "inet", "bcd"]);
        })
        .await;
        put_back(&host, "inserted rule", object, || {
            tool(&["nft", "insert", "rule", "inet", "bcd", "forward", "accept"]);
        })
        .await;
        put_back(&host, "renamed chain", object, || {
            tool(&["nft", "rename", "chain", "bridge", "bcd", "post-ingress", "mine"]);
        })
        .await;
        put_back(&host, "policy", object, || {
            tool(&["nft", "chain", "inet", "bcd", "forward", "{ policy drop; }"]);
        })
        .await;
        put_back(&host, "foreign chain in our table", object, || {
            tool(&[
                "nft",
                "add",
                "chain",
                "inet",
                "bcd",
                "mine",
                "{ type filter hook input priority -5; }",
            ]);
        })
        .await;
        assert_eq!(ruleset(), before);
        assert!(tool(&["ip", "-o", "link", "show", &tap]).contains(&format!("master {bridge}")));
    });
}

#[test]
fn each_part_of_a_port_that_is_removed_is_told_and_put_back() {
    in_netns(|| async {
        let host = Host::new();
        let (net, one) = (network(1, NetworkType::Nat), port(1, 1));
        host.has_network(&net).await;
        let tap = host.tap(&one).await;
        let object = ObjectRef::Port(one.uuid);
        let before = ruleset();
        put_back(&host, "tap", object, || {
            tool(&["ip", "link", "del", &tap]);
        })
        .await;
        put_back(&host, "out of its bridge", object, || {
            tool(&["ip", "link", "set", &tap, "nomaster"]);
        })
        .await;
        put_back(&host, "down", object, || {
            tool(&["ip", "link", "set", &tap, "down"]);
        })
        .await;
        put_back(&host, "one rule", object, || {
            let chain = format!("{tap}.spoof");
            let listing = tool(&["nft", "-a", "list", "chain", "bridge", "bcd", &chain]);
            let handle = listing.lines().find(|line| line.contains("ether saddr")).unwrap();
            let handle = handle.rsplit(' ').next().unwrap();
            tool(&["nft", "delete", "rule", "bridge", "bcd", &chain, "handle", handle]);
        })
        .await;
        put_back(&host, "an element", object, || {
            tool(&[
                "nft",
                "delete",
                "element",
                "bridge",
                "bcd",
                "ingress",
                &format!("{{ \"{tap}\" }}"),
            ]);
        })
        .await;
        assert_eq!(ruleset(), before);
    });
}

#[test]
fn a_cleared_alias_a_lost_dhcp_entry_and_lost_run_files_are_put_back() {
    in_netns(|| async {
        let host = Host::new();
        let (net, one) = (network(1, NetworkType::Nat), port(1, 1));
        host.has_network(&net).await;
        let tap = host.tap(&one).await;
        tool(&["ip", "link", "set", &tap, "alias", ""]);
        assert!(host.is_port_healthy(one.uuid).await.is_err());
        assert_eq!(host.port(&one).await, Change::Changed);
        host.is_port_healthy(one.uuid).await.unwrap();
        std::fs::remove_file(host.dir.path().join(format!("run/{}/hosts/{}", net.uuid, one.uuid)))
            .unwrap();
        assert!(host.is_port_healthy(one.uuid).await.is_err());
        assert_eq!(host.port(&one).await, Change::Changed);
        std::fs::remove_dir_all(host.dir.path().join(format!("run/{}", net.uuid))).unwrap();
        assert!(host.is_healthy(net.uuid).await.is_err());
        let error = host.driver.attach_port(&host.cx, &one).await.unwrap_err();
        assert_eq!(error.kind(), drivers_api::ErrorKind::Unavailable, "{error}");
        assert_eq!(host.network(&net).await, Change::Changed);
        assert_eq!(host.port(&one).await, Change::Unchanged);
        host.is_healthy(net.uuid).await.unwrap();
        host.is_port_healthy(one.uuid).await.unwrap();
        let ours = testbed::netns::Netns::current().unwrap().pids().unwrap();
        assert_eq!(ours.len(), 1, "one dnsmasq, and not the one whose files were lost: {ours:?}");
    });
}

#[test]
fn a_dnsmasq_without_an_identity_is_replaced_by_one() {
    in_netns(|| async {
        let host = Host::new();
        let net = network(1, NetworkType::Nat);
        host.has_network(&net).await;
        let run = host.dir.path().join(format!("run/{}", net.uuid));
        let pid = std::fs::read_to_string(run.join("pid")).unwrap();
        for content in ["", "garbage\n", "00000000-0000-4000-8000-000000000000 1 1\nx\n"] {
            std::fs::write(run.join("identity"), content).unwrap();
            assert_eq!(host.network(&net).await, Change::Changed, "{content:?}");
            let ours = testbed::netns::Netns::current().unwrap().pids().unwrap();
            assert_eq!(ours.len(), 1, "{ours:?}");
        }
        assert_ne!(std::fs::read_to_string(run.join("pid")).unwrap(), pid);
    });
}

#[test]
fn dnsmasq_outlives_the_agent_and_is_taken_over() {
    in_netns(|| async {
        let mut host = Host::new();
        let net = network(1, NetworkType::Nat);
        host.has_network(&net).await;
        let pid_file = host.dir.path().join(format!("run/{}/pid", net.uuid));
        let pid = std::fs::read_to_string(&pid_file).unwrap();
        host.restart();
        assert_eq!(host.network(&net).await, Change::Unchanged);
        assert_eq!(std::fs::read_to_string(&pid_file).unwrap(), pid);
        let mut events = host.driver.events().unwrap();
        quiet(&mut events).await;
        tool(&["kill", "-9", pid.trim()]);
        assert_eq!(
            event_about(&mut events, ObjectRef::Network(net.uuid)).await,
            EventKind::Changed
        );
        let mut other = net.clone();
        other.mtu_bytes = Some(drivers_api::MtuBytes::new(1400).unwrap());
        assert_eq!(host.network(&other).await, Change::Changed);
        host.is_healthy(net.uuid).await.unwrap();
        let link = tool(&["ip", "-o", "link", "show", "type", "bridge"]);
        assert!(link.contains("mtu 1400"), "{link}");
        assert!(try_tool(&["kill", "-0", pid.trim()]).status.code() != Some(0));
    });
}
