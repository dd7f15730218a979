//! What the tests of this driver share.

use std::{os::unix::fs::PermissionsExt, path::Path, time::Duration};

use driver_linux_bridge::{BridgeConfig, LinuxBridge};
use drivers_api::{
    Change, Context, EventKind, EventStream, HostId, Network, NetworkId, NetworkSpec, NetworkType,
    ObjectRef, PortId, PortSpec, VmId,
};
use tempfile::TempDir;
use testbed::netns::{Guest, tool};

pub(crate) const NODE: &str = "77777777-0000-4000-8000-000000000001";

/// A host of one test: its directories, and the driver on it.
pub(crate) struct Host {
    pub(crate) dir: TempDir,
    pub(crate) driver: LinuxBridge,
    pub(crate) cx: Context,
}

impl Host {
    pub(crate) fn new() -> Self {
        let dir = dir();
        let driver = open(dir.path());
        Self { dir, driver, cx: Context::new() }
    }

    /// The driver of an agent that was started anew.
    pub(crate) fn restart(&mut self) {
        self.driver = open(self.dir.path());
    }

    pub(crate) async fn network(&self, spec: &NetworkSpec) -> Change {
        self.driver.ensure_network(&self.cx, spec).await.unwrap()
    }

    pub(crate) async fn port(&self, spec: &PortSpec) -> Change {
        self.driver.attach_port(&self.cx, spec).await.unwrap().change
    }

    /// Makes the network, whatever was there.
    pub(crate) async fn has_network(&self, spec: &NetworkSpec) {
        self.driver.ensure_network(&self.cx, spec).await.map(drop_change).unwrap();
    }

    /// Attaches the port, whatever was there.
    pub(crate) async fn has_port(&self, spec: &PortSpec) {
        self.driver
            .attach_port(&self.cx, spec)
            .await
            .map(|outcome| drop_change(outcome.change))
            .unwrap();
    }

    pub(crate) async fn detach(&self, port: PortId) {
        self.driver.detach_port(&self.cx, port).await.map(drop_change).unwrap();
    }

    pub(crate) async fn destroy(&self, network: NetworkId) {
        self.driver.destroy_network(&self.cx, network).await.map(drop_change).unwrap();
    }

    pub(crate) async fn tap(&self, spec: &PortSpec) -> String {
        let nic = self.driver.attach_port(&self.cx, spec).await.unwrap().value;
        nic.device.as_str().to_owned()
    }

    /// A guest with the port's MAC address and its v4 address, not by DHCP.
    pub(crate) async fn guest(&self, spec: &PortSpec, gateway: Option<&str>) -> Guest {
        let tap = self.tap(spec).await;
        let guest = Guest::on_tap(&tap, &spec.mac.to_string()).unwrap();
        for address in &spec.addresses {
            let (length, gateway) = if address.is_ipv4() {
                (24, gateway.filter(|gateway| !gateway.contains(':')))
            } else {
                (64, None)
            };
            guest.address(&format!("{address}/{length}"), gateway);
        }
        guest
    }

    pub(crate) async fn is_healthy(&self, network: NetworkId) -> Result<(), String> {
        let status = self.driver.get(&self.cx, network).await.unwrap().unwrap();
        if status.healthy { Ok(()) } else { Err(status.messages.join("; ")) }
    }

    pub(crate) async fn is_port_healthy(&self, port: PortId) -> Result<(), String> {
        let status = self.driver.get_port(&self.cx, port).await.unwrap().unwrap();
        if status.healthy { Ok(()) } else { Err(status.messages.join("; ")) }
    }
}

/// A directory that everybody may pass, as under /run, so that dnsmasq can be its own user.
pub(crate) fn dir() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
    dir
}

/// For calls whose effect is what a test looks at.
fn drop_change(_: Change) {}

pub(crate) fn open(dir: &Path) -> LinuxBridge {
    LinuxBridge::open(config(dir)).unwrap()
}

