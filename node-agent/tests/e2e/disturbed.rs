//! A host that somebody disturbs: processes killed, links and rules removed, a monitor that is silent.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use testbed::netns::{tool, try_tool};

use crate::{
    manifests::hello,
    node::{Node, on_node},
};

/// How soon drift is mended: an event says so, and the mending itself takes milliseconds.
const SOON: Duration = Duration::from_secs(5);

fn signal(pid: u64, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// The names of links that start with a prefix of the agent's.
fn links() -> Vec<String> {
    let text = tool(&["ip", "-o", "link"]);
    let name = |line: &str| {
        line.split(": ").nth(1).map(|name| name.split('@').next().unwrap_or(name).to_owned())
    };
    let mut names: Vec<String> =
        text.lines().filter_map(name).filter(|name| name != "lo").collect();
    names.sort();
    names
}

fn rules() -> usize {
    tool(&["nft", "list", "ruleset"]).lines().count()
}

fn dnsmasq_pids() -> Vec<u64> {
    let mut pids = Vec::new();
    let mine = std::fs::read_link("/proc/thread-self/ns/net").unwrap();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let comm = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if comm.trim() == "dnsmasq"
            && std::fs::read_link(entry.path().join("ns/net")).is_ok_and(|ns| ns == mine)
        {
            pids.push(pid);
        }
    }
    pids
}

async fn ready(node: &Node) -> bool {
    node.phase("instance", "hello").await == "Ready"
        && node.phase("network", "lan").await == "Ready"
}

#[test]
fn a_killed_qemu_is_started_again_by_policy() {
    on_node(|node| async move {
        node.apply(&hello(&node.registry())).await;
        let pid = node.pid("hello").await;
        signal(pid, Signal::KILL);
        let again = || async {
            let observed = node.observed("instance", "hello").await;
            observed["pid"].as_u64().is_some_and(|new| new != pid) && observed["state"] == "running"
        };
        node.until("a new QEMU", SOON, again).await;
        node.guest(node.address("hello").await, |_| true).await;
    });
}

#[test]
fn what_is_removed_by_hand_is_put_back() {
    on_node(|node| async move {
        node.apply(&hello(&node.registry())).await;
        let address = node.address("hello").await;
        let info = node.guest(address, |info| info["boots"] == 1).await;
        let (all_links, all_rules) = (links(), rules());
        assert_eq!(all_links.len(), 2, "a bridge and a tap: {all_links:?}");
        let whole = || async {
            links() == all_links
                && rules() == all_rules
                && dnsmasq_pids().len() == 1
                && ready(&node).await
        };
        assert!(whole().await);

        tool(&["nft", "flush", "ruleset"]);
        node.until("the rules are back", SOON, whole).await;
        for table in ["inet", "bridge"] {
            for line in tool(&["nft", "list", "tables", table]).lines() {
                let mut words = vec!["nft", "delete"];
                words.extend(line.split_whitespace());
                try_tool(&words);
                node.until("a table is back", SOON, whole).await;
            }
        }
        for pid in dnsmasq_pids() {
            signal(pid, Signal::KILL);
        }
        node.until("DHCP is back", SOON, || async {
            dnsmasq_pids().len() == 1 && ready(&node).await
        })
        .await;
        let after = node.guest(address, |_| true).await;
        assert_eq!(after["boot_id"], info["boot_id"], "mended without a restart");

        let bridge = tool(&["ip", "-o", "link", "show", "type", "bridge"]);
        let bridge = bridge.split(": ").nth(1).unwrap().to_owned();
        tool(&["ip", "link", "delete", &bridge]);
        node.until("the bridge is back with its tap", SOON, whole).await;
        let after = node.guest(address, |_| true).await;
        assert_eq!(after["boot_id"], info["boot_id"], "mended without a restart");

        let tap = all_links.iter().find(|name| **name != bridge).unwrap();
        tool(&["ip", "link", "delete", tap]);
        node.until("the tap is back", SOON, || async { links() == all_links }).await;
        // The VMM held the old tap: the guest reaches the new one after its NIC was plugged anew or a restart.
        node.until("the instance is ready", Duration::from_secs(60), || ready(&node)).await;
        node.guest(address, |_| true).await;
    });
}

#[test]
fn a_silent_monitor_harms_only_its_vm() {
    on_node(|mut node| async move {
        node.apply(&hello(&node.registry())).await;
        let pid = node.pid("hello").await;
        signal(pid, Signal::STOP);
        // An agent that starts beside a silent VM neither hangs nor starts a second one.
        node.kill_agent().await;
        node.start_agent().await;
        let unknown = || async { node.observed("instance", "hello").await["state"] == "unknown" };
        node.until("the state is unknown", Duration::from_secs(20), unknown).await;
        let describe = node.ok(&["describe", "instance", "hello"]).await;
        assert!(describe.contains(&pid.to_string()), "the message names the process: {describe}");
        assert_eq!(node.pid("hello").await, pid);
        // Others go on.
        let volume = "api_version: bcd/v1\nkind: Volume\nname: other\nspec: {size_gib: 1}\n";
        node.apply(volume).await;
        signal(pid, Signal::CONT);
        node.until("it is ready again", Duration::from_secs(30), || ready(&node)).await;
        assert_eq!(node.pid("hello").await, pid, "nothing was restarted");
        // A VMM that is stopped for ever does not outlive a delete.
        signal(pid, Signal::STOP);
        node.ok(&["delete", "instance", "hello", "--wait"]).await;
        assert!(
            !std::path::Path::new(&format!("/proc/{pid}/exe")).exists() || zombie(pid),
            "QEMU is gone"
        );
    });
}

fn zombie(pid: u64) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "))
}
