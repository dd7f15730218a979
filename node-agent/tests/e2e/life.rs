//! An instance's life: made, kept, stopped, removed.

use std::{collections::BTreeMap, path::Path, time::Duration};

use serde_json::Value;
use testbed::netns::tool;

use crate::{
    manifests::hello,
    node::{Node, find, on_node},
};

/// All that the agent could write on a host: files with their times, links, rules.
fn host_state(node: &Node) -> BTreeMap<String, String> {
    let mut state = BTreeMap::new();
    for below in ["volumes", "images", "state"] {
        walk(&node.path(below), &mut state);
    }
    state.insert("links".to_owned(), tool(&["ip", "address"]));
    state.insert("rules".to_owned(), tool(&["nft", "-j", "list", "ruleset"]));
    // The store's own log of writes and the guest's console are no writes of drivers, and a lock's file names its holder.
    let own = |path: &str| {
        ["-wal", "-shm", "serial.log", "/lock", ".lock"].iter().any(|end| path.ends_with(end))
    };
    state.retain(|path, _| !own(path));
    state
}

/// Fails with what differs.
fn unwritten(before: &BTreeMap<String, String>, node: &Node, what: &str) {
    let after = without_counters(host_state(node));
    let of = |state: &BTreeMap<String, String>, key: &String| state.get(key).cloned();
    let changed: Vec<_> = before
        .keys()
        .chain(after.keys())
        .filter(|key| of(before, key) != of(&after, key))
        .map(|key| (key, of(before, key), of(&after, key)))
        .collect();
    assert!(changed.is_empty(), "{what} writes nothing to the host: {changed:#?}");
}

fn walk(path: &Path, state: &mut BTreeMap<String, String>) {
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        let found = entry.metadata().unwrap();
        if found.is_dir() {
            walk(&entry.path(), state);
        } else if !entry.path().starts_with(path.join("volumes")) {
            state.insert(
                entry.path().display().to_string(),
                format!("{:?} {}", found.modified().unwrap(), found.len()),
            );
        }
    }
}

/// Rules without what changes by traffic alone.
fn without_counters(mut state: BTreeMap<String, String>) -> BTreeMap<String, String> {
    if let Some(rules) = state.get_mut("rules") {
        let mut value: Value = serde_json::from_str(rules).unwrap();
        strip(&mut value);
        *rules = value.to_string();
    }
    // A guest writes its own disk.
    state.retain(|path, _| !path.contains("/volumes/"));
    state
}

fn strip(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|key, _| !matches!(key.as_str(), "packets" | "bytes" | "handle"));
            map.values_mut().for_each(strip);
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[test]
fn hello_answers_over_its_bridge_and_a_second_apply_changes_nothing() {
    on_node(|node| async move {
        let manifest = hello(&node.registry());
        node.apply(&manifest).await;
        assert_eq!(node.phase("instance", "hello").await, "Ready");
        let info = node.guest(node.address("hello").await, |info| info["boots"] == 1).await;
        assert_eq!(info["hostname"], "hello", "the NoCloud seed is read: {info}");
        assert!(find(&info, "user_data").unwrap().as_str().unwrap().starts_with("#cloud-config"));

        let before = without_counters(host_state(&node));
        let plan = node.bcd_with(&["plan", "-f", "-"], &manifest).await;
        assert_eq!(plan.code, 0, "nothing to do: {plan:?}");
        node.apply(&manifest).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        unwritten(&before, &node, "a second apply");
    });
}

#[test]
fn a_killed_agent_leaves_the_vm_alone_and_the_next_one_adopts_it() {
    on_node(|mut node| async move {
        node.apply(&hello(&node.registry())).await;
        let address = node.address("hello").await;
        let before = node.guest(address, |info| info["boots"] == 1).await;
        let pid = node.pid("hello").await;
        let state = without_counters(host_state(&node));

        node.kill_agent().await;
        assert!(Path::new(&format!("/proc/{pid}")).exists(), "QEMU outlives the agent");
        node.guest(address, |info| info["boot_id"] == before["boot_id"]).await;
        node.start_agent().await;
        let settle = || async { node.phase("instance", "hello").await == "Ready" };
        node.until("adopted", Duration::from_secs(20), settle).await;

        assert_eq!(node.pid("hello").await, pid, "the same QEMU");
        let after = node.guest(address, |_| true).await;
        assert_eq!(after["boot_id"], before["boot_id"], "the guest was not restarted");
        let uptime = |info: &Value| info["uptime_seconds"].as_f64().unwrap();
        assert!(uptime(&after) > uptime(&before), "uptime goes on");
        unwritten(&state, &node, "adoption");
    });
}

