//! Abilities that some drivers have.

use std::time::Duration;

use drivers_api::{
    BoxFuture, Change, ErrorKind, Hypervisor, InstanceSpec, ObjectRef, VmPower, VmState, WholeSpec,
};

use super::{Kit, life::absent_devices};
use crate::kit::{Check, expect, failed, not_applicable, same};

impl Kit<'_> {
    /// The case's instance: bootable, with a disk and a NIC where the driver takes them.
    async fn instance(&self, n: u32) -> InstanceSpec {
        let vm = self.vm(n).await;
        let boot = self.bench.boot_disk(self.run.number(n)).await;
        let disk = self.bench.disk(self.run.number(n + 1)).await;
        let nic = self.bench.nic(self.run.number(n + 1)).await;
        InstanceSpec::new(vm, boot.into_iter().chain(disk).collect(), nic.into_iter().collect())
    }

    async fn ensure(&self, whole: &dyn WholeSpec, spec: &InstanceSpec) -> Check<Change> {
        self.run.ok("ensure_vm", whole.ensure_vm(&self.run.cx(), spec)).await
    }

    /// Checks that the VM is as a whole spec says.
    async fn is_as(&self, driver: &dyn Hypervisor, spec: &InstanceSpec) -> Check {
        let status = self.status(driver, &spec.vm).await?;
        let runs = spec.power == VmPower::Running;
        let wanted = if runs { VmState::Running } else { VmState::Stopped };
        same("the state", &status.state, &wanted)?;
        same("the spec as applied", &status.spec, &Some(spec.vm.clone()))?;
        let sorted = |names: Vec<String>| {
            let mut names = names;
            names.sort();
            names
        };
        let disks = |disks: &[drivers_api::DiskSpec]| {
            sorted(disks.iter().map(|disk| format!("{disk:?}")).collect())
        };
        let nics = |nics: &[drivers_api::NicHandle]| {
            sorted(nics.iter().map(|nic| format!("{nic:?}")).collect())
        };
        same("the disks", &disks(&status.disks), &disks(&spec.disks))?;
        same("the NICs", &nics(&status.nics), &nics(&spec.nics))
    }
}

fn whole(driver: &dyn Hypervisor) -> Check<&dyn WholeSpec> {
    match driver.whole_spec() {
        Some(whole) => Ok(whole),
        None => not_applicable("the driver takes no whole specs"),
    }
}

pub(super) async fn whole_spec(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let whole = whole(&*driver)?;
    let mut spec = kit.instance(0).await;
    same("ensure_vm", &kit.ensure(whole, &spec).await?, &Change::Created)?;
    kit.is_as(&*driver, &spec).await?;
    let before = kit.bench.census().await;
    let pid = kit.status(&*driver, &spec.vm).await?.pid;
    same("ensure_vm again", &kit.ensure(whole, &spec).await?, &Change::Unchanged)?;
    same("the VMM's process", &kit.status(&*driver, &spec.vm).await?.pid, &pid)?;
    kit.unwritten(&before).await?;
    spec.power = VmPower::Stopped;
    expect(kit.ensure(whole, &spec).await?.wrote(), "ensure_vm (stopped) changed nothing")?;
    kit.is_as(&*driver, &spec).await?;
    same("ensure_vm (stopped) again", &kit.ensure(whole, &spec).await?, &Change::Unchanged)?;
    spec.disks.retain(|disk| disk.boot);
    spec.nics.clear();
    spec.power = VmPower::Running;
    let _ = kit.ensure(whole, &spec).await?;
    kit.is_as(&*driver, &spec).await?;
    same("ensure_vm without devices again", &kit.ensure(whole, &spec).await?, &Change::Unchanged)
}

pub(super) async fn drop_whole_spec(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let first = whole(&*driver)?;
    let spec = &kit.instance(0).await;
    let call =
        |cx| -> BoxFuture<'_, _> { Box::pin(async move { first.ensure_vm(&cx, spec).await }) };
    let nothing = || -> BoxFuture<'_, Check> { Box::pin(std::future::ready(Ok(()))) };
    let converges = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            let fresh = kit.open().await?;
            let _ = kit.ensure(whole(&*fresh)?, spec).await?;
            kit.is_as(&*fresh, spec).await?;
            let again = kit.ensure(whole(&*fresh)?, spec).await?;
            same("ensure_vm after the repeat", &again, &Change::Unchanged)?;
            let _ = kit.delete(&*fresh, &spec.vm).await?;
            kit.gone(&*fresh, &spec.vm).await
        })
    };
    kit.run.dropped("ensure_vm", nothing, call, converges).await
}

