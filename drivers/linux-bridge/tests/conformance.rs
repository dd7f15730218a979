//! The driver contract, over a nat, an isolated and a bridged network in a network namespace of its own.

#![cfg(test)]

#[path = "host/common.rs"]
#[expect(dead_code, reason = "this file uses a part of it")]
mod common;

use std::sync::Arc;

use conformance::{Census, NetworkBench, Options, Plant, async_trait};
use drivers_api::{
    HostId, IfName, Network, NetworkId, NetworkSpec, NetworkType, PortSpec, Result, VmId,
};
use tempfile::TempDir;
use testbed::netns::{Netns, in_netns, tool, try_tool};

/// A namespace, the directories of an agent, and one type of network.
struct Bench {
    dir: TempDir,
    network_type: NetworkType,
}

const UPLINK: &str = "lan0";

fn uuid(kind: &str, n: u32) -> String {
    format!("{kind}0000000-0000-4000-8000-{n:012x}")
}

fn bridge(network: NetworkId) -> String {
    IfName::derived("bcdb", network.uuid()).unwrap().to_string()
}

fn tap(port: &PortSpec) -> String {
    IfName::derived("bcdt", port.uuid.uuid()).unwrap().to_string()
}

#[async_trait]
impl NetworkBench for Bench {
    fn node(&self) -> HostId {
        common::NODE.parse().unwrap()
    }

    async fn open(&self) -> Result<Arc<dyn Network>> {
        let driver = driver_linux_bridge::LinuxBridge::open(common::config(self.dir.path()))?;
        Ok(Arc::new(driver))
    }

    async fn network(&self, n: u32) -> NetworkSpec {
        let id: NetworkId = uuid("1", n).parse().unwrap();
        let mut spec = NetworkSpec::new(id, format!("net{n}").parse().unwrap(), self.network_type);
        let (high, low) = (n / 200, n % 200);
        spec.cidr = Some(format!("10.{}.{low}.0/24", high + 50).parse().unwrap());
        if self.network_type == NetworkType::Bridged {
            spec.uplink = Some(UPLINK.parse().unwrap());
        } else {
            spec.gateway = Some(format!("10.{}.{low}.1", high + 50).parse().unwrap());
        }
        spec
    }

    async fn port(&self, network: &NetworkSpec, n: u32) -> PortSpec {
        let of = network.uuid.uuid().as_bytes()[15];
        let vm: VmId = uuid("3", n + u32::from(of) * 1000).parse().unwrap();
        let id = uuid("a", n + u32::from(of) * 1000).parse().unwrap();
        let [high, low] = u16::try_from(n).unwrap().to_be_bytes();
        let mac = format!("52:54:00:{of:02x}:{high:02x}:{low:02x}").parse().unwrap();
        let mut spec = PortSpec::new(id, vm, network.uuid, "net0".parse().unwrap(), mac);
        let range = network.cidr.unwrap();
        if let Some(address) =
            range.nth(u128::from(n) + 10).filter(|one| range.is_host_address(*one))
        {
            spec.addresses.push(address);
        }
        spec.hostname = Some(format!("guest{n}"));
        spec
    }

    async fn plant_foreign_network(&self, network: &NetworkSpec) -> Plant {
        if self.network_type == NetworkType::Bridged {
            return Plant::not_tried("a bridged network has no device of its own");
        }
        tool(&["ip", "link", "add", &bridge(network.uuid), "type", "bridge"]);
        Plant::Done
    }

    async fn plant_foreign_port(&self, port: &PortSpec) -> Plant {
        tool(&["ip", "tuntap", "add", &tap(port), "mode", "tap"]);
        Plant::Done
    }

    async fn fingerprint_foreign(&self) -> String {
        let links = tool(&["ip", "-d", "-o", "link"]);
        let foreign = |line: &&str| line.contains(": bcd") && !line.contains("bcd-node:");
        // Timers of a bridge run on.
        let stable = |line: &str| {
            line.split(' ').filter(|word| !word.contains('.')).collect::<Vec<_>>().join(" ")
        };
        links.lines().filter(foreign).map(stable).collect()
    }

