//! The cases of the hypervisor trait.

mod devices;
mod interrupted;
mod life;
mod more;
mod ownership;

use std::sync::Arc;

use async_trait::async_trait;
use drivers_api::{Change, HostInfo, Hypervisor, Mark, VmSpec, VmState, VmStatus};

use crate::{
    Census, DriverKind, HypervisorBench, Options, Report,
    kit::{Case, Check, Run, Subject, cases, expect, failed, same},
    runner::run_cases,
};

/// Checks a hypervisor driver.
pub async fn check_hypervisor(bench: &dyn HypervisorBench, options: &Options) -> Report {
    let kit = Kit { bench, run: Run::new(options) };
    run_cases(&kit, DriverKind::Hypervisor, &all()).await
}

pub(super) struct Kit<'a> {
    bench: &'a dyn HypervisorBench,
    run: Run<'a>,
}

#[rustfmt::skip]
fn all<'k>() -> Vec<Case<Kit<'k>>> { cases! { Kit<'k>:
    "create": "CreateVM provisions the VM's static state." => life::create;
    "create-again": "CreateVM: re-calling with same UUID is no-op." => life::create_again;
    "create-at-once": "CreateVM twice, the second call while the first is running: one VM, both calls succeed." => life::create_at_once;
    "create-changed": "A changed spec is applied once; the same spec again: unchanged." => life::create_changed;
    "invalid-spec": "A spec that cannot work is refused with the field's path, before any effect." => life::invalid_spec;
    "odd-names": "A name is free text: it round-trips byte for byte or is refused." => life::odd_names;
    "lifecycle-of-absent": "DeleteVM: missing is no-op (not an error); StopVM and Detach follow the same contract." => life::lifecycle_of_absent;
    "lookup-of-absent": "ErrNotFound is returned by lookup-shaped methods." => life::lookup_of_absent;
    "start-stop": "StartVM: already-running is no-op; StopVM: already-stopped is no-op." => life::start_stop;
    "start-at-once": "A VM runs in at most one VMM." => life::start_at_once;
    "reboot": "A reboot leaves the VM running; a stopped VM is started." => life::reboot;
    "delete-running": "DeleteVM removes every host-local state for the VM." => life::delete_running;
    "create-after-delete": "A VM of the same identity can be made at once after its deletion." => life::create_after_delete;
    "side-by-side": "Calls for different objects run side by side." => life::side_by_side;
    "attach-disk": "AttachDisk: idempotent on (vmUUID, disk.VolumeUUID); DetachDisk: missing attachment is no-op." => devices::attach_disk;
    "attach-nic": "AttachNIC / DetachNIC follow the same contract." => devices::attach_nic;
    "attach-otherwise": "The same volume with another bus or access is a conflict." => devices::attach_otherwise;
    "attach-size": "Volumes are made by the volume driver: a non-zero size is refused." => devices::attach_size;
    "attach-hot": "A device is added at once where the VM runs, and removed when the guest lets go." => devices::attach_hot;
    "fresh-start": "With an empty memory, list finds all that is there, with its mark and its spec as applied." => ownership::fresh_start;
    "outlives-the-agent": "VMs outlive the agent, and a new instance adopts them." => ownership::outlives_the_agent;
    "foreign": "What is not marked ours is never changed or removed: an object of the same identity is a conflict." => ownership::foreign;
    "half-made": "A half-made VM is completed by create." => ownership::half_made_is_completed;
    "half-made-delete": "DeleteVM removes every host-local state, whatever of it is there." => ownership::half_made_is_deleted;
    "vmm-killed": "A VMM that is gone is seen as stopped, with how it ended; the VM starts again." => ownership::vmm_killed;
    "vmm-silent": "A VMM that does not answer is unknown: no second one is started beside it, and no other VM waits for it." => ownership::vmm_silent;
    "back-end-down": "Already gone is success only when the absence was seen; else the answer is unavailable." => ownership::backend_down;
    "deadline": "A driver gives up at the deadline, and leaves the host so that a repeat converges." => interrupted::deadline;
    "cancelled": "A call ends soon after its cancellation, and leaves the host so that a repeat converges." => interrupted::cancelled;
    "drop-create": "Every await of create may be the last one." => interrupted::drop_create;
    "drop-start": "Every await of start may be the last one." => interrupted::drop_start;
    "drop-stop": "Every await of stop may be the last one." => interrupted::drop_stop;
    "drop-delete": "Every await of delete may be the last one." => interrupted::drop_delete;
    "drop-attach": "Every await of attach and detach may be the last one." => interrupted::drop_attach;
    "whole-spec": "The same whole spec again: unchanged." => more::whole_spec;
    "drop-whole-spec": "Every await of a whole spec may be the last one." => more::drop_whole_spec;
    "console": "A console answers with what the guest wrote; unavailable while the VM does not run." => more::console;
    "resize": "Resizing what is not running changes nothing; a smaller disk is refused." => more::resize;
    "events": "A driver with events tells of starts and exits." => more::events;
} }

