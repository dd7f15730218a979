//! The cases of the volume trait.

mod attachments;
mod interrupted;
mod life;

use std::sync::Arc;

use async_trait::async_trait;
use drivers_api::{
    AttachRequest, AttachedVolume, Change, DetachRequest, HostInfo, Mark, Outcome, Uuid, VmId,
    Volume, VolumeSpec, VolumeStatus,
};

use crate::{
    Census, DriverKind, Options, Report, VolumeBench,
    kit::{Case, Check, Run, Subject, cases, expect, failed, same},
    runner::run_cases,
};

/// Checks a volume driver.
pub async fn check_volume(bench: &dyn VolumeBench, options: &Options) -> Report {
    let kit = Kit { bench, run: Run::new(options) };
    run_cases(&kit, DriverKind::Volume, &all()).await
}

pub(super) struct Kit<'a> {
    bench: &'a dyn VolumeBench,
    run: Run<'a>,
}

#[rustfmt::skip]
fn all<'k>() -> Vec<Case<Kit<'k>>> { cases! { Kit<'k>:
    "ensure": "EnsureVolume creates the backing storage." => life::ensure;
    "ensure-again": "EnsureVolume re-running with the same spec is a no-op." => life::ensure_again;
    "ensure-at-once": "EnsureVolume twice, the second call while the first is running: one volume, both calls succeed." => life::ensure_at_once;
    "grow": "EnsureVolume with a larger size grows the volume." => life::grow;
    "shrink": "EnsureVolume re-running with a smaller size is rejected." => life::shrink;
    "no-space": "A volume that does not fit is exhausted; a failed growth leaves the old size valid." => life::no_space;
    "other-format": "EnsureVolume with another format is rejected." => life::other_format;
    "odd-names": "A name is free text: it round-trips byte for byte or is refused." => life::odd_names;
    "source": "A volume starts as a copy of its source, which is looked at only when the volume is made." => life::source;
    "source-missing": "EnsureVolume of a source that is not there is not-found, and makes nothing." => life::source_missing;
    "lifecycle-of-absent": "DestroyVolume: no-op if missing; DetachVolume follows the same contract." => life::lifecycle_of_absent;
    "lookup-of-absent": "ErrNotFound is returned by lookup-shaped methods." => life::lookup_of_absent;
    "create-after-destroy": "A volume of the same identity can be made at once after its removal." => life::create_after_destroy;
    "side-by-side": "Calls for different objects run side by side." => life::side_by_side;
    "fresh-start": "With an empty memory, list finds all that is there, with its mark and its spec as applied." => life::fresh_start;
    "foreign": "What is not marked ours is never changed or removed: an object of the same name is a conflict." => life::foreign;
    "half-made": "A half-made volume is finished by ensure." => life::half_made_is_completed;
    "half-made-destroy": "DestroyVolume removes the volume, half-made ones included." => life::half_made_is_destroyed;
    "back-end-down": "Already gone is success only when the absence was seen; else the answer is unavailable." => life::backend_down;
    "attach": "AttachVolume returns the path or URI that the hypervisor opens, plus access mode." => attachments::attach;
    "attach-again": "AttachVolume again by the same VM: unchanged, the same answer." => attachments::attach_again;
    "attach-other": "AttachVolume is a conflict that names the VM that has the volume." => attachments::attach_other;
    "attach-readers": "Any number of readers may share a volume that nobody writes." => attachments::readers;
    "attach-kinds": "AttachVolume is unsupported when the hypervisor opens none of the backings." => attachments::kinds;
    "detach": "DetachVolume releases the per-host attachment; it does not delete the volume." => attachments::detach;
    "destroy-attached": "DestroyVolume of a volume that is open is a conflict that names who has it, and forces nothing." => attachments::destroy_attached;
    "attach-fresh": "An attachment is found, and kept, by an instance with an empty memory." => attachments::fresh_start;
    "deadline": "A driver gives up at the deadline, and leaves the host so that a repeat converges." => interrupted::deadline;
    "cancelled": "A call ends soon after its cancellation, and leaves the host so that a repeat converges." => interrupted::cancelled;
    "drop-ensure": "Every await of ensure may be the last one." => interrupted::drop_ensure;
    "drop-grow": "Every await of a growth may be the last one; the old size stays valid." => interrupted::drop_grow;
    "drop-destroy": "Every await of destroy may be the last one." => interrupted::drop_destroy;
    "drop-attach": "Every await of attach and detach may be the last one." => interrupted::drop_attach;
} }