#[test]
fn stop_start_and_reboot_do_what_they_say() {
    on_node(|node| async move {
        node.apply(&hello(&node.registry())).await;
        let address = node.address("hello").await;
        let first = node.guest(address, |info| info["boots"] == 1).await;

        node.ok(&["reboot", "hello"]).await;
        let second = node.guest(address, |info| info["boot_id"] != first["boot_id"]).await;
        node.ok(&["stop", "hello"]).await;
        let state = |wanted: &'static str| {
            let node = &node;
            move || async move { node.observed("instance", "hello").await["state"] == wanted }
        };
        node.until("stopped", Duration::from_secs(60), state("stopped")).await;
        node.ok(&["start", "hello"]).await;
        let third = node.guest(address, |info| info["boot_id"] != second["boot_id"]).await;
        assert_ne!(third["boot_id"], first["boot_id"]);
        let log = node.ok(&["logs", "hello"]).await;
        assert!(log.contains("READY: hello"), "the serial log is kept over restarts: {log}");
    });
}

#[test]
fn a_deletion_wins_in_every_state() {
    on_node(|node| async move {
        // What never was, and twice.
        for _ in 0..2 {
            assert_eq!(node.bcd(&["delete", "instance", "never"]).await.code, 0);
        }
        let manifest = hello(&node.registry());
        // While it is being made, and at once again under the same name.
        node.submit(&manifest).await;
        node.ok(&["delete", "instance", "hello"]).await;
        node.apply(&manifest).await;
        assert_eq!(node.phase("instance", "hello").await, "Ready");
        // Twice, waiting the second time.
        node.ok(&["delete", "instance", "hello"]).await;
        node.ok(&["delete", "instance", "hello", "--wait"]).await;
        // Everything, by file.
        node.submit(&manifest).await;
        let gone = node.bcd_with(&["delete", "-f", "-", "--wait"], &manifest).await;
        assert_eq!(gone.code, 0, "{gone:?}\n{}", node.agent_log());
        let links = tool(&["ip", "-o", "link"]);
        assert_eq!(links.lines().count(), 1, "only lo is left: {links}");
        assert_eq!(tool(&["nft", "list", "ruleset"]), "", "no rule is left");
        assert_eq!(
            std::fs::read_dir(node.path("volumes")).unwrap().filter(|entry| !hidden(entry)).count(),
            0
        );
    });
}

fn hidden(entry: &std::io::Result<std::fs::DirEntry>) -> bool {
    // Lock files stay: a removed lock is no lock.
    entry.as_ref().is_ok_and(|entry| {
        entry.file_type().is_ok_and(|kind| kind.is_file())
            || std::fs::read_dir(entry.path()).is_ok_and(|mut entries| entries.next().is_none())
    })
}

#[test]
fn a_uki_boots_under_uefi_firmware_and_so_does_a_disk() {
    on_node(|node| async move {
        let registry = node.registry();
        let manifest = format!(
            "\
api_version: bcd/v1
kind: Image
name: uki
spec: {{ref: {registry}/guest-uki:latest}}
---
api_version: bcd/v1
kind: Image
name: boot
spec: {{ref: {registry}/boot:latest}}
---
api_version: bcd/v1
kind: Network
name: lan
spec: {{type: nat, cidr: 10.77.0.0/24}}
---
api_version: bcd/v1
kind: Instance
name: by-uki
spec:
  cpus: 1
  memory_mib: 256
  boot: {{kind: uki, ref: uki}}
  nics: [{{name: lan, network: lan}}]
---
api_version: bcd/v1
kind: Volume
name: root
spec: {{size_gib: 1, source: {{image: boot}}}}
---
api_version: bcd/v1
kind: Instance
name: by-disk
spec:
  cpus: 1
  memory_mib: 256
  boot: {{kind: firmware}}
  disks: [{{name: root, volume: root, boot: true}}]
  nics: [{{name: lan, network: lan}}]
"
        );
        node.apply(&manifest).await;
        for name in ["by-uki", "by-disk"] {
            let info = node.guest(node.address(name).await, |_| true).await;
            assert_eq!(info["firmware"], "uefi", "{name}: {info}");
        }
        // The base of the clone is not the cache's: the image may go.
        let gone = node.bcd_with(&["delete", "-f", "-", "--wait"], &manifest).await;
        assert_eq!(gone.code, 0, "{gone:?}");
    });
}
