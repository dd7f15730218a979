//! Whose a VM is, and what is left of one.

use drivers_api::{Change, ErrorKind, Exit, VmState};

use super::Kit;
use crate::kit::{Check, expect, failed, not_tried, same};

pub(super) async fn fresh_start(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.vm(0).await;
    let _ = kit.create(&*driver, &spec).await?;
    let disk = kit.bench.disk(kit.run.number(1)).await;
    let nic = kit.bench.nic(kit.run.number(1)).await;
    if let Some(disk) = &disk {
        let _ = kit.plug_disk(&*driver, &spec, disk).await?;
    }
    if let Some(nic) = &nic {
        let _ = kit.plug_nic(&*driver, &spec, nic).await?;
    }
    let before = kit.status(&*driver, &spec).await?;
    drop(driver);
    let driver = kit.open().await?;
    let all = kit.run.ok("list", driver.list(&kit.run.cx())).await?;
    let Some(listed) = all.into_iter().find(|vm| vm.uuid == spec.uuid) else {
        return failed("list of a new instance does not have the VM");
    };
    same("the VM after a fresh start", &listed, &before)?;
    same("its spec as applied", &listed.spec, &Some(spec.clone()))?;
    same("create_vm after a fresh start", &kit.create(&*driver, &spec).await?, &Change::Unchanged)?;
    if let Some(disk) = &disk {
        let again = kit.plug_disk(&*driver, &spec, disk).await?;
        same("attach_disk after a fresh start", &again, &Change::Unchanged)?;
    }
    if let Some(nic) = &nic {
        let again = kit.plug_nic(&*driver, &spec, nic).await?;
        same("attach_nic after a fresh start", &again, &Change::Unchanged)?;
    }
    Ok(())
}

pub(super) async fn outlives_the_agent(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.running(&*driver, 0).await?;
    let pid = kit.status(&*driver, &spec).await?.pid;
    drop(driver);
    let driver = kit.open().await?;
    let status = kit.status(&*driver, &spec).await?;
    same("the state seen by a new instance", &status.state, &VmState::Running)?;
    same("the VMM's process seen by a new instance", &status.pid, &pid)?;
    same("start_vm by a new instance", &kit.start(&*driver, &spec).await?, &Change::Unchanged)?;
    same("the VMM's process after start_vm", &kit.status(&*driver, &spec).await?.pid, &pid)?;
    expect(kit.stop(&*driver, &spec).await?.wrote(), "stop_vm by a new instance did nothing")?;
    kit.state(&*driver, &spec, VmState::Stopped).await
}

pub(super) async fn foreign(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    // Not among the numbers that are cleared: the driver must refuse to delete it.
    let spec = kit.bench.vm(990).await;
    kit.bench.plant_foreign(&spec).await.check()?;
    let before = kit.bench.fingerprint_foreign(&spec).await;
    let touched = touch_foreign(kit, &*driver, &spec).await;
    let after = kit.bench.fingerprint_foreign(&spec).await;
    kit.bench.remove_foreign(&spec).await;
    touched?;
    expect(!before.is_empty(), "the bench has no fingerprint of what it planted")?;
    same("the foreign object", &after, &before)
}

async fn touch_foreign(
    kit: &Kit<'_>,
    driver: &dyn drivers_api::Hypervisor,
    spec: &drivers_api::VmSpec,
) -> Check {
    let conflict = &[ErrorKind::Conflict];
    let cx = kit.run.cx();
    let call = driver.create_vm(&cx, spec);
    let error = kit.run.fails("create_vm over a foreign VM", conflict, call).await?;
    let text = error.chain();
    expect(
        text.contains(&spec.uuid.to_string()),
        format_args!("the conflict does not name the VM's UUID: {text}"),
    )?;
    let cx = kit.run.cx();
    let call = driver.delete_vm(&cx, spec.uuid);
    kit.run.fails("delete_vm of a foreign VM", conflict, call).await?;
    let cx = kit.run.cx();
    let call = driver.get(&cx, spec.uuid);
    kit.run.fails("get of a foreign VM", conflict, call).await?;
    let cx = kit.run.cx();
    let call = driver.start_vm(&cx, spec.uuid);
    let kinds = &[ErrorKind::Conflict, ErrorKind::NotFound];
    kit.run.fails("start_vm of a foreign VM", kinds, call).await?;
    let all = kit.run.ok("list", driver.list(&kit.run.cx())).await?;
    expect(!all.iter().any(|vm| vm.uuid == spec.uuid), "list has the foreign VM")
}

pub(super) async fn half_made_is_completed(kit: &Kit<'_>) -> Check {
    let states = kit.bench.half_made();
    if states.is_empty() {
        return not_tried("the bench plants no half-made VMs");
    }
    for (state, n) in states.into_iter().zip(0..) {
        let spec = kit.vm(n).await;
        kit.bench.plant_half_made(&spec, state).await.check()?;
        let driver = kit.open().await?;
        let listed = kit.run.ok("list", driver.list(&kit.run.cx())).await?;
        expect(
            listed.iter().any(|vm| vm.uuid == spec.uuid),
            format_args!("{state}: list does not have the half-made VM"),
        )?;
        let change = kit.create(&*driver, &spec).await?;
        expect(change.wrote(), format_args!("{state}: create_vm says that it changed nothing"))?;
        let status = kit.status(&*driver, &spec).await?;
        same(format_args!("{state}: the spec"), &status.spec, &Some(spec.clone()))?;
        same(state, &kit.create(&*driver, &spec).await?, &Change::Unchanged)?;
    }
    Ok(())
}

