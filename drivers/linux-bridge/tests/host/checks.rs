//! What is refused, and that a refusal has no effect.

use drivers_api::{
    Change, DeviceName, ErrorKind, IfName, IpCidr, MacAddr, Network, NetworkId, NetworkSpec,
    NetworkType, PortId, PortSpec, SecurityGroupId, Uuid, VmId,
};
use serde_json::Value;
use testbed::netns::{in_netns, tool, try_tool};

use crate::common::{Host, census, network, port};

fn cases(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// Case VAL-02: the ports of the file, in one network.
#[test]
fn names_of_similar_ports_are_short_distinct_stable_and_carry_the_whole_id() {
    in_netns(|| async {
        let mut host = Host::new();
        let file = cases(include_str!("../cases/val02-tapnames.json"));
        let mut networks = Vec::new();
        let mut ports = Vec::new();
        for case in file["ports"].as_array().unwrap() {
            let network: NetworkId = case["NetworkUUID"].as_str().unwrap().parse().unwrap();
            if !networks.contains(&network) {
                networks.push(network);
            }
            let at = networks.iter().position(|known| *known == network).unwrap();
            let id: PortId = case["UUID"].as_str().unwrap().parse().unwrap();
            let vm: VmId = case["VMUUID"].as_str().unwrap().parse().unwrap();
            let name: DeviceName = "net0".parse().unwrap();
            let spec = PortSpec::new(
                id,
                vm,
                network,
                name,
                case["MAC"].as_str().unwrap().parse().unwrap(),
            );
            ports.push((at, spec));
        }
        for (at, id) in networks.iter().enumerate() {
            let mut spec = network(u8::try_from(at).unwrap() + 70, NetworkType::Isolated);
            spec.uuid = *id;
            host.has_network(&spec).await;
        }
        // The name that the seventh port would get is somebody else's.
        let foreign = IfName::derived("bcdt", ports[6].1.uuid.uuid()).unwrap();
        tool(&["ip", "link", "add", foreign.as_str(), "type", "bridge"]);
        let before = tool(&["ip", "-o", "link", "show", foreign.as_str()]);
        let mut names = Vec::new();
        for (at, (_, spec)) in ports.iter().enumerate() {
            let answer = host.driver.attach_port(&host.cx, spec).await;
            if at == 6 {
                assert_eq!(answer.unwrap_err().kind(), ErrorKind::Conflict);
            } else {
                names.push(answer.unwrap().value.device.as_str().to_owned());
            }
        }
        assert_eq!(
            host.driver.get_port(&host.cx, ports[6].1.uuid).await.unwrap_err().kind(),
            ErrorKind::Conflict
        );
        assert_eq!(tool(&["ip", "-o", "link", "show", foreign.as_str()]), before);
        host.restart();
        assert_eq!(host.driver.list_ports(&host.cx).await.unwrap().len(), ports.len() - 1);
        for (at, (_, spec)) in ports.iter().enumerate().filter(|(at, _)| *at != 6) {
            let answer = host.driver.attach_port(&host.cx, spec).await.unwrap();
            assert_eq!(answer.change, Change::Unchanged);
            let device = answer.value.device;
            assert_eq!(device.as_str(), names[if at > 6 { at - 1 } else { at }]);
            assert!((1..=15).contains(&device.as_str().len()));
            let shown = tool(&["ip", "-d", "-o", "link", "show", device.as_str()]);
            assert!(shown.contains(&spec.uuid.to_string()), "{shown}");
        }
        names.sort();
        names.dedup();
        assert_eq!(names.len(), ports.len() - 1);
        for (_, spec) in ports.iter().step_by(2) {
            host.detach(spec.uuid).await;
        }
        assert_eq!(
            tool(&["ip", "-o", "link", "show", foreign.as_str()]),
            before,
            "detach leaves it too"
        );
    });
}

/// Case VAL-03.
#[test]
fn each_mac_address_of_the_table_is_taken_or_refused_as_it_says() {
    in_netns(|| async {
        let host = Host::new();
        host.has_network(&network(1, NetworkType::Isolated)).await;
        for case in cases(include_str!("../cases/val03-macs.json")).as_array().unwrap() {
            let (text, expect) = (case["MAC"].as_str().unwrap(), case["expect"].as_str().unwrap());
            match text.parse::<MacAddr>() {
                Ok(mac) => {
                    assert!(expect.starts_with("accept"), "{text}: {expect}");
                    let mut spec = port(1, 1);
                    spec.mac = mac;
                    let nic = host.driver.attach_port(&host.cx, &spec).await.unwrap().value;
                    assert_eq!(nic.mac.to_string(), text.to_lowercase());
                    host.detach(spec.uuid).await;
                }
                Err(_) => assert_ne!(expect, "accept", "{text}"),
            }
        }
    });
}

/// A network of the table; `None` when a field of it is refused where it is read.
fn spec_of(case: &Value) -> Option<NetworkSpec> {
    let text = |key: &str| case["spec"][key].as_str().unwrap();
    let network_type = match text("Type") {
        "nat" => NetworkType::Nat,
        "isolated" => NetworkType::Isolated,
        _ => return None,
    };
    let cidr = text("CIDR").replace("@HOST_UPLINK_CIDR@", "192.0.2.0/24");
    let gateway = text("Gateway").replace("@HOST_UPLINK_GW@", "192.0.2.1");
    let mut spec =
        NetworkSpec::new(text("UUID").parse().ok()?, text("Name").parse().ok()?, network_type);
    spec.cidr = Some(cidr.parse::<IpCidr>().ok()?);
    if !gateway.is_empty() {
        spec.gateway = Some(gateway.parse().ok()?);
    }
    for server in case["spec"]["DNSServers"].as_array().unwrap() {
        spec.dns_servers.push(server.as_str().unwrap().parse().ok()?);
    }
    Some(spec)
}

/// Case VAL-04, the networks.
#[test]
fn each_network_of_the_table_is_taken_or_refused_as_it_says() {
    in_netns(|| async {
        let host = Host::new();
        tool(&["ip", "link", "add", "up0", "type", "bridge"]);
        tool(&["ip", "link", "set", "up0", "up"]);
        tool(&["ip", "addr", "add", "192.0.2.9/24", "dev", "up0"]);
        let before = census(host.dir.path());
        let file = cases(include_str!("../cases/val04-networks.json"));
        let find =
            |name: &str| file.as_array().unwrap().iter().find(|case| case["case"] == name).unwrap();
        for case in file.as_array().unwrap() {
            let (name, expect) = (case["case"].as_str().unwrap(), case["expect"].as_str().unwrap());
            if name == "peer-overlap" {
                host.has_network(&spec_of(find("ok")).unwrap()).await;
            }
            let answer = match spec_of(case) {
                None => None,
                Some(spec) => match host.driver.ensure_network(&host.cx, &spec).await {
                    Ok(change) => Some((spec, change)),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::InvalidSpec, "{name}: {error}");
                        assert!(error.field().is_some(), "{name}: {error}");
                        None
                    }
                },
            };
            match answer {
                Some((spec, change)) => {
                    assert!(
                        expect.starts_with("accept") || expect.starts_with("documented"),
                        "{name}: {expect}"
                    );
                    assert_eq!(change, Change::Created, "{name}");
                    assert_eq!(host.network(&spec).await, Change::Unchanged, "{name}");
                    host.destroy(spec.uuid).await;
                }
                None => assert_ne!(expect, "accept", "{name}"),
            }
            if name == "peer-overlap" {
                host.destroy(spec_of(find("ok")).unwrap().uuid).await;
            }
            assert_eq!(census(host.dir.path()), before, "{name} left something");
        }
    });
}

