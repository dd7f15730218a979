//! Plans against a model of an ideal host: whatever it looks like at first, the steps of a plan make the next plan empty.

use std::{collections::BTreeMap, sync::Arc};

use async_trait::async_trait;
use conformance::reference::Host;
use drivers_api::{
    ArtifactKind, Attachment, BackingKind, BootFiles, BootKind, Change, Context, DiskBus,
    DiskFormat, ErrorKind, Exit, HostId, HostInfo, Hypervisor, HypervisorAbilities, ImageFiles,
    ImageStatus, InstanceSpec, Mark, NetworkStatus, PortStatus, Result, VmState, VmStatus,
    VolumeStatus, WholeSpec,
};
use proptest::prelude::*;

use super::*;
use crate::{
    seen::{Look, Stamp},
    wanted::{Boot, Disk, ImageSpec, NetworkSpec, Nic, RestartPolicy, VolumeSpec, WantedSpec},
};

/// A hypervisor that only says what it can do.
struct Stub {
    whole: bool,
    hot: bool,
}

fn nothing<T>() -> Result<T> {
    Err(Error::unsupported("do anything with", "a stub"))
}

#[async_trait]
impl Hypervisor for Stub {
    fn abilities(&self) -> HypervisorAbilities {
        let mut abilities = HypervisorAbilities::new(
            vec![BootKind::DirectLinux],
            vec![BackingKind::File],
            vec![DiskBus::Virtio],
        );
        abilities.hot_disks = self.hot;
        abilities.hot_nics = self.hot;
        abilities
    }
    fn whole_spec(&self) -> Option<&dyn WholeSpec> {
        self.whole.then_some(self as &dyn WholeSpec)
    }
    async fn host_info(&self, _: &Context) -> Result<HostInfo> {
        nothing()
    }
    async fn create_vm(&self, _: &Context, _: &VmSpec) -> Result<Change> {
        nothing()
    }
    async fn start_vm(&self, _: &Context, _: VmId) -> Result<Change> {
        nothing()
    }
    async fn stop_vm(&self, _: &Context, _: VmId, _: Duration) -> Result<Change> {
        nothing()
    }
    async fn reboot_vm(&self, _: &Context, _: VmId, _: Duration) -> Result<Change> {
        nothing()
    }
    async fn delete_vm(&self, _: &Context, _: VmId) -> Result<Change> {
        nothing()
    }
    async fn attach_disk(&self, _: &Context, _: VmId, _: &DiskSpec) -> Result<Change> {
        nothing()
    }
    async fn detach_disk(&self, _: &Context, _: VmId, _: VolumeId) -> Result<Change> {
        nothing()
    }
    async fn attach_nic(&self, _: &Context, _: VmId, _: &NicHandle) -> Result<Change> {
        nothing()
    }
    async fn detach_nic(&self, _: &Context, _: VmId, _: &IfName) -> Result<Change> {
        nothing()
    }
    async fn list(&self, _: &Context) -> Result<Vec<VmStatus>> {
        nothing()
    }
    async fn get(&self, _: &Context, _: VmId) -> Result<Option<VmStatus>> {
        nothing()
    }
}

#[async_trait]
impl WholeSpec for Stub {
    async fn ensure_vm(&self, _: &Context, _: &InstanceSpec) -> Result<Change> {
        nothing()
    }
}

/// The host as it is, and the ideal drivers on it.
#[derive(Clone, Default)]
struct Model {
    vm: Option<VmStatus>,
    ports: BTreeMap<PortId, PortStatus>,
    volumes: BTreeMap<VolumeId, VolumeStatus>,
    networks: BTreeMap<NetworkId, NetworkStatus>,
    told: BTreeMap<VolumeId, u64>,
}

fn uuid(number: u128) -> drivers_api::Uuid {
    drivers_api::Uuid::from_bytes(number.to_be_bytes()).unwrap()
}

fn host() -> HostId {
    HostId::new(uuid(1))
}

fn mark(object: drivers_api::Uuid) -> Mark {
    Mark::new(host(), object)
}

fn backing(volume: VolumeId) -> Backing {
    Backing::File { path: format!("/v/{volume}").parse().unwrap(), format: DiskFormat::Raw }
}

