//! A process of its own: descriptors are counted, so no other test may run beside it.

#![cfg(test)]

#[path = "host/common.rs"]
#[expect(dead_code, reason = "this file uses a part of it")]
mod common;

use common::{Host, census, network, port};
use drivers_api::NetworkType;
use testbed::netns::{in_netns, tool};

/// Case LEAK-01, the network's part of it.
#[test]
fn fifty_failed_starts_use_the_same_tap_and_leave_nothing() {
    in_netns(|| async {
        let host = Host::new();
        host.has_network(&network(1, NetworkType::Nat)).await;
        let before = census(host.dir.path());
        let fds = || std::fs::read_dir("/proc/thread-self/fd").unwrap().count();
        let mut first = None;
        for _ in 0..50 {
            for m in [1, 2] {
                host.has_port(&port(1, m)).await;
            }
            let taps = tool(&["ip", "-o", "link"]).matches(": bcdt").count();
            assert_eq!(taps, 2);
            first.get_or_insert_with(fds);
        }
        assert!(fds().abs_diff(first.unwrap()) <= 2, "descriptors leak");
        for m in [1, 2] {
            host.detach(port(1, m).uuid).await;
        }
        assert_eq!(census(host.dir.path()), before);
    });
}