/// Case VAL-04, the ports.
#[test]
fn an_address_that_a_port_cannot_have_is_refused_without_effect() {
    in_netns(|| async {
        let host = Host::new();
        host.has_network(&network(1, NetworkType::Nat)).await;
        host.has_port(&port(1, 1)).await;
        let before = census(host.dir.path());
        let attach = |change: fn(&mut PortSpec)| {
            let mut spec = port(1, 2);
            change(&mut spec);
            let host = &host;
            async move { host.driver.attach_port(&host.cx, &spec).await.unwrap_err().kind() }
        };
        for address in ["10.1.0.1", "10.1.0.0", "10.1.0.255", "10.2.0.5", "fd00::5"] {
            let mut spec = port(1, 2);
            spec.addresses = vec![address.parse().unwrap()];
            let error = host.driver.attach_port(&host.cx, &spec).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidSpec, "{address}");
            assert_eq!(error.field(), Some("addresses[0]"), "{address}");
        }
        assert!("10.1.0.5/24".parse::<std::net::IpAddr>().is_err(), "an address has no length");
        assert_eq!(attach(|spec| spec.addresses = port(1, 1).addresses).await, ErrorKind::Conflict);
        assert_eq!(attach(|spec| spec.mac = port(1, 1).mac).await, ErrorKind::Conflict);
        assert_eq!(
            attach(|spec| spec.network_uuid = network(5, NetworkType::Nat).uuid).await,
            ErrorKind::NotFound
        );
        assert_eq!(
            attach(|spec| spec.hostname = Some("a,b".to_owned())).await,
            ErrorKind::InvalidSpec
        );
        let group = |spec: &mut PortSpec| {
            let id: Uuid = "99999999-2222-4333-8444-555555555555".parse().unwrap();
            spec.effective_security_groups = Some(vec![SecurityGroupId::new(id)]);
        };
        assert_eq!(attach(group).await, ErrorKind::Unsupported);
        assert_eq!(census(host.dir.path()), before);
        let mut none = port(1, 2);
        none.effective_security_groups = Some(Vec::new());
        assert_eq!(host.port(&none).await, Change::Created);
    });
}

