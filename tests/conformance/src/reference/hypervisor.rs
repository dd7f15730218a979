//! The hypervisor driver over the reference host.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use drivers_api::{
    BackingKind, BootKind, Change, Console, Context, DiskBus, DiskSpec, ErrorKind, EventKind,
    EventStream, Exit, HostInfo, Hypervisor, HypervisorAbilities, IfName, InstanceSpec, NicHandle,
    Resize, Result, VmId, VmPower, VmSpec, VmState, VmStatus, VolumeId, WholeSpec,
};

use super::{
    Op,
    devices::Device,
    host::{Call, Host, State, refuse},
    vm::{Run, Vm},
};

/// The hypervisor driver over a [`Host`]. Made by [`Host::hypervisor`].
#[derive(Clone, Debug)]
pub struct ReferenceHypervisor {
    pub(super) host: Host,
    has_whole_spec: bool,
}

impl ReferenceHypervisor {
    pub(super) const fn new(host: Host) -> Self {
        Self { host, has_whole_spec: true }
    }

    /// The same driver without [`WholeSpec`]: its VMs are made by create, attach and start.
    #[must_use]
    pub fn without_whole_spec(&self) -> Arc<Self> {
        Arc::new(Self { host: self.host.clone(), has_whole_spec: false })
    }

    /// Looks at a VM that is ours.
    pub(super) fn look<T>(
        &self,
        op: Op,
        vm: VmId,
        look: impl FnOnce(&mut State, &Vm) -> Result<T>,
    ) -> Result<Option<T>> {
        let mut state = self.host.lock();
        if state.machines.foreign.contains_key(&vm) {
            let reason = format!("a VM {vm} without our mark is on the host");
            return Err(refuse(ErrorKind::Conflict, op, format_args!("vm {vm}"), reason)
                .with_remedy("remove it, or give the instance another UUID"));
        }
        let Some(machine) = state.machines.vms.remove(&vm) else { return Ok(None) };
        let answer = look(&mut state, &machine);
        state.machines.vms.insert(vm, machine);
        answer.map(Some)
    }

    /// Changes a VM that is there; counts as one write.
    pub(super) fn write(&self, vm: VmId, change: impl FnOnce(&mut Vm)) {
        let mut state = self.host.lock();
        if let Some(machine) = state.machines.vms.get_mut(&vm) {
            change(machine);
            state.wrote();
        }
        drop(state);
        self.host.woken();
    }

    async fn create(&self, call: &Call, op: Op, spec: &VmSpec) -> Result<Change> {
        let vm = spec.uuid;
        let found = self.look(op, vm, |_, machine| Ok(machine.spec.clone()))?;
        let change = match found {
            Some(Some(applied)) if applied == *spec => return Ok(Change::Unchanged),
            Some(_) => Change::Changed,
            None => {
                let mut state = self.host.lock();
                state.machines.vms.insert(vm, Vm::half_made());
                state.wrote();
                Change::Created
            }
        };
        call.between().await?;
        self.write(vm, |machine| machine.spec = Some(spec.clone()));
        self.host.lock().tell_vm(vm, EventKind::Appeared, "the VM was made");
        Ok(change)
    }

    async fn start(&self, call: &Call, op: Op, vm: VmId) -> Result<Change> {
        let object = format!("vm {vm}");
        let ready = self.look(op, vm, |state, machine| {
            let Some(spec) = machine.spec.clone() else {
                return Err(refuse(ErrorKind::NotFound, op, &object, "the VM is half made")
                    .with_remedy("create it again with its spec"));
            };
            match &machine.run {
                Some(run) if run.frozen => {
                    let reason = format!("the VMM {} is there and does not answer", run.pid);
                    return Err(refuse(ErrorKind::UnknownOutcome, op, &object, reason));
                }
                Some(run) => return Ok((spec, Some(run.state))),
                None => {}
            }
            if spec.boot.kind == BootKind::Firmware && !machine.disks.iter().any(|disk| disk.boot) {
                let reason = "firmware boot needs a disk with boot: true";
                return Err(drivers_api::Error::invalid("disks", reason).during("start", &object));
            }
            state.can_open(op, vm, machine)?;
            Ok((spec, None))
        })?;
        let Some((spec, running)) = ready else {
            return Err(refuse(ErrorKind::NotFound, op, &object, "there is no such VM"));
        };
        match running {
            Some(VmState::Starting) => {}
            Some(_) => return Ok(Change::Unchanged),
            None => {
                let mut state = self.host.lock();
                let pid = state.machines.spawn(vm);
                let disk_bytes = state.disk_sizes(vm);
                if let Some(machine) = state.machines.vms.get_mut(&vm) {
                    let state = VmState::Starting;
                    machine.run = Some(Run { pid, state, spec, disk_bytes, frozen: false });
                    machine.last_exit = None;
                }
                state.wrote();
            }
        }
        call.between().await?;
        self.write(vm, |machine| {
            if let Some(run) = machine.run.as_mut() {
                run.state = VmState::Running;
                machine.console.write(b"guest: started\n");
            }
        });
        self.host.lock().tell_vm(vm, EventKind::Changed, "the guest runs");
        Ok(Change::Changed)
    }