fn handle(spec: &PortSpec) -> NicHandle {
    let device = IfName::derived("tap", spec.uuid.uuid()).unwrap();
    NicHandle::new(spec.name.clone(), spec.uuid, device, spec.mac)
}

impl Model {
    fn seen(&self) -> Seen {
        let mut seen = Seen::new(host());
        let (id, at): (DriverId, Stamp) = ("d".into(), 1);
        seen.put_vms(&id, Ok(self.vm.iter().cloned().collect()), at);
        seen.put_ports(&id, Ok(self.ports.values().cloned().collect()), at);
        seen.put_volumes(&id, Ok(self.volumes.values().cloned().collect()), at);
        seen.put_networks(&id, Ok(self.networks.values().cloned().collect()), at);
        let files =
            ImageFiles::Kernel { kernel: "/k".parse().unwrap(), initrd: None, cmdline: None };
        assert_eq!(files.kind(), ArtifactKind::Kernel);
        let digest = format!("sha256:{}", "0".repeat(64)).parse().unwrap();
        let image = ImageStatus::new("r.test/k:1".parse().unwrap(), digest, files, 1);
        seen.put_images(&id, Ok(vec![image]), at);
        seen
    }

    fn attach(&mut self, request: &AttachRequest) {
        let volume = self.volumes.get_mut(&request.volume_uuid).unwrap();
        volume.attachments.retain(|one| one.vm_uuid != request.vm_uuid);
        assert!(volume.attachments.is_empty(), "two VMs have one volume open");
        let mut one = Attachment::new(request.host_uuid, request.vm_uuid, false);
        one.read_only = request.read_only;
        volume.attachments.push(one);
    }

    /// What an ideal driver makes of a step. Asserts what no plan may ask.
    fn apply(&mut self, op: &Op) {
        match op.clone() {
            Op::AttachVolume(request) => self.attach(&request),
            Op::DetachVolume(request) => {
                let holds = |vm: &VmStatus| {
                    vm.state != VmState::Stopped
                        && vm.disks.iter().any(|disk| disk.volume_uuid == request.volume_uuid)
                };
                assert!(!self.vm.as_ref().is_some_and(holds), "taken from under a running VM");
                let volume = self.volumes.get_mut(&request.volume_uuid).unwrap();
                volume.attachments.retain(|one| one.vm_uuid != request.vm_uuid);
            }
            Op::AttachPort(spec) => {
                let nic = Some(handle(&spec));
                let id = spec.uuid;
                self.ports.insert(id, PortStatus::new(id, mark(id.uuid()), Some(spec), nic));
            }
            Op::DetachPort(port) => drop(self.ports.remove(&port)),
            Op::EnsureVm { vm, disks, nics, power, .. } => {
                let disks = disks.iter().map(|disk| self.disk(disk)).collect();
                let nics = nics.iter().map(|nic| self.nic(nic)).collect();
                self.create(vm);
                let status = self.vm.as_mut().unwrap();
                (status.disks, status.nics) = (disks, nics);
                if power == VmPower::Running {
                    self.start();
                }
            }
            Op::CreateVm(spec) => self.create(spec),
            Op::AttachDisk(_, disk) => {
                let disk = self.disk(&disk);
                self.vm.as_mut().unwrap().disks.push(disk);
            }
            Op::DetachDisk(_, volume) => {
                let vm = self.vm.as_mut().unwrap();
                let gone: Vec<_> = vm.disks.extract_if(.., |d| d.volume_uuid == volume).collect();
                vm.detaching.retain(|name| gone.iter().all(|disk| disk.name != *name));
            }
            Op::ResizeDisk(_, volume, bytes) => drop(self.told.insert(volume, bytes)),
            Op::AttachNic(_, nic) => {
                let nic = self.nic(&nic);
                self.vm.as_mut().unwrap().nics.push(nic);
            }
            Op::DetachNic(_, device) => {
                let vm = self.vm.as_mut().unwrap();
                let gone: Vec<_> = vm.nics.extract_if(.., |nic| nic.device == device).collect();
                vm.detaching.retain(|name| gone.iter().all(|nic| nic.name != *name));
            }
            Op::StartVm(..) => self.start(),
            Op::StopVm(..) => {
                let vm = self.vm.as_mut().unwrap();
                vm.state = VmState::Stopped;
                vm.last_exit = Some(Exit::Requested);
                vm.restart_needed = false;
                // What the guest had not let go of ends with it.
                let gone = std::mem::take(&mut vm.detaching);
                vm.disks.retain(|disk| !gone.contains(&disk.name));
                vm.nics.retain(|nic| !gone.contains(&nic.name));
                self.told.clear();
            }
            Op::DeleteVm(_) => self.vm = None,
            Op::Pull(_)
            | Op::RemoveImage(_)
            | Op::EnsureVolume(_)
            | Op::DestroyVolume(_)
            | Op::EnsureNetwork(_)
            | Op::DestroyNetwork(_)
            | Op::RebootVm(..) => panic!("no step of these cases: {op:?}"),
        }
    }

