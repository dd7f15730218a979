//! Killed between any two steps and started again (REC-01): the same end as without, no leak, no second VMM.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use drivers_api::{BoxFuture, Change, Error};
use reconciler::{StepHook, plan::Step, store::WantedStore};

use super::common::{Node, converged, instance_key, settle, until, vm};

/// Stops at the nth passage, before or after a step, and stays there.
struct Stop {
    at: u64,
    passed: AtomicU64,
}

impl Stop {
    fn pass(&self) -> BoxFuture<'_, Result<(), Error>> {
        let now = self.passed.fetch_add(1, Ordering::SeqCst);
        if now == self.at { Box::pin(std::future::pending()) } else { Box::pin(async { Ok(()) }) }
    }

    fn reached(&self) -> bool {
        self.passed.load(Ordering::SeqCst) > self.at
    }
}

impl StepHook for Stop {
    fn before<'a>(&'a self, _: &'a Step) -> BoxFuture<'a, Result<(), Error>> {
        self.pass()
    }
    fn after<'a>(
        &'a self,
        _: &'a Step,
        _: Result<Change, &'a Error>,
    ) -> BoxFuture<'a, Result<(), Error>> {
        self.pass()
    }
}

fn stop_at(node: &mut Node, at: u64) -> Arc<Stop> {
    let stop = Arc::new(Stop { at, passed: AtomicU64::new(0) });
    node.settings.hook = Some(Arc::<Stop>::clone(&stop));
    stop
}

#[tokio::test(start_paused = true)]
async fn killed_at_any_step_of_making_it_converges_with_one_vmm_and_no_leak() {
    for whole in [true, false] {
        let calm = Node { whole, ..Node::hello() };
        let reconciler = calm.start();
        converged(&calm, &reconciler).await;
        let wanted = calm.host.census();
        let mut at = 0;
        loop {
            let mut node = Node { whole, ..Node::hello() };
            let stop = stop_at(&mut node, at);
            let reconciler = node.start();
            settle().await;
            if !stop.reached() {
                break;
            }
            drop(reconciler);
            node.settings.hook = None;
            let reconciler = node.start();
            converged(&node, &reconciler).await;
            settle().await;
            assert_eq!(wanted.diff(&node.host.census()), Vec::<String>::new(), "killed at {at}");
            assert_eq!(node.host.vmm_starts(vm("web")), 1, "killed at {at}");
            assert_eq!(node.host.violations(), Vec::<String>::new());
            at += 1;
        }
        assert!(at >= 14, "only {at} places were tried");
    }
}

#[tokio::test(start_paused = true)]
async fn killed_at_any_step_of_removing_it_leaves_nothing() {
    let empty = Node::new().host.census();
    let mut at = 0;
    loop {
        let mut node = Node::hello();
        let reconciler = node.start();
        converged(&node, &reconciler).await;
        drop(reconciler);
        for object in node.store.snapshot().iter() {
            node.store.delete(&object.key());
        }
        let stop = stop_at(&mut node, at);
        let reconciler = node.start();
        settle().await;
        if !stop.reached() {
            break;
        }
        drop(reconciler);
        node.settings.hook = None;
        let _reconciler = node.start();
        until("all is gone", 60, || node.store.snapshot().is_empty()).await;
        assert_eq!(empty.diff(&node.host.census()), Vec::<String>::new(), "killed at {at}");
        at += 1;
    }
    assert!(at >= 14, "only {at} places were tried");
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_is_killed_and_started_again_adopts_the_vm_and_writes_nothing() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    settle().await;
    drop(reconciler);
    let (pid, writes) = (node.host.vmm_pid(vm("web")), node.host.writes());
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    settle().await;
    assert_eq!((node.host.vmm_pid(vm("web")), node.host.writes()), (pid, writes));
    assert!(pid.is_some());
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_starts_beside_a_silent_host_gives_no_port_another_address() {
    let node = Node::hello();
    node.store.apply(super::common::instance("first", &[], &["net"]));
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    // Not the lowest address: that of the first is free again.
    node.store.delete(&instance_key("first"));
    node.store.apply(super::common::instance("second", &[], &["net"]));
    let gone = || node.store.snapshot().get(&instance_key("first")).is_none();
    until("the first is gone", 30, gone).await;
    converged(&node, &reconciler).await;
    let addresses = |reconciler: &reconciler::Reconciler| {
        ["web", "second"].map(|name| {
            let status = reconciler.status(&instance_key(name)).unwrap();
            status.observed["addresses"].clone()
        })
    };
    let before = addresses(&reconciler);
    node.host.set_down(true);
    let reconciler = node.start();
    settle().await;
    node.host.set_down(false);
    let writes = node.host.writes();
    tokio::time::sleep(std::time::Duration::from_secs(120)).await;
    converged(&node, &reconciler).await;
    assert_eq!((addresses(&reconciler), node.host.writes()), (before, writes));
}

#[tokio::test(start_paused = true)]
async fn an_empty_store_destroys_nothing_and_what_is_there_is_named() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    let object = node.store.snapshot().get(&instance_key("web")).unwrap().clone();
    let addresses = reconciler.status(&instance_key("web")).unwrap().observed["addresses"].clone();
    drop(reconciler);
    let census = node.host.census();
    let mut lost = Node::new();
    lost.host = node.host.clone();
    let reconciler = lost.start();
    settle().await;
    tokio::time::sleep(std::time::Duration::from_secs(300)).await;
    assert_eq!(node.host.census(), census);
    let unclaimed = reconciler.unclaimed().await.unwrap();
    assert_eq!(unclaimed.len(), 4, "{unclaimed:?}");
    // Applied again under the same identities it is adopted: no restart, no new address.
    let (pid, writes) = (node.host.vmm_pid(vm("web")), node.host.writes());
    for wanted in node.store.snapshot().iter() {
        lost.store.apply((**wanted).clone());
    }
    assert_eq!(lost.store.snapshot().get(&instance_key("web")).unwrap().uuid, object.uuid);
    converged(&lost, &reconciler).await;
    settle().await;
    assert_eq!((node.host.vmm_pid(vm("web")), node.host.writes()), (pid, writes));
    assert_eq!(reconciler.status(&instance_key("web")).unwrap().observed["addresses"], addresses);
    assert_eq!(reconciler.unclaimed().await.unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn a_host_that_restarted_is_brought_up_again_in_order() {
    let mut node = Node::hello();
    node.settings.parallel_starts = 1;
    for (name, order) in [("c", 30), ("a", 10), ("b", 20)] {
        let object = super::common::instance(name, &[], &["net"]);
        node.store.apply(super::common::with(object, |spec| spec.start_order = order));
    }
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    drop(reconciler);
    let census = node.host.census();
    node.host.reboot();
    drop(node.host.take_log());
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    settle().await;
    assert_eq!(node.host.census(), census);
    let starts: Vec<_> = node
        .host
        .take_log()
        .into_iter()
        .filter(|(op, _)| *op == conformance::reference::Op::EnsureVm)
        .filter_map(|(_, object)| object)
        .collect();
    assert_eq!(starts, ["web", "a", "b", "c"].map(|name| vm(name).uuid()));
}
