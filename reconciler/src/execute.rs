//! Executes planned steps, and nothing else.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use drivers_api::{
    AttachedVolume, Change, DiskSpec, Error, ErrorKind, InstanceSpec, NicHandle, PortId, VmId,
    VolumeId,
};
use tokio::time::Instant;

use crate::{
    admit::Load,
    call::{Call, Caller, Label},
    drivers::Drivers,
    gate,
    observe::Part,
    plan::{DiskPlan, Group, NicPlan, Op, Planned},
    resolve::no_driver,
    status::{Executed, StatusEvent},
    wanted::{Wanted, WantedSpec},
};

/// What the steps of a plan answered.
#[derive(Debug, Default)]
struct Facts {
    volumes: BTreeMap<VolumeId, AttachedVolume>,
    ports: BTreeMap<PortId, NicHandle>,
}

/// How the execution of a plan ended.
pub(crate) struct Report {
    /// What changed the host.
    pub(crate) executed: Vec<Executed>,
    /// The first step that failed.
    pub(crate) failure: Option<(Planned, Error)>,
}

/// Executes the steps in their order. A failed step ends those that need its group, and no others.
pub(crate) async fn execute(caller: &Caller, object: &Wanted, steps: Vec<Planned>) -> Report {
    let mut facts = Facts::default();
    let mut failed: Vec<Group> = Vec::new();
    let mut report = Report { executed: Vec::new(), failure: None };
    for planned in steps {
        if planned.needs.iter().any(|group| failed.contains(group)) {
            continue;
        }
        if caller.cancel.is_cancelled() || caller.engine.is_stopping() {
            let error = Error::new(
                ErrorKind::Cancelled,
                crate::call::verb(planned.step.action),
                &planned.step.target,
                "something newer was asked for",
            );
            report.failure.get_or_insert((planned, error));
            break;
        }
        touch(caller, object, &planned);
        let begun = Instant::now();
        match one(caller, object, &planned, &mut facts).await {
            Ok(change) => {
                remember(caller, object, &planned.op);
                if change.wrote() {
                    let took = begun.elapsed();
                    let done = Executed { step: planned.step, change, took };
                    tracing::info!(step = %done.step, ?change, ?took, "executed");
                    caller.engine.tell(StatusEvent::Step(done.clone()));
                    report.executed.push(done);
                }
            }
            Err(error) => {
                failed.push(planned.group);
                report.failure.get_or_insert((planned, error));
            }
        }
    }
    report
}

/// One step, with the seam around it.
async fn one(
    caller: &Caller,
    object: &Wanted,
    planned: &Planned,
    facts: &mut Facts,
) -> Result<Change, Error> {
    let hook = caller.engine.settings.hook.clone();
    let pass = enter(caller, object, &planned.op).await?;
    caller.take_place().await;
    if let Some(hook) = &hook {
        hook.before(&planned.step).await?;
    }
    let call = prepare(&caller.engine.drivers, planned, facts)?;
    let grace = if let Op::StopVm(_, grace) | Op::RebootVm(_, grace) = &planned.op {
        *grace
    } else {
        Duration::ZERO
    };
    let limit = caller.engine.settings.deadlines.of(planned.step.action, grace);
    let label = Label {
        action: planned.step.action,
        driver: Arc::clone(&planned.driver),
        object: planned.step.target.clone(),
    };
    // A start that takes long must not keep other VMs from starting.
    let answer = {
        let call = caller.call(label, limit, call);
        tokio::pin!(call);
        match pass {
            None => call.await,
            Some(pass) => {
                tokio::select! {
                    biased;
                    answer = &mut call => answer,
                    () = tokio::time::sleep(caller.engine.settings.slow_call) => {
                        drop(pass);
                        call.await
                    }
                }
            }
        }
    };
    if let Some(hook) = &hook {
        hook.after(&planned.step, answer.as_ref().map(|answer| answer.change)).await?;
    }
    let answer = answer?;
    match (answer.fact, &planned.op) {
        (Fact::Volume(volume), Op::AttachVolume(request)) => {
            facts.volumes.insert(request.volume_uuid, volume);
        }
        (Fact::Port(handle), Op::AttachPort(spec)) => {
            facts.ports.insert(spec.uuid, handle);
        }
        (_, _) => {}
    }
    Ok(answer.change)
}

/// Before a VM is started: room for it, and its turn.
async fn enter(caller: &Caller, object: &Wanted, op: &Op) -> Result<Option<gate::Pass>, Error> {
    let vm = if let Op::EnsureVm { vm, starts: true, .. } = op {
        vm.uuid
    } else if let Op::StartVm(vm, _) = op {
        *vm
    } else {
        return Ok(None);
    };
    let WantedSpec::Instance(spec) = &object.spec else { return Ok(None) };
    if let Err(error) = caller.engine.ledger().promise(vm, Load::of(spec)) {
        caller.engine.ledger().wait(object.key());
        return Err(error);
    }
    caller.give_place();
    Ok(Some(caller.engine.gate.enter(spec.start_order).await))
}

