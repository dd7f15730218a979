//! An instance: its ports, its attachments, its VM with disks and NICs, and whether it runs.
//!
//! Order of the steps: a requested stop; then what is taken away, from the guest inwards (disk, attachment, NIC, port);
//! then what is added, from the host outwards (ports, attachments, VM, disks and NICs, start); then sizes and a reboot.

use std::{sync::Arc, time::Duration};

use drivers_api::{Exit, HypervisorAbilities, VmPower, VmSpec, VmState, VmStatus};

use super::{
    Action, Devices, DiskPlan, Group, Memory, NicPlan, Op, Plan, Planned, Verdict, World,
    devices::{Plug, Scene, silent},
    disks::disks,
    nics::nics,
    of_another_node,
};
use crate::{
    resolve::{Hold, no_driver, vm_spec},
    seen::Look,
    store::Done,
    wanted::{InstanceSpec, Key, Kind, RestartPolicy, Wanted},
};

/// Whether the VM is to be started, and why.
enum Start {
    No,
    /// It ended by itself, and stays so until somebody asks.
    Rests(String),
    Later(Duration),
    Now(String),
}

pub(super) fn plan(
    world: &World<'_>,
    memory: &Memory,
    object: &Wanted,
    spec: &InstanceSpec,
) -> Plan {
    let Some((driver, hypervisor)) = world.drivers.find_hypervisor(spec.driver.as_deref()) else {
        return Hold::from(no_driver("hypervisor", spec.driver.as_deref())).into();
    };
    let vm = drivers_api::VmId::new(object.uuid);
    let status = match world.seen.vm(driver, &vm) {
        Look::There(status) if status.mark.node != world.settings.host => {
            return of_another_node(&object.key(), status.mark).into();
        }
        Look::There(status) if status.state == VmState::Unknown => {
            return Hold::Unknown(silent(&status)).into();
        }
        Look::There(status) => Some(status),
        Look::Absent => None,
        Look::Foreign(error) => return Hold::Stuck(error).into(),
        Look::Unknown(error) => return Hold::Unknown(error).into(),
    };
    let scene = Scene { world, memory, object, spec, driver, vm, status: status.as_deref() };
    Draft::new(scene, hypervisor.abilities(), hypervisor.whole_spec().is_some()).plan()
}

struct Draft<'a> {
    scene: Scene<'a>,
    abilities: HypervisorAbilities,
    whole: bool,
    /// Why the VM is stopped first, if it is.
    stop: Option<String>,
}

impl<'a> Draft<'a> {
    fn new(scene: Scene<'a>, abilities: HypervisorAbilities, whole: bool) -> Self {
        Self { scene, abilities, whole, stop: None }
    }

    fn state(&self) -> VmState {
        self.scene.status.map_or(VmState::Stopped, |status| status.state)
    }

    /// Whether it runs now and goes on.
    fn runs_on(&self) -> bool {
        self.stop.is_none() && self.state() != VmState::Stopped
    }

    fn wants_reboot(&self) -> bool {
        self.scene.object.reboots > self.scene.object.reboots_done
    }

    fn is_asked(&self) -> bool {
        let object = self.scene.object;
        self.scene.memory.asked || self.wants_reboot() || object.starts > object.starts_done
    }

    fn plan(mut self) -> Plan {
        let scene = self.scene;
        let applied = scene.status.and_then(|status| status.spec.as_ref());
        let resolved = vm_spec(scene.world, scene.object, scene.spec, applied);
        let differs = match &resolved {
            Ok((spec, _)) => applied.filter(|_| scene.status.is_some()).is_some_and(|a| a != spec),
            Err(_) => false,
        };
        self.stop = self.stop_reason(differs);
        let mut plan = self.stop_step();
        let plug = |hot| Plug {
            exists: scene.status.is_some(),
            running: self.runs_on(),
            hot,
            whole: self.whole,
        };
        let devices = disks(&scene, plug(self.abilities.hot_disks))
            .and_then(|disks| Ok((disks, nics(&scene, plug(self.abilities.hot_nics))?, resolved?)));
        let (disks, nics, (vm, boot_hold)) = match devices {
            Ok(devices) => devices,
            Err(hold) => {
                plan.verdict = hold.into();
                return plan;
            }
        };
        self.finish(plan, (vm, boot_hold), disks, nics)
    }

