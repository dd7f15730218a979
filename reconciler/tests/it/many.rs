//! Many objects at once.

use std::{collections::BTreeSet, time::Duration};

use conformance::reference::Op;
use reconciler::status::Phase;

use super::common::{Node, converged, image, instance, instance_key, network, settle, until, vm};

fn fleet(node: &Node, count: usize) {
    node.store.apply(image("kernel"));
    node.store.apply(network("net", "10.0.0.0/16"));
    for at in 0..count {
        node.store.apply(instance(&format!("vm{at}"), &[], &["net"]));
    }
}

#[tokio::test(start_paused = true)]
async fn two_hundred_instances_start_while_one_call_hangs_and_statuses_answer() {
    let mut node = Node::new();
    node.settings.workers = 4;
    fleet(&node, 200);
    node.host.set_latency(Duration::from_millis(2));
    node.host.hang(Op::EnsureVm, Some(vm("vm7").uuid()));
    node.host.hang(Op::GetVm, Some(vm("vm8").uuid()));
    let reconciler = node.start();
    until("the others run", 60, || node.host.census().count("vmms") == 198).await;
    settle().await;
    let ready = reconciler.statuses().iter().filter(|s| s.phase == Phase::Ready).count();
    assert_eq!(ready, 200, "198 instances, an image and a network");
    assert_ne!(reconciler.status(&instance_key("vm7")).unwrap().phase, Phase::Ready);
    let addresses: BTreeSet<String> = reconciler
        .statuses()
        .iter()
        .filter_map(|status| status.observed.get("addresses").map(ToString::to_string))
        .filter(|addresses| addresses != "[]")
        .collect();
    assert!(addresses.len() >= 198, "each has its own: {}", addresses.len());
    node.host.release();
    converged(&node, &reconciler).await;
    assert_eq!(node.host.violations(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_resync_of_unchanged_objects_asks_for_lists_and_nothing_else() {
    let node = Node::new();
    fleet(&node, 100);
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    settle().await;
    let gets = [Op::GetVm, Op::GetPort, Op::GetNetwork, Op::GetVolume, Op::GetImage];
    let count = || gets.iter().map(|op| node.host.calls(*op)).sum::<u64>();
    let (before, lists, writes) = (count(), node.host.calls(Op::ListVms), node.host.writes());
    tokio::time::sleep(Duration::from_secs(301)).await;
    assert_eq!((count(), node.host.writes()), (before, writes));
    assert!((9..=11).contains(&(node.host.calls(Op::ListVms) - lists)));
}

/// How long this thread has been on a CPU: the first field of `schedstat`, in nanoseconds
/// (`Documentation/scheduler/sched-stats.rst` of the kernel).
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos: Option<u64> = text.split_whitespace().next().and_then(|field| field.parse().ok());
    assert!(nanos.is_some(), "the kernel keeps no /proc/thread-self/schedstat");
    Duration::from_nanos(nanos.unwrap_or_default())
}

#[tokio::test(start_paused = true)]
async fn a_resync_of_a_thousand_unchanged_instances_is_cheap_even_unoptimised() {
    let node = Node::new();
    node.store.apply(image("kernel"));
    node.store.apply(network("net", "10.0.0.0/16"));
    let all = (0..1_000).map(|at| instance(&format!("vm{at}"), &[], &["net"]));
    node.store.apply_all(all);
    let reconciler = node.start();
    let ready = || {
        let statuses = reconciler.statuses();
        statuses.iter().filter(|status| status.phase == Phase::Ready).count() == 1_002
    };
    while !ready() {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    settle().await;
    let (writes, begun) = (node.host.writes(), cpu_time());
    tokio::time::sleep(Duration::from_secs(30)).await;
    let resync = cpu_time() - begun;
    assert_eq!(node.host.writes(), writes);
    // Measured with debug assertions: 1.8 s for 10,000, the in-memory driver's own part included.
    assert!(resync < Duration::from_millis(600), "{resync:?}");
}
