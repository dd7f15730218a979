//! Anything may happen in any order; once it is quiet the host is as wanted, and no VM was restarted for nothing.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::wildcard_enum_match_arm,
    reason = "a test whose helpers clippy takes for code"
)]

use std::{collections::BTreeSet, time::Duration};

use conformance::reference::{Fault, Op, When};
use drivers_api::{CpuCount, ErrorKind, VmPower};
use proptest::prelude::*;
use reconciler::{
    Reconciler,
    store::WantedStore,
    wanted::{Key, Kind, Wanted, WantedSpec},
};

use super::common::{
    Node, converged, image, instance, instance_key, key, network, volume, volume_of, with,
};

const VMS: [&str; 4] = ["a", "b", "c", "d"];
const VOLUMES: [&str; 4] = ["v0", "v1", "v2", "v3"];
const NETWORKS: [&str; 2] = ["n0", "n1"];

/// One thing that happens.
#[derive(Clone, Debug)]
enum Event {
    ApplyInstance { vm: usize, volumes: Vec<usize>, networks: Vec<usize>, cpus: u64, runs: bool },
    ApplyVolume { volume: usize, size: u64, from_image: bool },
    ApplyNetwork(usize),
    ApplyImages,
    Delete(Kind, usize),
    Reboot(usize),
    Kill(usize),
    PowerOff(usize),
    RemovePart { vm: usize, part: usize },
    RemoveNetworkPart { network: usize, part: usize },
    EvictImage,
    Freeze(usize),
    Fault { op: usize, kind: usize, when: usize, times: u64 },
    Hang { op: usize },
    Release,
    RestartAgent,
    RestartHost,
    Wait(u64),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let vm = 0..VMS.len();
    let some_volumes = prop::collection::btree_set(0..VOLUMES.len(), 0..3);
    let some_networks = prop::collection::btree_set(0..NETWORKS.len(), 0..3);
    let apply = (vm.clone(), some_volumes, some_networks, 1..4_u64, prop::bool::weighted(0.85))
        .prop_map(|(vm, volumes, networks, cpus, runs)| Event::ApplyInstance {
            vm,
            volumes: volumes.into_iter().collect(),
            networks: networks.into_iter().collect(),
            cpus,
            runs,
        });
    let kind = prop::sample::select(Kind::ALL.to_vec());
    let event = prop_oneof![
        8 => apply,
        3 => (0..VOLUMES.len(), 1..5_u64, any::<bool>())
            .prop_map(|(volume, size, from_image)| Event::ApplyVolume { volume, size, from_image }),
        2 => (0..NETWORKS.len()).prop_map(Event::ApplyNetwork),
        1 => Just(Event::ApplyImages),
        4 => (kind, 0..4_usize).prop_map(|(kind, at)| Event::Delete(kind, at)),
        1 => vm.clone().prop_map(Event::Reboot),
        2 => vm.clone().prop_map(Event::Kill),
        1 => vm.clone().prop_map(Event::PowerOff),
        2 => (vm.clone(), 0..3_usize).prop_map(|(vm, part)| Event::RemovePart { vm, part }),
        2 => (0..NETWORKS.len(), 0..3_usize)
            .prop_map(|(network, part)| Event::RemoveNetworkPart { network, part }),
        1 => Just(Event::EvictImage),
        1 => vm.prop_map(Event::Freeze),
        5 => (0..Op::ALL.len(), 0..5_usize, 0..3_usize, 1..4_u64)
            .prop_map(|(op, kind, when, times)| Event::Fault { op, kind, when, times }),
        2 => (0..Op::ALL.len()).prop_map(|op| Event::Hang { op }),
        2 => Just(Event::Release),
        3 => Just(Event::RestartAgent),
        1 => Just(Event::RestartHost),
        8 => (0..12_u32).prop_map(|power| Event::Wait(1 << power)),
    ];
    prop::collection::vec(event, 5..60)
}

/// A node to which things happen.
struct World {
    node: Node,
    reconciler: Option<Reconciler>,
    /// Counts identities of objects that are applied anew.
    made: usize,
    /// VMs that something legitimate stopped, or that were asked to.
    disturbed: BTreeSet<drivers_api::VmId>,
    frozen: Vec<drivers_api::VmId>,
}

impl World {
    fn new(whole: bool) -> Self {
        let node = Node { whole, ..Node::new() };
        node.host.set_latency(Duration::from_millis(1));
        let mut world = Self {
            reconciler: Some(node.start()),
            node,
            made: 0,
            disturbed: BTreeSet::new(),
            frozen: Vec::new(),
        };
        for object in [image("kernel"), image("disk")] {
            world.apply(object);
        }
        for (at, name) in NETWORKS.into_iter().enumerate() {
            world.apply(network(name, &format!("10.{}.0.0/24", at + 1)));
        }
        for (at, name) in VOLUMES.into_iter().enumerate() {
            let object = if at % 2 == 0 { volume(name, 1) } else { volume_of(name, 1, "disk") };
            world.apply(object);
        }
        world
    }

