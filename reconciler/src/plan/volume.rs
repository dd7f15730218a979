//! A volume: made, grown, finished where it is half made, and freed from VMs that are gone.

use drivers_api::{DetachRequest, Error, VmId, VolumeId, VolumeStatus};

use super::{Action, Drafter, Op, Plan, Planned, Verdict, World, of_another_node};
use crate::{
    resolve::{Hold, volume_driver, volume_spec},
    seen::Look,
    wanted::{Key, VolumeSpec, Wanted},
};

pub(super) fn plan(world: &World<'_>, object: &Wanted, spec: &VolumeSpec) -> Plan {
    let driver = match volume_driver(world, spec) {
        Ok(driver) => driver,
        Err(error) => return Hold::from(error).into(),
    };
    let id = VolumeId::new(object.uuid);
    let (reason, made) = match world.seen.volume(driver, &id) {
        Look::There(status) => {
            if !is_ours(world, driver, &status) {
                return of_another_node(&object.key(), status.mark).into();
            }
            match difference(object, spec, &status) {
                Err(error) => return Hold::from(error).into(),
                Ok(Some(reason)) => (reason, status.complete),
                Ok(None) => {
                    let steps = orphans(world, &object.key(), driver, &status);
                    return Plan::new(steps, Verdict::Satisfied(status.message.clone()));
                }
            }
        }
        Look::Absent => ("missing".to_owned(), false),
        Look::Foreign(error) => return Hold::Stuck(error).into(),
        Look::Unknown(error) => return Hold::Unknown(error).into(),
    };
    let volume = match volume_spec(world, object, spec, made || world.assume) {
        Ok(volume) => volume,
        Err(hold) => return hold.into(),
    };
    let draft = Drafter { key: object.key() };
    let target = format!("volume {} ({} GiB)", object.name, spec.size_gib);
    let call = (Action::EnsureVolume, Op::EnsureVolume(volume));
    Plan::new(vec![draft.step(driver, call, target, reason)], Verdict::Satisfied(None))
}

/// A volume of a cluster-wide backend may have been made by another host's agent.
fn is_ours(world: &World<'_>, driver: &str, status: &VolumeStatus) -> bool {
    status.mark.node == world.settings.host
        || world.drivers.find_volume(Some(driver)).is_some_and(|(_, driver)| !driver.local())
}

/// In what the volume differs; `None` where it is as wanted. The source counts only until the volume is complete.
fn difference(
    object: &Wanted,
    spec: &VolumeSpec,
    status: &VolumeStatus,
) -> Result<Option<String>, Error> {
    let Some(applied) = status.spec.as_ref().filter(|_| status.complete) else {
        return Ok(Some("half made".to_owned()));
    };
    if applied.format != spec.format {
        let reason = format!("the volume is {} and stays so", applied.format.as_str());
        return Err(Error::invalid("spec.format", reason));
    }
    if applied.size_gib > spec.size_gib {
        let reason = format!("the volume has {} GiB and is grow-only", applied.size_gib);
        return Err(Error::invalid("spec.size_gib", reason));
    }
    if applied.size_gib < spec.size_gib {
        let (from, to) = (applied.size_gib, spec.size_gib);
        return Ok(Some(format!("differs: size_gib {from} -> {to}")));
    }
    // While a VM has it open the backend's size may follow only when the VM is told of it.
    if status.attachments.is_empty() && status.size_bytes < spec.size_gib.bytes() {
        return Ok(Some(format!("drifted: it has {} bytes", status.size_bytes)));
    }
    if applied.name.as_str() != object.name.as_str() || applied.project_uuid != object.project {
        return Ok(Some("differs: name or project".to_owned()));
    }
    Ok(None)
}

/// Ends the attachments of VMs that nobody wants and that every hypervisor shows to be gone.
pub(super) fn orphans(
    world: &World<'_>,
    key: &Key,
    driver: &str,
    status: &VolumeStatus,
) -> Vec<Planned> {
    let host = world.settings.host;
    let here = status.attachments.iter().filter(|one| one.host_uuid == host);
    let gone = here.filter(|one| is_orphan(world, one.vm_uuid));
    let draft = Drafter { key: key.clone() };
    gone.map(|one| {
        let request = DetachRequest::new(status.uuid, host, one.vm_uuid);
        let target = format!("volume {} of vm {}", key.name, one.vm_uuid);
        let call = (Action::DetachVolume, Op::DetachVolume(request));
        draft.step(driver, call, target, "the VM is gone and not wanted")
    })
    .collect()
}

/// Whether nobody wants a VM and every hypervisor shows it to be gone.
pub(super) fn is_orphan(world: &World<'_>, vm: VmId) -> bool {
    world.index.owner(vm.uuid()).is_none()
        && world.seen.vm_is_gone(vm, world.drivers.hypervisors().map(|(id, _)| id))
}
