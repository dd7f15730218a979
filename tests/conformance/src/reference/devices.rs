//! Disks and NICs of the reference hypervisor.

use std::collections::BTreeMap;

use async_trait::async_trait;
use drivers_api::{
    Backing, Change, Context, CpuCount, DeviceName, DiskSpec, Error, ErrorKind, EventKind, IfName,
    MemoryMib, NicHandle, Resize, Result, VmId, VolumeId,
};

use super::{
    Op,
    host::{Call, State, refuse},
    hypervisor::ReferenceHypervisor,
    vm::{Run, Vm},
};

/// How many disks, and how many NICs, a VM has slots for.
const SLOTS: usize = 24;

/// Which device to detach.
pub(super) enum Device {
    Disk(VolumeId),
    Nic(IfName),
}

impl Device {
    fn name_in(&self, machine: &Vm) -> Option<DeviceName> {
        match self {
            Self::Disk(volume) => machine
                .disks
                .iter()
                .find(|disk| disk.volume_uuid == *volume)
                .map(|disk| disk.name.clone()),
            Self::Nic(device) => {
                machine.nics.iter().find(|nic| nic.device == *device).map(|nic| nic.name.clone())
            }
        }
    }

    fn remove_from(&self, machine: &mut Vm) {
        match self {
            Self::Disk(volume) => machine.disks.retain(|disk| disk.volume_uuid != *volume),
            Self::Nic(device) => machine.nics.retain(|nic| nic.device != *device),
        }
    }
}

impl State {
    /// Whether a VMM could open the disks and NICs of a VM now. Backings and devices that this host did not make are
    /// taken on trust.
    pub(super) fn can_open(&mut self, op: Op, vm: VmId, machine: &Vm) -> Result<()> {
        let object = format!("vm {vm}");
        for disk in &machine.disks {
            self.open_disk(op, vm, disk)?;
        }
        for nic in &machine.nics {
            if self.links.lacks_tap(nic.port_uuid) {
                let reason = format!("the device {} is not there", nic.device);
                return Err(refuse(ErrorKind::Unavailable, op, &object, reason));
            }
        }
        Ok(())
    }

    fn open_disk(&mut self, op: Op, vm: VmId, disk: &DiskSpec) -> Result<()> {
        let object = format!("vm {vm}");
        if self.disks.is_missing(&disk.backing) {
            let reason = format!("{} is not there", disk.backing.path_or_uri());
            return Err(refuse(ErrorKind::Unavailable, op, object, reason));
        }
        let writers = self.machines.vms.iter().filter(|(other, machine)| {
            **other != vm
                && machine.run.is_some()
                && machine
                    .disks
                    .iter()
                    .any(|d| d.backing == disk.backing && !(d.read_only && disk.read_only))
        });
        let others: Vec<VmId> = writers.map(|(other, _)| *other).collect();
        for other in others {
            let volume = disk.volume_uuid;
            let text = format!("volume {volume} is open for writing in vm {other} and vm {vm}");
            self.machines.violations.push(text);
        }
        Ok(())
    }

    /// The sizes of the VM's disks as its VMM sees them when it starts.
    pub(super) fn disk_sizes(&self, vm: VmId) -> BTreeMap<VolumeId, u64> {
        let disks = self.machines.vms.get(&vm).map(|machine| machine.disks.as_slice());
        disks
            .unwrap_or_default()
            .iter()
            .map(|disk| (disk.volume_uuid, self.disks.size_of(disk.volume_uuid)))
            .collect()
    }
}

impl ReferenceHypervisor {
    pub(super) async fn plug_disk(
        &self,
        call: &Call,
        op: Op,
        vm: VmId,
        disk: &DiskSpec,
    ) -> Result<Change> {
        let object = format!("vm {vm}");
        let conflict = |reason: String| Err(refuse(ErrorKind::Conflict, op, &object, reason));
        let there = self.look(op, vm, |state, machine| {
            if machine.disks.contains(disk) && !machine.detaching.contains(&disk.name) {
                return Ok(true);
            }
            let volume = disk.volume_uuid;
            if machine.disks.iter().any(|other| other.volume_uuid == volume) {
                return conflict(format!("volume {volume} is attached otherwise: detach it first"));
            }
            if machine.disks.iter().any(|other| other.name == disk.name) {
                return conflict(format!("another disk has the name {}", disk.name));
            }
            if disk.boot && machine.disks.iter().any(|other| other.boot) {
                return conflict("another disk is the boot disk".to_owned());
            }
            if machine.disks.len() >= SLOTS {
                let reason = format!("all {SLOTS} slots for disks are taken");
                return Err(refuse(ErrorKind::Exhausted, op, &object, reason));
            }
            if machine.run.is_some() {
                state.open_disk(op, vm, disk)?;
            }
            Ok(false)
        })?;
        let Some(there) = there else {
            return Err(refuse(ErrorKind::NotFound, op, &object, "there is no such VM"));
        };
        if there {
            return Ok(Change::Unchanged);
        }
        call.between().await?;
        let bytes = self.host.lock().disks.size_of(disk.volume_uuid);
        self.write(vm, |machine| {
            if !machine.disks.contains(disk) {
                machine.disks.push(disk.clone());
            }
            if let Some(run) = machine.run.as_mut() {
                run.disk_bytes.insert(disk.volume_uuid, bytes);
            }
        });
        self.host.lock().tell_vm(vm, EventKind::Changed, "a disk was attached");
        Ok(Change::Created)
    }

