//! Our rules beside those of others.

use drivers_api::{Change, ErrorKind, Network, NetworkType};
use testbed::netns::{in_netns, tool};

use crate::common::{Host, network, port, quiet, ruleset};

#[test]
fn a_hundred_passes_and_ten_restarts_leave_the_rules_and_write_nothing() {
    in_netns(|| async {
        let mut host = Host::new();
        let net = network(1, NetworkType::Nat);
        host.has_network(&net).await;
        let ports: Vec<_> = (1..=5).map(|m| port(1, m)).collect();
        for port in &ports {
            host.has_port(port).await;
        }
        let before = ruleset();
        let mut events = host.driver.events().unwrap();
        quiet(&mut events).await;
        let mut monitor = Monitor::start();
        for round in 0..100 {
            if round % 10 == 0 {
                host.restart();
            }
            assert_eq!(host.network(&net).await, Change::Unchanged, "round {round}");
            for port in &ports {
                assert_eq!(host.port(port).await, Change::Unchanged, "round {round}");
            }
        }
        assert_eq!(monitor.seen(), "", "no change of links, addresses or rules was notified");
        assert_eq!(ruleset(), before);
    });
}

/// `ip monitor` and `nft monitor` at once.
struct Monitor {
    children: Vec<(std::process::Child, std::path::PathBuf)>,
    /// Removed at the end.
    _dir: tempfile::TempDir,
}

impl Monitor {
    #[expect(clippy::disallowed_methods, reason = "a test's own tool needs no command runner")]
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut children = Vec::new();
        for (name, argv) in [("ip", &["monitor", "link", "address"][..]), ("nft", &["monitor"])] {
            let path = dir.path().join(name);
            let out = std::fs::File::create(&path).unwrap();
            let child = std::process::Command::new(name).args(argv).stdout(out).spawn().unwrap();
            children.push((child, path));
        }
        let this = Self { children, _dir: dir };
        // Each monitor is known to listen when it has shown a change of ours.
        for _ in 0..100 {
            tool(&["nft", "add", "table", "ip", "probe"]);
            tool(&["nft", "delete", "table", "ip", "probe"]);
            tool(&["ip", "link", "add", "probe", "type", "bridge"]);
            tool(&["ip", "link", "del", "probe"]);
            if this
                .children
                .iter()
                .all(|(_, path)| std::fs::read_to_string(path).unwrap().contains("probe"))
            {
                return this;
            }
        }
        panic!("the monitors show nothing");
    }

    fn seen(&mut self) -> String {
        // A last change that both show: all before it was shown.
        tool(&["nft", "add", "table", "ip", "last"]);
        tool(&["ip", "link", "add", "last", "type", "bridge"]);
        let mut text = String::new();
        for (child, path) in &mut self.children {
            let mut shown = String::new();
            for _ in 0..100_000 {
                shown = std::fs::read_to_string(&*path).unwrap();
                if shown.contains("last") {
                    break;
                }
                std::thread::yield_now();
            }
            child.kill().unwrap();
            child.wait().unwrap();
            let ours = shown.lines().filter(|line| {
                !line.contains("probe")
                    && !line.contains("last")
                    && !line.contains("new generation")
                    && !line.trim_start().starts_with("link/ether")
            });
            text.extend(ours.map(|line| format!("{line}\n")));
        }
        tool(&["nft", "delete", "table", "ip", "last"]);
        tool(&["ip", "link", "del", "last"]);
        text
    }
}

#[test]
fn the_rules_of_others_are_never_touched() {
    in_netns(|| async {
        let host = Host::new();
        tool(&[
            "nft",
            "add table inet filter; add chain inet filter input { type filter hook input priority 0; }; add rule inet filter input tcp dport 22 accept",
        ]);
        tool(&[
            "nft",
            "add table ip nat; add map ip nat m { type ifname : verdict; elements = { \"lo\" : accept }; }",
        ]);
        let before = ruleset();
        let (net, one) = (network(1, NetworkType::Nat), port(1, 1));
        host.has_network(&net).await;
        host.has_port(&one).await;
        let with = ruleset();
        assert_ne!(with, before);
        tool(&["nft", "add", "rule", "inet", "filter", "input", "tcp", "dport", "23", "accept"]);
        assert_eq!(host.port(&one).await, Change::Unchanged);
        host.is_healthy(net.uuid).await.unwrap();
        host.detach(one.uuid).await;
        host.destroy(net.uuid).await;
        let listing = tool(&["nft", "-a", "list", "chain", "inet", "filter", "input"]);
        let handle = listing
            .lines()
            .find(|line| line.contains("dport 23"))
            .unwrap()
            .rsplit(' ')
            .next()
            .unwrap();
        tool(&["nft", "delete", "rule", "inet", "filter", "input", "handle", handle]);
        assert_eq!(ruleset(), before);
    });
}