    /// Why the VM is stopped before all else.
    fn stop_reason(&self, spec_differs: bool) -> Option<String> {
        let status = self.scene.status?;
        if matches!(status.state, VmState::Stopped | VmState::Unknown) {
            return None;
        }
        if self.scene.spec.power == VmPower::Stopped {
            return Some("wanted stopped".to_owned());
        }
        if status.state == VmState::Stopping {
            return Some("a stop was begun".to_owned());
        }
        let changed = status.restart_needed || spec_differs;
        (status.state == VmState::Running && self.wants_reboot() && changed)
            .then(|| "reboot asked for, with a changed spec".to_owned())
    }

    fn stop_step(&self) -> Plan {
        let mut plan = Plan::satisfied();
        if let Some(reason) = &self.stop {
            let scene = &self.scene;
            let call = (Action::StopVm, Op::StopVm(scene.vm, self.grace()));
            let target = format!("vm {}", scene.object.name);
            let step = scene.draft().step(scene.driver, call, target, reason.clone());
            plan.steps.push(step.in_group(Group::Power, &[]));
        }
        plan
    }

    fn grace(&self) -> Duration {
        Duration::from_secs(self.scene.spec.stop_grace_seconds.into())
    }

    fn start(&self) -> Start {
        let scene = &self.scene;
        if scene.spec.power == VmPower::Stopped {
            return Start::No;
        }
        let Some(status) = scene.status.filter(|status| status.spec.is_some()) else {
            return Start::Now("missing".to_owned());
        };
        if self.stop.is_some() {
            return Start::Now("stopped for a restart".to_owned());
        }
        match status.state {
            VmState::Stopped => {}
            VmState::Starting => return Start::Now("a start was begun".to_owned()),
            VmState::Paused => return Start::Now("paused".to_owned()),
            VmState::Running | VmState::Stopping | VmState::Unknown | _ => return Start::No,
        }
        if self.is_asked() {
            return Start::Now("asked for".to_owned());
        }
        let Some(exit) = status.last_exit.filter(|exit| *exit != Exit::Requested) else {
            return Start::Now("not running".to_owned());
        };
        let failed = !matches!(exit, Exit::GuestShutdown | Exit::Code(0));
        let again = match scene.spec.restart_policy {
            RestartPolicy::Always => true,
            RestartPolicy::OnFailure => failed,
            RestartPolicy::Never => false,
        };
        let how = describe(exit);
        match (again, scene.memory.hold_start) {
            (false, _) => Start::Rests(how),
            (true, Some(wait)) if !wait.is_zero() => Start::Later(wait),
            (true, _) => Start::Now(how),
        }
    }

    fn finish(
        &self,
        mut plan: Plan,
        (vm, boot_hold): (VmSpec, Option<Hold>),
        mut disks: Devices<DiskPlan>,
        mut nics: Devices<NicPlan>,
    ) -> Plan {
        let scene = &self.scene;
        let start = self.start();
        let mut holds = std::mem::take(&mut disks.holds);
        holds.append(&mut nics.holds);
        if matches!(start, Start::Now(_)) {
            holds.extend(boot_hold);
            holds.extend(scene.memory.room.clone().err().map(Hold::Stuck));
        }
        plan.steps.append(&mut disks.remove);
        plan.steps.append(&mut nics.remove);
        if holds.is_empty() || scene.status.is_some() {
            plan.steps.append(&mut nics.wire);
            plan.steps.append(&mut disks.wire);
        }
        let mut restart = std::mem::take(&mut disks.restart);
        restart.append(&mut nics.restart);
        let differs = disks.differs || nics.differs;
        let plugs = (std::mem::take(&mut disks.plug), std::mem::take(&mut nics.plug));
        let bytes: Vec<DiskPlan> = disks.all.clone();
        if holds.is_empty() || self.runs_on() {
            let machine = Machine { vm, disks: disks.all, nics: nics.all, plugs, differs };
            self.machine(&mut plan.steps, machine, &start, holds.is_empty());
        }
        self.resize(&mut plan.steps, &bytes, &mut restart);
        let complete = holds.is_empty();
        if self.wants_reboot() && self.runs_on() && self.state() == VmState::Running && complete {
            let call = (Action::RebootVm, Op::RebootVm(scene.vm, self.grace()));
            let target = format!("vm {}", scene.object.name);
            let step = scene.draft().step(scene.driver, call, target, "asked for");
            plan.steps.push(step.in_group(Group::Vm, &[Group::Vm, Group::Disks, Group::Nics]));
        }
        plan.done = self.done(&start).filter(|_| complete);
        plan.verdict = self.verdict(holds, &start, restart);
        plan
    }

