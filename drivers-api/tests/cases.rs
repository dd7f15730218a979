//! The tables of spellings, names and addresses in `data/`: what the contract takes and what it refuses.

#![expect(clippy::unwrap_used, clippy::panic, reason = "the helpers of a test")]

use std::{collections::BTreeSet, net::IpAddr};

use drivers_api::{
    DeviceName, DisplayName, Error, ErrorKind, HostPath, IfName, IpCidr, MacAddr, NetworkId,
    NetworkSpec, NetworkType, PortId, PortSpec, SecretRef, Uuid, VmId, VolumeId,
};
use serde_json::Value;

fn table(text: &str) -> Vec<Value> {
    serde_json::from_str(text).unwrap()
}

fn text<'a>(row: &'a Value, field: &str) -> &'a str {
    row[field].as_str().unwrap_or_else(|| panic!("{row} has no {field}"))
}

const LOWER: &str = "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b";

#[test]
fn one_uuid_has_one_value_and_every_other_spelling_is_refused() {
    let rows = table(include_str!("data/val01-uuids.json"));
    assert_eq!(rows.len(), 18);
    for row in &rows {
        let spelling = row["spec"]["UUID"].as_str().unwrap();
        let found = spelling.parse::<VmId>();
        match text(row, "case") {
            "lower" | "upper" => assert_eq!(found.unwrap().to_string(), LOWER),
            case => {
                let error = found.expect_err(case).in_field("uuid");
                assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidSpec, Some("uuid")));
                assert!(!error.kind().is_retryable(), "{case}");
                assert!(!error.to_string().contains(['\n', '\0']), "{case}: {error}");
            }
        }
        // All kinds of identifiers take the same spellings.
        let taken = spelling.parse::<VmId>().is_ok();
        assert_eq!(spelling.parse::<NetworkId>().is_ok(), taken);
        assert_eq!(spelling.parse::<PortId>().is_ok(), taken);
        assert_eq!(spelling.parse::<VolumeId>().is_ok(), taken);
    }
}

#[test]
fn the_names_of_similar_ports_and_networks_are_distinct_valid_and_stable() {
    let file: Value = serde_json::from_str(include_str!("data/val02-tapnames.json")).unwrap();
    let ids = |list: &str| -> Vec<Uuid> {
        let rows = file[list].as_array().unwrap();
        rows.iter().map(|row| text(row, "UUID").parse().unwrap()).collect()
    };
    let (ports, networks) = (ids("ports"), ids("networks"));
    assert_eq!((ports.len(), networks.len()), (40, 2));
    let named = |prefix: &'static str, ids: &[Uuid]| -> Vec<IfName> {
        ids.iter().map(|id| IfName::derived(prefix, *id).unwrap()).collect()
    };
    for (port_prefix, network_prefix) in [("tap", "br"), ("t", "b")] {
        let names = [named(port_prefix, &ports), named(network_prefix, &networks)].concat();
        let again = [named(port_prefix, &ports), named(network_prefix, &networks)].concat();
        assert_eq!(names, again);
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), 42, "{names:?}");
        for name in &names {
            let bytes = name.as_str();
            assert!((1..=15).contains(&bytes.len()), "{name}");
            assert!(!matches!(bytes, "lo" | "." | ".."), "{name}");
            assert!(!bytes.contains(['/', ':', '%', ' ', ',']), "{name}");
        }
    }
}

#[test]
fn a_mac_that_no_guest_may_have_is_refused() {
    let rows = table(include_str!("data/val03-macs.json"));
    assert_eq!(rows.len(), 14);
    for row in &rows {
        let spelling = text(row, "MAC");
        let found = spelling.parse::<MacAddr>();
        match spelling {
            "52:54:00:12:34:56" => assert_eq!(found.unwrap().to_string(), spelling),
            "52:54:00:AB:CD:EF" => assert_eq!(found.unwrap().to_string(), "52:54:00:ab:cd:ef"),
            // The contract's one spelling has colons, and the caller allocates: no other row is taken.
            _ => assert!(found.is_err(), "{spelling:?} is taken; the table says {}", row["expect"]),
        }
    }
}