#[test]
fn a_table_of_our_name_that_is_not_ours_is_a_conflict_and_stays() {
    in_netns(|| async {
        let host = Host::new();
        tool(&[
            "nft",
            "add table inet bcd; add chain inet bcd forward { type filter hook forward priority 0; policy drop; }",
        ]);
        let before = ruleset();
        let error =
            host.driver.ensure_network(&host.cx, &network(1, NetworkType::Nat)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
        assert!(error.to_string().contains("inet bcd"), "{error}");
        assert_eq!(ruleset(), before);
        host.driver.destroy_network(&host.cx, network(1, NetworkType::Nat).uuid).await.unwrap_err();
        assert_eq!(ruleset(), before);
        tool(&["nft", "delete", "table", "inet", "bcd"]);
        assert_eq!(
            host.driver.destroy_network(&host.cx, network(1, NetworkType::Nat).uuid).await.unwrap(),
            Change::Changed
        );
        assert_eq!(ruleset().matches("table").count(), 0);
    });
}

#[test]
fn a_foreign_forward_policy_that_drops_is_named_and_the_message_goes_with_it() {
    in_netns(|| async {
        let host = Host::new();
        let net = network(1, NetworkType::Nat);
        host.has_network(&net).await;
        let messages =
            || async { host.driver.get(&host.cx, net.uuid).await.unwrap().unwrap().messages };
        assert_eq!(messages().await, Vec::<String>::new());
        for family in ["ip", "ip6"] {
            tool(&[
                "nft",
                &format!(
                    "add table {family} filter; add chain {family} filter FORWARD {{ type filter hook forward priority 0; policy drop; }}"
                ),
            ]);
            let seen = messages().await;
            assert_eq!(seen.len(), 1, "{seen:?}");
            for part in [&format!("table {family} filter"), "FORWARD", "bridge-nf-call-iptables"] {
                assert!(seen[0].contains(part), "{part} in {seen:?}");
            }
            tool(&["nft", &format!("chain {family} filter FORWARD {{ policy accept; }}")]);
            assert_eq!(messages().await, Vec::<String>::new());
        }
        assert!(
            tool(&["nft", "list", "ruleset"]).contains("chain FORWARD"),
            "the foreign chain is left as it is"
        );
    });
}

#[test]
fn two_hundred_ports_at_once_need_few_commits_and_each_is_whole() {
    in_netns(|| async {
        let host = Host::new();
        let net = network(1, NetworkType::Nat);
        host.has_network(&net).await;
        let ports: Vec<_> = (1..=200).map(|m| port(1, m)).collect();
        let calls = ports.iter().map(|port| host.port(port));
        let begun = tokio::time::Instant::now();
        let changes = futures_util::future::join_all(calls).await;
        let took = begun.elapsed();
        assert!(changes.iter().all(|change| *change == Change::Created));
        let statuses = host.driver.list_ports(&host.cx).await.unwrap();
        assert_eq!(statuses.len(), 200);
        for status in statuses {
            assert!(status.healthy, "{:?}", status.messages);
        }
        assert!(took < std::time::Duration::from_secs(20), "{took:?}");
        let gone = ports.iter().map(|port| host.driver.detach_port(&host.cx, port.uuid));
        for change in futures_util::future::join_all(gone).await {
            assert_eq!(change.unwrap(), Change::Changed);
        }
        assert!(
            !tool(&["nft", "list", "table", "bridge", "bcd"]).contains("bcdt")
                || !tool(&["nft", "list", "map", "bridge", "bcd", "spoof"]).contains("goto")
        );
    });
}
