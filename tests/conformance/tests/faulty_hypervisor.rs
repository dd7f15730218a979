//! The kit fails a hypervisor driver for each rule that it breaks, in the case of that rule.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use conformance::{
    Census, HypervisorBench, Options, Plant, check_hypervisor,
    reference::{Host, ReferenceBench},
};
use drivers_api::{
    Change, Context, DiskSpec, Error, ErrorKind, HostId, HostInfo, Hypervisor, HypervisorAbilities,
    IfName, NicHandle, Result, VmId, VmSpec, VmState, VmStatus, VolumeId,
};

/// One way to break the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    RestartsOnStart,
    HidesThatARestartIsNeeded,
    MakesDisks,
    LosesDevicesOnRestart,
    DeletesForeignVms,
    StartsASecondVmm,
    ListWaitsForTheSilent,
    SaysStoppedAndIsNot,
    EndsVmsWithTheAgent,
    ChangesTheName,
}

struct Flawed {
    inner: Arc<dyn Hypervisor>,
    host: Host,
    flaw: Flaw,
    attached_here: Mutex<BTreeSet<VolumeId>>,
    started_here: Mutex<BTreeSet<VmId>>,
    asleep: AtomicBool,
}

impl Flawed {
    fn is(&self, flaw: Flaw) -> bool {
        self.flaw == flaw
    }

    fn filter(&self, mut status: VmStatus) -> VmStatus {
        if self.is(Flaw::HidesThatARestartIsNeeded) {
            status.restart_needed = false;
        }
        if self.is(Flaw::LosesDevicesOnRestart) {
            let here = self.attached_here.lock().unwrap_or_else(PoisonError::into_inner);
            status.disks.retain(|disk| here.contains(&disk.volume_uuid));
        }
        status
    }
}

impl Drop for Flawed {
    fn drop(&mut self) {
        if self.is(Flaw::EndsVmsWithTheAgent) {
            let started = self.started_here.lock().unwrap_or_else(PoisonError::into_inner);
            for vm in started.iter() {
                self.host.kill_vm(*vm);
            }
        }
    }
}

#[async_trait]
impl Hypervisor for Flawed {
    fn abilities(&self) -> HypervisorAbilities {
        self.inner.abilities()
    }
    async fn host_info(&self, cx: &Context) -> Result<HostInfo> {
        self.inner.host_info(cx).await
    }
    async fn create_vm(&self, cx: &Context, spec: &VmSpec) -> Result<Change> {
        let mut spec = spec.clone();
        if self.is(Flaw::ChangesTheName)
            && let Ok(name) = spec.name.as_str().trim().parse()
        {
            spec.name = name;
        }
        self.inner.create_vm(cx, &spec).await
    }
    async fn start_vm(&self, cx: &Context, vm: VmId) -> Result<Change> {
        if self.is(Flaw::RestartsOnStart) {
            self.host.kill_vm(vm);
        }
        self.started_here.lock().unwrap_or_else(PoisonError::into_inner).insert(vm);
        match self.inner.start_vm(cx, vm).await {
            Err(error)
                if self.is(Flaw::StartsASecondVmm) && error.kind() == ErrorKind::UnknownOutcome =>
            {
                Ok(Change::Changed)
            }
            answer => answer,
        }
    }
    async fn stop_vm(&self, cx: &Context, vm: VmId, grace: Duration) -> Result<Change> {
        if self.is(Flaw::SaysStoppedAndIsNot) && !self.asleep.swap(true, Ordering::SeqCst) {
            return Ok(Change::Changed);
        }
        self.inner.stop_vm(cx, vm, grace).await
    }
    async fn reboot_vm(&self, cx: &Context, vm: VmId, grace: Duration) -> Result<Change> {
        self.inner.reboot_vm(cx, vm, grace).await
    }
    async fn delete_vm(&self, cx: &Context, vm: VmId) -> Result<Change> {
        if self.is(Flaw::DeletesForeignVms) {
            self.host.remove_foreign_vm(vm);
        }
        self.inner.delete_vm(cx, vm).await
    }
    async fn attach_disk(&self, cx: &Context, vm: VmId, disk: &DiskSpec) -> Result<Change> {
        self.attached_here.lock().unwrap_or_else(PoisonError::into_inner).insert(disk.volume_uuid);
        let mut disk = disk.clone();
        if self.is(Flaw::MakesDisks) {
            disk.size_gib = 0;
        }
        self.inner.attach_disk(cx, vm, &disk).await
    }
    async fn detach_disk(&self, cx: &Context, vm: VmId, volume: VolumeId) -> Result<Change> {
        self.inner.detach_disk(cx, vm, volume).await
    }
    async fn attach_nic(&self, cx: &Context, vm: VmId, nic: &NicHandle) -> Result<Change> {
        self.inner.attach_nic(cx, vm, nic).await
    }
    async fn detach_nic(&self, cx: &Context, vm: VmId, device: &IfName) -> Result<Change> {
        self.inner.detach_nic(cx, vm, device).await
    }
    async fn list(&self, cx: &Context) -> Result<Vec<VmStatus>> {
        let all = self.inner.list(cx).await?;
        if self.is(Flaw::ListWaitsForTheSilent) && all.iter().any(|vm| vm.state == VmState::Unknown)
        {
            return Err(Error::new(ErrorKind::Unavailable, "list", "vms", "one does not answer"));
        }
        Ok(all.into_iter().map(|status| self.filter(status)).collect())
    }
    async fn get(&self, cx: &Context, vm: VmId) -> Result<Option<VmStatus>> {
        Ok(self.inner.get(cx, vm).await?.map(|status| self.filter(status)))
    }
}