/// A step that is cut short may have made something that no later plan of the object would look for.
fn touch(caller: &Caller, object: &Wanted, planned: &Planned) {
    let driver = Arc::clone(&planned.driver);
    let part = if let Op::AttachPort(spec) = &planned.op {
        Part::Port(driver, spec.uuid)
    } else if let Op::AttachVolume(request) = &planned.op {
        Part::Volume(driver, request.volume_uuid)
    } else {
        return;
    };
    caller.engine.with_note(&object.key(), |note| {
        if let Part::Port(_, port) = &part {
            note.ports.insert(*port);
        }
        note.touched.insert(part);
    });
}

/// What the next plan of the object needs to know beside what the host shows.
fn remember(caller: &Caller, object: &Wanted, op: &Op) {
    caller.engine.with_note(&object.key(), |note| {
        let mut tell = |disk: &DiskPlan| {
            if let Some(bytes) = disk.bytes {
                note.told.insert(disk.volume, bytes);
            }
        };
        if let Op::EnsureVm { disks, starts: true, .. } = op {
            disks.iter().for_each(tell);
        } else if let Op::AttachDisk(_, disk) = op {
            tell(disk);
        } else if let Op::StartVm(_, sizes) = op {
            note.told.extend(sizes.iter().copied());
        } else if let Op::ResizeDisk(_, volume, bytes) = op {
            note.told.insert(*volume, *bytes);
        }
        if matches!(op, Op::EnsureVm { starts: true, .. } | Op::StartVm(..)) {
            note.crashes.restarted();
            note.asked = false;
        }
    });
}

/// What a step answers.
struct Answer {
    change: Change,
    fact: Fact,
}

enum Fact {
    None,
    Volume(AttachedVolume),
    Port(NicHandle),
}

const fn plain(change: Change) -> Answer {
    Answer { change, fact: Fact::None }
}

/// A call without anything borrowed: `$driver` is found, `$method` called.
macro_rules! call {
    ($drivers:ident, $find:ident, $planned:ident, |$d:ident, $cx:ident| $body:expr) => {{
        let id = &$planned.driver;
        let Some((_, found)) = $drivers.$find(Some(id)) else {
            return Err(no_driver("driver", Some(id)));
        };
        let $d = Arc::clone(found);
        Ok(Box::new(move |$cx| Box::pin(async move { $body })))
    }};
}

fn prepare(drivers: &Drivers, planned: &Planned, facts: &Facts) -> Result<Call<Answer>, Error> {
    match planned.op.clone() {
        Op::Pull(reference) => call!(drivers, find_image, planned, |d, cx| {
            Ok(plain(d.pull(&cx, &reference).await?.change))
        }),
        Op::RemoveImage(reference) => call!(drivers, find_image, planned, |d, cx| {
            d.delete(&cx, &reference).await.map(plain)
        }),
        Op::EnsureVolume(spec) => call!(drivers, find_volume, planned, |d, cx| {
            d.ensure_volume(&cx, &spec).await.map(plain)
        }),
        Op::DestroyVolume(id) => call!(drivers, find_volume, planned, |d, cx| {
            d.destroy_volume(&cx, id).await.map(plain)
        }),
        Op::AttachVolume(request) => call!(drivers, find_volume, planned, |d, cx| {
            let outcome = d.attach_volume(&cx, &request).await?;
            Ok(Answer { change: outcome.change, fact: Fact::Volume(outcome.value) })
        }),
        Op::DetachVolume(request) => call!(drivers, find_volume, planned, |d, cx| {
            d.detach_volume(&cx, &request).await.map(plain)
        }),
        Op::EnsureNetwork(spec) => call!(drivers, find_network, planned, |d, cx| {
            d.ensure_network(&cx, &spec).await.map(plain)
        }),
        Op::DestroyNetwork(id) => call!(drivers, find_network, planned, |d, cx| {
            d.destroy_network(&cx, id).await.map(plain)
        }),
        Op::AttachPort(spec) => call!(drivers, find_network, planned, |d, cx| {
            let outcome = d.attach_port(&cx, &spec).await?;
            Ok(Answer { change: outcome.change, fact: Fact::Port(outcome.value) })
        }),
        Op::DetachPort(id) => call!(drivers, find_network, planned, |d, cx| {
            d.detach_port(&cx, id).await.map(plain)
        }),
        op @ (Op::EnsureVm { .. }
        | Op::CreateVm(_)
        | Op::AttachDisk(..)
        | Op::DetachDisk(..)
        | Op::ResizeDisk(..)
        | Op::AttachNic(..)
        | Op::DetachNic(..)
        | Op::StartVm(..)
        | Op::StopVm(..)
        | Op::RebootVm(..)
        | Op::DeleteVm(_)) => prepare_vm(drivers, planned, facts, op),
    }
}

