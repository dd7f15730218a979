//! Many instances at once, and a look at many that need nothing.

use std::{sync::Arc, time::Duration};

use conformance::reference::Host;
use driver_linux_bridge::{BridgeConfig, LinuxBridge};
use reconciler::{
    Drivers,
    wanted::{Key, Kind},
};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use testbed::netns::in_netns;

use crate::{
    Options,
    figures::{Figures, say},
    instance::{script, times_of},
    rig::{Rig, key, node, wanted},
};

/// 1,000 instances of the reference hypervisor on real taps with real rules.
pub(crate) fn measure_many(options: &Options) -> Figures {
    let count: u32 = if options.quick { 100 } else { 1000 };
    let by_hand = in_netns(move || script_taps(count / 10));
    let (took, rss) = in_netns(move || many(count));
    let mut figures = Figures::default();
    let rate = f64::from(count) / took.as_secs_f64();
    let peer = format!("{:.0} a second by script", 1000.0 / by_hand);
    figures.at_least("instances a second, real taps and rules", rate, "/s", 200.0, &peer);
    figures.plain(
        "resident memory of the bench at that many instances",
        rss,
        "MiB",
        "agent and drivers in one process",
    );
    figures
}

async fn script_taps(count: u32) -> f64 {
    times_of(&script(&["taps", &count.to_string()]).await, "tap").quantile_ms(0.5)
}

async fn many(count: u32) -> (Duration, f64) {
    let dir = tempfile::Builder::new().prefix("bcd-").tempdir_in("/tmp").expect("a directory");
    let host = Host::with_node(node());
    let bridge = LinuxBridge::open(BridgeConfig::new(
        node(),
        "bench",
        dir.path().join("net"),
        dir.path().join("run"),
    ));
    let drivers = Drivers::new()
        .hypervisor("reference", host.hypervisor())
        .network("linux-bridge", Arc::new(bridge.expect("the bridge driver opens")))
        .volume("reference", host.volume())
        .image("reference", host.image());
    let rig = Rig::new(drivers, Duration::from_secs(3600));
    rig.store.put(wanted(
        Kind::Network,
        "lan",
        &json!({ "type": "isolated", "cidr": "10.64.0.0/16" }),
    ));
    rig.ready(&[key(Kind::Network, "lan")]).await;
    let keys = put_instances(&rig, count);
    let took = rig.ready(&keys).await;
    let rss = resident_mib();
    rig.reconciler.shutdown().await;
    (took, rss)
}

fn put_instances(rig: &Rig, count: u32) -> Vec<Key> {
    let mut keys = Vec::new();
    for number in 0..count {
        let name = format!("vm{number:05}");
        rig.store.put(wanted(Kind::Volume, &name, &json!({ "size_gib": 1, "format": "raw" })));
        rig.store.put(wanted(
            Kind::Instance,
            &name,
            &json!({
                "cpus": 1, "memory_mib": 64, "boot": { "kind": "firmware" },
                "disks": [{ "name": "root", "volume": name, "boot": true }],
                "nics": [{ "name": "lan", "network": "lan" }],
            }),
        ));
        keys.push(key(Kind::Instance, &name));
    }
    keys
}

/// A resync of 10,000 objects that are as wanted, with the reference drivers.
pub(crate) fn measure_resync(options: &Options) -> Figures {
    let objects: u32 = if options.quick { 1000 } else { 10_000 };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let cost = runtime.expect("a runtime").block_on(resync(objects));
    let mut figures = Figures::default();
    figures.at_most(
        &format!("CPU of a resync of {objects} unchanged objects"),
        cost.as_secs_f64(),
        "s",
        1.0,
        "",
    );
    figures
}

async fn resync(objects: u32) -> Duration {
    let every = Duration::from_secs(5);
    let rounds = 3;
    let host = Host::with_node(node());
    let drivers = Drivers::new()
        .hypervisor("reference", host.hypervisor())
        .network("reference", host.network())
        .volume("reference", host.volume())
        .image("reference", host.image());
    let rig = Rig::new(drivers, every);
    rig.store.put(wanted(
        Kind::Network,
        "lan",
        &json!({ "type": "isolated", "cidr": "10.64.0.0/16" }),
    ));
    // A volume and an instance each.
    let keys = put_instances(&rig, objects / 2);
    say(&format!("{objects} objects ready after {:.1} s", rig.ready(&keys).await.as_secs_f64()));
    let writes = host.writes();
    let before = clock_gettime(ClockId::ProcessCPUTime);
    tokio::time::sleep(every * rounds).await;
    let after = clock_gettime(ClockId::ProcessCPUTime);
    assert_eq!(host.writes(), writes, "nothing is written when nothing differs");
    rig.reconciler.shutdown().await;
    let nanos = |at: rustix::time::Timespec| {
        Duration::new(at.tv_sec.unsigned_abs(), u32::try_from(at.tv_nsec).unwrap_or_default())
    };
    (nanos(after) - nanos(before)) / rounds
}

fn resident_mib() -> f64 {
    crate::idle::resident_mib(std::process::id())
}