    /// The steps that make, change and start the VM.
    fn machine(&self, steps: &mut Vec<Planned>, machine: Machine, start: &Start, complete: bool) {
        const ALL: &[Group] = &[Group::Power, Group::Disks, Group::Nics, Group::Vm];
        let scene = &self.scene;
        let draft = scene.draft();
        let target = format!("vm {}", scene.object.name);
        let applied = scene.status.and_then(|status| status.spec.as_ref());
        let change = match applied {
            None if scene.status.is_none() => Some("missing".to_owned()),
            None => Some("half made".to_owned()),
            Some(applied) if *applied != machine.vm => Some(differences(applied, &machine.vm)),
            Some(_) => None,
        };
        let starts = matches!(start, Start::Now(_));
        let (plug_disks, plug_nics) = machine.plugs;
        let sizes = machine.disks.iter().filter_map(|disk| Some((disk.volume, disk.bytes?)));
        let sizes = sizes.collect();
        if !self.whole {
            if let Some(reason) = change {
                let call = (Action::CreateVm, Op::CreateVm(machine.vm));
                let step = draft.step(scene.driver, call, target.clone(), reason);
                steps.push(step.in_group(Group::Vm, &[Group::Power]));
            }
            steps.extend(plug_disks.into_iter().chain(plug_nics));
            if let Start::Now(reason) = start {
                let call = (Action::StartVm, Op::StartVm(scene.vm, sizes));
                let step = draft.step(scene.driver, call, target, reason.clone());
                steps.push(step.in_group(Group::Vm, ALL));
            }
            return;
        }
        if self.runs_on() && !starts {
            steps.extend(plug_disks.into_iter().chain(plug_nics));
        }
        let lists = (!self.runs_on() && machine.differs).then(|| "disks or nics differ".to_owned());
        let reason = match start {
            Start::Now(reason) => Some(reason.clone()),
            Start::No | Start::Rests(_) | Start::Later(_) => None,
        };
        let Some(reason) = change.or(lists).or(reason).filter(|_| complete) else { return };
        let (disks, nics) = self.lists(machine.disks, machine.nics);
        let power = if starts || self.runs_on() { VmPower::Running } else { VmPower::Stopped };
        let ensure = Op::EnsureVm { vm: machine.vm, disks, nics, power, starts };
        let step = draft.step(scene.driver, (Action::EnsureVm, ensure), target, reason);
        steps.push(step.in_group(Group::Vm, ALL));
    }

    /// What the whole spec names. A running VM whose devices stay as they are until its next start keeps what it has.
    fn lists(&self, disks: Vec<DiskPlan>, nics: Vec<NicPlan>) -> (Vec<DiskPlan>, Vec<NicPlan>) {
        let Some(status) = self.scene.status.filter(|_| self.runs_on()) else {
            return (disks, nics);
        };
        let disks = if self.abilities.hot_disks { disks } else { current_disks(status) };
        let nics = if self.abilities.hot_nics {
            nics
        } else {
            let now = status.nics.iter();
            now.map(|nic| NicPlan { port: nic.port_uuid, handle: Some(nic.clone()) }).collect()
        };
        (disks, nics)
    }

    /// Tells a running VM of disks that have grown since it was told last.
    fn resize(&self, steps: &mut Vec<Planned>, disks: &[DiskPlan], restart: &mut Vec<String>) {
        let scene = &self.scene;
        let Some(status) = scene.status.filter(|_| self.runs_on()) else { return };
        let able = scene
            .world
            .drivers
            .find_hypervisor(Some(scene.driver))
            .is_some_and(|(_, hypervisor)| hypervisor.resize().is_some());
        for disk in disks.iter().filter(|disk| disk.backing.is_some()) {
            let Some(bytes) = disk.bytes else { continue };
            if !status.disks.iter().any(|current| current.volume_uuid == disk.volume) {
                continue;
            }
            let told = scene.memory.told.get(&disk.volume).copied();
            // A volume of the first generation never grew: its VM knows its size.
            let first = self.is_first(disk.volume) && !disk.growth_due;
            let told = told.or_else(|| first.then_some(bytes));
            if told == Some(bytes) {
                continue;
            }
            if !able {
                if told.is_some() {
                    restart.push(format!("disk {}: grown to {bytes} bytes", disk.name));
                }
                continue;
            }
            let call = (Action::ResizeDisk, Op::ResizeDisk(scene.vm, disk.volume, bytes));
            let target = format!("disk {} ({} GiB)", disk.name, bytes >> 30);
            let step = scene.draft().step(scene.driver, call, target, "the volume has grown");
            steps.push(step.in_group(Group::Disks, &[Group::Disks]));
        }
    }