fn prepare_vm(
    drivers: &Drivers,
    planned: &Planned,
    facts: &Facts,
    op: Op,
) -> Result<Call<Answer>, Error> {
    match op {
        Op::EnsureVm { vm, disks, nics, power, .. } => {
            let disks = disks.iter().map(|disk| facts.disk(disk)).collect::<Result<_, _>>()?;
            let nics = nics.iter().map(|nic| facts.nic(nic)).collect::<Result<_, _>>()?;
            let mut spec = InstanceSpec::new(vm, disks, nics);
            spec.power = power;
            call!(drivers, find_hypervisor, planned, |d, cx| {
                let Some(whole) = d.whole_spec() else {
                    return Err(Error::unsupported("ensure", spec.vm.uuid));
                };
                whole.ensure_vm(&cx, &spec).await.map(plain)
            })
        }
        Op::CreateVm(spec) => call!(drivers, find_hypervisor, planned, |d, cx| {
            d.create_vm(&cx, &spec).await.map(plain)
        }),
        Op::AttachDisk(vm, disk) => {
            let disk = facts.disk(&disk)?;
            call!(drivers, find_hypervisor, planned, |d, cx| {
                d.attach_disk(&cx, vm, &disk).await.map(plain)
            })
        }
        Op::AttachNic(vm, nic) => {
            let nic = facts.nic(&nic)?;
            call!(drivers, find_hypervisor, planned, |d, cx| {
                d.attach_nic(&cx, vm, &nic).await.map(plain)
            })
        }
        Op::DetachDisk(vm, volume) => call!(drivers, find_hypervisor, planned, |d, cx| {
            d.detach_disk(&cx, vm, volume).await.map(plain)
        }),
        Op::DetachNic(vm, device) => call!(drivers, find_hypervisor, planned, |d, cx| {
            d.detach_nic(&cx, vm, &device).await.map(plain)
        }),
        Op::ResizeDisk(vm, volume, bytes) => call!(drivers, find_hypervisor, planned, |d, cx| {
            let Some(resize) = d.resize() else {
                return Err(Error::unsupported("resize", vm));
            };
            resize.resize_disk(&cx, vm, volume, bytes).await.map(plain)
        }),
        Op::StartVm(vm, _) => call!(drivers, find_hypervisor, planned, |d, cx| {
            d.start_vm(&cx, vm).await.map(plain)
        }),
        Op::StopVm(vm, grace) => call!(drivers, find_hypervisor, planned, |d, cx| {
            d.stop_vm(&cx, vm, grace).await.map(plain)
        }),
        Op::RebootVm(vm, grace) => call!(drivers, find_hypervisor, planned, |d, cx| {
            d.reboot_vm(&cx, vm, grace).await.map(plain)
        }),
        Op::DeleteVm(vm) => call!(drivers, find_hypervisor, planned, |d, cx| {
            d.delete_vm(&cx, vm).await.map(plain)
        }),
        Op::Pull(_)
        | Op::RemoveImage(_)
        | Op::EnsureVolume(_)
        | Op::DestroyVolume(_)
        | Op::AttachVolume(_)
        | Op::DetachVolume(_)
        | Op::EnsureNetwork(_)
        | Op::DestroyNetwork(_)
        | Op::AttachPort(_)
        | Op::DetachPort(_) => {
            Err(Error::new(ErrorKind::Internal, "prepare", &planned.step, "it is no step of a VM"))
        }
    }
}

impl Facts {
    fn disk(&self, disk: &DiskPlan) -> Result<DiskSpec, Error> {
        let answered = self.volumes.get(&disk.volume).map(|volume| volume.backing.clone());
        let backing = answered.or_else(|| disk.backing.clone()).ok_or_else(|| {
            missing(format_args!("disk {}", disk.name), "what to open is not known")
        })?;
        Ok(disk.spec(backing))
    }

    fn nic(&self, nic: &NicPlan) -> Result<NicHandle, Error> {
        let handle = self.ports.get(&nic.port).or(nic.handle.as_ref()).cloned();
        handle.ok_or_else(|| missing(format_args!("port {}", nic.port), "its device is not known"))
    }
}

/// A step's answer that a later step needs and that the plan did not foresee: planned anew after a look at the host.
fn missing(object: std::fmt::Arguments<'_>, reason: &str) -> Error {
    Error::new(ErrorKind::Internal, "plan", object, reason)
}

/// The VM that a plan's steps are about, for a caller that has only the object.
pub(crate) fn vm_of(object: &Wanted) -> Option<VmId> {
    matches!(object.spec, WantedSpec::Instance(_)).then(|| VmId::new(object.uuid))
}
