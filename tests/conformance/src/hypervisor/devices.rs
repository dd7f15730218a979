//! Disks and NICs.

use drivers_api::{Change, DiskSpec, ErrorKind, Hypervisor, NicHandle, VmSpec};

use super::{Kit, life::absent_devices};
use crate::kit::{Check, expect, not_applicable, same};

impl Kit<'_> {
    pub(super) async fn disk(&self, n: u32) -> Check<DiskSpec> {
        match self.bench.disk(self.run.number(n)).await {
            Some(disk) => Ok(disk),
            None => not_applicable("the driver takes no disks"),
        }
    }

    pub(super) async fn nic(&self, n: u32) -> Check<NicHandle> {
        match self.bench.nic(self.run.number(n)).await {
            Some(nic) => Ok(nic),
            None => not_applicable("the driver takes no NICs"),
        }
    }

    pub(super) async fn plug_disk(
        &self,
        driver: &dyn Hypervisor,
        spec: &VmSpec,
        disk: &DiskSpec,
    ) -> Check<Change> {
        self.run.ok("attach_disk", driver.attach_disk(&self.run.cx(), spec.uuid, disk)).await
    }

    pub(super) async fn unplug_disk(
        &self,
        driver: &dyn Hypervisor,
        spec: &VmSpec,
        disk: &DiskSpec,
    ) -> Check<Change> {
        let cx = self.run.cx();
        let call = driver.detach_disk(&cx, spec.uuid, disk.volume_uuid);
        self.run.ok("detach_disk", call).await
    }

    pub(super) async fn plug_nic(
        &self,
        driver: &dyn Hypervisor,
        spec: &VmSpec,
        nic: &NicHandle,
    ) -> Check<Change> {
        self.run.ok("attach_nic", driver.attach_nic(&self.run.cx(), spec.uuid, nic)).await
    }

    pub(super) async fn unplug_nic(
        &self,
        driver: &dyn Hypervisor,
        spec: &VmSpec,
        nic: &NicHandle,
    ) -> Check<Change> {
        let cx = self.run.cx();
        let call = driver.detach_nic(&cx, spec.uuid, &nic.device);
        self.run.ok("detach_nic", call).await
    }

    /// Whether the VM's status has exactly this disk of that volume, or none.
    pub(super) async fn has_disk(
        &self,
        driver: &dyn Hypervisor,
        spec: &VmSpec,
        disk: &DiskSpec,
        wanted: bool,
    ) -> Check {
        let disks = self.status(driver, spec).await?.disks;
        let found: Vec<_> =
            disks.into_iter().filter(|d| d.volume_uuid == disk.volume_uuid).collect();
        let wanted = if wanted { vec![disk.clone()] } else { Vec::new() };
        same("the VM's disk", &found, &wanted)
    }

    pub(super) async fn has_nic(
        &self,
        driver: &dyn Hypervisor,
        spec: &VmSpec,
        nic: &NicHandle,
        wanted: bool,
    ) -> Check {
        let nics = self.status(driver, spec).await?.nics;
        let found: Vec<_> = nics.into_iter().filter(|n| n.device == nic.device).collect();
        let wanted = if wanted { vec![nic.clone()] } else { Vec::new() };
        same("the VM's NIC", &found, &wanted)
    }

    /// Attaches a disk and detaches it, each twice.
    async fn disk_round(&self, driver: &dyn Hypervisor, spec: &VmSpec, disk: &DiskSpec) -> Check {
        let first = self.plug_disk(driver, spec, disk).await?;
        expect(first.wrote(), "attach_disk says that it changed nothing")?;
        self.has_disk(driver, spec, disk, true).await?;
        same("attach_disk again", &self.plug_disk(driver, spec, disk).await?, &Change::Unchanged)?;
        self.has_disk(driver, spec, disk, true).await?;
        let gone = self.unplug_disk(driver, spec, disk).await?;
        expect(gone.wrote(), "detach_disk says that it changed nothing")?;
        self.has_disk(driver, spec, disk, false).await?;
        let again = self.unplug_disk(driver, spec, disk).await?;
        same("detach_disk again", &again, &Change::Unchanged)
    }

    /// Attaches a NIC and detaches it, each twice.
    async fn nic_round(&self, driver: &dyn Hypervisor, spec: &VmSpec, nic: &NicHandle) -> Check {
        let first = self.plug_nic(driver, spec, nic).await?;
        expect(first.wrote(), "attach_nic says that it changed nothing")?;
        self.has_nic(driver, spec, nic, true).await?;
        same("attach_nic again", &self.plug_nic(driver, spec, nic).await?, &Change::Unchanged)?;
        self.has_nic(driver, spec, nic, true).await?;
        let gone = self.unplug_nic(driver, spec, nic).await?;
        expect(gone.wrote(), "detach_nic says that it changed nothing")?;
        self.has_nic(driver, spec, nic, false).await?;
        let again = self.unplug_nic(driver, spec, nic).await?;
        same("detach_nic again", &again, &Change::Unchanged)
    }
}

