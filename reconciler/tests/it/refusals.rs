//! What is refused before anything happens.

use drivers_api::VmPower;
use reconciler::{
    Capacity,
    store::WantedStore,
    wanted::{Kind, WantedSpec},
};

use super::common::{
    Node, converged, image, instance, instance_key, key, network, settle, vm, volume, with,
};

fn fields(
    node: &Node,
    reconciler: &reconciler::Reconciler,
    objects: Vec<reconciler::wanted::Wanted>,
) -> Vec<String> {
    let set = node.store.snapshot().with_all(objects);
    reconciler
        .check(&set)
        .iter()
        .map(|refusal| format!("{} {}", refusal.key, refusal.field))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn wrong_references_shapes_and_clashes_are_refused_at_their_field() {
    let node = Node::hello();
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    let refused = |objects| fields(&node, &reconciler, objects);
    assert_eq!(refused(vec![]), Vec::<String>::new());
    assert_eq!(
        refused(vec![instance("x", &["rot"], &["nat"])]),
        ["Instance x spec.disks[0].volume", "Instance x spec.nics[0].network"]
    );
    assert_eq!(refused(vec![instance("x", &["root"], &[])]), ["Instance x spec.disks[0].volume"]);
    let driver = with(instance("x", &[], &[]), |spec| spec.driver = Some("vmware".to_owned()));
    assert_eq!(refused(vec![driver]), ["Instance x spec.driver"]);
    let asked = |ip: &str| {
        with(instance("x", &[], &["net"]), |spec| spec.nics[0].ip = Some(ip.parse().unwrap()))
    };
    for bad in ["10.9.0.1", "10.1.0.1", "10.1.0.255", "10.1.0.2"] {
        assert_eq!(refused(vec![asked(bad)]), ["Instance x spec.nics[0].ip"], "{bad}");
    }
    assert_eq!(refused(vec![asked("10.1.0.77")]), Vec::<String>::new());
    let mut same = asked("10.1.0.77");
    same.name = "y".parse().unwrap();
    same.uuid = super::common::uuid("y");
    assert_eq!(refused(vec![asked("10.1.0.77"), same]).len(), 1);
    assert_eq!(refused(vec![volume("root", 1)]), ["Volume root spec.size_gib"]);
    let mut raw = super::common::volume_of("root", 2, "disk");
    if let WantedSpec::Volume(spec) = &mut raw.spec {
        spec.format = drivers_api::DiskFormat::Raw;
    }
    assert_eq!(refused(vec![raw]), ["Volume root spec.format"]);
    let mut twin = volume("twin", 1);
    twin.uuid = super::common::uuid("Volume/root");
    assert_eq!(refused(vec![twin]), ["Volume twin uuid"]);
    assert_eq!(refused(vec![network("n", "10.5.0.0/31")]), ["Network n spec.cidr"]);
    let firmware = with(instance("x", &[], &[]), |spec| {
        spec.boot.kind = drivers_api::BootKind::Firmware;
    });
    let both = ["Instance x spec.disks", "Instance x spec.boot.ref"];
    assert_eq!(refused(vec![firmware]), both);
    node.store.delete(&key(Kind::Network, "net"));
    assert_eq!(refused(vec![instance("x", &[], &["net"])]), ["Instance x spec.nics[0].network"]);
    assert_eq!(refused(vec![image("other")]), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_is_there_already_keeps_nobody_from_another_change() {
    let node = Node::hello();
    node.store.apply(instance("broken", &["nowhere"], &[]));
    let reconciler = node.start();
    settle().await;
    assert_eq!(fields(&node, &reconciler, vec![volume("new", 1)]), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn no_vm_is_made_beyond_the_host_s_size_and_one_that_waits_starts_when_there_is_room() {
    let mut node = Node::new();
    node.settings.capacity = Capacity::new(8, 300);
    node.store.apply(image("kernel"));
    let reconciler = node.start();
    converged(&node, &reconciler).await;
    let all = || vec![instance("a", &[], &[]), instance("b", &[], &[]), instance("c", &[], &[])];
    assert_eq!(fields(&node, &reconciler, all()), ["Instance c spec"]);
    // Accepted all the same, as by an agent with another opinion: the passes hold the limit too.
    for object in all() {
        node.store.apply(object);
    }
    settle().await;
    assert_eq!(node.host.census().count("vmms"), 2);
    let waits = ["a", "b", "c"].into_iter().find(|name| node.host.vmm_pid(vm(name)).is_none());
    let failure = reconciler.status(&instance_key(waits.unwrap())).unwrap().failure.unwrap();
    assert_eq!(failure.kind, drivers_api::ErrorKind::Exhausted);
    assert_eq!(node.host.census().count("vms"), 2, "nothing is made of it");
    let runs = ["a", "b", "c"].into_iter().find(|name| node.host.vmm_pid(vm(name)).is_some());
    node.change(runs.unwrap(), |spec| spec.power = VmPower::Stopped);
    let begun = tokio::time::Instant::now();
    super::common::until("the waiting one runs", 5, || {
        node.host.vmm_pid(vm(waits.unwrap())).is_some()
    })
    .await;
    assert!(begun.elapsed() < std::time::Duration::from_secs(1));
}