    async fn stop(&self, call: &Call, op: Op, vm: VmId, grace: Duration) -> Result<Change> {
        let running = self.look(op, vm, |_, machine| {
            Ok(machine.run.as_ref().map(|run| machine.deaf || run.frozen))
        })?;
        let Some(Some(deaf)) = running else { return Ok(Change::Unchanged) };
        self.write(vm, |machine| {
            if let Some(run) = machine.run.as_mut() {
                run.state = VmState::Stopping;
            }
        });
        call.between().await?;
        let exit = if deaf {
            call.bounded(tokio::time::sleep(grace)).await?;
            Exit::Requested
        } else {
            Exit::GuestShutdown
        };
        self.exit(vm, exit, "the VM was stopped");
        Ok(Change::Changed)
    }

    fn exit(&self, vm: VmId, exit: Exit, message: &str) {
        let mut state = self.host.lock();
        if state.vmm_exits(vm, exit, message) {
            state.wrote();
        }
        drop(state);
        self.host.woken();
    }

    async fn delete(&self, call: &Call, vm: VmId) -> Result<Change> {
        if self.look(Op::DeleteVm, vm, |_, _| Ok(()))?.is_none() {
            return Ok(Change::Unchanged);
        }
        self.exit(vm, Exit::Requested, "the VM is deleted");
        call.between().await?;
        self.write(vm, |machine| machine.spec = None);
        call.between().await?;
        let mut state = self.host.lock();
        if state.machines.vms.remove(&vm).is_some() {
            state.wrote();
            state.tell_vm(vm, EventKind::Gone, "the VM was deleted");
        }
        Ok(Change::Changed)
    }

    async fn reboot(&self, call: &Call, vm: VmId) -> Result<Change> {
        let op = Op::RebootVm;
        let deaf = self.look(op, vm, |_, machine| {
            Ok(machine.run.as_ref().filter(|run| !run.frozen).map(|_| machine.deaf))
        })?;
        let Some(Some(deaf)) = deaf else { return self.start(call, op, vm).await };
        call.between().await?;
        let note: &[u8] = if deaf { b"guest: reset\n" } else { b"guest: restarted\n" };
        self.write(vm, |machine| machine.console.write(note));
        Ok(Change::Changed)
    }

    /// Puts the devices of a VM that does not run into the order of its spec.
    fn order(&self, vm: VmId, spec: &InstanceSpec) -> Change {
        let mut state = self.host.lock();
        let machine = state.machines.vms.get_mut(&vm).filter(|machine| machine.run.is_none());
        let Some(machine) = machine else { return Change::Unchanged };
        if machine.disks == spec.disks && machine.nics == spec.nics {
            return Change::Unchanged;
        }
        machine.disks.clone_from(&spec.disks);
        machine.nics.clone_from(&spec.nics);
        state.wrote();
        Change::Changed
    }

    async fn ensure(&self, call: &Call, cx: &Context, spec: &InstanceSpec) -> Result<Change> {
        let (op, vm) = (Op::EnsureVm, spec.vm.uuid);
        let mut change = self.create(call, op, &spec.vm).await?;
        let found = self.look(op, vm, |_, machine| {
            Ok((machine.disks.clone(), machine.nics.clone(), machine.run.is_some()))
        })?;
        let (disks, nics, running) = found.unwrap_or_default();
        if running && spec.power == VmPower::Stopped {
            let grace = cx.deadline().map(tokio::time::Instant::from_std);
            let grace = grace.map(|at| at.saturating_duration_since(tokio::time::Instant::now()));
            // Half of what is left: the other half is for the end of a guest that does not listen.
            let grace = grace.map_or(Duration::from_secs(30), |left| left / 2);
            change = change.and(self.stop(call, op, vm, grace).await?);
        }
        for disk in disks.iter().filter(|disk| !spec.disks.contains(disk)) {
            change = change.and(self.detach(call, op, vm, Device::Disk(disk.volume_uuid)).await?);
        }
        for nic in nics.iter().filter(|nic| !spec.nics.contains(nic)) {
            change = change.and(self.detach(call, op, vm, Device::Nic(nic.device.clone())).await?);
        }
        for disk in spec.disks.iter().filter(|disk| !disks.contains(disk)) {
            change = change.and(self.plug_disk(call, op, vm, disk).await?);
        }
        for nic in spec.nics.iter().filter(|nic| !nics.contains(nic)) {
            change = change.and(self.plug_nic(call, op, vm, nic).await?);
        }
        change = change.and(self.order(vm, spec));
        if spec.power == VmPower::Running {
            change = change.and(self.start(call, op, vm).await?);
        }
        Ok(change)
    }
}

#[async_trait]
impl Hypervisor for ReferenceHypervisor {
    fn abilities(&self) -> HypervisorAbilities {
        let boot =
            vec![BootKind::Uki, BootKind::DirectLinux, BootKind::OciImage, BootKind::Firmware];
        let backings = vec![BackingKind::File, BackingKind::BlockDevice, BackingKind::Rbd];
        let buses = vec![DiskBus::Virtio, DiskBus::Scsi, DiskBus::Nvme];
        let mut abilities = HypervisorAbilities::new(boot, backings, buses);
        abilities.hot_disks = true;
        abilities.hot_nics = true;
        abilities
    }