#[async_trait]
impl Subject for Kit<'_> {
    fn run(&self) -> &Run<'_> {
        &self.run
    }

    async fn info(&self) -> Check<HostInfo> {
        let driver = self.open().await?;
        expect(!driver.name().is_empty(), "the backend's name is empty")?;
        expect(!driver.backings().is_empty(), "the driver says that it has no backing")?;
        let info = self.run.ok("host_info", driver.host_info(&self.run.cx())).await?;
        let wanted = driver.local().then(|| self.bench.node());
        same("the host's uuid (none for a cluster-wide driver)", &info.uuid, &wanted)?;
        expect(!info.driver.is_empty(), "the driver's id is empty")?;
        expect(!info.hostname.is_empty(), "the host's name is empty")?;
        let _ = self.run.ok("list", driver.list(&self.run.cx())).await?;
        // An image that the bench brings is there before the census.
        let _ = self.bench.source().await;
        Ok(info)
    }

    async fn clear(&self) -> Check {
        let used = self.run.take_used();
        if used.is_empty() {
            return Ok(());
        }
        let driver = self.open().await?;
        for n in used {
            let spec = self.bench.volume(n).await;
            let get = driver.get(&self.run.cx(), spec.uuid).await;
            for attachment in
                get.ok().flatten().map(|status| status.attachments).unwrap_or_default()
            {
                let (host, vm) = (attachment.host_uuid, attachment.vm_uuid);
                let request = DetachRequest::new(spec.uuid, host, vm);
                let cx = self.run.cx();
                let _ = self.run.ok("detach_volume", driver.detach_volume(&cx, &request)).await?;
            }
            let cx = self.run.cx();
            let _ = self.run.ok("destroy_volume", driver.destroy_volume(&cx, spec.uuid)).await?;
        }
        Ok(())
    }

    async fn census(&self) -> Census {
        self.bench.census().await
    }
}

impl Kit<'_> {
    async fn open(&self) -> Check<Arc<dyn Volume>> {
        self.run.ok("opening the driver", self.bench.open()).await
    }

    /// The case's `n`th volume, which is cleared after the case.
    async fn volume(&self, n: u32) -> VolumeSpec {
        self.bench.volume(self.run.number(n)).await
    }

    async fn get(&self, driver: &dyn Volume, spec: &VolumeSpec) -> Check<Option<VolumeStatus>> {
        self.run.ok("get", driver.get(&self.run.cx(), spec.uuid)).await
    }

    async fn status(&self, driver: &dyn Volume, spec: &VolumeSpec) -> Check<VolumeStatus> {
        match self.get(driver, spec).await? {
            Some(status) => {
                same("the mark", &status.mark, &Mark::new(self.bench.node(), spec.uuid.uuid()))?;
                Ok(status)
            }
            None => failed("get: the volume is not there"),
        }
    }

    async fn ensure(&self, driver: &dyn Volume, spec: &VolumeSpec) -> Check<Change> {
        self.run.ok("ensure_volume", driver.ensure_volume(&self.run.cx(), spec)).await
    }

    async fn destroy(&self, driver: &dyn Volume, spec: &VolumeSpec) -> Check<Change> {
        self.run.ok("destroy_volume", driver.destroy_volume(&self.run.cx(), spec.uuid)).await
    }

    /// The request of the `n`th VM for a volume.
    fn request(&self, driver: &dyn Volume, spec: &VolumeSpec, n: u8) -> Check<AttachRequest> {
        let accepts = driver.backings().to_vec();
        Ok(AttachRequest::new(spec.uuid, self.bench.node(), vm(n)?, accepts))
    }

    async fn attach(
        &self,
        driver: &dyn Volume,
        request: &AttachRequest,
    ) -> Check<Outcome<AttachedVolume>> {
        self.run.ok("attach_volume", driver.attach_volume(&self.run.cx(), request)).await
    }

    async fn detach(&self, driver: &dyn Volume, request: &AttachRequest) -> Check<Change> {
        let request = DetachRequest::new(request.volume_uuid, request.host_uuid, request.vm_uuid);
        self.run.ok("detach_volume", driver.detach_volume(&self.run.cx(), &request)).await
    }

    /// Checks that a volume is whole and as its spec says.
    async fn whole(&self, driver: &dyn Volume, spec: &VolumeSpec) -> Check {
        let status = self.status(driver, spec).await?;
        expect(status.complete, format_args!("the volume is incomplete: {:?}", status.message))?;
        same("the spec as applied", &status.spec, &Some(spec.clone()))?;
        same("the size that a guest sees", &status.size_bytes, &spec.size_gib.bytes())
    }

    async fn gone(&self, driver: &dyn Volume, spec: &VolumeSpec) -> Check {
        expect(self.get(driver, spec).await?.is_none(), "get: the removed volume is there")?;
        let all = self.run.ok("list", driver.list(&self.run.cx())).await?;
        expect(!all.iter().any(|v| v.uuid == spec.uuid), "list: the removed volume is there")?;
        let again = self.destroy(driver, spec).await?;
        same("destroy_volume of the removed volume", &again, &Change::Unchanged)
    }

    async fn unwritten(&self, before: &Census) -> Check {
        let diff = before.diff(&self.bench.census().await);
        expect(diff.is_empty(), format_args!("the repeat changed the host: {}", diff.join(", ")))
    }
}

/// The `n`th VM that attaches volumes.
fn vm(n: u8) -> Check<VmId> {
    let mut bytes = *b"conformance-vm-0";
    if let Some(last) = bytes.last_mut() {
        *last = b'a' + n;
    }
    match Uuid::from_bytes(bytes) {
        Some(uuid) => Ok(VmId::new(uuid)),
        None => failed("the kit's own UUID is nil"),
    }
}