    async fn remove_foreign(&self) {
        for line in tool(&["ip", "-o", "link"]).lines().filter(|line| line.contains(": bcd")) {
            let name = line.split(": ").nth(1).unwrap();
            if !line.contains("bcd-node:") {
                tool(&["ip", "link", "del", name]);
            }
        }
    }

    fn network_parts(&self) -> Vec<&'static str> {
        if self.network_type == NetworkType::Bridged {
            return vec!["rules"];
        }
        vec!["bridge", "address", "rules", "one table", "dhcp", "run files"]
    }

    async fn remove_network_part(&self, network: &NetworkSpec, part: &str) -> Plant {
        let name = bridge(network.uuid);
        let run = self.dir.path().join("run").join(network.uuid.to_string());
        match part {
            "bridge" => tool(&["ip", "link", "del", &name]),
            "address" => tool(&["ip", "addr", "flush", "dev", &name, "scope", "global"]),
            "rules" => tool(&["nft", "flush", "ruleset"]),
            "one table" => tool(&["nft", "delete", "table", "inet", "bcd"]),
            "dhcp" => {
                let pid = std::fs::read_to_string(run.join("pid")).unwrap();
                tool(&["kill", "-9", pid.trim()]);
                // A signal is sent before it has done its work.
                let stat = format!("/proc/{}/stat", pid.trim());
                while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z")) {
                    tokio::task::yield_now().await;
                }
                String::new()
            }
            "run files" => tool(&["rm", "-r", run.to_str().unwrap()]),
            other => panic!("no part {other}"),
        };
        Plant::Done
    }

    fn port_parts(&self) -> Vec<&'static str> {
        vec!["tap", "membership", "rules", "alias"]
    }

    async fn remove_port_part(&self, port: &PortSpec, part: &str) -> Plant {
        let name = tap(port);
        match part {
            "tap" => tool(&["ip", "link", "del", &name]),
            "membership" => tool(&["ip", "link", "set", &name, "nomaster"]),
            "rules" => {
                tool(&["nft", "flush", "chain", "bridge", "bcd", &format!("{name}.ingress")])
            }
            "alias" => tool(&["ip", "link", "set", &name, "alias", ""]),
            other => panic!("no part {other}"),
        };
        Plant::Done
    }

    async fn break_backend(&self) -> Plant {
        std::fs::rename(self.dir.path().join("state"), self.dir.path().join("away")).unwrap();
        Plant::Done
    }

    async fn mend(&self) {
        std::fs::rename(self.dir.path().join("away"), self.dir.path().join("state")).unwrap();
    }

    async fn census(&self) -> Census {
        let mut census = Census::new();
        let links = tool(&["ip", "-o", "link"]);
        census
            .extend("links", links.lines().map(|line| line.split(": ").nth(1).unwrap().to_owned()));
        let addresses = tool(&["ip", "-o", "addr"]);
        census.extend(
            "addresses",
            addresses
                .lines()
                .map(|line| line.split_whitespace().skip(1).take(3).collect::<Vec<_>>().join(" ")),
        );
        census.extend("rules", common::ruleset().lines());
        census.extend("processes", Netns::current().unwrap().pids().unwrap());
        for name in ["net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"] {
            census.add("sysctls", tool(&["sysctl", name]));
        }
        census.add_tree("files", self.dir.path()).unwrap();
        census
    }
}

#[test]
fn the_driver_keeps_the_contract_with_every_type_of_network() {
    in_netns(|| async {
        assert!(try_tool(&["ip", "-V"]).status.success());
        tool(&["ip", "link", "add", UPLINK, "type", "bridge", "forward_delay", "0"]);
        tool(&["ip", "link", "set", UPLINK, "up"]);
        for network_type in [NetworkType::Nat, NetworkType::Isolated, NetworkType::Bridged] {
            let bench = Bench { dir: common::dir(), network_type };
            // The directories of the driver are there before the first census.
            drop(bench.open().await.unwrap());
            let report = conformance::check_network(&bench, &Options::default()).await;
            report.assert_passed();
        }
    });
}