pub(super) async fn console(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let Some(console) = driver.console() else {
        return not_applicable("the driver has no console");
    };
    let spec = kit.vm(0).await;
    let call =
        async { console.open_console(&kit.run.cx(), spec.uuid, 0).await.map(|_| "a console") };
    kit.run.fails("open_console of an absent VM", &[ErrorKind::NotFound], call).await?;
    let cx = kit.run.cx();
    let call = console.console_log(&cx, spec.uuid, 1024);
    kit.run.fails("console_log of an absent VM", &[ErrorKind::NotFound], call).await?;
    let spec = kit.bootable(&*driver, 0).await?;
    let call =
        async { console.open_console(&kit.run.cx(), spec.uuid, 0).await.map(|_| "a console") };
    kit.run.fails("open_console of a stopped VM", &[ErrorKind::Unavailable], call).await?;
    let cx = kit.run.cx();
    let call = console.console_log(&cx, spec.uuid, 1024);
    kit.run.ok("console_log of a stopped VM", call).await?;
    let _ = kit.start(&*driver, &spec).await?;
    let mut streams = Vec::new();
    for _ in 0..2 {
        let cx = kit.run.cx();
        let call = console.open_console(&cx, spec.uuid, 1024);
        streams.push(kit.run.ok("open_console", call).await?);
    }
    let _ = kit.stop(&*driver, &spec).await?;
    for stream in &mut streams {
        drain(kit, stream.as_mut()).await?;
    }
    let cx = kit.run.cx();
    let call = console.console_log(&cx, spec.uuid, 16);
    let log = kit.run.ok("console_log", call).await?;
    expect(log.len() <= 16, "console_log answers more bytes than were asked for")
}

/// Reads a console to its end, which comes when the VM is gone.
async fn drain(kit: &Kit<'_>, stream: &mut dyn drivers_api::ConsoleStream) -> Check {
    loop {
        match tokio::time::timeout(kit.run.options.settle, stream.read()).await {
            Ok(Ok(bytes)) if bytes.is_empty() => return Ok(()),
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return failed(format_args!("reading the console: {error:?}")),
            Err(_) => return failed("the console of a stopped VM does not end"),
        }
    }
}

pub(super) async fn resize(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let Some(resize) = driver.resize() else {
        return not_applicable("the driver resizes nothing");
    };
    let spec = kit.vm(0).await;
    let _ = kit.create(&*driver, &spec).await?;
    let (volume, _) = absent_devices()?;
    let cx = kit.run.cx();
    let call = resize.resize_disk(&cx, spec.uuid, volume, 1 << 30);
    kit.run.fails("resize_disk of an absent disk", &[ErrorKind::NotFound], call).await?;
    let disk = kit.disk(1).await?;
    let _ = kit.plug_disk(&*driver, &spec, &disk).await?;
    let cx = kit.run.cx();
    let call = resize.resize_disk(&cx, spec.uuid, disk.volume_uuid, 1 << 30);
    let change = kit.run.ok("resize_disk", call).await?;
    same("resize_disk of a stopped VM", &change, &Change::Unchanged)
}

pub(super) async fn events(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let Some(mut events) = driver.events() else {
        return not_applicable("the driver has no events");
    };
    let spec = kit.running(&*driver, 0).await?;
    let _ = kit.stop(&*driver, &spec).await?;
    let mine = Some(ObjectRef::Vm(spec.uuid));
    let limit = kit.run.options.settle.max(Duration::from_secs(1));
    let seen = tokio::time::timeout(limit, async {
        while let Some(event) = events.next().await {
            if event.object == mine || event.object.is_none() {
                return true;
            }
        }
        false
    });
    match seen.await {
        Ok(true) => Ok(()),
        Ok(false) => failed("the subscription ended"),
        Err(_) => failed("a VM was started and stopped, and no event tells of it"),
    }
}
