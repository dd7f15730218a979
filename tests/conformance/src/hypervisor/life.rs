//! A VM's life: made, started, stopped, deleted; and each again.

use std::sync::Arc;

use drivers_api::{
    BootKind, BootSpec, Change, ErrorKind, IfName, MemoryMib, Uuid, VmState, VolumeId,
};
use futures_util::future::join_all;

use super::Kit;
use crate::{
    kit::{Check, expect, failed, same},
    odd::ODD_NAMES,
};

pub(super) async fn create(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.vm(0).await;
    expect(kit.get(&*driver, &spec).await?.is_none(), "get: the VM is there before it was made")?;
    same("create_vm", &kit.create(&*driver, &spec).await?, &Change::Created)?;
    let status = kit.status(&*driver, &spec).await?;
    same("the spec as applied", &status.spec, &Some(spec.clone()))?;
    same("the state", &status.state, &VmState::Stopped)?;
    let all = kit.run.ok("list", driver.list(&kit.run.cx())).await?;
    let listed = all.iter().filter(|vm| vm.uuid == spec.uuid).count();
    same("how often list has the VM", &listed, &1)?;
    same("delete_vm", &kit.delete(&*driver, &spec).await?, &Change::Changed)?;
    kit.gone(&*driver, &spec).await
}

pub(super) async fn create_again(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.vm(0).await;
    let _ = kit.create(&*driver, &spec).await?;
    let before = kit.bench.census().await;
    for time in ["second", "third"] {
        let again = kit.create(&*driver, &spec).await?;
        same(format_args!("the {time} create_vm"), &again, &Change::Unchanged)?;
    }
    kit.unwritten(&before).await
}

pub(super) async fn create_at_once(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.vm(0).await;
    let calls = (0..kit.run.options.parallel).map(|_| kit.create(&*driver, &spec));
    let changes = join_all(calls).await.into_iter().collect::<Check<Vec<_>>>()?;
    expect(changes.iter().any(|change| change.wrote()), "no call says that it made the VM")?;
    let all = kit.run.ok("list", driver.list(&kit.run.cx())).await?;
    let listed = all.iter().filter(|vm| vm.uuid == spec.uuid).count();
    same("how often list has the VM", &listed, &1)?;
    same("create_vm afterwards", &kit.create(&*driver, &spec).await?, &Change::Unchanged)
}

pub(super) async fn create_changed(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.running(&*driver, 0).await?;
    let mut changed = spec.clone();
    changed.memory_mib = match MemoryMib::new(spec.memory_mib.get() * 2) {
        Ok(memory) => memory,
        Err(error) => return failed(error),
    };
    same("create_vm with more memory", &kit.create(&*driver, &changed).await?, &Change::Changed)?;
    let status = kit.status(&*driver, &spec).await?;
    same("the spec as applied", &status.spec, &Some(changed.clone()))?;
    same("the state of the running VM", &status.state, &VmState::Running)?;
    expect(status.restart_needed, "a running VM with other memory does not say restart_needed")?;
    same("create_vm again", &kit.create(&*driver, &changed).await?, &Change::Unchanged)?;
    let _ = kit.stop(&*driver, &spec).await?;
    let _ = kit.start(&*driver, &spec).await?;
    let status = kit.status(&*driver, &spec).await?;
    expect(!status.restart_needed, "the restarted VM still says restart_needed")
}

pub(super) async fn invalid_spec(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let mut spec = kit.vm(0).await;
    let invalid = &[ErrorKind::InvalidSpec];
    let before = kit.bench.census().await;
    spec.boot = BootSpec::new(BootKind::DirectLinux, "not/resolved".to_owned(), None);
    let cx = kit.run.cx();
    let call = driver.create_vm(&cx, &spec);
    kit.run.fails("create_vm without boot files", invalid, call).await?;
    spec = kit.vm(0).await;
    spec.boot.cmdline = Some("console=ttyS0\u{7}".to_owned());
    let cx = kit.run.cx();
    let call = driver.create_vm(&cx, &spec);
    kit.run.fails("create_vm with a control character in cmdline", invalid, call).await?;
    expect(kit.get(&*driver, &spec).await?.is_none(), "get: the refused VM is there")?;
    let diff = before.diff(&kit.bench.census().await);
    expect(diff.is_empty(), format_args!("a refused spec changed the host: {}", diff.join(", ")))
}