    fn create(&mut self, spec: VmSpec) {
        let vm = self.vm.get_or_insert_with(|| {
            VmStatus::new(spec.uuid, mark(spec.uuid.uuid()), None, VmState::Stopped)
        });
        vm.restart_needed |= vm.state != VmState::Stopped && vm.spec.as_ref() != Some(&spec);
        vm.spec = Some(spec);
    }

    fn start(&mut self) {
        let vm = self.vm.as_mut().unwrap();
        let fresh = vm.state == VmState::Stopped;
        if fresh {
            vm.restart_needed = false;
        }
        vm.state = VmState::Running;
        vm.last_exit = None;
        for disk in &vm.disks {
            let bytes = self.volumes[&disk.volume_uuid].size_bytes;
            self.told.insert(disk.volume_uuid, bytes);
            let open = &self.volumes[&disk.volume_uuid].attachments;
            let mine = open.iter().any(|one| one.vm_uuid == vm.uuid);
            assert!(mine || !fresh, "started without its disk");
        }
        for nic in &vm.nics {
            let port = self.ports.get(&nic.port_uuid);
            let tap = port.is_some_and(|port| port.nic.is_some());
            assert!(tap || !fresh, "started without its tap");
        }
    }

    fn disk(&self, disk: &DiskPlan) -> DiskSpec {
        let vm = self.vm.as_ref().map(|vm| vm.uuid);
        let volume = &self.volumes[&disk.volume];
        let mine = volume.attachments.iter().any(|one| vm.is_none_or(|vm| one.vm_uuid == vm));
        assert!(mine || disk.backing.is_some(), "a disk is plugged that is not attached");
        disk.spec(backing(disk.volume))
    }

    fn nic(&self, nic: &NicPlan) -> NicHandle {
        let shown = self.ports.get(&nic.port).and_then(|port| port.nic.clone());
        shown.or_else(|| nic.handle.clone()).expect("a NIC is plugged whose device is not there")
    }
}

/// A VM that is there: state, whether its spec differs, disks, NICs, and which of these are being detached.
type There = (usize, bool, Vec<(usize, bool)>, Vec<(usize, usize)>, Vec<usize>);

/// What is random about a case.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a coin")]
struct Case {
    whole: bool,
    hot: bool,
    runs: bool,
    deleting: bool,
    wanted_disks: Vec<(usize, bool)>,
    wanted_nics: Vec<(usize, usize)>,
    vm: Option<There>,
    attached: Vec<(usize, bool)>,
    ports: Vec<(usize, usize, usize)>,
}

