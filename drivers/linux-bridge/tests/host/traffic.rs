//! What passes and what does not, with guests behind real taps.

use drivers_api::{Network, NetworkType};
use testbed::netns::{Guest, Netns, in_netns, tool};

use crate::common::{Host, network, port};

/// A server of one page in a namespace, which ends with it.
fn serve(ns: &Netns, port: &str) {
    ns.tool(&["busybox", "httpd", "-p", port, "-h", "/proc/sys/kernel"]);
}

fn get(from: Option<&Netns>, url: &str) -> bool {
    let argv = ["busybox", "timeout", "2", "busybox", "wget", "-q", "-O", "/dev/null", url];
    let output = match from {
        Some(ns) => ns.try_tool(&argv),
        None => testbed::netns::try_tool(&argv),
    };
    output.status.success()
}

/// The outside: a namespace at 192.0.2.2 behind the host's uplink 192.0.2.1.
fn outside() -> Guest {
    let outside = Guest::on_veth("up0", "02:00:00:00:ff:02").unwrap();
    tool(&["ip", "addr", "add", "192.0.2.1/24", "dev", "up0"]);
    outside.address("192.0.2.2/24", None);
    outside
}

#[test]
fn the_host_reaches_its_guests_and_guests_of_one_network_reach_each_other() {
    in_netns(|| async {
        for network_type in [NetworkType::Nat, NetworkType::Isolated] {
            let host = Host::new();
            let net = network(1, network_type);
            host.has_network(&net).await;
            let one = host.guest(&port(1, 1), Some("10.1.0.1")).await;
            let two = host.guest(&port(1, 2), Some("10.1.0.1")).await;
            serve(one.ns(), "80");
            assert!(get(None, "http://10.1.0.11/ostype"), "host to guest");
            assert!(get(Some(two.ns()), "http://10.1.0.11/ostype"), "guest to guest");
            assert!(two.pings("10.1.0.1"), "guest to gateway");
            drop((one, two));
            for port in [port(1, 1), port(1, 2)] {
                host.detach(port.uuid).await;
            }
            host.destroy(net.uuid).await;
        }
    });
}

#[test]
fn a_nat_guest_reaches_the_outside_and_the_outside_never_reaches_it() {
    in_netns(|| async {
        let host = Host::new();
        host.has_network(&network(1, NetworkType::Nat)).await;
        let guest = host.guest(&port(1, 1), Some("10.1.0.1")).await;
        let outside = outside();
        serve(outside.ns(), "80");
        serve(guest.ns(), "80");
        assert!(guest.pings("192.0.2.2"));
        assert!(get(Some(guest.ns()), "http://192.0.2.2/ostype"));
        // The way in is known to the outside, and still closed.
        outside.ns().tool(&["ip", "route", "add", "10.1.0.0/24", "via", "192.0.2.1"]);
        assert!(!outside.pings("10.1.0.11"));
        assert!(!get(Some(outside.ns()), "http://10.1.0.11/ostype"));
        assert!(get(None, "http://10.1.0.11/ostype"), "the server itself answers");
        // The outside saw the host's address only.
        assert!(guest.pings("192.0.2.2"));
    });
}

#[test]
fn networks_do_not_reach_each_other_and_isolated_guests_reach_nothing_else() {
    in_netns(|| async {
        let host = Host::new();
        host.has_network(&network(1, NetworkType::Nat)).await;
        host.has_network(&network(2, NetworkType::Nat)).await;
        host.has_network(&network(3, NetworkType::Isolated)).await;
        let one = host.guest(&port(1, 1), Some("10.1.0.1")).await;
        let two = host.guest(&port(2, 1), Some("10.2.0.1")).await;
        let three = host.guest(&port(3, 1), Some("10.3.0.1")).await;
        let outside = outside();
        serve(two.ns(), "80");
        assert!(get(None, "http://10.2.0.11/ostype"), "the server itself answers");
        assert!(!one.pings("10.2.0.11"));
        assert!(!get(Some(one.ns()), "http://10.2.0.11/ostype"));
        assert!(!three.pings("10.2.0.11") && !three.pings("192.0.2.2"));
        assert!(!two.pings("10.3.0.11") && two.pings("192.0.2.2"));
        assert!(three.pings("10.3.0.1"), "its own gateway");
        drop(outside);
    });
}

#[test]
fn guests_reach_no_service_of_the_host_but_addresses_and_names() {
    in_netns(|| async {
        let host = Host::new();
        host.has_network(&network(1, NetworkType::Nat)).await;
        let guest = host.guest(&port(1, 1), Some("10.1.0.1")).await;
        serve(&Netns::current().unwrap(), "8080");
        tool(&["ip", "addr", "add", "192.0.2.1/32", "dev", "lo"]);
        assert!(get(None, "http://10.1.0.1:8080/ostype"), "the server itself answers");
        assert!(!get(Some(guest.ns()), "http://10.1.0.1:8080/ostype"));
        assert!(!get(Some(guest.ns()), "http://192.0.2.1:8080/ostype"));
    });
}