struct Bench {
    inner: ReferenceBench,
    flaw: Flaw,
}

impl Bench {
    fn reference(&self) -> &dyn HypervisorBench {
        &self.inner
    }
}

#[async_trait]
impl HypervisorBench for Bench {
    fn node(&self) -> HostId {
        self.reference().node()
    }
    async fn open(&self) -> Result<Arc<dyn Hypervisor>> {
        Ok(Arc::new(Flawed {
            inner: self.reference().open().await?,
            host: self.inner.host().clone(),
            flaw: self.flaw,
            attached_here: Mutex::default(),
            started_here: Mutex::default(),
            asleep: AtomicBool::new(false),
        }))
    }
    async fn vm(&self, n: u32) -> VmSpec {
        self.reference().vm(n).await
    }
    async fn disk(&self, n: u32) -> Option<DiskSpec> {
        self.reference().disk(n).await
    }
    async fn nic(&self, n: u32) -> Option<NicHandle> {
        self.reference().nic(n).await
    }
    async fn plant_foreign(&self, vm: &VmSpec) -> Plant {
        self.reference().plant_foreign(vm).await
    }
    async fn fingerprint_foreign(&self, vm: &VmSpec) -> String {
        self.reference().fingerprint_foreign(vm).await
    }
    async fn remove_foreign(&self, vm: &VmSpec) {
        self.reference().remove_foreign(vm).await;
    }
    async fn silence_vmm(&self, vm: VmId) -> Plant {
        self.reference().silence_vmm(vm).await
    }
    async fn wake_vmm(&self, vm: VmId) {
        self.reference().wake_vmm(vm).await;
    }
    async fn census(&self) -> Census {
        self.reference().census().await
    }
}

/// Checks that a flaw fails the case of its rule.
async fn caught(flaw: Flaw, case: &str) {
    let bench = Bench { inner: ReferenceBench::new(Host::new()), flaw };
    let options = Options {
        call_limit: Duration::from_millis(500),
        settle: Duration::from_millis(50),
        process_census: false,
        only: vec![case.to_owned()],
        ..Options::default()
    };
    let report = check_hypervisor(&bench, &options).await;
    let failed: Vec<_> = report.failures().map(|case| case.name).collect();
    assert!(failed.contains(&case), "{flaw:?} is not caught by {case}, but by {failed:?}");
}

#[tokio::test]
async fn each_flaw_fails_the_case_of_its_rule() {
    caught(Flaw::RestartsOnStart, "start-stop").await;
    caught(Flaw::RestartsOnStart, "outlives-the-agent").await;
    caught(Flaw::HidesThatARestartIsNeeded, "create-changed").await;
    caught(Flaw::MakesDisks, "attach-size").await;
    caught(Flaw::LosesDevicesOnRestart, "fresh-start").await;
    caught(Flaw::DeletesForeignVms, "foreign").await;
    caught(Flaw::StartsASecondVmm, "vmm-silent").await;
    caught(Flaw::ListWaitsForTheSilent, "vmm-silent").await;
    caught(Flaw::SaysStoppedAndIsNot, "start-stop").await;
    caught(Flaw::EndsVmsWithTheAgent, "outlives-the-agent").await;
    caught(Flaw::ChangesTheName, "odd-names").await;
}
