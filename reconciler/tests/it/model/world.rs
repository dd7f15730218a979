//! A node to which things happen, with a record of what each allows.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use conformance::reference::{Fault, Host};
use drivers_api::{BoxFuture, CpuCount, Error, NetworkId, PortId, VmId, VmPower};
use reconciler::{
    Reconciler, StepHook,
    plan::Step,
    store::WantedStore,
    wanted::{InstanceSpec, Key, Kind, Wanted, WantedSpec},
};

use super::{
    super::common::{
        Node, image, instance, instance_key, key, network, port_of, uuid, volume, volume_of, with,
    },
    event::{Event, IMAGES, NETWORKS, VMS, VOLUMES},
};

/// Keeps the steps whose calls are made.
#[derive(Default)]
pub(super) struct Steps(Mutex<Vec<Step>>);

impl Steps {
    pub(super) fn take(&self) -> Vec<Step> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl StepHook for Steps {
    fn before<'a>(&'a self, step: &'a Step) -> BoxFuture<'a, Result<(), Error>> {
        self.0.lock().unwrap().push(step.clone());
        Box::pin(std::future::ready(Ok(())))
    }
}

/// What of a VM's past matters to what it may be now.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Past {
    /// How often it may have been started.
    pub(super) starts: u64,
    /// How its last run ended by itself, unless somebody asked for a start since.
    pub(super) ended: Option<Ended>,
}

/// How a run ended by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Ended {
    Well,
    Badly,
}

/// A node to which things happen.
pub(super) struct World {
    pub(super) node: Node,
    pub(super) steps: Arc<Steps>,
    pub(super) reconciler: Reconciler,
    /// Counts identities of objects that are applied anew.
    made: usize,
    pub(super) past: BTreeMap<VmId, Past>,
    /// The VMs that were changed to behave badly.
    bad: BTreeSet<VmId>,
    /// Whether the agent was killed since the last rest: a step may have been announced and its call not made.
    pub(super) killed: bool,
    /// The addresses of ports at the last rest, each with its network.
    pub(super) addresses: BTreeMap<PortId, (NetworkId, Vec<std::net::IpAddr>)>,
}

fn subnet(name: &str) -> String {
    let at = NETWORKS.iter().position(|network| *network == name).unwrap();
    format!("10.{}.0.0/24", at + 1)
}