pub(super) async fn odd_names(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    for name in ODD_NAMES {
        let mut spec = kit.vm(0).await;
        spec.name = match name.parse() {
            Ok(name) => name,
            Err(error) => return failed(error),
        };
        match kit.run.call("create_vm", driver.create_vm(&kit.run.cx(), &spec)).await? {
            Ok(_) => {
                let found = kit.status(&*driver, &spec).await?.spec.map(|spec| spec.name);
                same("the name as applied", &found, &Some(spec.name.clone()))?;
            }
            Err(error) if error.kind() == ErrorKind::InvalidSpec => {}
            Err(error) => return failed(format_args!("create_vm named {name:?}: {error:?}")),
        }
        let _ = kit.delete(&*driver, &spec).await?;
    }
    Ok(())
}

pub(super) async fn lifecycle_of_absent(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let vm = kit.vm(0).await.uuid;
    let before = kit.bench.census().await;
    let (volume, device) = absent_devices()?;
    let grace = kit.run.options.stop_grace;
    for _ in 0..2 {
        let cx = kit.run.cx();
        let answers = [
            ("stop_vm", kit.run.ok("stop_vm", driver.stop_vm(&cx, vm, grace)).await?),
            ("delete_vm", kit.run.ok("delete_vm", driver.delete_vm(&cx, vm)).await?),
            ("detach_disk", kit.run.ok("detach_disk", driver.detach_disk(&cx, vm, volume)).await?),
            ("detach_nic", kit.run.ok("detach_nic", driver.detach_nic(&cx, vm, &device)).await?),
        ];
        for (what, change) in answers {
            same(format_args!("{what} of an absent VM"), &change, &Change::Unchanged)?;
        }
    }
    kit.unwritten(&before).await
}

/// A volume and a device that nobody has.
pub(super) fn absent_devices() -> Check<(VolumeId, IfName)> {
    match (Uuid::from_bytes(*b"no-such-volume-0"), "no-such-nic".parse()) {
        (Some(volume), Ok(device)) => Ok((VolumeId::new(volume), device)),
        (_, _) => failed("the kit's own names are invalid"),
    }
}

pub(super) async fn lookup_of_absent(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.vm(0).await;
    let not_found = &[ErrorKind::NotFound];
    expect(kit.get(&*driver, &spec).await?.is_none(), "get: an absent VM is there")?;
    let cx = kit.run.cx();
    let call = driver.start_vm(&cx, spec.uuid);
    kit.run.fails("start_vm of an absent VM", not_found, call).await?;
    let grace = kit.run.options.stop_grace;
    let cx = kit.run.cx();
    let call = driver.reboot_vm(&cx, spec.uuid, grace);
    kit.run.fails("reboot_vm of an absent VM", not_found, call).await?;
    if let Some(disk) = kit.bench.disk(kit.run.number(0)).await {
        let cx = kit.run.cx();
        let call = driver.attach_disk(&cx, spec.uuid, &disk);
        kit.run.fails("attach_disk to an absent VM", not_found, call).await?;
    }
    if let Some(nic) = kit.bench.nic(kit.run.number(0)).await {
        let cx = kit.run.cx();
        let call = driver.attach_nic(&cx, spec.uuid, &nic);
        kit.run.fails("attach_nic to an absent VM", not_found, call).await?;
    }
    expect(kit.get(&*driver, &spec).await?.is_none(), "get: a refused call made the VM")
}