    fn current(&self, name: &str) -> Option<drivers_api::VmId> {
        let set = self.node.store.snapshot();
        set.get(&instance_key(name)).map(|object| drivers_api::VmId::new(object.uuid))
    }

    fn disturb(&mut self, name: &str) {
        self.disturbed.extend(self.current(name));
    }

    /// Applies as an agent does: a new identity for a new object, and nothing that is refused.
    fn apply(&mut self, object: Wanted) {
        let set = self.node.store.snapshot();
        let Some(reconciler) = &self.reconciler else { return };
        let live = set.live(&object.key());
        let uuid = live.map_or_else(
            || {
                self.made += 1;
                super::common::uuid(&format!("{} {}", object.key(), self.made))
            },
            |live| live.uuid,
        );
        let object = Wanted { uuid, ..object };
        let old = set.get(&object.key());
        let proposed = match old {
            Some(old) if old.deleting => set.with(old.with_successor(object.clone())),
            Some(_) | None => set.with(object.clone()),
        };
        if !reconciler.check(&proposed).is_empty() {
            return;
        }
        let power = |object: &Wanted| match &object.spec {
            WantedSpec::Instance(spec) => Some(spec.power),
            _ => None,
        };
        if let Some(live) = live
            && power(live) != power(&object)
        {
            self.disturbed.insert(drivers_api::VmId::new(live.uuid));
        }
        self.node.store.apply(object);
    }

