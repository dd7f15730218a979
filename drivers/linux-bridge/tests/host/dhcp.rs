//! Addresses by DHCP and router advertisement.

use std::{os::unix::fs::PermissionsExt, time::Duration};

use drivers_api::NetworkType;
use testbed::netns::{Guest, in_netns};

use crate::common::{Host, network, port};

/// What a real DHCP client gets: its output with the variables of its script.
fn lease(guest: &Guest) -> String {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script");
    std::fs::write(&script, "#!/bin/sh\necho event=$1\nenv\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).unwrap();
    let script = script.to_str().unwrap();
    let argv =
        ["busybox", "udhcpc", "-i", "eth0", "-n", "-q", "-f", "-t", "5", "-T", "1", "-s", script];
    let output = guest.ns().try_tool(&argv);
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

#[test]
fn a_guest_gets_its_ports_address_its_router_and_its_resolver() {
    in_netns(|| async {
        let host = Host::new();
        let net = network(1, NetworkType::Nat);
        host.has_network(&net).await;
        let one = port(1, 1);
        let guest = Guest::on_tap(&host.tap(&one).await, &one.mac.to_string()).unwrap();
        let text = lease(&guest);
        for part in ["ip=10.1.0.11", "router=10.1.0.1", "dns=10.1.0.1", "subnet=255.255.255.0"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let user =
            std::fs::read_to_string(host.dir.path().join(format!("run/{}/pid", net.uuid))).unwrap();
        let status = std::fs::read_to_string(format!("/proc/{}/status", user.trim())).unwrap();
        let uid = status.lines().find(|line| line.starts_with("Uid:")).unwrap();
        assert!(!uid.contains("\t0\t"), "dnsmasq runs unprivileged: {uid}");
    });
}

#[test]
fn guests_of_several_networks_get_their_addresses_right_after_one_another() {
    in_netns(|| async {
        let host = Host::new();
        let mut guests = Vec::new();
        for number in 1..=3 {
            let net = network(number, NetworkType::Nat);
            host.has_network(&net).await;
            let port = port(number, 1);
            guests.push(Guest::on_tap(&host.tap(&port).await, &port.mac.to_string()).unwrap());
        }
        for (guest, number) in guests.iter().zip(1..) {
            let text = lease(guest);
            assert!(text.contains(&format!("ip=10.{number}.0.11")), "network {number}: {text}");
        }
    });
}

#[test]
fn a_network_without_a_gateway_gives_addresses_and_no_router() {
    in_netns(|| async {
        let host = Host::new();
        let mut net = network(1, NetworkType::Isolated);
        net.gateway = None;
        host.has_network(&net).await;
        host.is_healthy(net.uuid).await.unwrap();
        let one = port(1, 1);
        let guest = Guest::on_tap(&host.tap(&one).await, &one.mac.to_string()).unwrap();
        let text = lease(&guest);
        assert!(text.contains("ip=10.1.0.11"), "{text}");
        assert!(!text.contains("router=") && !text.contains("dns="), "{text}");
    });
}

#[test]
fn an_unknown_guest_and_a_detached_port_get_nothing() {
    in_netns(|| async {
        let host = Host::new();
        host.has_network(&network(1, NetworkType::Nat)).await;
        let (one, two) = (port(1, 1), port(1, 2));
        host.has_port(&one).await;
        let guest = Guest::on_tap(&host.tap(&two).await, &two.mac.to_string()).unwrap();
        assert!(lease(&guest).contains("ip=10.1.0.12"));
        drop(guest);
        host.detach(two.uuid).await;
        // Another guest gets the address at once, though the lease of the first would hold for an hour.
        let mut third = port(1, 3);
        third.addresses = two.addresses.clone();
        let guest = Guest::on_tap(&host.tap(&third).await, &third.mac.to_string()).unwrap();
        let text = lease(&guest);
        assert!(text.contains("ip=10.1.0.12"), "{text}");
        drop(guest);
        host.detach(third.uuid).await;
        // The port is there again under another address: the old one is not given.
        let mut again = two.clone();
        again.addresses = vec!["10.1.0.50".parse().unwrap()];
        let guest = Guest::on_tap(&host.tap(&again).await, &again.mac.to_string()).unwrap();
        let text = lease(&guest);
        assert!(text.contains("ip=10.1.0.50"), "{text}");
    });
}

#[test]
fn a_guest_learns_its_ipv6_router_and_reaches_it() {
    in_netns(|| async {
        let host = Host::new();
        let mut net = network(1, NetworkType::Nat);
        net.cidr6 = Some("fd77:1::/64".parse().unwrap());
        net.gateway6 = Some("fd77:1::1".parse().unwrap());
        host.has_network(&net).await;
        host.is_healthy(net.uuid).await.unwrap();
        let mut one = port(1, 1);
        one.addresses.push("fd77:1::11".parse().unwrap());
        let guest = host.guest(&one, Some("10.1.0.1")).await;
        let mut route = String::new();
        for _ in 0..40 {
            route = guest.ns().tool(&["ip", "-6", "route", "show", "default"]);
            if !route.is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        assert!(route.contains("proto ra"), "no router advertisement came: {route:?}");
        assert!(guest.pings("fd77:1::1"));
        assert!(guest.pings("10.1.0.1"));
    });
}