pub(crate) fn config(dir: &Path) -> BridgeConfig {
    let node: HostId = NODE.parse().unwrap();
    BridgeConfig::new(node, "testhost", dir.join("state"), dir.join("run"))
}

/// The network 10.N.0.0/24 with gateway 10.N.0.1.
pub(crate) fn network(n: u8, network_type: NetworkType) -> NetworkSpec {
    let id: NetworkId = format!("11111111-2222-4333-8444-0000000000{n:02x}").parse().unwrap();
    let mut spec = NetworkSpec::new(id, format!("net{n}").parse().unwrap(), network_type);
    spec.cidr = Some(format!("10.{n}.0.0/24").parse().unwrap());
    spec.gateway = Some(format!("10.{n}.0.1").parse().unwrap());
    spec
}

/// The port 10.N.0.(M+10) of that network.
pub(crate) fn port(n: u8, m: u8) -> PortSpec {
    let id: PortId = format!("aaaaaaaa-bbbb-4ccc-8ddd-00000000{n:02x}{m:02x}").parse().unwrap();
    let vm: VmId = format!("3f2b8c1e-9a4d-4e6f-8b7a-00000000{n:02x}{m:02x}").parse().unwrap();
    let network = network(n, NetworkType::Nat).uuid;
    let mac = format!("52:54:00:00:{n:02x}:{m:02x}").parse().unwrap();
    let mut spec = PortSpec::new(id, vm, network, "net0".parse().unwrap(), mac);
    spec.addresses.push(format!("10.{n}.0.{}", m + 10).parse().unwrap());
    spec.hostname = Some(format!("guest{m}"));
    spec
}

/// The ruleset without handles and counters, one object a line.
pub(crate) fn ruleset() -> String {
    let text = tool(&["nft", "-j", "list", "ruleset"]);
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    strip(&mut value);
    let objects = value["nftables"].as_array().unwrap();
    // The order of chains is that of their making. That of rules is in their comments.
    let mut lines: Vec<String> = objects.iter().map(ToString::to_string).collect();
    lines.sort();
    lines.join("\n")
}

fn strip(value: &mut serde_json::Value) {
    use serde_json::Value::{Bool, Null, Number, String};
    match value {
        serde_json::Value::Object(fields) => {
            for key in ["handle", "packets", "bytes"] {
                fields.remove(key);
            }
            fields.values_mut().for_each(strip);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(strip),
        Null | Bool(_) | Number(_) | String(_) => {}
    }
}

/// What of the host the driver could leave behind.
pub(crate) fn census(dir: &Path) -> Vec<String> {
    let mut seen: Vec<String> = tool(&["ip", "-o", "link"])
        .lines()
        .map(|line| line.split(": ").nth(1).unwrap().to_owned())
        .collect();
    seen.push(ruleset());
    for name in
        ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding", "net/ipv6/conf/default/accept_ra"]
    {
        seen.push(std::fs::read_to_string(format!("/proc/sys/{name}")).unwrap());
    }
    let mut files = Vec::new();
    walk(dir, &mut files);
    files.sort();
    seen.extend(files);
    seen
}

fn walk(dir: &Path, files: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        files.push(path.display().to_string());
        if path.is_dir() {
            walk(&path, files);
        }
    }
}

/// Waits for an event about the object.
pub(crate) async fn event_about(events: &mut EventStream, object: ObjectRef) -> EventKind {
    let wait = async {
        loop {
            let event = events.next().await.unwrap();
            if event.object == Some(object) {
                return event.kind;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(5), wait).await.expect("an event within five seconds")
}

/// Takes what events there are until none comes for a moment.
pub(crate) async fn quiet(events: &mut EventStream) -> usize {
    let mut count = 0;
    while tokio::time::timeout(Duration::from_millis(400), events.next()).await.is_ok() {
        count += 1;
    }
    count
}
