//! What never returns, is silent or fails for ever costs the others nothing.

use std::{collections::BTreeMap, time::Duration};

use conformance::reference::{Fault, Op};
use drivers_api::ErrorKind;
use reconciler::{
    Reconciler,
    status::Phase,
    store::WantedStore,
    wanted::{Kind, Wanted},
};
use tokio::time::Instant;

use super::common::{
    Node, converged, image, instance, is_reached, key, network, settle, until, vm, volume,
    volume_id,
};

/// The healthy instances.
const FLEET: usize = 200;

/// The objects that fail for ever.
const BROKEN: usize = 50;

/// How long each change of the fleet is watched.
const WATCH: Duration = Duration::from_secs(30);

/// What changes took, each from its acceptance, on tokio's clock.
#[derive(Debug, Default)]
struct Times {
    /// Until there was a status of it at all.
    shown: Vec<Duration>,
    /// Until the host was as wanted.
    reached: Vec<Duration>,
    /// Until it was gone.
    gone: Vec<Duration>,
    /// Objects that were not done within [`WATCH`].
    open: Vec<String>,
}

impl Times {
    fn worst(all: &[Duration]) -> Duration {
        all.iter().copied().max().unwrap_or_default()
    }
}

/// Accepts the changes 20 ms after one another, and watches each.
async fn change(node: &Node, reconciler: &Reconciler, changes: Vec<Wanted>, times: &mut Times) {
    let mut open: BTreeMap<String, (Instant, Wanted, bool)> = BTreeMap::new();
    let mut left = changes.into_iter();
    let end = Instant::now() + WATCH;
    let mut tick = 0_u64;
    loop {
        if tick.is_multiple_of(4)
            && let Some(object) = left.next()
        {
            let deleting = object.deleting;
            node.store.put(object.clone());
            open.insert(object.name.to_string(), (Instant::now(), object, !deleting));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        open.retain(|_, (since, object, unseen)| {
            let key = object.key();
            let status = reconciler.status(&key).filter(|status| status.uuid == object.uuid);
            if *unseen && status.is_some() {
                times.shown.push(since.elapsed());
                *unseen = false;
            }
            if object.deleting {
                let there = node.store.snapshot().get(&key).is_some();
                if !there {
                    times.gone.push(since.elapsed());
                }
                return there;
            }
            let reached = status.is_some_and(|status| is_reached(object, &status));
            if reached {
                times.reached.push(since.elapsed());
            }
            !reached
        });
        if Instant::now() > end || (open.is_empty() && left.len() == 0) {
            times.open.extend(open.into_keys());
            return;
        }
        tick += 1;
    }
}

fn next(node: &Node, at: usize, networks: &[&str]) -> Wanted {
    let object = instance(&format!("vm{at}"), &[], networks);
    match node.store.snapshot().get(&object.key()) {
        Some(old) => old.next(object),
        None => object,
    }
}

/// What making, changing and deleting a fleet takes, and how many calls never returned.
async fn fleet(trouble: bool) -> (Times, u64) {
    let mut node = Node::new();
    node.settings.workers = 8;
    node.settings.jitter_seed = Some(1);
    node.host.set_latency(Duration::from_millis(2));
    for object in [image("kernel"), network("net", "10.0.0.0/16"), network("side", "10.1.0.0/16")] {
        node.store.apply(object);
    }
    node.store.apply(instance("silent", &[], &["net"]));
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    if trouble {
        for at in 0..BROKEN {
            let name = format!("broken{at}");
            let fault = Fault::new(Op::EnsureVolume, ErrorKind::Internal);
            node.host.inject(fault.on(volume_id(&name).uuid()).for_ever());
            node.store.apply(volume(&name, 1));
        }
        assert!(node.host.freeze_vmm(vm("silent"), true));
        settle().await;
        node.host.hang_every(200);
    }
    let mut times = Times::default();
    let make = (0..FLEET).map(|at| next(&node, at, &["net"])).collect();
    change(&node, &reconciler, make, &mut times).await;
    let grow = (0..FLEET).map(|at| next(&node, at, &["net", "side"])).collect();
    change(&node, &reconciler, grow, &mut times).await;
    let set = node.store.snapshot();
    let wanted = |at: usize| set.get(&key(Kind::Instance, &format!("vm{at}"))).unwrap().deleted();
    change(&node, &reconciler, (0..FLEET).map(wanted).collect(), &mut times).await;
    if trouble {
        let phase = |kind, name: &str| reconciler.status(&key(kind, name)).map(|s| s.phase);
        let broken = (0..BROKEN).map(|at| phase(Kind::Volume, &format!("broken{at}")));
        let is_bad = |phase| matches!(phase, Some(Phase::Retrying | Phase::Unknown));
        assert!(broken.clone().all(is_bad), "{:?}", broken.collect::<Vec<_>>());
        assert_eq!(phase(Kind::Instance, "silent"), Some(Phase::Unknown));
        assert_eq!(node.host.vmm_starts(vm("silent")), 1);
    }
    let hung = node.host.hung();
    node.host.heal();
    node.host.release();
    node.host.freeze_vmm(vm("silent"), false);
    converged_all(&node, &reconciler).await;
    assert_eq!(node.host.violations(), Vec::<String>::new());
    (times, hung)
}

/// All trouble has ended: everything becomes as wanted, and the deleted is gone.
async fn converged_all(node: &Node, reconciler: &Reconciler) {
    converged(node, reconciler).await;
    assert_eq!(node.host.census().count("vmms"), 1, "the silent one alone is left");
}

#[tokio::test(start_paused = true)]
async fn calls_that_never_return_a_silent_monitor_and_fifty_broken_objects_delay_no_other() {
    let (calm, none) = fleet(false).await;
    assert_eq!((none, calm.open.len()), (0, 0), "{:?}", calm.open);
    assert_eq!(calm.reached.len(), 2 * FLEET);
    assert_eq!(calm.gone.len(), FLEET);
    let (bad, hung) = fleet(true).await;
    assert!(hung >= 10, "only {hung} calls hung");
    // Only an object whose own call hung may wait; each change that is open is one of these.
    let open = u64::try_from(bad.open.len()).unwrap();
    assert!(open <= hung, "{hung} calls hung and {open} changes are open: {:?}", bad.open);
    let late = |limit: Duration, all: &[Duration]| all.iter().filter(|took| **took > limit).count();
    let slack = Duration::from_millis(20);
    for (what, calm, bad) in [
        ("until shown", &calm.shown, &bad.shown),
        ("until reached", &calm.reached, &bad.reached),
        ("until gone", &calm.gone, &bad.gone),
    ] {
        let limit = Times::worst(calm) * 2 + slack;
        let late = u64::try_from(late(limit, bad)).unwrap();
        assert!(
            late + open <= hung,
            "{what}: {late} took more than {limit:?}, {hung} hung: {bad:?}"
        );
    }
    assert_eq!(bad.shown.len(), 2 * FLEET);
    assert!(Times::worst(&bad.shown) <= Times::worst(&calm.shown) + slack, "{:?}", bad.shown);
}

#[tokio::test(start_paused = true)]
async fn a_look_or_a_list_that_never_returns_is_made_again() {
    for op in [Op::ListVms, Op::ListPorts, Op::GetVm, Op::GetPort] {
        let node = Node::hello();
        let reconciler = node.start();
        converged(&node, &reconciler).await;
        settle().await;
        let calls = node.host.calls(op);
        node.host.hang_deaf(op, None);
        node.store.apply(instance("web", &["root"], &[]));
        node.host.kill_vm(vm("web"));
        until("it hangs", 60, || node.host.calls(op) > calls).await;
        node.host.stop_hanging();
        // The deadline of a look, what it may take beyond, and a back-off; then the next list.
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(node.host.hung(), 1, "{op}");
        let status = reconciler.status(&key(Kind::Instance, "web")).unwrap();
        assert_eq!(status.phase, Phase::Ready, "{op}: {status:?}");
        assert!(node.host.vmm_pid(vm("web")).is_some());
    }
}
