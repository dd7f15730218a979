//! Calls that end early: at their deadline, by cancellation, or because their future is dropped.

use std::sync::Arc;

use drivers_api::{BoxFuture, Change, Hypervisor, VmSpec, VmState};

use super::Kit;
use crate::kit::{Check, Ending, expect, same};

/// What every closure of these cases needs.
struct Scene<'k> {
    kit: &'k Kit<'k>,
    driver: Arc<dyn Hypervisor>,
    spec: VmSpec,
}

impl<'k> Scene<'k> {
    async fn new(kit: &'k Kit<'k>) -> Check<Scene<'k>> {
        let driver = kit.open().await?;
        let spec = kit.vm(0).await;
        Ok(Self { kit, driver, spec })
    }

    fn nothing(&self) -> BoxFuture<'_, Check> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Creating converges, to a VM that is whole; deleting clears it.
    fn converges(&self) -> BoxFuture<'_, Check> {
        Box::pin(async {
            // As after a crash: whoever repeats the call remembers nothing.
            let driver = self.kit.open().await?;
            let _ = self.kit.create(&*driver, &self.spec).await?;
            let again = self.kit.create(&*driver, &self.spec).await?;
            same("create_vm after the repeat", &again, &Change::Unchanged)?;
            let status = self.kit.status(&*driver, &self.spec).await?;
            same("the spec as applied", &status.spec, &Some(self.spec.clone()))?;
            self.clears().await
        })
    }

    fn clears(&self) -> BoxFuture<'_, Check> {
        Box::pin(async {
            let driver = self.kit.open().await?;
            let _ = self.kit.delete(&*driver, &self.spec).await?;
            self.kit.gone(&*driver, &self.spec).await
        })
    }

    fn made(&self) -> BoxFuture<'_, Check> {
        Box::pin(async { self.kit.bootable(&*self.driver, 0).await.map(drop) })
    }

    fn started(&self) -> BoxFuture<'_, Check> {
        Box::pin(async { self.kit.running(&*self.driver, 0).await.map(drop) })
    }
}

pub(super) async fn deadline(kit: &Kit<'_>) -> Check {
    ended(kit, Ending::Deadline).await
}

pub(super) async fn cancelled(kit: &Kit<'_>) -> Check {
    ended(kit, Ending::Cancel).await
}

async fn ended(kit: &Kit<'_>, how: Ending) -> Check {
    let scene = Scene::new(kit).await?;
    let (driver, spec) = (&scene.driver, &scene.spec);
    kit.run
        .ended(
            "create_vm",
            how,
            |cx| Box::pin(async move { driver.create_vm(&cx, spec).await }),
            || {
                Box::pin(async {
                    let there = kit.get(&**driver, spec).await?.is_some();
                    expect(!there, "a call whose context had ended made the VM")
                })
            },
            || scene.converges(),
        )
        .await?;
    scene.made().await?;
    kit.run
        .ended(
            "start_vm",
            how,
            |cx| Box::pin(async move { driver.start_vm(&cx, spec.uuid).await }),
            || scene.nothing(),
            || {
                Box::pin(async {
                    let _ = kit.start(&**driver, spec).await?;
                    kit.state(&**driver, spec, VmState::Running).await?;
                    let _ = kit.stop(&**driver, spec).await?;
                    kit.state(&**driver, spec, VmState::Stopped).await
                })
            },
        )
        .await?;
    kit.run
        .ended(
            "delete_vm",
            how,
            |cx| Box::pin(async move { driver.delete_vm(&cx, spec.uuid).await }),
            || scene.nothing(),
            || {
                Box::pin(async {
                    scene.clears().await?;
                    scene.started().await
                })
            },
        )
        .await
}

pub(super) async fn drop_create(kit: &Kit<'_>) -> Check {
    let scene = Scene::new(kit).await?;
    let (driver, spec) = (&scene.driver, &scene.spec);
    let call =
        |cx| -> BoxFuture<'_, _> { Box::pin(async move { driver.create_vm(&cx, spec).await }) };
    kit.run.dropped("create_vm", || scene.nothing(), call, || scene.converges()).await?;
    kit.run.dropped("create_vm", || scene.nothing(), call, || scene.clears()).await
}