    fn events(&self) -> Option<EventStream> {
        Some(self.host.subscribe(|state| &state.vm_events))
    }

    fn whole_spec(&self) -> Option<&dyn WholeSpec> {
        self.has_whole_spec.then_some(self as &dyn WholeSpec)
    }

    fn console(&self) -> Option<&dyn Console> {
        Some(self)
    }

    fn resize(&self) -> Option<&dyn Resize> {
        Some(self)
    }

    async fn host_info(&self, cx: &Context) -> Result<HostInfo> {
        self.host.info(cx, "reference-hypervisor").await.map(|mut info| {
            "reference".clone_into(&mut info.hypervisor);
            info
        })
    }

    async fn create_vm(&self, cx: &Context, spec: &VmSpec) -> Result<Change> {
        let object = format!("vm {}", spec.uuid);
        spec.boot.validate().map_err(|error| error.during("create", object))?;
        let call = self.host.begin(cx, Op::CreateVm, Some(spec.uuid.uuid())).await?;
        let change = self.create(&call, Op::CreateVm, spec).await?;
        call.end(change).await
    }

    async fn start_vm(&self, cx: &Context, vm: VmId) -> Result<Change> {
        let call = self.host.begin(cx, Op::StartVm, Some(vm.uuid())).await?;
        let change = self.start(&call, Op::StartVm, vm).await?;
        call.end(change).await
    }

    async fn stop_vm(&self, cx: &Context, vm: VmId, grace: Duration) -> Result<Change> {
        let call = self.host.begin(cx, Op::StopVm, Some(vm.uuid())).await?;
        let change = self.stop(&call, Op::StopVm, vm, grace).await?;
        call.end(change).await
    }

    async fn reboot_vm(&self, cx: &Context, vm: VmId, _grace: Duration) -> Result<Change> {
        let call = self.host.begin(cx, Op::RebootVm, Some(vm.uuid())).await?;
        let change = self.reboot(&call, vm).await?;
        call.end(change).await
    }

    async fn delete_vm(&self, cx: &Context, vm: VmId) -> Result<Change> {
        let call = self.host.begin(cx, Op::DeleteVm, Some(vm.uuid())).await?;
        let change = self.delete(&call, vm).await?;
        call.end(change).await
    }

    async fn attach_disk(&self, cx: &Context, vm: VmId, disk: &DiskSpec) -> Result<Change> {
        disk.validate().map_err(|error| error.during("attach disk", format!("vm {vm}")))?;
        let call = self.host.begin(cx, Op::AttachDisk, Some(vm.uuid())).await?;
        let change = self.plug_disk(&call, Op::AttachDisk, vm, disk).await?;
        call.end(change).await
    }

    async fn detach_disk(&self, cx: &Context, vm: VmId, volume: VolumeId) -> Result<Change> {
        let call = self.host.begin(cx, Op::DetachDisk, Some(vm.uuid())).await?;
        let change = self.detach(&call, Op::DetachDisk, vm, Device::Disk(volume)).await?;
        call.end(change).await
    }

    async fn attach_nic(&self, cx: &Context, vm: VmId, nic: &NicHandle) -> Result<Change> {
        let call = self.host.begin(cx, Op::AttachNic, Some(vm.uuid())).await?;
        let change = self.plug_nic(&call, Op::AttachNic, vm, nic).await?;
        call.end(change).await
    }

    async fn detach_nic(&self, cx: &Context, vm: VmId, device: &IfName) -> Result<Change> {
        let call = self.host.begin(cx, Op::DetachNic, Some(vm.uuid())).await?;
        let change = self.detach(&call, Op::DetachNic, vm, Device::Nic(device.clone())).await?;
        call.end(change).await
    }

    async fn list(&self, cx: &Context) -> Result<Vec<VmStatus>> {
        let call = self.host.begin(cx, Op::ListVms, None).await?;
        let node = self.host.node();
        let all = self.host.lock().machines.vms.iter().map(|(vm, m)| m.status(*vm, node)).collect();
        call.end(all).await
    }

    async fn get(&self, cx: &Context, vm: VmId) -> Result<Option<VmStatus>> {
        let call = self.host.begin(cx, Op::GetVm, Some(vm.uuid())).await?;
        let node = self.host.node();
        let status = self.look(Op::GetVm, vm, |_, machine| Ok(machine.status(vm, node)))?;
        call.end(status).await
    }
}

#[async_trait]
impl WholeSpec for ReferenceHypervisor {
    async fn ensure_vm(&self, cx: &Context, spec: &InstanceSpec) -> Result<Change> {
        let object = format!("vm {}", spec.vm.uuid);
        spec.validate().map_err(|error| error.during("ensure", object))?;
        let call = self.host.begin(cx, Op::EnsureVm, Some(spec.vm.uuid.uuid())).await?;
        let change = self.ensure(&call, cx, spec).await?;
        call.end(change).await
    }
}
