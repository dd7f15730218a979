//! What an operator does, and what the host becomes.

use std::time::Duration;

use super::common::{
    Node, converged, image, instance, instance_key, key, network, port, settle, until, vm, volume,
    volume_of, with,
};
use conformance::reference::Op;
use drivers_api::VmPower;
use reconciler::{
    status::{Phase, StatusEvent},
    store::WantedStore,
    wanted::{Kind, WantedSpec},
};

#[tokio::test(start_paused = true)]
async fn hello_becomes_a_running_vm_and_a_second_apply_writes_nothing() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    assert!(node.host.vmm_pid(vm("web")).is_some());
    let status = reconciler.status(&instance_key("web")).unwrap();
    assert_eq!(status.phase, Phase::Ready);
    assert_eq!(status.observed["addresses"], serde_json::json!(["10.1.0.2"]));
    settle().await;
    let writes = node.host.writes();
    for object in node.store.snapshot().iter() {
        node.store.apply((**object).clone());
    }
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(node.host.writes(), writes, "{:?}", node.host.take_log());
    assert_eq!(reconciler.plan(&node.store.snapshot()).await.unwrap(), []);
    assert_eq!(node.host.violations(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn hello_works_over_a_hypervisor_without_the_whole_spec() {
    let mut node = Node::hello();
    node.whole = false;
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    assert!(node.host.vmm_pid(vm("web")).is_some());
    settle().await;
    let writes = node.host.writes();
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(node.host.writes(), writes);
}

#[tokio::test(start_paused = true)]
async fn a_plan_of_new_objects_shows_all_steps_and_executes_none() {
    let node = Node::hello();
    let all = node.store.snapshot();
    let empty = Node::new();
    let reconciler = empty.start();
    let steps = reconciler.plan(&all).await.unwrap();
    let text: Vec<String> = steps.iter().map(|step| format!("{:?}", step.action)).collect();
    assert_eq!(
        text,
        ["Pull", "Pull", "EnsureVolume", "EnsureNetwork", "AttachPort", "AttachVolume", "EnsureVm"]
    );
    assert_eq!(empty.host.writes(), 0);
}

#[tokio::test(start_paused = true)]
async fn deleting_everything_at_once_leaves_nothing() {
    let node = Node::hello();
    let before = node.host.census();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    for object in node.store.snapshot().iter() {
        node.store.delete(&object.key());
    }
    until("all is gone", 60, || node.store.snapshot().is_empty()).await;
    assert_eq!(node.host.census(), before);
    assert!(reconciler.statuses().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_same_name_applied_while_it_is_deleted_is_made_anew() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    let old = node.host.vmm_pid(vm("web"));
    node.store.delete(&instance_key("web"));
    let mut again = instance("web", &["root"], &["net"]);
    again.uuid = super::common::uuid("another web");
    node.store.apply(again);
    converged(&node, &reconciler).await;
    assert_eq!(node.host.vmm_pid(vm("web")), None);
    let new = node.host.vmm_pid(drivers_api::VmId::new(super::common::uuid("another web")));
    assert!(new.is_some() && new != old);
    assert_eq!(node.host.violations(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_killed_vmm_is_started_again_at_once_and_then_later_and_later() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    let begun = tokio::time::Instant::now();
    node.host.kill_vm(vm("web"));
    until("it runs again", 5, || node.host.vmm_pid(vm("web")).is_some()).await;
    assert!(begun.elapsed() < Duration::from_secs(1));
    let mut waits = Vec::new();
    for _ in 0..9 {
        settle().await;
        let begun = tokio::time::Instant::now();
        node.host.kill_vm(vm("web"));
        until("it runs again", 90, || node.host.vmm_pid(vm("web")).is_some()).await;
        waits.push(begun.elapsed());
    }
    assert!(waits.iter().any(|wait| *wait > Duration::from_secs(5)), "{waits:?}");
    let status = reconciler.status(&instance_key("web")).unwrap();
    assert_eq!(status.observed["restarts"], 10);
    tokio::time::sleep(Duration::from_secs(61)).await;
    let begun = tokio::time::Instant::now();
    node.host.kill_vm(vm("web"));
    until("it runs again", 5, || node.host.vmm_pid(vm("web")).is_some()).await;
    assert!(begun.elapsed() < Duration::from_secs(1), "a stable run ends the row");
}

#[tokio::test(start_paused = true)]
async fn what_somebody_removed_is_put_back_from_the_event() {
    let node = Node::hello();
    let mut node = node;
    node.settings.resync = Duration::from_secs(3600);
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    let census = node.host.census();
    let pid = node.host.vmm_pid(vm("web"));
    assert!(node.host.remove_bridge(super::common::network_id("net")));
    assert!(node.host.remove_port_part(port("web", "eth0"), "rules"));
    settle().await;
    assert!(node.host.remove_tap(port("web", "eth0")));
    settle().await;
    assert_eq!(node.host.census(), census);
    assert!(!node.host.remove_network_part(super::common::network_id("net"), "nothing"));
    assert!(node.host.remove_tap(port("web", "eth0")), "the tap was put back");
    settle().await;
    assert_eq!(node.host.vmm_pid(vm("web")), pid, "no VM is restarted for drift");
    assert_eq!(reconciler.status(&instance_key("web")).unwrap().phase, Phase::Ready);
}

#[tokio::test(start_paused = true)]
async fn power_is_followed() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    node.change("web", |spec| spec.power = VmPower::Stopped);
    converged(&node, &reconciler).await;
    assert_eq!(node.host.vmm_pid(vm("web")), None);
    node.change("web", |spec| {
        spec.power = VmPower::Running;
        spec.restart_policy = reconciler::wanted::RestartPolicy::Never;
    });
    converged(&node, &reconciler).await;
    assert!(node.host.vmm_pid(vm("web")).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_reboot_is_done_once_and_recorded() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    node.store.edit(&instance_key("web"), |object| object.reboots += 1);
    settle().await;
    assert_eq!(node.host.calls(Op::RebootVm), 1);
    let object = node.store.snapshot().get(&instance_key("web")).unwrap().clone();
    assert_eq!((object.reboots_done, object.generation), (1, 1));
    drop(reconciler);
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    settle().await;
    assert_eq!(node.host.calls(Op::RebootVm), 1);
}

#[tokio::test(start_paused = true)]
async fn a_changed_spec_needs_a_restart_and_a_reboot_applies_it() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    let pid = node.host.vmm_pid(vm("web"));
    node.change("web", |spec| spec.cpus = drivers_api::CpuCount::new(2).unwrap());
    converged(&node, &reconciler).await;
    assert_eq!(reconciler.status(&instance_key("web")).unwrap().phase, Phase::RestartNeeded);
    assert_eq!(node.host.vmm_pid(vm("web")), pid);
    node.store.edit(&instance_key("web"), |object| object.reboots += 1);
    settle().await;
    converged(&node, &reconciler).await;
    assert_eq!(reconciler.status(&instance_key("web")).unwrap().phase, Phase::Ready);
    assert_ne!(node.host.vmm_pid(vm("web")), pid);
}

#[tokio::test(start_paused = true)]
async fn disks_and_nics_come_and_go_while_the_vm_runs() {
    for whole in [true, false] {
        let mut node = Node::hello();
        node.whole = whole;
        let reconciler = node.start();
        converged(&node, &reconciler).await;
        let (pid, census) = (node.host.vmm_pid(vm("web")), node.host.census());
        node.store.apply(volume("data", 1));
        node.store.apply(network("side", "10.2.0.0/24"));
        let two = instance("web", &["root", "data"], &["net", "side"]);
        node.store.apply(two);
        converged(&node, &reconciler).await;
        assert_eq!(node.host.calls(Op::AttachDisk), if whole { 1 } else { 2 });
        assert_eq!(node.host.census().count("ports"), 2);
        assert_eq!(node.host.census().count("attachments"), 2);
        node.store.apply(instance("web", &["root"], &["net"]));
        node.store.delete(&key(Kind::Volume, "data"));
        node.store.delete(&key(Kind::Network, "side"));
        converged(&node, &reconciler).await;
        assert_eq!(node.host.census(), census);
        assert_eq!(node.host.vmm_pid(vm("web")), pid);
        assert_eq!(reconciler.status(&instance_key("web")).unwrap().phase, Phase::Ready);
    }
}

#[tokio::test(start_paused = true)]
async fn a_grown_volume_is_told_to_the_running_vm_even_after_a_crash_between() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    node.host.hang(Op::ResizeDisk, None);
    node.store.apply(volume_of("root", 4, "disk"));
    until("the resize is called", 10, || node.host.calls(Op::ResizeDisk) == 1).await;
    drop(reconciler);
    node.host.release();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    settle().await;
    assert_eq!(node.host.calls(Op::ResizeDisk), 2);
    assert_eq!(node.host.volume_bytes(super::common::volume_id("root")), 4 << 30);
    assert_eq!(reconciler.plan(&node.store.snapshot()).await.unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_an_instance_uses_is_deleted_when_that_is_gone() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    node.store.delete(&key(Kind::Volume, "root"));
    settle().await;
    let status = reconciler.status(&key(Kind::Volume, "root")).unwrap();
    assert_eq!((status.phase, status.blocked_by), (Phase::Deleting, Some(instance_key("web"))));
    assert!(node.host.vmm_pid(vm("web")).is_some());
    node.store.delete(&instance_key("web"));
    until("both are gone", 20, || {
        let set = node.store.snapshot();
        set.get(&key(Kind::Volume, "root")).is_none() && set.get(&instance_key("web")).is_none()
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn an_instance_waits_for_what_it_names_and_starts_at_once_when_that_is_there() {
    let node = Node::new();
    let reconciler = node.start();
    node.store.apply(image("kernel"));
    node.store.apply(network("net", "10.1.0.0/24"));
    node.store.apply(with(instance("web", &["root"], &["net"]), |_| ()));
    settle().await;
    let status = reconciler.status(&instance_key("web")).unwrap();
    let blocker = Some(key(Kind::Volume, "root"));
    assert_eq!((status.phase, status.blocked_by), (Phase::Blocked, blocker));
    node.store.apply(volume("root", 1));
    let begun = tokio::time::Instant::now();
    converged(&node, &reconciler).await;
    assert!(begun.elapsed() < Duration::from_secs(1));
    assert!(matches!(
        node.store.snapshot().get(&instance_key("web")).unwrap().spec,
        WantedSpec::Instance(_)
    ));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_cancels_what_runs_and_leaves_the_vms() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    node.store.apply(volume("slow", 1));
    node.host.hang(Op::EnsureVolume, None);
    until("a step hangs", 5, || node.host.calls(Op::EnsureVolume) == 2).await;
    let begun = tokio::time::Instant::now();
    reconciler.shutdown().await;
    assert!(begun.elapsed() < Duration::from_secs(1));
    node.host.release();
    node.store.apply(volume("late", 1));
    settle().await;
    assert_eq!(node.host.census().count("volumes"), 1, "no step is begun after a shutdown");
    assert!(node.host.vmm_pid(vm("web")).is_some());
}

#[tokio::test(start_paused = true)]
async fn subscribers_are_told_of_steps_statuses_and_ends() {
    let node = Node::hello();
    let reconciler = node.start();
    let mut events = reconciler.subscribe();
    converged(&node, &reconciler).await;
    node.store.delete(&instance_key("web"));
    until("it is gone", 20, || node.store.snapshot().get(&instance_key("web")).is_none()).await;
    settle().await;
    let all: Vec<StatusEvent> = std::iter::from_fn(|| events.try_recv().ok()).collect();
    let count = |is: fn(&StatusEvent) -> bool| all.iter().filter(|event| is(event)).count();
    let steps = count(|event| matches!(event, StatusEvent::Step(_)));
    let gone = count(|event| matches!(event, StatusEvent::Gone { .. }));
    let host = count(|event| matches!(event, StatusEvent::Host { .. }));
    let is_ready = |event: &StatusEvent| matches!(event, StatusEvent::Changed(status) if status.phase == Phase::Ready);
    let ready = count(is_ready);
    assert_eq!((steps, gone), (7 + 4, 1), "made in seven steps, removed in four");
    assert!(ready >= 5 && host > 0, "{ready} {host}");
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_an_unwanted_vm_holds_is_deleted_once_that_vm_is_gone() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    drop(reconciler);
    // The store forgot the instance alone, as a restore of an old copy does.
    let mut old = Node::new();
    old.host = node.host.clone();
    for object in node.store.snapshot().iter().filter(|object| object.key() != instance_key("web"))
    {
        old.store.put((**object).clone());
    }
    let reconciler = old.start();
    converged(&old, &reconciler).await;
    for kind in [Kind::Volume, Kind::Network] {
        old.store.delete(&key(kind, if kind == Kind::Volume { "root" } else { "net" }));
    }
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(old.host.census().count("attachments"), 1, "an unclaimed VM is never touched");
    let gets = old.host.calls(Op::GetVolume);
    assert!(gets < 100, "it is not asked all the time: {gets}");
    old.host.remove_vm(vm("web"));
    until("both are gone", 120, || {
        let set = old.store.snapshot();
        set.of_kind(Kind::Volume).count() + set.of_kind(Kind::Network).count() == 0
    })
    .await;
    assert_eq!(old.host.census().count("ports"), 0);
}