pub(super) async fn start_stop(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.bootable(&*driver, 0).await?;
    expect(kit.start(&*driver, &spec).await?.wrote(), "start_vm says that it changed nothing")?;
    let status = kit.status(&*driver, &spec).await?;
    same("the state after start_vm", &status.state, &VmState::Running)?;
    same("start_vm again", &kit.start(&*driver, &spec).await?, &Change::Unchanged)?;
    let again = kit.status(&*driver, &spec).await?;
    same("the VMM's process after a second start_vm", &again.pid, &status.pid)?;
    same("create_vm of the running VM", &kit.create(&*driver, &spec).await?, &Change::Unchanged)?;
    expect(kit.stop(&*driver, &spec).await?.wrote(), "stop_vm says that it changed nothing")?;
    let status = kit.status(&*driver, &spec).await?;
    same("the state after stop_vm", &status.state, &VmState::Stopped)?;
    same("the VMM's process after stop_vm", &status.pid, &None)?;
    expect(status.last_exit.is_some(), "a stopped VM does not say how its run ended")?;
    same("stop_vm again", &kit.stop(&*driver, &spec).await?, &Change::Unchanged)?;
    let _ = kit.start(&*driver, &spec).await?;
    kit.state(&*driver, &spec, VmState::Running).await
}

pub(super) async fn start_at_once(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.bootable(&*driver, 0).await?;
    let calls = (0..kit.run.options.parallel).map(|_| kit.start(&*driver, &spec));
    let changes = join_all(calls).await.into_iter().collect::<Check<Vec<_>>>()?;
    expect(changes.iter().any(|change| change.wrote()), "no call says that it started the VM")?;
    let pid = kit.status(&*driver, &spec).await?.pid;
    same("start_vm afterwards", &kit.start(&*driver, &spec).await?, &Change::Unchanged)?;
    same("the VMM's process", &kit.status(&*driver, &spec).await?.pid, &pid)
}

pub(super) async fn reboot(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.bootable(&*driver, 0).await?;
    let grace = kit.run.options.stop_grace;
    for from in ["stopped", "running"] {
        let cx = kit.run.cx();
        let call = driver.reboot_vm(&cx, spec.uuid, grace);
        let change = kit.run.ok("reboot_vm", call).await?;
        expect(change.wrote(), format_args!("reboot_vm of a {from} VM changed nothing"))?;
        kit.state(&*driver, &spec, VmState::Running).await?;
    }
    Ok(())
}

pub(super) async fn delete_running(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let before = kit.bench.census().await;
    let spec = kit.running(&*driver, 0).await?;
    same("delete_vm", &kit.delete(&*driver, &spec).await?, &Change::Changed)?;
    kit.gone(&*driver, &spec).await?;
    let diff = before.diff(&kit.bench.census().await);
    expect(diff.is_empty(), format_args!("the deleted VM left behind: {}", diff.join(", ")))
}

pub(super) async fn create_after_delete(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    for _ in 0..3 {
        let spec = kit.running(&*driver, 0).await?;
        let _ = kit.delete(&*driver, &spec).await?;
        same("create_vm", &kit.create(&*driver, &spec).await?, &Change::Created)?;
        let status = kit.status(&*driver, &spec).await?;
        expect(status.disks.is_empty() && status.nics.is_empty(), "old devices came back")?;
        let _ = kit.delete(&*driver, &spec).await?;
    }
    Ok(())
}

pub(super) async fn side_by_side(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let count = kit.run.options.parallel.min(4);
    let made = (0..count).map(|n| {
        let driver = Arc::clone(&driver);
        async move { kit.running(&*driver, n).await }
    });
    let specs = join_all(made).await.into_iter().collect::<Check<Vec<_>>>()?;
    let Some((first, rest)) = specs.split_first() else { return Ok(()) };
    let _ = kit.delete(&*driver, first).await?;
    kit.gone(&*driver, first).await?;
    for spec in rest {
        let status = kit.status(&*driver, spec).await?;
        same("the spec of a neighbour", &status.spec, &Some(spec.clone()))?;
        same("the state of a neighbour", &status.state, &VmState::Running)?;
    }
    Ok(())
}