pub(super) async fn drop_start(kit: &Kit<'_>) -> Check {
    let scene = Scene::new(kit).await?;
    let (driver, spec) = (&scene.driver, &scene.spec);
    let call =
        |cx| -> BoxFuture<'_, _> { Box::pin(async move { driver.start_vm(&cx, spec.uuid).await }) };
    let after = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            let fresh = kit.open().await?;
            let _ = kit.start(&*fresh, spec).await?;
            let status = kit.status(&*fresh, spec).await?;
            same("the state after a repeat", &status.state, &VmState::Running)?;
            same(
                "start_vm after the repeat",
                &kit.start(&*fresh, spec).await?,
                &Change::Unchanged,
            )?;
            let pid = kit.status(&*fresh, spec).await?.pid;
            same("the VMM's process", &pid, &status.pid)?;
            scene.clears().await
        })
    };
    kit.run.dropped("start_vm", || scene.made(), call, after).await?;
    kit.run.dropped("start_vm", || scene.made(), call, || scene.clears()).await
}

pub(super) async fn drop_stop(kit: &Kit<'_>) -> Check {
    let scene = Scene::new(kit).await?;
    let (driver, spec) = (&scene.driver, &scene.spec);
    let grace = kit.run.options.stop_grace;
    let call = |cx| -> BoxFuture<'_, _> {
        Box::pin(async move { driver.stop_vm(&cx, spec.uuid, grace).await })
    };
    let after = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            let fresh = kit.open().await?;
            let _ = kit.stop(&*fresh, spec).await?;
            kit.state(&*fresh, spec, VmState::Stopped).await?;
            same("stop_vm after the repeat", &kit.stop(&*fresh, spec).await?, &Change::Unchanged)
        })
    };
    kit.run.dropped("stop_vm", || scene.started(), call, after).await
}

pub(super) async fn drop_delete(kit: &Kit<'_>) -> Check {
    let scene = Scene::new(kit).await?;
    let (driver, spec) = (&scene.driver, &scene.spec);
    let call = |cx| -> BoxFuture<'_, _> {
        Box::pin(async move { driver.delete_vm(&cx, spec.uuid).await })
    };
    kit.run.dropped("delete_vm", || scene.started(), call, || scene.clears()).await?;
    // What a deletion left half-made, a create takes up again.
    kit.run.dropped("delete_vm", || scene.made(), call, || scene.converges()).await
}

pub(super) async fn drop_attach(kit: &Kit<'_>) -> Check {
    let scene = Scene::new(kit).await?;
    let (driver, spec) = (&scene.driver, &scene.spec);
    let disk = &kit.disk(1).await?;
    let attach = |cx| -> BoxFuture<'_, _> {
        Box::pin(async move { driver.attach_disk(&cx, spec.uuid, disk).await })
    };
    let detach = |cx| -> BoxFuture<'_, _> {
        Box::pin(async move { driver.detach_disk(&cx, spec.uuid, disk.volume_uuid).await })
    };
    let attached = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            let fresh = kit.open().await?;
            let _ = kit.plug_disk(&*fresh, spec, disk).await?;
            kit.has_disk(&*fresh, spec, disk, true).await
        })
    };
    let detached = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            let fresh = kit.open().await?;
            let _ = kit.unplug_disk(&*fresh, spec, disk).await?;
            kit.has_disk(&*fresh, spec, disk, false).await
        })
    };
    scene.made().await?;
    kit.run.dropped("attach_disk", detached, attach, attached).await?;
    kit.run.dropped("detach_disk", attached, detach, detached).await?;
    let hot = driver.abilities().hot_disks && kit.bench.guest_lets_go();
    if hot {
        let _ = kit.start(&**driver, spec).await?;
        kit.run.dropped("attach_disk (running)", detached, attach, attached).await?;
        kit.run.dropped("detach_disk (running)", attached, detach, detached).await?;
    }
    Ok(())
}