    fn is_first(&self, volume: drivers_api::VolumeId) -> bool {
        let world = self.scene.world;
        let key = world.index.owner(volume.uuid()).filter(|key: &&Key| key.kind == Kind::Volume);
        key.and_then(|key| world.wanted.get(key)).is_some_and(|object| object.generation == 1)
    }

    /// Which requests this plan fulfils. A start is as good as a reboot; of a VM that is wanted stopped neither is asked.
    fn done(&self, start: &Start) -> Option<Done> {
        let object = self.scene.object;
        let runs = self.runs_on() && self.state() == VmState::Running;
        let settled =
            runs || matches!(start, Start::Now(_)) || self.scene.spec.power == VmPower::Stopped;
        let pending = self.wants_reboot() || object.starts > object.starts_done;
        (settled && pending).then(|| Done::all_of(object))
    }

    fn verdict(&self, holds: Vec<Hold>, start: &Start, restart: Vec<String>) -> Verdict {
        let rank = |hold: &Hold| match hold {
            Hold::Stuck(_) => 0,
            Hold::Unknown(_) => 1,
            Hold::Blocked(..) => 2,
        };
        if let Some(hold) = holds.into_iter().min_by_key(rank) {
            return hold.into();
        }
        match start {
            Start::Later(after) => {
                let why = "it keeps ending by itself: the restart waits".to_owned();
                return Verdict::Waiting { after: *after, why };
            }
            Start::Rests(how) => {
                let policy = self.scene.spec.restart_policy;
                let text = format!("{how}; restart policy {policy:?} leaves it stopped");
                return Verdict::Satisfied(Some(text));
            }
            Start::No | Start::Now(_) => {}
        }
        let flagged = self.scene.status.is_some_and(|status| status.restart_needed);
        if self.runs_on() && (flagged || !restart.is_empty()) {
            let mut all = restart;
            if flagged {
                all.push("the VM runs with an older spec".to_owned());
            }
            return Verdict::RestartNeeded(all.join("; "));
        }
        Verdict::Satisfied(self.scene.status.and_then(|status| status.message.clone()))
    }
}

/// What the VM is to be.
struct Machine {
    vm: VmSpec,
    disks: Vec<DiskPlan>,
    nics: Vec<NicPlan>,
    plugs: (Vec<Planned>, Vec<Planned>),
    differs: bool,
}

fn current_disks(status: &VmStatus) -> Vec<DiskPlan> {
    let current = status.disks.iter();
    current
        .map(|disk| DiskPlan {
            name: disk.name.clone(),
            volume: disk.volume_uuid,
            bus: disk.bus,
            read_only: disk.read_only,
            boot: disk.boot,
            bytes: None,
            growth_due: false,
            backing: Some(disk.backing.clone()),
        })
        .collect()
}

/// How a run ended, for people.
pub(crate) fn describe(exit: Exit) -> String {
    match exit {
        Exit::GuestShutdown => "the guest shut itself down".to_owned(),
        Exit::Requested => "stopped on request".to_owned(),
        Exit::Code(code) => format!("the VMM ended with exit code {code}"),
        Exit::Signal(signal) => format!("signal {signal} ended the VMM"),
        Exit::Unseen => "the VMM ended unseen".to_owned(),
        _ => "the VMM ended".to_owned(),
    }
}

/// In what two specs of a VM differ.
fn differences(old: &VmSpec, new: &VmSpec) -> String {
    let mut all = Vec::new();
    let mut note = |what: &str, from: &dyn std::fmt::Display, to: &dyn std::fmt::Display| {
        all.push(format!("{what} {from} -> {to}"));
    };
    if old.cpu_count != new.cpu_count {
        note("cpus", &old.cpu_count, &new.cpu_count);
    }
    if old.memory_mib != new.memory_mib {
        note("memory_mib", &old.memory_mib, &new.memory_mib);
    }
    if old.name != new.name {
        note("name", &old.name, &new.name);
    }
    if old.boot != new.boot {
        all.push("boot".to_owned());
    }
    if old.cloud_init != new.cloud_init {
        all.push("user_data".to_owned());
    }
    if old.project_uuid != new.project_uuid {
        all.push("project".to_owned());
    }
    format!("differs: {}", all.join(", "))
}

/// Whether a VM's last run ended by itself, so that its restart is one of a row.
pub(crate) fn ended_by_itself(status: &Arc<VmStatus>) -> bool {
    status.state == VmState::Stopped && !matches!(status.last_exit, None | Some(Exit::Requested))
}
