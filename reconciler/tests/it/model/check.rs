//! What must hold once it is quiet.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use conformance::reference::Op;
use drivers_api::{
    Context, Hypervisor, Image, Network, NetworkId, PortId, VmId, VmPower, VmState, VmStatus,
    Volume, VolumeId,
};
use reconciler::{
    plan::{Action, Step},
    status::Phase,
    store::WantedStore,
    wanted::{InstanceSpec, Key, Kind, ObjectName, RestartPolicy, Wanted, WantedSpec},
};

use super::{
    super::common::{is_reached, key, port_of},
    event::Event,
    world::{Ended, Past, World, instance_spec},
};

/// How long it may take from the end of all trouble: several back-offs at their longest, one after another.
const LIMIT: Duration = Duration::from_secs(900);

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

/// The call that a step makes.
fn call_of(action: Action) -> Option<Op> {
    Some(match action {
        Action::Pull => Op::Pull,
        Action::RemoveImage => Op::DeleteImage,
        Action::EnsureVolume => Op::EnsureVolume,
        Action::DestroyVolume => Op::DestroyVolume,
        Action::AttachVolume => Op::AttachVolume,
        Action::DetachVolume => Op::DetachVolume,
        Action::EnsureNetwork => Op::EnsureNetwork,
        Action::DestroyNetwork => Op::DestroyNetwork,
        Action::AttachPort => Op::AttachPort,
        Action::DetachPort => Op::DetachPort,
        Action::EnsureVm => Op::EnsureVm,
        Action::CreateVm => Op::CreateVm,
        Action::AttachDisk => Op::AttachDisk,
        Action::DetachDisk => Op::DetachDisk,
        Action::ResizeDisk => Op::ResizeDisk,
        Action::AttachNic => Op::AttachNic,
        Action::DetachNic => Op::DetachNic,
        Action::StartVm => Op::StartVm,
        Action::StopVm => Op::StopVm,
        Action::RebootVm => Op::RebootVm,
        Action::DeleteVm => Op::DeleteVm,
        _ => return None,
    })
}

impl World {
    /// Ends all trouble, waits until it is quiet, and looks whether all is as wanted.
    pub(super) async fn rest(&mut self, then: Option<&Event>) -> Result<(), String> {
        self.heal();
        self.converge().await?;
        // Past the next comparison of everything.
        tokio::time::sleep(self.node.settings.resync + Duration::from_secs(3)).await;
        self.converge().await?;
        self.check().await?;
        self.check_quiet().await?;
        self.check_calls()?;
        if let Some(event) = then {
            self.calmly(event).await?;
        }
        Ok(())
    }

