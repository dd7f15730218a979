//! The boundaries between the workspace's crates, held on what `cargo metadata` says.
//!
//! Each rule names the whole forbidden way, so that the one edge to remove is seen.

#![expect(clippy::expect_used, clippy::indexing_slicing, reason = "the helpers of a test")]

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};
use layering::{Edge, Graph};

/// The workspace with all features on, for the platform that the project is for.
fn metadata() -> Metadata {
    MetadataCommand::new()
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml"))
        .features(cargo_metadata::CargoOpt::AllFeatures)
        .other_options(
            ["--locked", "--filter-platform", "x86_64-unknown-linux-gnu"].map(String::from),
        )
        .exec()
        .expect("cargo metadata of the workspace (is Cargo.lock up to date?)")
}

fn graph(metadata: &Metadata) -> Graph {
    let names: BTreeMap<_, _> =
        metadata.packages.iter().map(|package| (&package.id, package.name.as_str())).collect();
    let mut graph = Graph::default();
    for node in &metadata.resolve.as_ref().expect("a resolved graph").nodes {
        for dependency in &node.deps {
            for kind in &dependency.dep_kinds {
                let dev = kind.kind == DependencyKind::Development;
                let edge = if dev { Edge::Dev } else { Edge::Build };
                graph.add(names[&node.id], names[&dependency.pkg], edge);
            }
        }
    }
    graph
}

fn members(metadata: &Metadata) -> Vec<&Package> {
    metadata.workspace_packages()
}

fn names(metadata: &Metadata) -> BTreeSet<&str> {
    members(metadata).iter().map(|package| package.name.as_str()).collect()
}

/// The members in the folder `drivers/`.
fn drivers(metadata: &Metadata) -> BTreeSet<&str> {
    let folder = metadata.workspace_root.join("drivers");
    let drivers: BTreeSet<&str> = members(metadata)
        .iter()
        .filter(|package| package.manifest_path.starts_with(&folder))
        .map(|package| package.name.as_str())
        .collect();
    assert!(drivers.len() >= 4, "the drivers are not found: {drivers:?}");
    drivers
}

#[test]
fn the_contract_depends_on_std_alone() {
    let metadata = metadata();
    let packages = members(&metadata);
    let contract =
        packages.iter().find(|package| package.name == "drivers-api").expect("drivers-api");
    for dependency in &contract.dependencies {
        if dependency.kind == DependencyKind::Development {
            continue;
        }
        assert_eq!(dependency.name, "serde", "drivers-api depends on {}", dependency.name);
        assert!(dependency.optional, "drivers-api depends on serde without a feature");
    }
    let defaults = contract.features.get("default").map_or(&[][..], Vec::as_slice);
    assert!(defaults.is_empty(), "drivers-api has default features: {defaults:?}");
    let dev: BTreeSet<&str> = contract
        .dependencies
        .iter()
        .filter(|dependency| dependency.kind == DependencyKind::Development)
        .map(|dependency| dependency.name.as_str())
        .collect();
    let inside = names(&metadata);
    let reached: Vec<_> =
        dev.iter().filter(|name| inside.contains(*name) && **name != "drivers-api").collect();
    assert!(reached.is_empty(), "the tests of drivers-api depend on {reached:?}");
}

#[test]
fn drivers_never_reach_each_other_or_what_is_above_them() {
    let metadata = metadata();
    let (graph, drivers) = (graph(&metadata), drivers(&metadata));
    let above = ["reconciler", "node-agent", "bcx-adapter"];
    for driver in &drivers {
        let way = graph.way(driver, true, |name| drivers.contains(name) || above.contains(&name));
        assert_eq!(way, None, "a driver depends on drivers-api and shared helpers only");
    }
}

#[test]
fn the_reconciler_knows_the_contract_alone() {
    let metadata = metadata();
    let (graph, inside) = (graph(&metadata), names(&metadata));
    let way = graph.way("reconciler", false, |name| inside.contains(name) && name != "drivers-api");
    assert_eq!(way, None, "the reconciler depends on drivers-api only");
    let for_tests = ["drivers-api", "conformance"];
    let way =
        graph.way("reconciler", true, |name| inside.contains(name) && !for_tests.contains(&name));
    assert_eq!(way, None, "the reconciler's tests depend on drivers-api and conformance only");
}

#[test]
fn shared_helpers_and_the_kit_know_the_contract_alone() {
    let metadata = metadata();
    let (graph, inside) = (graph(&metadata), names(&metadata));
    for helper in ["host", "conformance"] {
        let way = graph.way(helper, true, |name| inside.contains(name) && name != "drivers-api");
        assert_eq!(way, None, "{helper} depends on drivers-api only");
    }
    let drivers = drivers(&metadata);
    let way = graph.way("testbed", true, |name| drivers.contains(name));
    assert_eq!(way, None, "real parts for tests depend on no driver");
}

#[test]
fn only_the_agent_and_the_adapter_reach_grpc() {
    let metadata = metadata();
    let graph = graph(&metadata);
    let is_grpc = |name: &str| name.starts_with("tonic") || name.starts_with("prost");
    let mut reached = false;
    for member in names(&metadata) {
        let way = graph.way(member, true, is_grpc);
        if member == "crash" {
            // A test that is the whole agent, which it kills.
            continue;
        }
        if matches!(member, "node-agent" | "bcx-adapter") {
            reached |= way.is_some();
        } else {
            assert_eq!(way, None, "only node-agent and bcx-adapter know gRPC");
        }
    }
    assert!(reached, "nobody reaches gRPC: this rule looks for the wrong names");
}

#[test]
fn every_member_inherits_lints_licence_edition_and_oldest_rust() {
    let metadata = metadata();
    for member in members(&metadata) {
        let text = std::fs::read_to_string(&member.manifest_path).expect("a manifest");
        let manifest: toml::Table = text.parse().expect("a manifest");
        let inherits = |path: [&str; 2]| {
            let table = manifest.get(path[0]).and_then(|value| value.as_table());
            let value = table.and_then(|table| table.get(path[1]));
            match path[0] {
                "lints" => value.and_then(toml::Value::as_bool) == Some(true),
                _ => {
                    value.and_then(|value| value.get("workspace")).and_then(toml::Value::as_bool)
                        == Some(true)
                }
            }
        };
        let name = &member.name;
        assert!(inherits(["lints", "workspace"]), "{name} has no [lints] workspace = true");
        for field in ["license", "edition", "rust-version", "version", "publish"] {
            assert!(inherits(["package", field]), "{name} has no {field}.workspace = true");
        }
        assert_eq!(member.license.as_deref(), Some("Apache-2.0"), "{name}");
        assert!(member.description.is_some(), "{name} has no description");
    }
}

#[test]
fn the_third_party_driver_depends_on_the_contract_and_async_trait_only() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/third-party-driver/Cargo.toml");
    let text = std::fs::read_to_string(path).expect("the example's manifest");
    let manifest: toml::Table = text.parse().expect("the example's manifest");
    let listed = |table: &str| -> BTreeSet<String> {
        let table = manifest.get(table).and_then(|value| value.as_table());
        table.into_iter().flat_map(|table| table.keys().cloned()).collect()
    };
    let set = |names: &[&str]| -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    };
    assert_eq!(listed("dependencies"), set(&["async-trait", "drivers-api"]));
    assert_eq!(listed("dev-dependencies"), set(&["conformance", "tokio"]));
    assert!(manifest.contains_key("workspace"), "the example is a workspace of its own");
}
