//! Calls that end early: at their deadline, by cancellation, or because their future is dropped.

use drivers_api::{BoxFuture, Change, Volume, VolumeSpec};

use super::{Kit, life::grown};
use crate::kit::{Check, Ending, expect, same};

impl Kit<'_> {
    /// Making the volume converges, seen by an instance with an empty memory.
    async fn converges(&self, spec: &VolumeSpec) -> Check {
        let driver = self.open().await?;
        let _ = self.ensure(&*driver, spec).await?;
        self.whole(&*driver, spec).await?;
        let again = self.ensure(&*driver, spec).await?;
        same("ensure_volume after the repeat", &again, &Change::Unchanged)
    }

    async fn clears(&self, spec: &VolumeSpec) -> Check {
        let driver = self.open().await?;
        let _ = self.destroy(&*driver, spec).await?;
        self.gone(&*driver, spec).await
    }
}

fn nothing<'a>() -> BoxFuture<'a, Check> {
    Box::pin(std::future::ready(Ok(())))
}

pub(super) async fn deadline(kit: &Kit<'_>) -> Check {
    ended(kit, Ending::Deadline).await
}

pub(super) async fn cancelled(kit: &Kit<'_>) -> Check {
    ended(kit, Ending::Cancel).await
}

async fn ended(kit: &Kit<'_>, how: Ending) -> Check {
    let driver: &dyn Volume = &*kit.open().await?;
    let spec = &kit.volume(0).await;
    let untouched = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            let there = kit.get(driver, spec).await?.is_some();
            expect(!there, "a call whose context had ended made the volume")
        })
    };
    let remade = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            kit.converges(spec).await?;
            kit.clears(spec).await
        })
    };
    let ensure =
        |cx| -> BoxFuture<'_, _> { Box::pin(async move { driver.ensure_volume(&cx, spec).await }) };
    kit.run.ended("ensure_volume", how, ensure, untouched, remade).await?;
    let destroy = |cx| -> BoxFuture<'_, _> {
        Box::pin(async move { driver.destroy_volume(&cx, spec.uuid).await })
    };
    let cleared = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            kit.clears(spec).await?;
            kit.converges(spec).await
        })
    };
    kit.converges(spec).await?;
    kit.run.ended("destroy_volume", how, destroy, nothing, cleared).await
}

pub(super) async fn drop_ensure(kit: &Kit<'_>) -> Check {
    let driver: &dyn Volume = &*kit.open().await?;
    let mut spec = kit.volume(0).await;
    for source in [None, kit.bench.source().await] {
        spec.source = source;
        let spec = &spec;
        let call = |cx| -> BoxFuture<'_, _> {
            Box::pin(async move { driver.ensure_volume(&cx, spec).await })
        };
        let remade = || -> BoxFuture<'_, Check> {
            Box::pin(async {
                kit.converges(spec).await?;
                kit.clears(spec).await
            })
        };
        kit.run.dropped("ensure_volume", nothing, call, remade).await?;
        let cleared = || -> BoxFuture<'_, Check> { Box::pin(kit.clears(spec)) };
        kit.run.dropped("ensure_volume", nothing, call, cleared).await?;
    }
    Ok(())
}

pub(super) async fn drop_grow(kit: &Kit<'_>) -> Check {
    let driver: &dyn Volume = &*kit.open().await?;
    let spec = &kit.volume(0).await;
    let larger = &grown(spec)?;
    let before = || -> BoxFuture<'_, Check> { Box::pin(kit.converges(spec)) };
    let call = |cx| -> BoxFuture<'_, _> {
        Box::pin(async move { driver.ensure_volume(&cx, larger).await })
    };
    let after = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            kit.converges(larger).await?;
            kit.clears(spec).await
        })
    };
    kit.run.dropped("ensure_volume (growth)", before, call, after).await
}

pub(super) async fn drop_destroy(kit: &Kit<'_>) -> Check {
    let driver: &dyn Volume = &*kit.open().await?;
    let spec = &kit.volume(0).await;
    let made = || -> BoxFuture<'_, Check> { Box::pin(kit.converges(spec)) };
    let call = |cx| -> BoxFuture<'_, _> {
        Box::pin(async move { driver.destroy_volume(&cx, spec.uuid).await })
    };
    let cleared = || -> BoxFuture<'_, Check> { Box::pin(kit.clears(spec)) };
    kit.run.dropped("destroy_volume", made, call, cleared).await?;
    // What a removal left half-made, a make takes up again.
    kit.run.dropped("destroy_volume", made, call, made).await
}

pub(super) async fn drop_attach(kit: &Kit<'_>) -> Check {
    let driver: &dyn Volume = &*kit.open().await?;
    let spec = &kit.made(driver, 0).await?;
    let request = &kit.request(driver, spec, 0)?;
    let detach_request =
        &drivers_api::DetachRequest::new(request.volume_uuid, request.host_uuid, request.vm_uuid);
    let attach = |cx| -> BoxFuture<'_, _> {
        Box::pin(async move { driver.attach_volume(&cx, request).await })
    };
    let detach = |cx| -> BoxFuture<'_, _> {
        Box::pin(async move { driver.detach_volume(&cx, detach_request).await })
    };
    let attached = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            let fresh = kit.open().await?;
            let _ = kit.attach(&*fresh, request).await?;
            kit.open_in(&*fresh, spec, &[(0, false)]).await
        })
    };
    let detached = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            let fresh = kit.open().await?;
            let _ = kit.detach(&*fresh, request).await?;
            kit.open_in(&*fresh, spec, &[]).await
        })
    };
    kit.run.dropped("attach_volume", detached, attach, attached).await?;
    kit.run.dropped("detach_volume", attached, detach, detached).await
}