pub(super) fn instance_spec(object: &Wanted) -> Option<&InstanceSpec> {
    if let WantedSpec::Instance(spec) = &object.spec { Some(spec) } else { None }
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let mut node = Node { whole: seed & 1 == 0, ..Node::new() };
        let steps = Arc::<Steps>::default();
        node.settings.hook = Some(Arc::<Steps>::clone(&steps));
        node.settings.jitter_seed = Some(seed);
        node.settings.slow = Duration::from_secs(60);
        node.host.set_latency(Duration::from_millis(1));
        let reconciler = node.start();
        let (past, addresses) = (BTreeMap::new(), BTreeMap::new());
        let bad = BTreeSet::new();
        let mut world =
            Self { node, steps, reconciler, made: 0, past, bad, killed: false, addresses };
        for name in IMAGES {
            world.apply(image(name));
        }
        for name in NETWORKS {
            world.apply(network(name, &subnet(name)));
        }
        for (at, name) in VOLUMES.into_iter().enumerate() {
            let object = if at % 2 == 0 { volume(name, 1) } else { volume_of(name, 1, "disk") };
            world.apply(object);
        }
        world
    }

    pub(super) fn host(&self) -> Host {
        self.node.host.clone()
    }

    fn wanted(&self, name: &str) -> Option<Arc<Wanted>> {
        self.node.store.snapshot().get(&instance_key(name)).cloned()
    }

    fn vm(&self, name: &str) -> Option<VmId> {
        self.wanted(name).map(|object| VmId::new(object.uuid))
    }

    fn past(&mut self, vm: VmId) -> &mut Past {
        self.past.entry(vm).or_insert(Past { starts: 1, ended: None })
    }

    /// One more start of a VM is right. With `asked`, it must run whatever its restart policy says.
    fn may_start(&mut self, name: &str, asked: bool) {
        let Some(vm) = self.vm(name) else { return };
        let past = self.past(vm);
        past.starts += 1;
        if asked {
            past.ended = None;
        }
    }

    /// The set with an object applied as an agent does: a new identity for a new object. `None` when it is refused.
    pub(super) fn proposal(
        &mut self,
        object: Wanted,
    ) -> Option<(reconciler::wanted::WantedSet, Wanted)> {
        let set = self.node.store.snapshot();
        let known = set.live(&object.key()).map(|live| live.uuid);
        let uuid = known.unwrap_or_else(|| {
            self.made += 1;
            uuid(&format!("{} {}", object.key(), self.made))
        });
        let object = Wanted { uuid, ..object };
        let merged = match set.get(&object.key()) {
            Some(old) if old.deleting => old.with_successor(object.clone()),
            Some(old) => old.next(object.clone()),
            None => object.clone(),
        };
        let proposed = set.with(merged);
        self.reconciler.check(&proposed).is_empty().then_some((proposed, object))
    }

    fn apply(&mut self, object: Wanted) {
        let Some((_, object)) = self.proposal(object) else { return };
        self.accept(object);
    }

    /// Puts an object into the store that was found right.
    pub(super) fn accept(&mut self, object: Wanted) {
        let set = self.node.store.snapshot();
        let live = set.live(&object.key());
        if let (Some(before), Some(after)) = (live.and_then(instance_spec), instance_spec(&object))
        {
            let pending = live.is_some_and(|live| live.reboots > live.reboots_done);
            let starts = before.power == VmPower::Stopped && after.power == VmPower::Running;
            let past = self.past(VmId::new(object.uuid));
            if starts {
                past.starts += 1;
                past.ended = None;
            } else if pending && before.cpus != after.cpus {
                // A reboot of a changed VM is a stop and a start.
                past.starts += 1;
            }
        }
        self.forget_addresses(&object);
        self.node.store.apply(object);
    }

    /// A NIC that goes, or moves to another network, gives its address back.
    fn forget_addresses(&mut self, object: &Wanted) {
        let Some(spec) = instance_spec(object) else { return };
        let vm = VmId::new(object.uuid);
        for nic in ["eth0", "eth1"] {
            let wanted = |spec: &InstanceSpec| {
                let found = spec.nics.iter().find(|one| one.name.as_str() == nic);
                found.map(|one| one.network.clone())
            };
            let before = self.node.store.snapshot();
            let before = before.live(&object.key()).and_then(instance_spec).and_then(wanted);
            if before != wanted(spec) {
                self.addresses.remove(&port_of(vm, nic));
            }
        }
    }

    /// The object that an event applies.
    pub(super) fn object_of(&self, event: &Event) -> Option<Wanted> {
        Some(match event {
            Event::Instance { vm, volumes, networks, cpus, power, policy } => {
                with(instance(vm, volumes, networks), |spec| {
                    spec.cpus = CpuCount::new(*cpus).unwrap();
                    spec.power = *power;
                    spec.restart_policy = *policy;
                })
            }
            Event::Volume { volume: name, size, from_image } => {
                let there = self.node.store.snapshot().live(&key(Kind::Volume, name)).cloned();
                let source = match there.map(|object| object.spec) {
                    Some(WantedSpec::Volume(spec)) => spec.source.is_some(),
                    _ => *from_image,
                };
                if source { volume_of(name, *size, "disk") } else { volume(name, *size) }
            }
            Event::Network(name) => network(name, &subnet(name)),
            Event::Image(name) => image(name),
            _ => return None,
        })
    }

    pub(super) async fn happen(&mut self, event: &Event) -> Result<(), String> {
        if let Some(object) = self.object_of(event) {
            self.apply(object);
        } else {
            match event {
                Event::Delete(kind, name) => {
                    self.node.store.delete(&key(*kind, name));
                }
                Event::Wait(millis) => tokio::time::sleep(Duration::from_millis(*millis)).await,
                Event::RestartAgent => self.restart_agent(),
                Event::Rest(then) => return self.rest(then.as_deref()).await,
                other => self.trouble(other),
            }
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        Ok(())
    }

    pub(super) fn restart_agent(&mut self) {
        for name in VMS {
            let Some(object) = self.wanted(name) else { continue };
            // What was done and not recorded is done once more.
            if object.reboots > object.reboots_done || object.starts > object.starts_done {
                self.may_start(name, false);
            }
        }
        self.killed = true;
        self.reconciler = self.node.start();
    }

    fn ended(&mut self, name: &str, how: Ended, end: impl FnOnce(&Host, VmId) -> bool) {
        let Some(vm) = self.vm(name) else { return };
        if end(&self.host(), vm) {
            let past = self.past(vm);
            past.starts += 1;
            past.ended = Some(how);
        }
    }

    fn request(&mut self, name: &str, edit: impl FnOnce(&mut Wanted)) {
        self.may_start(name, true);
        self.node.store.edit(&instance_key(name), edit);
    }

    /// A VM behaves badly until the next rest.
    fn misbehave(&mut self, name: &str, how: impl FnOnce(&Host, VmId) -> bool) {
        if let Some(vm) = self.vm(name)
            && how(&self.host(), vm)
        {
            self.bad.insert(vm);
        }
    }

    fn trouble(&mut self, event: &Event) {
        let host = self.host();
        match *event {
            Event::Reboot(name) => self.request(name, |object| object.reboots += 1),
            Event::Start(name) => self.request(name, |object| object.starts += 1),
            Event::Kill(name) => self.ended(name, Ended::Badly, Host::kill_vm),
            Event::PowerOff(name) => self.ended(name, Ended::Well, Host::stop_guest),
            Event::Crash(name) => self.ended(name, Ended::Badly, |host, vm| host.crash_vmm(vm, 1)),
            Event::RemoveVm(name) => self.ended(name, Ended::Badly, Host::remove_vm),
            Event::Freeze(name) => self.misbehave(name, |host, vm| host.freeze_vmm(vm, true)),
            Event::Cling(name) => self.misbehave(name, |host, vm| host.set_guest_clings(vm, true)),
            Event::Deaf(name) => self.misbehave(name, |host, vm| host.set_guest_deaf(vm, true)),
            Event::RemovePortPart { vm: name, part } => {
                if let Some(vm) = self.vm(name) {
                    host.remove_port_part(port_of(vm, "eth0"), part);
                }
            }
            Event::RemoveNetworkPart { network: name, part } => {
                if let Some(object) = self.node.store.snapshot().get(&key(Kind::Network, name)) {
                    host.remove_network_part(NetworkId::new(object.uuid), part);
                }
            }
            Event::EvictImage(name) => {
                host.evict_image(&format!("registry.test/{name}:1").parse().unwrap());
            }
            Event::Fault { op, kind, when, times } => {
                host.inject(Fault::new(op, kind).at(when).times(times));
            }
            Event::Hang(op) => host.hang(op, None),
            Event::HangDeaf(op) => host.hang_deaf(op, None),
            Event::Release => host.release(),
            Event::Down(down) => host.set_down(down),
            Event::RestartHost => {
                for name in VMS {
                    // All runs end, and nobody sees how.
                    self.ended(name, Ended::Badly, |host, vm| host.vmm_pid(vm).is_some());
                }
                host.reboot();
            }
            _ => {}
        }
    }

    /// Ends all that troubles the host.
    pub(super) fn heal(&mut self) {
        let host = self.host();
        host.set_down(false);
        host.heal();
        host.release();
        for vm in std::mem::take(&mut self.bad) {
            host.freeze_vmm(vm, false);
            host.set_guest_clings(vm, false);
            host.set_guest_deaf(vm, false);
        }
        self.unblock();
    }

    /// What is deleted and still used would wait for ever: its users go too. So do those that name what is gone.
    pub(super) fn unblock(&self) {
        loop {
            let set = self.node.store.snapshot();
            let lost = |object: &Wanted| {
                object
                    .references()
                    .iter()
                    .any(|named| set.get(named).is_none_or(|named| named.deleting))
            };
            let lost_next = |object: &Wanted| {
                object.successor.as_ref().is_some_and(|next| {
                    next.references().iter().any(|named| set.live(named).is_none())
                })
            };
            let all: Vec<Key> = set
                .iter()
                .filter(|object| (!object.deleting && lost(object)) || lost_next(object))
                .map(|object| object.key())
                .collect();
            if all.is_empty() {
                return;
            }
            for key in &all {
                self.node.store.delete(key);
            }
        }
    }
}