/// An Ethernet frame with an ICMP echo request.
fn echo(mac: &str, from: [u8; 4], to: [u8; 4]) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(octets(mac));
    frame.extend([0x08, 0x00]);
    let mut ip = vec![0x45, 0, 0, 28, 0, 1, 0, 0, 64, 1, 0, 0];
    ip.extend(from);
    ip.extend(to);
    let sum = checksum(&ip);
    ip[10..12].copy_from_slice(&sum);
    let mut icmp = vec![8, 0, 0, 0, 0x12, 0x34, 0, 1];
    let sum = checksum(&icmp);
    icmp[2..4].copy_from_slice(&sum);
    frame.extend(ip);
    frame.extend(icmp);
    frame
}

/// An ARP announcement of an address.
fn announce(ether: &str, mac: &str, address: [u8; 4]) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(octets(ether));
    frame.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 2]);
    frame.extend(octets(mac));
    frame.extend(address);
    frame.extend([0xff; 6]);
    frame.extend(address);
    frame
}

fn octets(mac: &str) -> Vec<u8> {
    mac.split(':').map(|octet| u8::from_str_radix(octet, 16).unwrap()).collect()
}

fn checksum(bytes: &[u8]) -> [u8; 2] {
    let mut sum: u32 =
        bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!u16::try_from(sum).unwrap()).to_be_bytes()
}

/// How many frames of a port came past its anti-spoof chain.
fn passed() -> u64 {
    let text = tool(&["nft", "-j", "list", "counter", "bridge", "probe", "k"]);
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    value.pointer("/nftables/1/counter/packets").unwrap().as_u64().unwrap()
}

#[test]
fn a_guest_sends_with_its_own_addresses_only() {
    in_netns(|| async {
        let host = Host::new();
        host.has_network(&network(1, NetworkType::Nat)).await;
        let one = port(1, 1);
        let tap = host.tap(&one).await;
        let guest = Guest::on_tap(&tap, &one.mac.to_string()).unwrap();
        // Quiet, so that only the frames of this test count.
        guest.ns().tool(&["ip", "link", "set", "eth0", "down"]);
        tool(&[
            "nft",
            &format!(
                "add table bridge probe; add counter bridge probe k; add chain bridge probe c {{ type filter hook prerouting priority 5; }}; add rule bridge probe c iifname {tap} counter name k"
            ),
        ]);
        let own = one.mac.to_string();
        let (mine, other, gateway) = ([10, 1, 0, 11], [10, 1, 0, 12], [10, 1, 0, 1]);
        let mut vlan = echo(&own, mine, gateway);
        vlan.splice(12..12, [0x81, 0x00, 0x00, 0x05]);
        let cases = [
            ("own", true, echo(&own, mine, gateway)),
            ("other mac", false, echo("52:54:00:00:01:02", mine, gateway)),
            ("other address", false, echo(&own, other, gateway)),
            ("gateway's address", false, echo(&own, gateway, mine)),
            ("own arp", true, announce(&own, &own, mine)),
            ("arp for the gateway", false, announce(&own, &own, gateway)),
            ("arp of another mac", false, announce(&own, "52:54:00:00:01:02", mine)),
            ("tagged", false, vlan),
        ];
        for (what, passes, frame) in cases {
            let before = passed();
            guest.inject(&frame).unwrap();
            assert_eq!(passed() - before, u64::from(passes), "{what}");
        }
    });
}

#[test]
fn a_tap_without_rules_is_dropped_both_ways() {
    in_netns(|| async {
        let host = Host::new();
        let net = network(1, NetworkType::Nat);
        host.has_network(&net).await;
        let bridge = host.driver.get(&host.cx, net.uuid).await.unwrap().unwrap().device.unwrap();
        // A tap of ours as it would be before its rules are there.
        let name = "bcdtnorules";
        tool(&["ip", "tuntap", "add", name, "mode", "tap"]);
        tool(&["sysctl", "-qw", &format!("net.ipv6.conf.{name}.disable_ipv6=1")]);
        tool(&["ip", "link", "set", name, "master", bridge.as_str(), "up"]);
        let guest = Guest::on_tap(name, "52:54:00:00:01:63").unwrap();
        guest.address("10.1.0.99/24", None);
        let other = host.guest(&port(1, 1), None).await;
        assert!(!guest.pings("10.1.0.1") && !other.pings("10.1.0.99"));
        assert!(!guest.pings("10.1.0.11"));
        assert_eq!(guest.received(), 0, "not one frame reached it");
    });
}