pub(super) async fn half_made_is_deleted(kit: &Kit<'_>) -> Check {
    let states = kit.bench.half_made();
    if states.is_empty() {
        return not_tried("the bench plants no half-made VMs");
    }
    let before = kit.bench.census().await;
    for (state, n) in states.into_iter().zip(0..) {
        let spec = kit.vm(n).await;
        kit.bench.plant_half_made(&spec, state).await.check()?;
        let driver = kit.open().await?;
        let change = kit.delete(&*driver, &spec).await?;
        expect(change.wrote(), format_args!("{state}: delete_vm says that it changed nothing"))?;
        kit.gone(&*driver, &spec).await?;
        let diff = before.diff(&kit.bench.census().await);
        expect(diff.is_empty(), format_args!("{state} left behind: {}", diff.join(", ")))?;
    }
    Ok(())
}

pub(super) async fn vmm_killed(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.running(&*driver, 0).await?;
    kit.bench.kill_vmm(spec.uuid).await.check()?;
    let end = tokio::time::Instant::now() + kit.run.options.settle;
    let status = loop {
        let status = kit.status(&*driver, &spec).await?;
        if status.state == VmState::Stopped || tokio::time::Instant::now() >= end {
            break status;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    };
    same("the state after a kill of the VMM", &status.state, &VmState::Stopped)?;
    let exit = status.last_exit;
    expect(
        matches!(exit, Some(Exit::Signal(_) | Exit::Unseen | Exit::Code(_))),
        format_args!("a kill of the VMM is told as {exit:?}"),
    )?;
    let _ = kit.start(&*driver, &spec).await?;
    kit.state(&*driver, &spec, VmState::Running).await
}

pub(super) async fn vmm_silent(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let (silent, other) = (kit.running(&*driver, 0).await?, kit.bootable(&*driver, 1).await?);
    let before = kit.status(&*driver, &silent).await?.pid;
    kit.bench.silence_vmm(silent.uuid).await.check()?;
    let seen = beside_silence(kit, &*driver, &silent, &other).await;
    kit.bench.wake_vmm(silent.uuid).await;
    seen?;
    // An end without the guest's and the VMM's help.
    let fresh = kit.open().await?;
    let status = kit.status(&*fresh, &silent).await?;
    same("the VMM's process", &status.pid, &before)?;
    kit.bench.silence_vmm(silent.uuid).await.check()?;
    let ended = kit.delete(&*fresh, &silent).await;
    kit.bench.wake_vmm(silent.uuid).await;
    same("delete_vm of a VM whose VMM does not answer", &ended?, &Change::Changed)?;
    kit.gone(&*fresh, &silent).await
}

async fn beside_silence(
    kit: &Kit<'_>,
    driver: &dyn drivers_api::Hypervisor,
    silent: &drivers_api::VmSpec,
    other: &drivers_api::VmSpec,
) -> Check {
    let cx = kit.run.cx_in(kit.run.options.prompt);
    let all = kit.run.ok("list beside a silent VMM", driver.list(&cx)).await?;
    let seen = all.iter().find(|vm| vm.uuid == silent.uuid).map(|vm| vm.state);
    same("the state of a VM whose VMM does not answer", &seen, &Some(VmState::Unknown))?;
    let _ = kit.start(driver, other).await?;
    kit.state(driver, other, VmState::Running).await?;
    let cx = kit.run.cx_in(kit.run.options.prompt);
    let call = driver.start_vm(&cx, silent.uuid);
    let kinds = &[ErrorKind::UnknownOutcome, ErrorKind::Deadline];
    kit.run.fails("start_vm beside a silent VMM", kinds, call).await?;
    Ok(())
}

pub(super) async fn backend_down(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.vm(0).await;
    kit.bench.break_backend().await.check()?;
    let seen = unavailable(kit, &*driver, &spec).await;
    kit.bench.mend().await;
    seen?;
    same("delete_vm after the repair", &kit.delete(&*driver, &spec).await?, &Change::Unchanged)
}

async fn unavailable(
    kit: &Kit<'_>,
    driver: &dyn drivers_api::Hypervisor,
    spec: &drivers_api::VmSpec,
) -> Check {
    let kinds = &[ErrorKind::Unavailable];
    let cx = kit.run.cx();
    let call = driver.list(&cx);
    kit.run.fails("list with the back-end down", kinds, call).await?;
    let cx = kit.run.cx();
    let call = driver.get(&cx, spec.uuid);
    kit.run.fails("get with the back-end down", kinds, call).await?;
    let cx = kit.run.cx();
    let call = driver.delete_vm(&cx, spec.uuid);
    kit.run.fails("delete_vm with the back-end down", kinds, call).await?;
    Ok(())
}