/// The contract's network of a row of the table, built as a manifest's reader would.
fn network(spec: &Value) -> Result<NetworkSpec, Error> {
    let bad = |field: &'static str| move |error: drivers_api::ParseError| error.in_field(field);
    let address = |field: &'static str, text: &str| {
        text.parse::<IpAddr>().map_err(|error| Error::invalid(field, error))
    };
    let kind: NetworkType = serde_json::from_value(spec["Type"].clone())
        .map_err(|error| Error::invalid("type", error))?;
    let uuid = text(spec, "UUID").parse().map_err(bad("uuid"))?;
    let name = text(spec, "Name").parse().map_err(bad("name"))?;
    let mut network = NetworkSpec::new(uuid, name, kind);
    network.cidr = Some(text(spec, "CIDR").parse().map_err(bad("cidr"))?);
    let gateway = text(spec, "Gateway");
    if !gateway.is_empty() {
        network.gateway = Some(address("gateway", gateway)?);
    }
    for server in spec["DNSServers"].as_array().unwrap() {
        network.dns_servers.push(address("dns_servers", server.as_str().unwrap())?);
    }
    network.validate()?;
    Ok(network)
}

#[test]
fn a_network_that_would_break_later_is_refused_at_once() {
    let rows = table(include_str!("data/val04-networks.json"));
    assert_eq!(rows.len(), 23);
    let mut ok: Option<NetworkSpec> = None;
    for row in &rows {
        let (case, mut spec) = (text(row, "case"), row["spec"].clone());
        if case == "host-overlap" {
            spec["CIDR"] = "10.9.0.0/16".into();
            spec["Gateway"] = "10.9.0.1".into();
        }
        let found = network(&spec);
        match case {
            "ok" => ok = Some(found.unwrap()),
            // A v6 range without room for SLAAC is a range: the driver says what it does not advertise.
            "v6-ok" | "v6-120" | "no-gw-isolated" => drop(found.unwrap()),
            // These two only a host can refuse: the ranges say so.
            "host-overlap" => {
                let route: IpCidr = "10.9.0.0/24".parse().unwrap();
                assert!(found.unwrap().ranges().any(|range| range.overlaps(&route)));
            }
            "peer-overlap" => {
                let first = ok.as_ref().unwrap().cidr.unwrap();
                assert!(found.unwrap().ranges().any(|range| range.overlaps(&first)));
            }
            _ => {
                let error = found.expect_err(case);
                assert_eq!(error.kind(), ErrorKind::InvalidSpec, "{case}: {error}");
                assert!(error.field().is_some(), "{case}: {error}");
                assert!(!error.to_string().contains('\n'), "{case}: {error}");
            }
        }
    }
}

#[test]
fn a_port_gets_no_address_that_is_not_a_guests() {
    let rows = table(include_str!("data/val04-networks.json"));
    let network = network(&rows[0]["spec"]).unwrap();
    let port = |addresses: &[&str]| {
        let id: PortId = LOWER.parse().unwrap();
        let vm: VmId = LOWER.parse().unwrap();
        let name: DeviceName = "eth0".parse().unwrap();
        let mut port = PortSpec::new(id, vm, network.uuid, name, MacAddr::derived(id));
        port.addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        port.validate(&network)
    };
    port(&[]).unwrap();
    port(&["10.77.0.2"]).unwrap();
    for wrong in ["10.77.0.0", "10.77.0.1", "10.77.0.255", "10.78.0.2", "fd77::2"] {
        let error = port(&[wrong]).expect_err(wrong);
        assert_eq!(error.field(), Some("addresses[0]"), "{error}");
    }
    let error = port(&["10.77.0.2", "10.77.0.3"]).unwrap_err();
    assert_eq!(error.field(), Some("addresses[1]"), "{error}");
    assert!("10.77.0.2/24".parse::<IpAddr>().is_err());
}

#[test]
fn a_value_that_would_inject_is_refused_or_kept_to_the_byte() {
    let rows = table(include_str!("data/val05-injection.json"));
    assert_eq!(rows.len(), 17);
    for row in &rows {
        let value = text(row, "value");
        match text(row, "field") {
            // Free text: whoever builds a document from it escapes it. Control bytes and over-long text are refused.
            "VM.Name" | "Volume.Name" => match value.parse::<DisplayName>() {
                Ok(name) => {
                    assert_eq!(name.as_str(), value);
                    assert!(
                        format!("{name:?}").chars().all(|c| !c.is_control() && c != '\u{202e}')
                    );
                }
                Err(_) => assert!(value.len() > 255 || value.contains('\0'), "{value:?}"),
            },
            "Disk.BackingPath" => match value.parse::<HostPath>() {
                // One literal path, whose commas a driver must double or avoid.
                Ok(path) => assert!(value.contains(",readonly=off") && path.as_str() == value),
                Err(_) => assert!(value.contains("..") || !value.starts_with('/'), "{value:?}"),
            },
            "Disk.Bus" => {
                assert!(serde_json::from_value::<drivers_api::DiskBus>(value.into()).is_err());
            }
            "NIC.Device" => assert!(value.parse::<IfName>().is_err()),
            other => panic!("no rule for {other}"),
        }
    }
    assert!("env://A\nB".parse::<SecretRef>().is_err());
}
