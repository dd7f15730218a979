//! Drivers that fail, hang, panic and lie; hosts with what is not ours.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use conformance::reference::{Fault, Op, ReferenceVolume, When};
use drivers_api::{
    AttachRequest, AttachedVolume, BackingKind, Change, Context, DetachRequest, ErrorKind,
    HostInfo, Outcome, Result, Volume, VolumeId, VolumeSpec, VolumeStatus,
};
use reconciler::{
    Drivers, Reconciler,
    status::Phase,
    store::{MemoryStore, WantedStore},
    wanted::{Kind, RestartPolicy, Wanted},
};

use super::common::{
    Node, converged, image, instance, instance_key, key, network, port, settle, until, vm, volume,
    volume_id, with,
};

fn phase(reconciler: &Reconciler, name: &str) -> Option<Phase> {
    reconciler.status(&instance_key(name)).map(|status| status.phase)
}

#[tokio::test(start_paused = true)]
async fn every_call_that_fails_once_at_any_point_is_made_up_for() {
    let calm = Node::hello();
    let reconciler = calm.start();
    converged(&calm, &reconciler).await;
    let wanted = calm.host.census();
    let calls: Vec<Op> = Op::ALL.iter().copied().filter(|op| calm.host.calls(*op) > 0).collect();
    assert!(calls.len() >= 10, "{calls:?}");
    for op in calls {
        for when in [When::Before, When::HalfWay, When::After] {
            for kind in [ErrorKind::Unavailable, ErrorKind::UnknownOutcome, ErrorKind::NotFound] {
                let node = Node::hello();
                node.host.inject(Fault::new(op, kind).at(when));
                let reconciler = node.start();
                converged(&node, &reconciler).await;
                let place = format!("{op:?} {when:?} {kind:?}");
                assert_eq!(wanted.diff(&node.host.census()), Vec::<String>::new(), "{place}");
                assert_eq!(node.host.vmm_starts(vm("web")), 1, "{place}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_told_with_step_driver_attempt_and_next_try() {
    let node = Node::hello();
    node.host.inject(Fault::new(Op::EnsureVolume, ErrorKind::Exhausted).for_ever());
    let reconciler = node.start();
    tokio::time::sleep(Duration::from_secs(300)).await;
    let status = reconciler.status(&key(Kind::Volume, "root")).unwrap();
    assert_eq!(status.phase, Phase::Retrying);
    let failure = status.failure.unwrap();
    assert_eq!(failure.kind, ErrorKind::Exhausted);
    assert_eq!((failure.driver.as_str(), failure.step.driver.as_str()), ("reference", "reference"));
    assert!(failure.attempt >= 7, "{}", failure.attempt);
    assert!(failure.next_try_s.is_some_and(|wait| wait <= 60.0));
    assert_eq!(phase(&reconciler, "web"), Some(Phase::Blocked));
    node.host.heal();
    node.store.apply({
        let mut object = super::common::volume_of("root", 3, "disk");
        object.labels.insert("a".to_owned(), "b".to_owned());
        object
    });
    let begun = tokio::time::Instant::now();
    converged(&node, &reconciler).await;
    assert!(begun.elapsed() < Duration::from_secs(1), "a new generation waits for no back-off");
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_can_never_be_made_is_deleted_at_once() {
    let node = Node::hello();
    node.store.apply(with(instance("web", &["root"], &["net"]), |spec| {
        spec.boot.r#ref = Some("nowhere".to_owned());
    }));
    let mut nowhere = image("nowhere");
    nowhere.generation = 1;
    node.store.apply(nowhere);
    node.host.inject(Fault::new(Op::EnsureVm, ErrorKind::Internal).for_ever());
    let reconciler = node.start();
    tokio::time::sleep(Duration::from_secs(2400)).await;
    let failure = reconciler.status(&key(Kind::Image, "nowhere")).unwrap().failure.unwrap();
    assert!(failure.attempt >= 30, "{}", failure.attempt);
    node.host.remove_vm(vm("web"));
    for (kind, name) in [(Kind::Instance, "web"), (Kind::Image, "nowhere")] {
        node.store.delete(&key(kind, name));
    }
    let begun = tokio::time::Instant::now();
    until("both are gone", 5, || {
        let set = node.store.snapshot();
        set.get(&instance_key("web")).is_none() && set.get(&key(Kind::Image, "nowhere")).is_none()
    })
    .await;
    assert!(begun.elapsed() < Duration::from_secs(1));
    // The same identity may be made again.
    node.host.heal();
    node.store.apply(instance("web", &["root"], &["net"]));
    converged(&node, &reconciler).await;
}

#[tokio::test(start_paused = true)]
async fn a_delete_ends_a_create_that_hangs() {
    for op in [Op::EnsureVm, Op::AttachVolume, Op::AttachPort, Op::GetVm] {
        let node = Node::hello();
        let empty = Node::new().host.census();
        node.host.hang(op, None);
        let reconciler = node.start();
        until("it hangs", 20, || node.host.calls(op) > 0).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        for object in node.store.snapshot().iter() {
            node.store.delete(&object.key());
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        if op == Op::GetVm {
            // What cannot be seen is not taken for gone; the VM's own deletion is tried all the same.
            assert!(node.store.snapshot().get(&instance_key("web")).is_some());
            node.host.release();
        }
        until("all is gone", 90, || node.store.snapshot().is_empty()).await;
        assert_eq!(empty.diff(&node.host.census()), Vec::<String>::new(), "{op:?}");
        drop(reconciler);
    }
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_cannot_be_listed_destroys_nothing_and_is_said_to_be_unknown() {
    for (op, get) in [
        (Op::ListVms, Op::GetVm),
        (Op::ListPorts, Op::GetPort),
        (Op::ListNetworks, Op::GetNetwork),
        (Op::ListVolumes, Op::GetVolume),
        (Op::ListImages, Op::GetImage),
    ] {
        let node = Node::hello();
        let reconciler = node.start();
        converged(&node, &reconciler).await;
        settle().await;
        let (census, writes) = (node.host.census(), node.host.writes());
        for op in [op, get] {
            node.host.inject(Fault::new(op, ErrorKind::Unavailable).for_ever());
        }
        tokio::time::sleep(Duration::from_secs(120)).await;
        assert_eq!((node.host.census(), node.host.writes()), (census, writes), "{op:?}");
        let unknown = reconciler.statuses().iter().any(|status| status.phase == Phase::Unknown);
        assert!(unknown, "{op:?}: {:?}", reconciler.statuses());
        node.host.heal();
        converged(&node, &reconciler).await;
        assert_eq!(node.host.writes(), writes, "{op:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn beside_a_vmm_that_does_not_answer_nothing_is_started_and_a_delete_ends_it() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    node.host.freeze_vmm(vm("web"), true);
    settle().await;
    assert_eq!(phase(&reconciler, "web"), Some(Phase::Unknown));
    node.change("web", |spec| spec.power = drivers_api::VmPower::Stopped);
    tokio::time::sleep(Duration::from_secs(200)).await;
    assert_eq!(node.host.vmm_starts(vm("web")), 1);
    assert!(node.host.vmm_pid(vm("web")).is_some());
    node.store.delete(&instance_key("web"));
    until("it is gone", 30, || node.store.snapshot().get(&instance_key("web")).is_none()).await;
    assert_eq!(node.host.vmm_pid(vm("web")), None);
}

#[tokio::test(start_paused = true)]
async fn a_foreign_vm_of_the_same_identity_is_left_alone() {
    let node = Node::hello();
    node.host.plant_foreign_vm(vm("web"));
    let foreign = node.host.foreign_vm(vm("web"));
    let reconciler = node.start();
    tokio::time::sleep(Duration::from_secs(100)).await;
    let status = reconciler.status(&instance_key("web")).unwrap();
    assert_eq!(status.phase, Phase::Retrying);
    assert_eq!(status.failure.unwrap().kind, ErrorKind::Conflict);
    node.store.delete(&instance_key("web"));
    until("it is gone", 10, || node.store.snapshot().get(&instance_key("web")).is_none()).await;
    assert_eq!(node.host.foreign_vm(vm("web")), foreign);
}

#[tokio::test(start_paused = true)]
async fn half_made_things_are_completed() {
    let node = Node::hello();
    node.host.plant_half_made_vm(vm("web"));
    node.host.plant_half_made_volume(volume_id("root"));
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    assert!(node.host.vmm_pid(vm("web")).is_some());
    assert_eq!(node.host.volume_bytes(volume_id("root")), 2 << 30);
}

#[tokio::test(start_paused = true)]
async fn fifty_failed_boots_and_twenty_crashes_leak_nothing() {
    let node = Node::new();
    for object in [
        image("kernel"),
        network("a", "10.1.0.0/24"),
        network("b", "10.2.0.0/24"),
        volume("root", 1),
    ] {
        node.store.apply(object);
    }
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    let before = node.host.census();
    node.host.inject(Fault::new(Op::EnsureVm, ErrorKind::Internal).at(When::HalfWay).times(50));
    node.store.apply(instance("web", &["root"], &["a", "b"]));
    let limit = tokio::time::Instant::now() + Duration::from_secs(7200);
    while phase(&reconciler, "web") != Some(Phase::Ready) {
        assert!(tokio::time::Instant::now() < limit);
        assert!(node.host.census().count("ports") <= 2);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(node.host.calls(Op::EnsureVm) > 50);
    for _ in 0..20 {
        node.host.kill_vm(vm("web"));
        until("it runs again", 120, || node.host.vmm_pid(vm("web")).is_some()).await;
        assert_eq!(node.host.census().count("ports"), 2);
    }
    node.store.delete(&instance_key("web"));
    until("it is gone", 10, || node.store.snapshot().get(&instance_key("web")).is_none()).await;
    assert_eq!(before.diff(&node.host.census()), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn the_restart_policy_decides_by_how_the_run_ended() {
    use RestartPolicy::{Always, Never, OnFailure};
    for (policy, crash, again) in [
        (Always, false, true),
        (Always, true, true),
        (OnFailure, false, false),
        (OnFailure, true, true),
        (Never, false, false),
        (Never, true, false),
    ] {
        let node = Node::hello();
        node.change("web", |spec| spec.restart_policy = policy);
        let reconciler = node.start();
        converged(&node, &reconciler).await;
        if crash {
            node.host.crash_vmm(vm("web"), 1)
        } else {
            node.host.stop_guest(vm("web"))
        };
        tokio::time::sleep(Duration::from_secs(60)).await;
        let runs = node.host.vmm_pid(vm("web")).is_some();
        assert_eq!(runs, again, "{policy:?}, crash: {crash}");
        let status = reconciler.status(&instance_key("web")).unwrap();
        assert_eq!(status.phase, Phase::Ready, "{}", status.message);
        if !again {
            let text = if crash { "exit code 1" } else { "shut itself down" };
            assert!(status.observed["last_exit"].as_str().unwrap().contains(text));
            node.store.edit(&instance_key("web"), |object| object.starts += 1);
            until("the asked start", 5, || node.host.vmm_pid(vm("web")).is_some()).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_clings_to_a_disk_keeps_neither_its_nics_nor_its_deletion_waiting() {
    let node = Node::hello();
    node.store.apply(volume("data", 1));
    node.store.apply(network("side", "10.2.0.0/24"));
    node.store.apply(instance("web", &["root", "data"], &["net"]));
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    node.host.set_guest_clings(vm("web"), true);
    node.store.apply(instance("web", &["root"], &["net", "side"]));
    tokio::time::sleep(Duration::from_secs(100)).await;
    let status = reconciler.status(&instance_key("web")).unwrap();
    assert_eq!(status.failure.unwrap().kind, ErrorKind::Deadline);
    assert_eq!(node.host.census().count("ports"), 2, "the NIC is not held up by the disk");
    assert_eq!(node.host.census().count("attachments"), 2, "the disk is still open");
    node.host.set_guest_clings(vm("web"), false);
    converged(&node, &reconciler).await;
    assert_eq!(node.host.census().count("attachments"), 1);
}

#[tokio::test(start_paused = true)]
async fn an_image_in_use_is_deleted_only_after_its_users() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    node.store.delete(&key(Kind::Image, "disk"));
    settle().await;
    let status = reconciler.status(&key(Kind::Image, "disk")).unwrap();
    assert_eq!(status.blocked_by, Some(key(Kind::Volume, "root")));
    assert_eq!(node.host.calls(Op::DeleteImage), 0);
    assert!(node.host.census().count("ports") > 0 && node.host.remove_tap(port("web", "eth0")));
}

#[tokio::test(start_paused = true)]
async fn a_deletion_that_cannot_see_a_port_or_a_volume_waits_until_it_can() {
    for (get, list) in [(Op::GetPort, Op::ListPorts), (Op::GetVolume, Op::ListVolumes)] {
        let node = Node::hello();
        let reconciler = node.start();
        converged(&node, &reconciler).await;
        drop(reconciler);
        for op in [get, list] {
            node.host.inject(Fault::new(op, ErrorKind::Unavailable).for_ever());
        }
        node.store.delete(&instance_key("web"));
        // An agent that has seen nothing yet, and cannot.
        let _reconciler = node.start();
        tokio::time::sleep(Duration::from_secs(200)).await;
        assert!(node.store.snapshot().get(&instance_key("web")).is_some(), "{get}");
        assert_eq!(node.host.vmm_pid(vm("web")), None, "its VM is deleted all the same");
        node.host.heal();
        let gone = || node.store.snapshot().get(&instance_key("web")).is_none();
        until("it is gone", 120, gone).await;
        let census = node.host.census();
        assert_eq!((census.count("ports"), census.count("attachments")), (0, 0), "{get}");
    }
}

#[tokio::test(start_paused = true)]
async fn two_that_wait_for_each_other_do_not_run_in_circles() {
    let node = Node::hello();
    node.host.inject(Fault::new(Op::EnsureVolume, ErrorKind::Exhausted).for_ever());
    let reconciler = node.start();
    settle().await;
    // The volume cannot be made of what is being deleted, which waits for the volume.
    node.store.delete(&key(Kind::Image, "disk"));
    // And the instance waits for a volume that waits for the instance.
    node.store.delete(&key(Kind::Volume, "root"));
    settle().await;
    let blocked = |kind, name: &str| reconciler.status(&key(kind, name)).unwrap().blocked_by;
    assert_eq!(blocked(Kind::Image, "disk"), Some(key(Kind::Volume, "root")));
    assert_eq!(blocked(Kind::Volume, "root"), Some(instance_key("web")));
    assert_eq!(blocked(Kind::Instance, "web"), Some(key(Kind::Volume, "root")));
    let gets = || [Op::GetImage, Op::GetVolume, Op::GetVm].map(|op| node.host.calls(op));
    let before = gets();
    tokio::time::sleep(Duration::from_secs(600)).await;
    let more: Vec<u64> = gets().iter().zip(before).map(|(now, before)| now - before).collect();
    assert!(more.iter().all(|gets| *gets < 100), "they are looked at all the time: {more:?}");
    node.store.delete(&instance_key("web"));
    until("all three are gone", 60, || node.store.snapshot().of_kind(Kind::Volume).count() == 0)
        .await;
}

/// How a volume driver misbehaves.
#[derive(Clone, Copy, PartialEq)]
enum Manner {
    Panics,
    NeverReturns,
}

/// The reference volume driver, whose `ensure_volume` misbehaves for one volume.
struct Rogue {
    inner: Arc<ReferenceVolume>,
    victim: VolumeId,
    manner: Manner,
    inside: AtomicUsize,
    most_inside: AtomicUsize,
    let_go: tokio::sync::Semaphore,
}

impl Rogue {
    fn new(node: &Node, victim: &str, manner: Manner) -> Arc<Self> {
        Arc::new(Self {
            inner: node.host.volume(),
            victim: volume_id(victim),
            manner,
            inside: AtomicUsize::new(0),
            most_inside: AtomicUsize::new(0),
            let_go: tokio::sync::Semaphore::new(0),
        })
    }
}

#[async_trait]
impl Volume for Rogue {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn local(&self) -> bool {
        true
    }
    fn backings(&self) -> &[BackingKind] {
        self.inner.backings()
    }
    async fn host_info(&self, cx: &Context) -> Result<HostInfo> {
        self.inner.host_info(cx).await
    }
    async fn ensure_volume(&self, cx: &Context, spec: &VolumeSpec) -> Result<Change> {
        if spec.uuid != self.victim {
            return self.inner.ensure_volume(cx, spec).await;
        }
        let inside = self.inside.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_inside.fetch_max(inside, Ordering::SeqCst);
        if self.manner == Manner::Panics {
            self.inside.fetch_sub(1, Ordering::SeqCst);
            panic!("the driver has a fault");
        }
        // Deaf to deadline and cancellation, as a driver must not be.
        if let Ok(permit) = self.let_go.acquire().await {
            permit.forget();
        }
        self.inside.fetch_sub(1, Ordering::SeqCst);
        self.inner.ensure_volume(&Context::new(), spec).await
    }
    async fn destroy_volume(&self, cx: &Context, id: VolumeId) -> Result<Change> {
        self.inner.destroy_volume(cx, id).await
    }
    async fn attach_volume(
        &self,
        cx: &Context,
        request: &AttachRequest,
    ) -> Result<Outcome<AttachedVolume>> {
        self.inner.attach_volume(cx, request).await
    }
    async fn detach_volume(&self, cx: &Context, request: &DetachRequest) -> Result<Change> {
        self.inner.detach_volume(cx, request).await
    }
    async fn list(&self, cx: &Context) -> Result<Vec<VolumeStatus>> {
        self.inner.list(cx).await
    }
    async fn get(&self, cx: &Context, id: VolumeId) -> Result<Option<VolumeStatus>> {
        self.inner.get(cx, id).await
    }
}

fn start_with(node: &Node, rogue: &Arc<Rogue>) -> Reconciler {
    let drivers = Drivers::new()
        .hypervisor("reference", node.host.hypervisor())
        .network("reference", node.host.network())
        .volume("reference", Arc::<Rogue>::clone(rogue))
        .image("reference", node.host.image());
    let store = Arc::<MemoryStore>::clone(&node.store);
    Reconciler::start(store, drivers, node.settings.clone())
}

fn two_volumes() -> (Node, Wanted) {
    let node = Node::new();
    node.store.apply(volume("bad", 1));
    (node, volume("good", 1))
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_panics_is_a_failure_like_others() {
    let (node, good) = two_volumes();
    let rogue = Rogue::new(&node, "bad", Manner::Panics);
    let reconciler = start_with(&node, &rogue);
    settle().await;
    let failure = reconciler.status(&key(Kind::Volume, "bad")).unwrap().failure.unwrap();
    assert_eq!(failure.kind, ErrorKind::Internal);
    assert!(failure.message.contains("panicked: the driver has a fault"), "{}", failure.message);
    node.store.apply(good);
    until("the other is ready", 2, || {
        let status = reconciler.status(&key(Kind::Volume, "good"));
        status.is_some_and(|status| status.phase == Phase::Ready)
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_never_returns_is_made_once_and_a_deletion_ends_after_it() {
    let (mut node, good) = two_volumes();
    node.settings.workers = 1;
    let rogue = Rogue::new(&node, "bad", Manner::NeverReturns);
    let reconciler = start_with(&node, &rogue);
    settle().await;
    node.store.apply(good);
    until("the other is ready", 5, || {
        let status = reconciler.status(&key(Kind::Volume, "good"));
        status.is_some_and(|status| status.phase == Phase::Ready)
    })
    .await;
    tokio::time::sleep(Duration::from_secs(7200)).await;
    assert_eq!(rogue.most_inside.load(Ordering::SeqCst), 1);
    let status = reconciler.status(&key(Kind::Volume, "bad")).unwrap();
    assert_eq!(status.phase, Phase::Unknown, "{status:?}");
    node.store.delete(&key(Kind::Volume, "bad"));
    tokio::time::sleep(Duration::from_secs(600)).await;
    let status = reconciler.status(&key(Kind::Volume, "bad")).unwrap();
    assert_eq!(status.phase, Phase::Deleting);
    assert!(status.message.contains("not returned"), "{}", status.message);
    // The late call makes the volume after all; the deletion sees that.
    rogue.let_go.add_permits(1);
    until("it is gone", 60, || node.store.snapshot().get(&key(Kind::Volume, "bad")).is_none())
        .await;
    assert_eq!(node.host.census().count("volumes"), 1);
    assert_eq!(rogue.most_inside.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_list_that_hangs_at_the_start_delays_only_what_it_would_show() {
    let node = Node::hello();
    node.store.apply(instance("lean", &[], &["net"]));
    node.host.hang(Op::ListVolumes, None);
    let reconciler = node.start();
    until("the other runs", 2, || node.host.vmm_pid(vm("lean")).is_some()).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(phase(&reconciler, "lean"), Some(Phase::Ready));
    assert_eq!(phase(&reconciler, "web"), Some(Phase::Unknown));
    assert_eq!(node.host.vmm_pid(vm("web")), None);
    node.host.release();
    converged(&node, &reconciler).await;
}

#[tokio::test(start_paused = true)]
async fn an_address_that_is_asked_for_moves_a_port_and_is_given_to_nobody_else() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    node.change("web", |spec| spec.nics[0].ip = Some("10.1.0.3".parse().unwrap()));
    node.store.apply(instance("other", &[], &["net"]));
    node.store.apply(instance("third", &[], &["net"]));
    converged(&node, &reconciler).await;
    let address = |name: &str| {
        let status = reconciler.status(&instance_key(name)).unwrap();
        status.observed["addresses"][0].as_str().unwrap().to_owned()
    };
    assert_eq!(address("web"), "10.1.0.3");
    let mut others = [address("other"), address("third")];
    others.sort();
    assert!(!others.contains(&"10.1.0.3".to_owned()) && others[0] != others[1], "{others:?}");
    assert_eq!(node.host.vmm_starts(vm("web")), 1);
}