    pub(super) async fn plug_nic(
        &self,
        call: &Call,
        op: Op,
        vm: VmId,
        nic: &NicHandle,
    ) -> Result<Change> {
        let object = format!("vm {vm}");
        let conflict = |reason: String| Err(refuse(ErrorKind::Conflict, op, &object, reason));
        let there = self.look(op, vm, |state, machine| {
            if machine.nics.contains(nic) && !machine.detaching.contains(&nic.name) {
                return Ok(true);
            }
            let mut others = state.machines.vms.values().chain([machine]);
            if others.any(|other| other.nics.iter().any(|other| other.device == nic.device)) {
                return conflict(format!("the device {} is in use", nic.device));
            }
            if machine.nics.iter().any(|other| other.name == nic.name || other.mac == nic.mac) {
                return conflict(format!("another NIC has the name {} or its MAC", nic.name));
            }
            if machine.nics.len() >= SLOTS {
                let reason = format!("all {SLOTS} slots for NICs are taken");
                return Err(refuse(ErrorKind::Exhausted, op, &object, reason));
            }
            if machine.run.is_some() && state.links.lacks_tap(nic.port_uuid) {
                let reason = format!("the device {} is not there", nic.device);
                return Err(refuse(ErrorKind::Unavailable, op, &object, reason));
            }
            Ok(false)
        })?;
        let Some(there) = there else {
            return Err(refuse(ErrorKind::NotFound, op, &object, "there is no such VM"));
        };
        if there {
            return Ok(Change::Unchanged);
        }
        call.between().await?;
        self.write(vm, |machine| {
            if !machine.nics.contains(nic) {
                machine.nics.push(nic.clone());
            }
        });
        self.host.lock().tell_vm(vm, EventKind::Changed, "a NIC was attached");
        Ok(Change::Created)
    }

    pub(super) async fn detach(
        &self,
        call: &Call,
        op: Op,
        vm: VmId,
        device: Device,
    ) -> Result<Change> {
        let found = self.look(op, vm, |_, machine| {
            let name = device.name_in(machine);
            Ok(name.map(|name| (name, machine.run.is_some())))
        })?;
        let Some(Some((name, running))) = found else { return Ok(Change::Unchanged) };
        if running {
            self.write(vm, |machine| {
                if !machine.detaching.contains(&name) {
                    machine.detaching.push(name.clone());
                }
            });
        }
        call.between().await?;
        let clings = || {
            let state = self.host.lock();
            let machine = state.machines.vms.get(&vm);
            machine.is_some_and(|vm| vm.run.is_some() && vm.clings && vm.detaching.contains(&name))
        };
        call.wait_while(clings).await?;
        self.write(vm, |machine| {
            machine.detaching.retain(|other| *other != name);
            device.remove_from(machine);
        });
        self.host.lock().tell_vm(vm, EventKind::Changed, "a device was detached");
        Ok(Change::Changed)
    }

    /// Changes a run, if the VM runs. `change` answers whether there was anything to change.
    fn resize_run(
        &self,
        op: Op,
        vm: VmId,
        change: impl FnOnce(&mut Run) -> Result<bool>,
    ) -> Result<Change> {
        if self.look(op, vm, |_, _| Ok(()))?.is_none() {
            return Err(refuse(ErrorKind::NotFound, op, format!("vm {vm}"), "there is no such VM"));
        }
        let mut state = self.host.lock();
        let run = state.machines.vms.get_mut(&vm).and_then(|machine| machine.run.as_mut());
        let changed = run.map_or(Ok(false), change)?;
        if changed {
            state.wrote();
        }
        Ok(Change::changed_if(changed))
    }
}

#[async_trait]
impl Resize for ReferenceHypervisor {
    async fn resize_disk(
        &self,
        cx: &Context,
        vm: VmId,
        volume: VolumeId,
        bytes: u64,
    ) -> Result<Change> {
        let op = Op::ResizeDisk;
        let call = self.host.begin(cx, op, Some(vm.uuid())).await?;
        let has = self.look(op, vm, |_, machine| {
            Ok(machine.disks.iter().any(|disk| disk.volume_uuid == volume))
        })?;
        if has != Some(true) {
            let object = format!("disk {volume} of vm {vm}");
            return Err(refuse(ErrorKind::NotFound, op, object, "there is no such disk"));
        }
        let change = self.resize_run(op, vm, |run| {
            let known = run.disk_bytes.entry(volume).or_default();
            if bytes < *known {
                let reason = format!("{bytes} is less than the {known} that the guest sees");
                return Err(Error::invalid("bytes", reason));
            }
            Ok(std::mem::replace(known, bytes) != bytes)
        })?;
        call.end(change).await
    }

    async fn resize_cpus(&self, cx: &Context, vm: VmId, cpus: CpuCount) -> Result<Change> {
        let op = Op::ResizeCpus;
        let call = self.host.begin(cx, op, Some(vm.uuid())).await?;
        let change = self.resize_run(op, vm, |run| {
            if cpus > run.spec.cpu_count {
                return Err(Error::unsupported("add CPUs beyond those at the start to", vm));
            }
            Ok(std::mem::replace(&mut run.spec.cpu_count, cpus) != cpus)
        })?;
        call.end(change).await
    }

    async fn resize_memory(&self, cx: &Context, vm: VmId, memory: MemoryMib) -> Result<Change> {
        let op = Op::ResizeMemory;
        let call = self.host.begin(cx, op, Some(vm.uuid())).await?;
        let change = self.resize_run(op, vm, |run| {
            if memory > run.spec.memory_mib {
                return Err(Error::unsupported("add memory beyond that at the start to", vm));
            }
            Ok(std::mem::replace(&mut run.spec.memory_mib, memory) != memory)
        })?;
        call.end(change).await
    }
}

/// Whether a backing is one that the reference volume driver made.
pub(super) fn own_path(backing: &Backing) -> Option<&str> {
    let Backing::File { path, .. } = backing else { return None };
    path.as_str().strip_prefix("/reference/volumes/")
}