    async fn happen(&mut self, event: Event) {
        match event {
            Event::ApplyInstance { vm, volumes, networks, cpus, runs } => {
                let volumes: Vec<&str> = volumes.into_iter().map(|at| VOLUMES[at]).collect();
                let networks: Vec<&str> = networks.into_iter().map(|at| NETWORKS[at]).collect();
                self.apply(with(instance(VMS[vm], &volumes, &networks), |spec| {
                    spec.cpus = CpuCount::new(cpus).unwrap();
                    spec.power = if runs { VmPower::Running } else { VmPower::Stopped };
                }));
            }
            Event::ApplyVolume { volume: at, size, from_image } => {
                let name = VOLUMES[at];
                let there = self.node.store.snapshot().live(&key(Kind::Volume, name)).cloned();
                let source = match there.map(|object| object.spec) {
                    Some(WantedSpec::Volume(spec)) => spec.source.is_some(),
                    _ => from_image,
                };
                let object =
                    if source { volume_of(name, size, "disk") } else { volume(name, size) };
                self.apply(object);
            }
            Event::ApplyNetwork(at) => {
                self.apply(network(NETWORKS[at], &format!("10.{}.0.0/24", at + 1)));
            }
            Event::ApplyImages => {
                self.apply(image("kernel"));
                self.apply(image("disk"));
            }
            Event::Delete(kind, at) => self.delete(kind, at),
            Event::Wait(millis) => tokio::time::sleep(Duration::from_millis(millis)).await,
            Event::RestartAgent => {
                self.reconciler = None;
                self.reconciler = Some(self.node.start());
            }
            other => self.trouble(&other),
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }

    fn delete(&mut self, kind: Kind, at: usize) {
        let name = match kind {
            Kind::Instance => VMS[at],
            Kind::Volume => VOLUMES[at],
            Kind::Network => NETWORKS[at % NETWORKS.len()],
            _ => ["kernel", "disk"][at % 2],
        };
        self.node.store.delete(&key(kind, name));
    }

    fn trouble(&mut self, event: &Event) {
        let host = self.node.host.clone();
        match *event {
            Event::Reboot(at) => {
                self.disturb(VMS[at]);
                self.node.store.edit(&instance_key(VMS[at]), |object| object.reboots += 1);
            }
            Event::Kill(at) => {
                self.disturb(VMS[at]);
                self.current(VMS[at]).map(|vm| host.kill_vm(vm));
            }
            Event::PowerOff(at) => {
                self.disturb(VMS[at]);
                self.current(VMS[at]).map(|vm| host.stop_guest(vm));
            }
            Event::RemovePart { vm: at, part } => {
                let Some(vm) = self.current(VMS[at]) else { return };
                let port = super::common::port_of(vm, "eth0");
                host.remove_port_part(port, ["tap", "rules", "lease"][part]);
            }
            Event::RemoveNetworkPart { network: at, part } => {
                let set = self.node.store.snapshot();
                let Some(object) = set.get(&key(Kind::Network, NETWORKS[at])) else { return };
                let id = drivers_api::NetworkId::new(object.uuid);
                host.remove_network_part(id, ["bridge", "rules", "dhcp"][part]);
            }
            Event::EvictImage => {
                host.evict_image(&"registry.test/kernel:1".parse().unwrap());
            }
            Event::Freeze(at) => {
                if let Some(vm) = self.current(VMS[at]) {
                    host.freeze_vmm(vm, true);
                    self.frozen.push(vm);
                }
            }
            Event::Fault { op, kind, when, times } => {
                let kind = [
                    ErrorKind::Unavailable,
                    ErrorKind::UnknownOutcome,
                    ErrorKind::Internal,
                    ErrorKind::NotFound,
                    ErrorKind::Exhausted,
                ][kind];
                let when = [When::Before, When::HalfWay, When::After][when];
                host.inject(Fault::new(Op::ALL[op], kind).at(when).times(times));
            }
            Event::Hang { op } => host.hang(Op::ALL[op], None),
            Event::Release => host.release(),
            Event::RestartHost => {
                for name in VMS {
                    self.disturb(name);
                }
                host.reboot();
            }
            _ => {}
        }
    }

    /// Ends all trouble, waits until it is quiet, and looks whether all is as wanted.
    async fn come_to_rest(&mut self) {
        let host = self.node.host.clone();
        host.heal();
        host.release();
        for vm in &self.frozen {
            host.freeze_vmm(*vm, false);
        }
        let reconciler = self.reconciler.clone().unwrap();
        self.unblock_deletions();
        converged(&self.node, &reconciler).await;
        tokio::time::sleep(Duration::from_secs(120)).await;
        converged(&self.node, &reconciler).await;
        self.check_census();
        assert_eq!(reconciler.plan(&self.node.store.snapshot()).await.unwrap(), []);
        let writes = host.writes();
        tokio::time::sleep(Duration::from_secs(65)).await;
        assert_eq!(host.writes(), writes, "it goes on writing: {:?}", host.take_log());
        assert_eq!(host.violations(), Vec::<String>::new());
        assert_eq!(reconciler.unclaimed().await.unwrap(), []);
    }

    /// What is deleted and still used would wait for ever: its users go too.
    fn unblock_deletions(&self) {
        loop {
            let set = self.node.store.snapshot();
            let uses_a_tombstone = |object: &&std::sync::Arc<Wanted>| {
                !object.deleting
                    && object
                        .references()
                        .iter()
                        .any(|named| set.get(named).is_none_or(|named| named.deleting))
            };
            let users: Vec<Key> = set.iter().filter(uses_a_tombstone).map(|o| o.key()).collect();
            // A successor may name what is gone; it would be Blocked for ever.
            let lost: Vec<Key> = set
                .iter()
                .filter(|object| {
                    object.successor.as_ref().is_some_and(|next| {
                        next.references().iter().any(|named| set.live(named).is_none())
                    })
                })
                .map(|object| object.key())
                .collect();
            if users.is_empty() && lost.is_empty() {
                return;
            }
            for key in users.iter().chain(&lost) {
                self.node.store.delete(key);
            }
        }
    }

    fn check_census(&self) {
        let (set, census) = (self.node.store.snapshot(), self.node.host.census());
        let (mut vms, mut vmms, mut ports, mut attachments) = (0, 0, 0, 0);
        for object in set.of_kind(Kind::Instance) {
            let WantedSpec::Instance(spec) = &object.spec else { continue };
            vms += 1;
            vmms += usize::from(spec.power == VmPower::Running);
            ports += spec.nics.len();
            attachments += spec.disks.len();
            let id = drivers_api::VmId::new(object.uuid);
            if !self.disturbed.contains(&id) {
                let starts = self.node.host.vmm_starts(id);
                assert!(starts <= 1, "{} was restarted for nothing: {starts}", object.key());
            }
        }
        let counted = |class| census.count(class);
        assert_eq!(counted("vms"), vms);
        assert_eq!(counted("vmms"), vmms);
        assert_eq!(counted("ports"), ports);
        assert_eq!(counted("attachments"), attachments);
        assert_eq!(counted("volumes"), set.of_kind(Kind::Volume).count());
        assert_eq!(counted("networks"), set.of_kind(Kind::Network).count());
    }
}

/// How many worlds are tried: more where somebody has the time.
fn cases() -> u32 {
    std::env::var("BCD_WILD_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(40)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        max_shrink_iters: 400,
        ..ProptestConfig::default()
    })]

    #[test]
    fn whatever_happens_the_host_is_as_wanted_once_it_is_quiet(events in events(), whole: bool) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut world = World::new(whole);
            for event in events {
                world.happen(event).await;
            }
            world.come_to_rest().await;
        });
    }
}