#[async_trait]
impl Subject for Kit<'_> {
    fn run(&self) -> &Run<'_> {
        &self.run
    }

    async fn info(&self) -> Check<HostInfo> {
        let driver = self.open().await?;
        let info = self.run.ok("host_info", driver.host_info(&self.run.cx())).await?;
        same("the host's uuid", &info.uuid, &Some(self.bench.node()))?;
        expect(!info.driver.is_empty(), "the driver's id is empty")?;
        expect(!info.hostname.is_empty(), "the host's name is empty")?;
        expect(!info.hypervisor.is_empty(), "the hypervisor's name is empty")?;
        let abilities = driver.abilities();
        expect(!abilities.boot_kinds.is_empty(), "the driver says that it boots nothing")?;
        self.run.ok("list", driver.list(&self.run.cx())).await?;
        Ok(info)
    }

    async fn clear(&self) -> Check {
        let used = self.run.take_used();
        if used.is_empty() {
            return Ok(());
        }
        let driver = self.open().await?;
        for n in used {
            let vm = self.bench.vm(n).await.uuid;
            let _ = self.run.ok("delete_vm", driver.delete_vm(&self.run.cx(), vm)).await?;
        }
        Ok(())
    }

    async fn census(&self) -> Census {
        self.bench.census().await
    }
}

impl Kit<'_> {
    async fn open(&self) -> Check<Arc<dyn Hypervisor>> {
        self.run.ok("opening the driver", self.bench.open()).await
    }

    /// The case's `n`th VM, whose state is cleared after the case.
    async fn vm(&self, n: u32) -> VmSpec {
        self.bench.vm(self.run.number(n)).await
    }

    async fn get(&self, driver: &dyn Hypervisor, spec: &VmSpec) -> Check<Option<VmStatus>> {
        self.run.ok("get", driver.get(&self.run.cx(), spec.uuid)).await
    }

    /// The VM's status, which must be there.
    async fn status(&self, driver: &dyn Hypervisor, spec: &VmSpec) -> Check<VmStatus> {
        match self.get(driver, spec).await? {
            Some(status) => {
                same("the mark", &status.mark, &Mark::new(self.bench.node(), spec.uuid.uuid()))?;
                Ok(status)
            }
            None => failed("get: the VM is not there"),
        }
    }

    async fn create(&self, driver: &dyn Hypervisor, spec: &VmSpec) -> Check<Change> {
        self.run.ok("create_vm", driver.create_vm(&self.run.cx(), spec)).await
    }

    async fn delete(&self, driver: &dyn Hypervisor, spec: &VmSpec) -> Check<Change> {
        self.run.ok("delete_vm", driver.delete_vm(&self.run.cx(), spec.uuid)).await
    }

    async fn start(&self, driver: &dyn Hypervisor, spec: &VmSpec) -> Check<Change> {
        self.run.ok("start_vm", driver.start_vm(&self.run.cx(), spec.uuid)).await
    }

    async fn stop(&self, driver: &dyn Hypervisor, spec: &VmSpec) -> Check<Change> {
        let grace = self.run.options.stop_grace;
        self.run.ok("stop_vm", driver.stop_vm(&self.run.cx(), spec.uuid, grace)).await
    }

    /// Makes a VM that only needs to be started.
    async fn bootable(&self, driver: &dyn Hypervisor, n: u32) -> Check<VmSpec> {
        let spec = self.vm(n).await;
        let _ = self.create(driver, &spec).await?;
        if let Some(disk) = self.bench.boot_disk(self.run.number(n)).await {
            let cx = self.run.cx();
            let call = driver.attach_disk(&cx, spec.uuid, &disk);
            let _ = self.run.ok("attach_disk (boot disk)", call).await?;
        }
        Ok(spec)
    }

    /// Makes a VM and starts it.
    async fn running(&self, driver: &dyn Hypervisor, n: u32) -> Check<VmSpec> {
        let spec = self.bootable(driver, n).await?;
        let _ = self.start(driver, &spec).await?;
        self.state(driver, &spec, VmState::Running).await?;
        Ok(spec)
    }

    async fn state(&self, driver: &dyn Hypervisor, spec: &VmSpec, wanted: VmState) -> Check {
        let status = self.status(driver, spec).await?;
        let message = status.message.unwrap_or_default();
        same(format_args!("the VM's state ({message})"), &status.state, &wanted)
    }

    /// Checks that a VM is gone: by `get`, by `list` and for a second deletion.
    async fn gone(&self, driver: &dyn Hypervisor, spec: &VmSpec) -> Check {
        expect(self.get(driver, spec).await?.is_none(), "get: the deleted VM is there")?;
        let all = self.run.ok("list", driver.list(&self.run.cx())).await?;
        expect(!all.iter().any(|vm| vm.uuid == spec.uuid), "list: the deleted VM is there")?;
        let again = self.delete(driver, spec).await?;
        same("delete_vm of the deleted VM", &again, &Change::Unchanged)
    }

    /// Checks that a repeat of a call wrote nothing that the bench counts.
    async fn unwritten(&self, before: &Census) -> Check {
        let diff = before.diff(&self.bench.census().await);
        expect(diff.is_empty(), format_args!("the repeat changed the host: {}", diff.join(", ")))
    }
}
