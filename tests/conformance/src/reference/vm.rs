//! The machine's VMs and VMMs, and what happens to them on their own.

use std::collections::{BTreeMap, VecDeque};

use drivers_api::{
    DeviceName, DiskSpec, EventKind, Exit, HostEvent, HostId, Mark, NicHandle, ObjectRef, VmId,
    VmSpec, VmState, VmStatus, VolumeId,
};

use super::host::{Host, State};
use crate::Census;

/// How many bytes of a console are kept.
const CONSOLE_BYTES: usize = 64 << 10;

/// The signal that [`Host::kill_vm`] sends: SIGKILL (`signal(7)`).
const SIGKILL: i32 = 9;

#[derive(Default)]
pub(super) struct Machines {
    pub(super) vms: BTreeMap<VmId, Vm>,
    /// The VMM processes: more than one of a VM is what must never be.
    pub(super) vmms: BTreeMap<u32, VmId>,
    pub(super) foreign: BTreeMap<VmId, String>,
    pub(super) starts: BTreeMap<VmId, u64>,
    pub(super) violations: Vec<String>,
    last_pid: u32,
}

/// A VM's directory on the host.
pub(super) struct Vm {
    /// The spec as applied; `None` while it is half made.
    pub(super) spec: Option<VmSpec>,
    pub(super) disks: Vec<DiskSpec>,
    pub(super) nics: Vec<NicHandle>,
    pub(super) detaching: Vec<DeviceName>,
    pub(super) run: Option<Run>,
    pub(super) last_exit: Option<Exit>,
    /// The guest ignores requests to shut down.
    pub(super) deaf: bool,
    /// The guest does not let go of devices.
    pub(super) clings: bool,
    pub(super) console: ConsoleLog,
}

/// One run of a VM.
pub(super) struct Run {
    pub(super) pid: u32,
    pub(super) state: VmState,
    /// The spec with which it was started.
    pub(super) spec: VmSpec,
    pub(super) disk_bytes: BTreeMap<VolumeId, u64>,
    /// The VMM does not answer.
    pub(super) frozen: bool,
}

/// What a guest wrote, the oldest bytes dropped.
#[derive(Default)]
pub(super) struct ConsoleLog {
    bytes: VecDeque<u8>,
    /// How many bytes were written in all.
    pub(super) written: u64,
}

impl ConsoleLog {
    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        self.written += u64::try_from(bytes.len()).unwrap_or_default();
        let excess = self.bytes.len().saturating_sub(CONSOLE_BYTES);
        self.bytes.drain(..excess);
    }

    /// The bytes from an offset on, as far as they are kept.
    pub(super) fn since(&self, offset: u64) -> Vec<u8> {
        let wanted = usize::try_from(self.written.saturating_sub(offset)).unwrap_or(usize::MAX);
        let skip = self.bytes.len().saturating_sub(wanted);
        self.bytes.iter().skip(skip).copied().collect()
    }
}

impl Vm {
    pub(super) fn half_made() -> Self {
        Self {
            spec: None,
            disks: Vec::new(),
            nics: Vec::new(),
            detaching: Vec::new(),
            run: None,
            last_exit: None,
            deaf: false,
            clings: false,
            console: ConsoleLog::default(),
        }
    }

    pub(super) fn status(&self, vm: VmId, node: HostId) -> VmStatus {
        let mut status = VmStatus::new(
            vm,
            Mark::new(node, vm.uuid()),
            self.spec.clone(),
            self.run.as_ref().map_or(VmState::Stopped, |run| {
                if run.frozen { VmState::Unknown } else { run.state }
            }),
        );
        status.disks.clone_from(&self.disks);
        status.nics.clone_from(&self.nics);
        status.detaching.clone_from(&self.detaching);
        status.last_exit = if self.run.is_some() { None } else { self.last_exit };
        if let Some(run) = &self.run {
            status.pid = Some(run.pid);
            status.accel = Some("reference".to_owned());
            status.restart_needed = self.spec.as_ref() != Some(&run.spec);
            if run.frozen {
                status.message = Some(format!("the VMM {} does not answer", run.pid));
            }
        }
        if self.spec.is_none() {
            status.message = Some("the VM is half made".to_owned());
        }
        status
    }
}

impl Machines {
    /// Starts a VMM process.
    pub(super) fn spawn(&mut self, vm: VmId) -> u32 {
        self.last_pid += 1;
        if let Some(other) = self.vmms.iter().find(|(_, of)| **of == vm).map(|(pid, _)| *pid) {
            let pid = self.last_pid;
            self.violations.push(format!("vm {vm} runs in two VMMs: {other} and {pid}"));
        }
        self.vmms.insert(self.last_pid, vm);
        *self.starts.entry(vm).or_default() += 1;
        self.last_pid
    }

    pub(super) fn count(&self, census: &mut Census) {
        census.extend("vms", self.vms.keys());
        census.extend("vmms", self.vmms.values());
        census.extend("foreign", self.foreign.keys());
    }
}

impl State {
    /// The VMM is gone, and with it what the guest had not let go of.
    pub(super) fn vmm_exits(&mut self, vm: VmId, exit: Exit, message: &str) -> bool {
        let Some(machine) = self.machines.vms.get_mut(&vm) else { return false };
        let Some(run) = machine.run.take() else { return false };
        self.machines.vmms.remove(&run.pid);
        machine.last_exit = Some(exit);
        let gone = std::mem::take(&mut machine.detaching);
        machine.disks.retain(|disk| !gone.contains(&disk.name));
        machine.nics.retain(|nic| !gone.contains(&nic.name));
        self.tell_vm(vm, EventKind::Changed, message);
        true
    }