#[test]
fn a_foreign_bridge_of_a_networks_name_is_a_conflict_and_stays() {
    in_netns(|| async {
        let host = Host::new();
        let net = network(1, NetworkType::Nat);
        let name = IfName::derived("bcdb", net.uuid.uuid()).unwrap();
        for alias in [
            "",
            "mine",
            "bcd-node:99999999-2222-4333-8444-555555555555:network:11111111-2222-4333-8444-000000000001",
        ] {
            tool(&["ip", "link", "add", name.as_str(), "type", "bridge"]);
            tool(&["ip", "link", "set", name.as_str(), "alias", alias]);
            let before = census(host.dir.path());
            let error = host.driver.ensure_network(&host.cx, &net).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Conflict, "{alias}");
            assert!(error.to_string().contains(name.as_str()), "{error}");
            drop(host.driver.destroy_network(&host.cx, net.uuid).await);
            assert_eq!(census(host.dir.path()), before, "{alias}");
            tool(&["ip", "link", "del", name.as_str()]);
        }
    });
}

/// Case IDM-02.
#[test]
fn removing_what_never_was_succeeds_and_makes_nothing() {
    in_netns(|| async {
        let host = Host::new();
        let before = census(host.dir.path());
        for _ in 0..2 {
            let (net, one) = (network(1, NetworkType::Nat).uuid, port(1, 1).uuid);
            assert_eq!(host.driver.detach_port(&host.cx, one).await.unwrap(), Change::Unchanged);
            assert_eq!(
                host.driver.destroy_network(&host.cx, net).await.unwrap(),
                Change::Unchanged
            );
            assert_eq!(host.driver.get(&host.cx, net).await.unwrap(), None);
            assert_eq!(host.driver.get_port(&host.cx, one).await.unwrap(), None);
        }
        assert_eq!(census(host.dir.path()), before);
    });
}

#[test]
fn a_tap_can_be_opened_by_its_user_alone() {
    in_netns(|| async {
        let host = Host::new();
        host.has_network(&network(1, NetworkType::Nat)).await;
        let mut one = port(1, 1);
        one.owner_uid = Some(4242);
        let tap = host.tap(&one).await;
        let shown = tool(&["ip", "-d", "-o", "link", "show", &tap]);
        assert!(shown.contains("user 4242") && shown.contains("persist on"), "{shown}");
        assert_eq!(host.port(&one).await, Change::Unchanged);
        one.owner_uid = Some(4343);
        assert_eq!(host.port(&one).await, Change::Changed);
        assert!(tool(&["ip", "-d", "-o", "link", "show", &tap]).contains("user 4343"));
        assert!(
            try_tool(&["ip", "-o", "addr", "show", &tap]).stdout.is_empty(),
            "the host has no address on it"
        );
    });
}

#[test]
fn a_broken_record_is_shown_and_destroys_nothing() {
    in_netns(|| async {
        let mut host = Host::new();
        let (net, one) = (network(1, NetworkType::Nat), port(1, 1));
        host.has_network(&net).await;
        let tap = host.tap(&one).await;
        let record = host.dir.path().join(format!("state/ports/{}.json", one.uuid));
        std::fs::write(&record, "{").unwrap();
        host.restart();
        let status = host.driver.get_port(&host.cx, one.uuid).await.unwrap().unwrap();
        assert!(!status.healthy && status.spec.is_none());
        tool(&["ip", "link", "show", &tap]);
        assert_eq!(
            host.driver.attach_port(&host.cx, &one).await.unwrap_err().kind(),
            ErrorKind::Conflict
        );
        assert_eq!(host.driver.detach_port(&host.cx, one.uuid).await.unwrap(), Change::Changed);
        assert!(!record.exists());
        assert_eq!(host.port(&one).await, Change::Created);
        // All records gone: links that carry our mark are still listed, and can be removed.
        std::fs::remove_dir_all(host.dir.path().join("state")).unwrap();
        host.restart();
        let ports = host.driver.list_ports(&host.cx).await.unwrap();
        assert_eq!((ports.len(), ports[0].uuid, ports[0].spec.is_none()), (1, one.uuid, true));
        assert_eq!(host.driver.list(&host.cx).await.unwrap().len(), 1);
        assert_eq!(
            host.driver.destroy_network(&host.cx, net.uuid).await.unwrap_err().kind(),
            ErrorKind::Conflict
        );
        assert_eq!(host.driver.detach_port(&host.cx, one.uuid).await.unwrap(), Change::Changed);
        assert_eq!(host.driver.destroy_network(&host.cx, net.uuid).await.unwrap(), Change::Changed);
        assert_eq!(tool(&["ip", "-o", "link"]).lines().count(), 1, "only lo is left");
    });
}
