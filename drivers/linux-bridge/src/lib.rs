//! The network driver of a Linux host: networks are bridges, ports are taps, rules are nftables, addresses come from dnsmasq.
//!
//! Serves [`NetworkType::Nat`](drivers_api::NetworkType::Nat), [`Isolated`](drivers_api::NetworkType::Isolated) and
//! [`Bridged`](drivers_api::NetworkType::Bridged). [`LinuxBridge`] implements [`drivers_api::Network`].
//!
//! # What is on the host, and whose it is
//!
//! | part | where | mark |
//! |---|---|---|
//! | record of a network or port | `STATE_DIR/networks`, `STATE_DIR/ports` | node, UUID and spec as applied |
//! | bridge, tap | links `bcdb…`, `bcdt…` | alias `bcd-node:NODE:KIND:UUID` |
//! | rules | tables `bridge bcd`, `inet bcd` | a chain named after the node |
//! | DHCP, RA, DNS | one dnsmasq a network, files in `RUN_DIR/NETWORK` | the path of its configuration |
//! | forwarding switches | `/proc/sys/net` | `STATE_DIR/sysctls.json`: what they were |
//!
//! A record is written before the first effect and removed after the last, so every half-made state has one. Making goes:
//! record, rules, device, addresses, DHCP; a port's link comes up last. Removing goes the other way.
//!
//! # How a call runs
//!
//! A changing call runs as a task of its own under the object's lock. When its caller gives up, the task still ends what it
//! has begun; the next call for the object waits for it. Only the end of the process cuts it, and the record tells the next
//! process. The driver needs a Tokio runtime with IO and time, in the network namespace in which it is to work.

mod config;
mod dnsmasq;
mod driver;
mod error;
mod forwarding;
mod locks;
mod names;
mod netlink;
mod network;
mod nft;
mod plan;
mod port;
mod records;
mod serve;
mod status;
mod sysctl;
mod validate;
mod watch;

pub use config::BridgeConfig;
pub use driver::LinuxBridge;
pub use nft::Mode as FirewallMode;

/// The places at which a test can kill the process or inject an error (`host::fault`).
pub const FAULT_POINTS: &[&str] = &[
    "linux-bridge.network.recorded",
    "linux-bridge.network.ruled",
    "linux-bridge.bridge.made",
    "linux-bridge.bridge.marked",
    "linux-bridge.network.addressed",
    "linux-bridge.network.switched",
    "linux-bridge.dnsmasq.spawned",
    "linux-bridge.dnsmasq.recorded",
    "linux-bridge.port.recorded",
    "linux-bridge.port.ruled",
    "linux-bridge.port.dhcp",
    "linux-bridge.tap.made",
    "linux-bridge.tap.marked",
    "linux-bridge.tap.kept",
    "linux-bridge.firewall.committed",
    "linux-bridge.port.unplugged",
    "linux-bridge.port.unruled",
    "linux-bridge.port.undhcp",
    "linux-bridge.network.undhcp",
    "linux-bridge.network.unplugged",
    "linux-bridge.network.unruled",
    "linux-bridge.network.unswitched",
];

/// FNV-1a, 64 bit (<http://www.isthe.com/chongo/tech/comp/fnv/>): tells versions of a text apart.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