    /// Waits until everything in the store is as wanted.
    pub(super) async fn converge(&self) -> Result<(), String> {
        let limit = tokio::time::Instant::now() + LIMIT;
        let mut pause = Duration::from_millis(20);
        loop {
            let set = self.node.store.snapshot();
            let is_open = |object: &Wanted| {
                let status = self.reconciler.status(&object.key());
                object.deleting || !status.is_some_and(|status| is_reached(object, &status))
            };
            let Some(open) = set.iter().find(|object| is_open(object)) else { return Ok(()) };
            if tokio::time::Instant::now() > limit {
                let status = self.reconciler.status(&open.key());
                return Err(format!("not converged: {open:?}\n{status:#?}"));
            }
            // A tombstone's successor may come up that names what is being deleted.
            self.unblock();
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(2));
        }
    }

    /// Nothing is written, planned or claimed by nobody; a new agent sees it so too.
    async fn check_quiet(&mut self) -> Result<(), String> {
        let host = self.host();
        let plan = self.reconciler.plan(&self.node.store.snapshot()).await;
        let plan = plan.map_err(|error| format!("no plan: {error}"))?;
        ensure(plan.is_empty(), || format!("left to do: {plan:#?}"))?;
        let unclaimed = self.reconciler.unclaimed().await.map_err(|error| error.to_string())?;
        ensure(unclaimed.is_empty(), || format!("unowned: {unclaimed:?}"))?;
        let (writes, starts) = (host.writes(), self.all_starts());
        self.check_calls()?;
        self.restart_agent();
        self.converge().await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let log = || format!("an agent that starts anew writes: {:?}", host.take_log());
        ensure(host.writes() == writes && self.all_starts() == starts, log)?;
        self.killed = false;
        ensure(host.violations().is_empty(), || format!("{:?}", host.violations()))
    }

    fn all_starts(&self) -> u64 {
        self.past.keys().map(|vm| self.node.host.vmm_starts(*vm)).sum()
    }

    /// Each call that may write is that of a step.
    fn check_calls(&self) -> Result<(), String> {
        let mut count: BTreeMap<Op, (usize, usize)> = BTreeMap::new();
        for step in self.steps.take() {
            let call = call_of(step.action).ok_or_else(|| format!("no call is known of {step}"))?;
            count.entry(call).or_default().0 += 1;
        }
        for (op, _) in self.node.host.take_log() {
            count.entry(op).or_default().1 += 1;
        }
        for (op, (steps, calls)) in count {
            let right = if self.killed { calls <= steps } else { calls == steps };
            ensure(right, || format!("{op}: {steps} steps and {calls} calls"))?;
        }
        Ok(())
    }

    /// On a host that is as wanted: what is executed for a change is what was planned for it.
    async fn calmly(&mut self, event: &Event) -> Result<(), String> {
        let planned = if let Some(object) = self.object_of(event) {
            let Some((proposed, object)) = self.proposal(object) else { return Ok(()) };
            let plan = self.reconciler.plan(&proposed).await;
            self.accept(object);
            plan
        } else if let Event::Delete(kind, name) = event {
            let set = self.node.store.snapshot();
            let key = key(*kind, name);
            let Some(object) = set.get(&key) else { return Ok(()) };
            let used = set.iter().any(|user| user.references().contains(&key));
            if used {
                return Ok(());
            }
            let plan = self.reconciler.plan(&set.with(object.deleted())).await;
            self.node.store.delete(&key);
            plan
        } else {
            return Ok(());
        };
        let planned = planned.map_err(|error| format!("no plan: {error}"))?;
        self.converge().await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let executed = self.steps.take();
        drop(self.node.host.take_log());
        let by_object = |steps: &[Step]| {
            let mut all: BTreeMap<Key, Vec<(String, String)>> = BTreeMap::new();
            for step in steps {
                let what = (format!("{:?}", step.action), step.target.clone());
                all.entry(step.object.clone()).or_default().push(what);
            }
            all
        };
        ensure(by_object(&planned) == by_object(&executed), || {
            format!("for {event:?}\nplanned: {planned:#?}\nexecuted: {executed:#?}")
        })?;
        self.check().await
    }

    /// The host, as its drivers show it, is as wanted.
    async fn check(&mut self) -> Result<(), String> {
        let (host, set) = (self.host(), self.node.store.snapshot());
        let cx = Context::new();
        let lost = |error: drivers_api::Error| format!("the host cannot be looked at: {error}");
        let vms = host.hypervisor().list(&cx).await.map_err(lost)?;
        let ports = host.network().list_ports(&cx).await.map_err(lost)?;
        let networks = host.network().list(&cx).await.map_err(lost)?;
        let volumes = host.volume().list(&cx).await.map_err(lost)?;
        let images = host.image().list(&cx).await.map_err(lost)?;
        let ids = |kind| set.of_kind(kind).map(|object| object.uuid).collect::<BTreeSet<_>>();
        let same = |what: &str, seen: BTreeSet<drivers_api::Uuid>, wanted: BTreeSet<_>| {
            ensure(seen == wanted, || format!("{what}: seen {seen:?}, wanted {wanted:?}"))
        };
        same("vms", vms.iter().map(|vm| vm.uuid.uuid()).collect(), ids(Kind::Instance))?;
        same("networks", networks.iter().map(|n| n.uuid.uuid()).collect(), ids(Kind::Network))?;
        same("volumes", volumes.iter().map(|v| v.uuid.uuid()).collect(), ids(Kind::Volume))?;
        ensure(networks.iter().all(|network| network.healthy && network.spec.is_some()), || {
            format!("a network is not whole: {networks:?}")
        })?;
        let cached = images.len();
        ensure(cached == set.of_kind(Kind::Image).count(), || format!("images: {images:?}"))?;
        let mut attached: BTreeMap<VolumeId, BTreeSet<VmId>> = BTreeMap::new();
        let mut wired: BTreeMap<PortId, NetworkId> = BTreeMap::new();
        for object in set.of_kind(Kind::Instance) {
            let Some(spec) = instance_spec(object) else { continue };
            let vm = VmId::new(object.uuid);
            for disk in &spec.disks {
                attached
                    .entry(VolumeId::new(self.id(Kind::Volume, &disk.volume)?))
                    .or_default()
                    .insert(vm);
            }
            for nic in &spec.nics {
                let network = NetworkId::new(self.id(Kind::Network, &nic.network)?);
                wired.insert(port_of(vm, nic.name.as_str()), network);
            }
            let seen = vms.iter().find(|seen| seen.uuid == vm);
            self.check_vm(object, spec, seen.ok_or("it is gone")?)?;
        }
        for seen in &volumes {
            let key = set.of_kind(Kind::Volume).find(|object| object.uuid == seen.uuid.uuid());
            let Some(WantedSpec::Volume(spec)) = key.map(|object| &object.spec) else { continue };
            let users: BTreeSet<VmId> = seen.attachments.iter().map(|one| one.vm_uuid).collect();
            let wanted = attached.remove(&seen.uuid).unwrap_or_default();
            let whole = seen.complete && seen.size_bytes == spec.size_gib.get() << 30;
            ensure(whole && users == wanted, || format!("{seen:?}: wanted {spec:?}, {wanted:?}"))?;
        }
        let shown: BTreeMap<PortId, _> = ports.iter().map(|port| (port.uuid, port)).collect();
        ensure(shown.keys().eq(wired.keys()), || format!("ports: {ports:?}, wanted {wired:?}"))?;
        let mut given = BTreeSet::new();
        let mut now = BTreeMap::new();
        for (id, network) in wired {
            let port = shown.get(&id).ok_or("it is gone")?;
            let spec = port.spec.as_ref().filter(|spec| spec.network_uuid == network);
            let spec =
                spec.filter(|_| port.healthy).ok_or_else(|| format!("{port:?}: on {network}"))?;
            let unique = spec.addresses.iter().all(|address| given.insert((network, *address)));
            ensure(unique && !spec.addresses.is_empty(), || format!("addresses of {port:?}"))?;
            let place = (network, spec.addresses.clone());
            let before = self.addresses.get(&id).filter(|(on, _)| *on == network);
            ensure(before.is_none_or(|before| *before == place), || {
                format!("the address of {id} changed: {before:?}, {place:?}")
            })?;
            now.insert(id, place);
        }
        self.addresses = now;
        Ok(())
    }

    fn id(&self, kind: Kind, name: &ObjectName) -> Result<drivers_api::Uuid, String> {
        let set = self.node.store.snapshot();
        let object = set.get(&Key::new(kind, name.clone()));
        object.map(|object| object.uuid).ok_or_else(|| format!("{kind} {name} is gone"))
    }

    fn check_vm(
        &self,
        object: &Wanted,
        spec: &InstanceSpec,
        seen: &VmStatus,
    ) -> Result<(), String> {
        let vm = seen.uuid;
        let past = self.past.get(&vm).copied().unwrap_or(Past { starts: 1, ended: None });
        let rests = match (spec.restart_policy, past.ended) {
            (RestartPolicy::Always, _) | (_, None) => false,
            (RestartPolicy::OnFailure, Some(how)) => how == Ended::Well,
            (_, Some(_)) => true,
        };
        let state_ok = match (spec.power, seen.state) {
            (VmPower::Stopped, state) => state == VmState::Stopped,
            (_, VmState::Stopped) => rests,
            (_, state) => state == VmState::Running,
        };
        ensure(state_ok, || format!("{seen:?}\nwanted {object:?}\n{past:?}"))?;
        let vmms = usize::from(seen.state != VmState::Stopped);
        ensure(seen.pid.iter().count() == vmms, || format!("the VMM of {seen:?}"))?;
        let starts = self.node.host.vmm_starts(vm);
        ensure(starts <= past.starts, || {
            format!("{} was started {starts} times, {} were right", object.key(), past.starts)
        })?;
        let applied = seen.spec.as_ref().is_some_and(|applied| applied.cpu_count == spec.cpus);
        ensure(applied, || format!("{seen:?}\nwanted {spec:?}"))?;
        let status = self.reconciler.status(&object.key());
        let phase = status.as_ref().map(|status| status.phase);
        let flagged = phase == Some(Phase::RestartNeeded);
        ensure(flagged == (seen.restart_needed && seen.pid.is_some()), || {
            format!("{status:?}, {seen:?}")
        })?;
        let mut disks = Vec::new();
        for disk in &spec.disks {
            disks.push(VolumeId::new(self.id(Kind::Volume, &disk.volume)?));
        }
        let nics: BTreeSet<PortId> =
            spec.nics.iter().map(|nic| port_of(vm, nic.name.as_str())).collect();
        let same_disks = seen.disks.iter().map(|disk| disk.volume_uuid).collect::<BTreeSet<_>>()
            == disks.iter().copied().collect();
        let same_nics = seen.nics.iter().map(|nic| nic.port_uuid).collect::<BTreeSet<_>>() == nics;
        let exact = seen.disks.len() == disks.len() && seen.nics.len() == nics.len();
        ensure(same_disks && same_nics && exact && seen.detaching.is_empty(), || {
            format!("the devices of {seen:?}\nwanted {spec:?}")
        })?;
        let done = object.reboots == object.reboots_done && object.starts == object.starts_done;
        ensure(done || rests, || format!("a request is left: {object:?}"))
    }
}