fn cases() -> impl Strategy<Value = Case> {
    let disks = || prop::collection::btree_map(0..3_usize, any::<bool>(), 0..4);
    let nics = || prop::collection::btree_map(0..3_usize, 0..2_usize, 0..3);
    let vm = (0..5_usize, any::<bool>(), disks(), nics(), prop::collection::vec(0..3_usize, 0..2));
    let ports = prop::collection::btree_map(0..3_usize, (0..2_usize, 0..4_usize), 0..4);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), prop::bool::weighted(0.2));
    (flags, disks(), nics(), prop::option::weighted(0.8, vm), disks(), ports).prop_map(
        |((whole, hot, runs, deleting), wanted_disks, wanted_nics, vm, attached, ports)| Case {
            whole,
            hot,
            runs,
            deleting,
            wanted_disks: wanted_disks.into_iter().collect(),
            wanted_nics: wanted_nics.into_iter().collect(),
            vm: vm.map(|(state, differs, disks, nics, detaching)| {
                let (disks, nics) = (disks.into_iter().collect(), nics.into_iter().collect());
                (state, differs, disks, nics, detaching)
            }),
            attached: attached.into_iter().collect(),
            ports: ports.into_iter().map(|(nic, (net, health))| (nic, net, health)).collect(),
        },
    )
}

const STATES: [VmState; 5] =
    [VmState::Stopped, VmState::Starting, VmState::Running, VmState::Paused, VmState::Stopping];

fn vm_id() -> VmId {
    VmId::new(uuid(100))
}

fn volume_id(at: usize) -> VolumeId {
    VolumeId::new(uuid(200 + at as u128))
}

fn network_id(at: usize) -> NetworkId {
    NetworkId::new(uuid(300 + at as u128))
}

fn nic_name(at: usize) -> DeviceName {
    format!("eth{at}").parse().unwrap()
}

fn port_spec(nic: usize, network: usize) -> PortSpec {
    let id = crate::resolve::port_id(vm_id().uuid(), &nic_name(nic)).unwrap();
    let mac = drivers_api::MacAddr::derived(id);
    let mut spec = PortSpec::new(id, vm_id(), network_id(network), nic_name(nic), mac);
    spec.hostname = Some("web".to_owned());
    spec
}