/// The echo reply to [`echo`].
fn reply(mac: &str, from: [u8; 4], to: [u8; 4]) -> Vec<u8> {
    let mut frame = echo(mac, from, to);
    frame[34] = 0;
    frame[36..38].copy_from_slice(&[0, 0]);
    let sum = checksum(&frame[34..42]);
    frame[36..38].copy_from_slice(&sum);
    frame
}

/// Waits until a guest got a frame more than `before`, for at most a second.
async fn got_one(guest: &Guest, before: u64) -> bool {
    for _ in 0..100 {
        if guest.received() > before {
            return true;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    false
}

/// Two uplinks with the same range, and a guest with the same address on each: what one has asked for opens nothing for
/// the other.
#[test]
fn what_is_established_on_one_network_opens_nothing_on_another() {
    in_netns(|| async {
        let host = Host::new();
        let mut guests = Vec::new();
        let mut outsiders = Vec::new();
        let (mine, theirs) = ([10, 9, 0, 11], [10, 99, 0, 77]);
        for n in [1, 2] {
            let (uplink, name) = (format!("lan{n}"), format!("out{n}"));
            tool(&["ip", "link", "add", &uplink, "type", "bridge", "forward_delay", "0"]);
            tool(&["ip", "link", "set", &uplink, "up"]);
            tool(&["ip", "tuntap", "add", &name, "mode", "tap"]);
            for link in [&uplink, &name] {
                tool(&["sysctl", "-qw", &format!("net.ipv6.conf.{link}.disable_ipv6=1")]);
            }
            tool(&["ip", "link", "set", &name, "master", &uplink, "up"]);
            let mut net = network(n, NetworkType::Bridged);
            net.cidr = Some("10.9.0.0/24".parse().unwrap());
            net.gateway = None;
            net.uplink = Some(uplink.parse().unwrap());
            host.has_network(&net).await;
            let mut spec = port(n, 1);
            spec.addresses = vec!["10.9.0.11".parse().unwrap()];
            let tap = host.tap(&spec).await;
            for (of, mac, all) in [
                (&tap, spec.mac.to_string(), &mut guests),
                (&name, format!("02:00:00:00:ff:0{n}"), &mut outsiders),
            ] {
                let guest = Guest::on_tap(of, &mac).unwrap();
                // Its own network stack says nothing: only the frames of this test pass.
                guest.ns().tool(&["ip", "link", "set", "eth0", "down"]);
                all.push((guest, mac));
            }
        }
        let (asker, asker_mac) = &guests[0];
        let before = outsiders[0].0.received();
        asker.inject(&echo(asker_mac, mine, theirs)).unwrap();
        assert!(got_one(&outsiders[0].0, before).await, "the request gets out");
        for (at, comes) in [(1, false), (0, true)] {
            let (guest, (outsider, mac)) = (&guests[at].0, &outsiders[at]);
            let before = guest.received();
            outsider.inject(&reply(mac, theirs, mine)).unwrap();
            assert_eq!(got_one(guest, before).await, comes, "network {}", at + 1);
        }
    });
}

#[test]
fn a_bridged_port_joins_the_uplink_bridge_and_leaves_it_as_it_was() {
    in_netns(|| async {
        let host = Host::new();
        tool(&["ip", "link", "add", "lan0", "type", "bridge", "forward_delay", "0"]);
        tool(&["ip", "link", "set", "lan0", "up"]);
        let neighbour = Guest::on_veth("lan0p", "02:00:00:00:aa:01").unwrap();
        tool(&["ip", "link", "set", "lan0p", "master", "lan0"]);
        neighbour.address("10.9.0.77/24", None);
        let before = tool(&["ip", "-d", "-o", "link", "show", "lan0"]);
        let mut net = network(9, NetworkType::Bridged);
        net.gateway = None;
        net.uplink = Some("lan0".parse().unwrap());
        host.has_network(&net).await;
        let guest = host.guest(&port(9, 1), None).await;
        assert!(guest.pings("10.9.0.77"), "guest to neighbour");
        assert!(neighbour.pings("10.9.0.11"), "neighbour of the network's range to guest");
        neighbour.address("10.99.0.77/24", None);
        neighbour.ns().tool(&[
            "ip",
            "route",
            "add",
            "10.9.0.11/32",
            "dev",
            "eth0",
            "src",
            "10.99.0.77",
        ]);
        assert!(!neighbour.pings("10.9.0.11"), "from outside the range only replies");
        host.is_healthy(net.uuid).await.unwrap();
        drop(guest);
        host.detach(port(9, 1).uuid).await;
        host.destroy(net.uuid).await;
        let after = tool(&["ip", "-d", "-o", "link", "show", "lan0"]);
        // Timers of the bridge run on.
        let stable = |text: &str| {
            text.split_whitespace().filter(|word| !word.contains('.')).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(stable(&after), stable(&before));
    });
}
