//! Changes of a running instance, seen from inside the guest.

use serde_json::Value;

use crate::{
    manifests::{EXTRA_NONE, Extra, hello, instance},
    node::on_node,
};

const MORE: &str = "\
api_version: bcd/v1
kind: Volume
name: second
spec: {size_gib: 2, format: raw}
---
api_version: bcd/v1
kind: Network
name: side
spec: {type: isolated, cidr: 10.78.0.0/24}
---
";

fn disks(info: &Value) -> Vec<u64> {
    let mut sizes: Vec<u64> = info["disks"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|disk| disk["read_only"] == false)
        .map(|disk| disk["size_bytes"].as_u64().unwrap() >> 30)
        .collect();
    sizes.sort_unstable();
    sizes
}

fn nics(info: &Value) -> usize {
    info["nics"].as_array().unwrap().len()
}

#[test]
fn disks_and_nics_come_and_go_while_the_guest_runs() {
    on_node(|node| async move {
        node.apply(&hello(&node.registry())).await;
        let address = node.address("hello").await;
        let before = node.guest(address, |info| info["boots"] == 1).await;
        assert_eq!((disks(&before), nics(&before)), (vec![1], 1));

        let more = Extra {
            disks: "    - {name: second, volume: second}\n",
            nics: "    - {name: side, network: side, ip: 10.78.0.9}\n",
            more: "",
        };
        node.apply(&format!("{MORE}{}", instance("hello", more))).await;
        let both = |info: &Value| {
            disks(info) == [1, 2] && nics(info) == 2 && info.to_string().contains("10.78.0.9")
        };
        let with = node.guest(address, both).await;
        assert_eq!(with["boot_id"], before["boot_id"], "without a restart");

        node.apply(&instance("hello", EXTRA_NONE)).await;
        let without = node.guest(address, |info| disks(info) == [1] && nics(info) == 1).await;
        assert_eq!(without["boot_id"], before["boot_id"], "without a restart");
        // Released: the volume and the network can go.
        for (kind, name) in [("volume", "second"), ("network", "side")] {
            node.ok(&["delete", kind, name, "--wait"]).await;
        }
    });
}

#[test]
fn a_volume_grows_under_a_running_guest_and_never_shrinks() {
    on_node(|node| async move {
        node.apply(&hello(&node.registry())).await;
        let address = node.address("hello").await;
        let before = node.guest(address, |info| info["boots"] == 1).await;
        let volume = |gib: u32| {
            format!(
                "api_version: bcd/v1\nkind: Volume\nname: data\nspec: {{size_gib: {gib}, format: qcow2}}\n"
            )
        };
        node.apply(&volume(3)).await;
        let grown = node.guest(address, |info| disks(info) == [3]).await;
        assert_eq!(grown["boot_id"], before["boot_id"], "without a restart");

        let refused = node.bcd_with(&["apply", "-f", "-"], &volume(2)).await;
        assert_ne!(refused.code, 0, "a shrink is refused: {refused:?}");
        assert!(refused.err.contains("size_gib"), "with the field: {}", refused.err);
        assert_eq!(node.phase("volume", "data").await, "Ready");
    });
}

#[test]
fn what_only_a_restart_applies_is_reported_and_nothing_is_restarted() {
    on_node(|node| async move {
        node.apply(&hello(&node.registry())).await;
        let pid = node.pid("hello").await;
        let changed = instance("hello", EXTRA_NONE).replace("cpus: 1", "cpus: 2");
        node.submit(&changed).await;
        let told = || async { node.phase("instance", "hello").await == "RestartNeeded" };
        node.until("restart needed", std::time::Duration::from_secs(20), told).await;
        assert_eq!(node.pid("hello").await, pid);
        let text = node.ok(&["describe", "instance", "hello"]).await;
        assert!(text.contains("restart"), "{text}");
        node.ok(&["stop", "hello", "--wait"]).await;
        node.ok(&["start", "hello"]).await;
        let address = node.address("hello").await;
        node.guest(address, |info| info["cpus"] == 2).await;
    });
}