fn instance(case: &Case) -> Wanted {
    let disks = case.wanted_disks.iter().map(|(at, read_only)| Disk {
        name: format!("disk{at}").parse().unwrap(),
        volume: format!("v{at}").parse().unwrap(),
        bus: DiskBus::Virtio,
        boot: false,
        read_only: *read_only,
    });
    let nics = case.wanted_nics.iter().map(|(at, network)| Nic {
        name: nic_name(*at),
        network: format!("n{network}").parse().unwrap(),
        mac: None,
        ip: None,
        ip6: None,
    });
    let spec = crate::wanted::InstanceSpec {
        driver: None,
        cpus: drivers_api::CpuCount::new(1).unwrap(),
        memory_mib: drivers_api::MemoryMib::new(64).unwrap(),
        boot: Boot { kind: BootKind::DirectLinux, r#ref: Some("k".to_owned()), cmdline: None },
        disks: disks.collect(),
        nics: nics.collect(),
        user_data: None,
        power: if case.runs { VmPower::Running } else { VmPower::Stopped },
        restart_policy: RestartPolicy::Always,
        start_order: 0,
        stop_grace_seconds: 5,
    };
    let name = "web".parse().unwrap();
    let object = Wanted::new(vm_id().uuid(), name, WantedSpec::Instance(spec));
    if case.deleting { object.deleted() } else { object }
}

fn set(case: &Case) -> WantedSet {
    let mut all = vec![instance(case)];
    let image = ImageSpec { r#ref: "r.test/k:1".parse().unwrap(), driver: None };
    all.push(Wanted::new(uuid(400), "k".parse().unwrap(), WantedSpec::Image(image)));
    for at in 0..3 {
        let spec = VolumeSpec {
            driver: None,
            size_gib: drivers_api::SizeGib::new(1).unwrap(),
            format: DiskFormat::Raw,
            source: None,
        };
        let name = format!("v{at}").parse().unwrap();
        all.push(Wanted::new(volume_id(at).uuid(), name, WantedSpec::Volume(spec)));
    }
    for at in 0..2 {
        let text = format!(r#"{{"type": "isolated", "cidr": "10.{at}.1.0/24"}}"#);
        let spec: NetworkSpec = serde_json::from_str(&text).unwrap();
        let name = format!("n{at}").parse().unwrap();
        all.push(Wanted::new(network_id(at).uuid(), name, WantedSpec::Network(spec)));
    }
    WantedSet::new(all)
}

/// A VM that is there starts with what its disks and NICs need, as on any host on which it once was started.
fn model(case: &Case) -> Model {
    let mut model = Model::default();
    for at in 0..3 {
        let id = volume_id(at);
        let name = format!("v{at}").parse().unwrap();
        let size = drivers_api::SizeGib::new(1).unwrap();
        let spec = drivers_api::VolumeSpec::new(id, name, size, DiskFormat::Raw);
        let status = VolumeStatus::new(id, mark(id.uuid()), Some(spec), size.bytes(), 0);
        model.volumes.insert(id, status);
    }
    for (at, read_only) in &case.attached {
        let mut one = Attachment::new(host(), vm_id(), false);
        one.read_only = *read_only;
        model.volumes.get_mut(&volume_id(*at)).unwrap().attachments.push(one);
    }
    for (nic, network, health) in &case.ports {
        let spec = port_spec(*nic, *network);
        let (id, nic) = (spec.uuid, handle(&spec));
        let mut port = PortStatus::new(id, mark(id.uuid()), Some(spec), Some(nic));
        port.healthy = *health == 0;
        if *health == 2 {
            port.nic = None;
        }
        model.ports.insert(id, port);
    }
    if let Some((state, differs, disks, nics, detaching)) = &case.vm {
        let files = BootFiles::Kernel { kernel: "/k".parse().unwrap(), initrd: None };
        let boot =
            drivers_api::BootSpec::new(BootKind::DirectLinux, "r.test/k:1".to_owned(), Some(files));
        let cpus = drivers_api::CpuCount::new(if *differs { 2 } else { 1 }).unwrap();
        let memory = drivers_api::MemoryMib::new(64).unwrap();
        let spec = VmSpec::new(vm_id(), "web".parse().unwrap(), cpus, memory, boot);
        let id = vm_id();
        let mut vm = VmStatus::new(id, mark(id.uuid()), Some(spec), STATES[*state]);
        for (at, read_only) in disks {
            let name = format!("disk{at}").parse().unwrap();
            let mut disk = DiskSpec::new(name, volume_id(*at), backing(volume_id(*at)));
            disk.read_only = *read_only;
            vm.disks.push(disk);
        }
        vm.nics = nics.iter().map(|(nic, network)| handle(&port_spec(*nic, *network))).collect();
        if vm.state != VmState::Stopped {
            let names = vm.disks.iter().map(|disk| disk.name.clone());
            let names: Vec<_> = names.chain(vm.nics.iter().map(|nic| nic.name.clone())).collect();
            vm.detaching = detaching.iter().filter_map(|at| names.get(*at).cloned()).collect();
        }
        model.vm = Some(vm);
    }
    model
}

fn drivers(case: &Case) -> Drivers {
    let reference = Host::new();
    Drivers::new()
        .hypervisor("d", Arc::new(Stub { whole: case.whole, hot: case.hot }))
        .network("d", reference.network())
        .volume("d", reference.volume())
        .image("d", reference.image())
}

fn plan_once(case: &Case, model: &Model) -> Plan {
    let (wanted, seen, drivers) = (set(case), model.seen(), drivers(case));
    let (index, settings) = (Index::of(&wanted), Settings::new(host()));
    let world = World {
        wanted: &wanted,
        index: &index,
        seen: &seen,
        drivers: &drivers,
        settings: &settings,
        ready: &|_| true,
        in_use: &|_| None,
        assume: false,
    };
    let memory = Memory { told: model.told.clone(), ..Memory::empty() };
    plan(&world, &memory, &instance(case))
}

fn steps(plan: &Plan) -> Vec<String> {
    plan.steps.iter().map(|planned| planned.step.to_string()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_steps_of_a_plan_leave_nothing_to_plan(case in cases()) {
        let mut model = model(&case);
        let first = plan_once(&case, &model);
        prop_assert_eq!(steps(&first), steps(&plan_once(&case, &model)), "one input, one plan");
        let mut last = first;
        // What a stopped VM makes possible shows in a second round.
        for _ in 0..2 {
            for planned in &last.steps {
                model.apply(&planned.op);
            }
            last = plan_once(&case, &model);
        }
        prop_assert_eq!(steps(&last), Vec::<String>::new());
        if case.deleting {
            prop_assert!(matches!(last.verdict, Verdict::Clear), "{:?}", last.verdict);
            prop_assert!(model.vm.is_none() && model.ports.is_empty());
            return Ok(());
        }
        let runs = model.vm.as_ref().is_some_and(|vm| vm.state == VmState::Running);
        prop_assert_eq!(runs, case.runs);
        let restart = matches!(last.verdict, Verdict::RestartNeeded(_));
        let satisfied = matches!(last.verdict, Verdict::Satisfied(_));
        prop_assert!(satisfied || restart, "{:?}", last.verdict);
        let vm = model.vm.unwrap();
        if satisfied {
            prop_assert_eq!(vm.disks.len(), case.wanted_disks.len());
            prop_assert_eq!(vm.nics.len(), case.wanted_nics.len());
            let open = model.volumes.values().filter(|v| !v.attachments.is_empty()).count();
            prop_assert_eq!(open, case.wanted_disks.len());
            prop_assert_eq!(model.ports.len(), case.wanted_nics.len());
        }
    }

    #[test]
    fn what_cannot_be_seen_is_not_touched(case in cases(), which in 0..4_usize) {
        let (wanted, drivers) = (set(&case), drivers(&case));
        let (index, settings) = (Index::of(&wanted), Settings::new(host()));
        let mut seen = model(&case).seen();
        let id: DriverId = "d".into();
        let error = || Arc::new(Error::new(ErrorKind::Unavailable, "look at", "it", "silent"));
        let (volume, nic) = (case.wanted_disks.first(), case.wanted_nics.first());
        match (which, volume, nic) {
            (1, Some((at, _)), _) => {
                seen.put_volume(&id, volume_id(*at), Look::Unknown(error()), 2);
            }
            (2, _, Some((nic, network))) => {
                let port = port_spec(*nic, *network).uuid;
                seen.put_port(&id, port, Look::Unknown(error()), 2);
            }
            (_, _, _) => seen.put_vm(&id, vm_id(), Look::Unknown(error()), 2),
        }
        let world = World {
            wanted: &wanted, index: &index, seen: &seen, drivers: &drivers, settings: &settings,
            ready: &|_| true, in_use: &|_| None, assume: false,
        };
        let plan = plan(&world, &Memory::empty(), &instance(&case));
        prop_assert!(matches!(plan.verdict, Verdict::Unknown(_)), "{:?}", plan.verdict);
        if !case.deleting {
            // Only a stop that somebody asked for, of a VM that is seen, needs to know nothing else.
            let others = plan.steps.iter().filter(|p| p.step.action != Action::StopVm).count();
            prop_assert_eq!(others, 0);
        }
    }
}

#[test]
fn a_new_instance_is_made_in_the_order_ports_attachments_vm() {
    let case = Case {
        whole: false,
        hot: true,
        runs: true,
        deleting: false,
        wanted_disks: vec![(0, false)],
        wanted_nics: vec![(0, 0)],
        vm: None,
        attached: Vec::new(),
        ports: Vec::new(),
    };
    let actions = |case: &Case| -> Vec<Action> {
        plan_once(case, &model(case)).steps.iter().map(|planned| planned.step.action).collect()
    };
    use Action::{
        AttachDisk, AttachNic, AttachPort, AttachVolume, CreateVm, DeleteVm, DetachPort,
        DetachVolume, EnsureVm, StartVm, StopVm,
    };
    assert_eq!(
        actions(&case),
        [AttachPort, AttachVolume, CreateVm, AttachDisk, AttachNic, StartVm]
    );
    let whole = Case { whole: true, ..case.clone() };
    assert_eq!(actions(&whole), [AttachPort, AttachVolume, EnsureVm]);
    let there = Case {
        deleting: true,
        vm: Some((2, false, vec![(0, false)], vec![(0, 0)], Vec::new())),
        attached: vec![(0, false)],
        ports: vec![(0, 0, 0)],
        ..case
    };
    assert_eq!(actions(&there), [StopVm, DeleteVm, DetachPort, DetachVolume]);
}