pub(super) async fn attach_disk(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let disk = kit.disk(1).await?;
    let spec = kit.vm(0).await;
    let _ = kit.create(&*driver, &spec).await?;
    let (volume, _) = absent_devices()?;
    let cx = kit.run.cx();
    let call = driver.detach_disk(&cx, spec.uuid, volume);
    let absent = kit.run.ok("detach_disk", call).await?;
    same("detach_disk of a disk that was never there", &absent, &Change::Unchanged)?;
    kit.disk_round(&*driver, &spec, &disk).await?;
    kit.disk_round(&*driver, &spec, &disk).await
}

pub(super) async fn attach_nic(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let nic = kit.nic(1).await?;
    let spec = kit.vm(0).await;
    let _ = kit.create(&*driver, &spec).await?;
    let (_, device) = absent_devices()?;
    let cx = kit.run.cx();
    let call = driver.detach_nic(&cx, spec.uuid, &device);
    let absent = kit.run.ok("detach_nic", call).await?;
    same("detach_nic of a NIC that was never there", &absent, &Change::Unchanged)?;
    kit.nic_round(&*driver, &spec, &nic).await?;
    kit.nic_round(&*driver, &spec, &nic).await
}

pub(super) async fn attach_otherwise(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let disk = kit.disk(1).await?;
    let spec = kit.vm(0).await;
    let _ = kit.create(&*driver, &spec).await?;
    let _ = kit.plug_disk(&*driver, &spec, &disk).await?;
    let mut other = disk.clone();
    other.read_only = !disk.read_only;
    let cx = kit.run.cx();
    let call = driver.attach_disk(&cx, spec.uuid, &other);
    kit.run.fails("attach_disk with other access", &[ErrorKind::Conflict], call).await?;
    kit.has_disk(&*driver, &spec, &disk, true).await?;
    let Ok(mut second) = kit.disk(2).await else { return Ok(()) };
    second.name = disk.name.clone();
    let cx = kit.run.cx();
    let call = driver.attach_disk(&cx, spec.uuid, &second);
    let kinds = &[ErrorKind::Conflict, ErrorKind::InvalidSpec];
    kit.run.fails("attach_disk under a name that is taken", kinds, call).await?;
    kit.has_disk(&*driver, &spec, &disk, true).await
}

pub(super) async fn attach_size(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let mut disk = kit.disk(1).await?;
    let spec = kit.vm(0).await;
    let _ = kit.create(&*driver, &spec).await?;
    disk.size_gib = 1;
    let cx = kit.run.cx();
    let call = driver.attach_disk(&cx, spec.uuid, &disk);
    kit.run.fails("attach_disk with a size", &[ErrorKind::InvalidSpec], call).await?;
    kit.has_disk(&*driver, &spec, &disk, false).await
}

pub(super) async fn attach_hot(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let abilities = driver.abilities();
    if !abilities.hot_disks && !abilities.hot_nics {
        return not_applicable("the driver has no hot changes");
    }
    let spec = kit.running(&*driver, 0).await?;
    let pid = kit.status(&*driver, &spec).await?.pid;
    if abilities.hot_disks
        && let Some(disk) = kit.bench.disk(kit.run.number(1)).await
    {
        if kit.bench.guest_lets_go() {
            kit.disk_round(&*driver, &spec, &disk).await?;
        } else {
            let _ = kit.plug_disk(&*driver, &spec, &disk).await?;
            kit.has_disk(&*driver, &spec, &disk, true).await?;
        }
    }
    if abilities.hot_nics
        && let Some(nic) = kit.bench.nic(kit.run.number(2)).await
    {
        if kit.bench.guest_lets_go() {
            kit.nic_round(&*driver, &spec, &nic).await?;
        } else {
            let _ = kit.plug_nic(&*driver, &spec, &nic).await?;
            kit.has_nic(&*driver, &spec, &nic, true).await?;
        }
    }
    same("the VMM's process", &kit.status(&*driver, &spec).await?.pid, &pid)
}