    pub(super) fn tell_vm(&self, vm: VmId, kind: EventKind, message: &str) {
        self.vm_events.publish(HostEvent::new(ObjectRef::Vm(vm), kind, message));
    }
}

/// What happens to VMs without a driver.
impl Host {
    fn with_vm(&self, vm: VmId, change: impl FnOnce(&mut Vm)) -> bool {
        let found = self.lock().machines.vms.get_mut(&vm).map(change).is_some();
        self.woken();
        found
    }

    /// Kills the VMM of a running VM (SIGKILL). Answers whether there was one.
    pub fn kill_vm(&self, vm: VmId) -> bool {
        let killed =
            self.lock().vmm_exits(vm, Exit::Signal(SIGKILL), "the VMM was killed by signal 9");
        self.woken();
        killed
    }

    /// The guest powers itself off. Answers whether it ran.
    pub fn stop_guest(&self, vm: VmId) -> bool {
        let stopped = self.lock().vmm_exits(vm, Exit::GuestShutdown, "the guest powered off");
        self.woken();
        stopped
    }

    /// The VMM ends by itself with an exit code. Answers whether there was one.
    pub fn crash_vmm(&self, vm: VmId, code: i32) -> bool {
        let ended = self.lock().vmm_exits(vm, Exit::Code(code), "the VMM ended");
        self.woken();
        ended
    }

    /// The VMM stops answering ([`VmState::Unknown`]), or answers again.
    pub fn freeze_vmm(&self, vm: VmId, frozen: bool) -> bool {
        let mut state = self.lock();
        let run = state.machines.vms.get_mut(&vm).and_then(|vm| vm.run.as_mut());
        let found = run.map(|run| run.frozen = frozen).is_some();
        if found {
            state.tell_vm(vm, EventKind::Changed, "the VMM's answers changed");
        }
        drop(state);
        self.woken();
        found
    }

    /// The host restarts: all VMMs are gone, events and memory too; what is on disk stays.
    pub fn reboot(&self) {
        let mut state = self.lock();
        let running: Vec<VmId> = state.machines.vmms.values().copied().collect();
        for vm in running {
            state.vmm_exits(vm, Exit::Unseen, "the host restarted");
        }
        state.links.reboot();
        drop(state);
        self.woken();
    }

    /// Whether the guest ignores requests to shut down.
    pub fn set_guest_deaf(&self, vm: VmId, deaf: bool) -> bool {
        self.with_vm(vm, |vm| vm.deaf = deaf)
    }

    /// Whether the guest holds on to devices that are removed while it runs.
    pub fn set_guest_clings(&self, vm: VmId, clings: bool) -> bool {
        self.with_vm(vm, |vm| vm.clings = clings)
    }

    /// The guest writes to its console. Answers whether it runs.
    pub fn guest_writes(&self, vm: VmId, bytes: &[u8]) -> bool {
        let mut runs = false;
        self.with_vm(vm, |vm| {
            runs = vm.run.is_some();
            if runs {
                vm.console.write(bytes);
            }
        });
        runs
    }

    /// Removes everything of a VM from the host's disk, as a person would by hand. The VMM goes too.
    pub fn remove_vm(&self, vm: VmId) -> bool {
        let mut state = self.lock();
        state.vmm_exits(vm, Exit::Unseen, "the VM was removed by hand");
        let found = state.machines.vms.remove(&vm).is_some();
        if found {
            state.tell_vm(vm, EventKind::Gone, "the VM was removed by hand");
        }
        drop(state);
        self.woken();
        found
    }

    /// Puts a half-made VM on the host, as a create that was killed leaves it.
    pub fn plant_half_made_vm(&self, vm: VmId) {
        self.lock().machines.vms.insert(vm, Vm::half_made());
    }

    /// Puts a VM that is not ours under this identity.
    pub fn plant_foreign_vm(&self, vm: VmId) {
        self.lock().machines.foreign.insert(vm, "a VM of somebody else".to_owned());
    }

    /// What [`Host::plant_foreign_vm`] put there, if it is still as it was put.
    #[must_use]
    pub fn foreign_vm(&self, vm: VmId) -> Option<String> {
        self.lock().machines.foreign.get(&vm).cloned()
    }

    /// Takes a foreign VM away.
    pub fn remove_foreign_vm(&self, vm: VmId) {
        self.lock().machines.foreign.remove(&vm);
    }

    /// The process of the VM's VMM.
    #[must_use]
    pub fn vmm_pid(&self, vm: VmId) -> Option<u32> {
        self.lock().machines.vms.get(&vm).and_then(|vm| vm.run.as_ref()).map(|run| run.pid)
    }

    /// How many VMMs were started for a VM.
    #[must_use]
    pub fn vmm_starts(&self, vm: VmId) -> u64 {
        self.lock().machines.starts.get(&vm).copied().unwrap_or_default()
    }

    /// What must never be, and was: two VMMs of one VM, one disk written by two VMs. Empty on a good host.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.lock().machines.violations.clone()
    }
}
