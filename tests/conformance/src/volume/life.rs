//! A volume's life: made, grown, removed; and each again.

use std::sync::Arc;

use drivers_api::{
    Change, DetachRequest, DiskFormat, ErrorKind, SizeGib, Volume, VolumeSource, VolumeSpec,
};
use futures_util::future::join_all;

use super::{Kit, vm};
use crate::{
    kit::{Check, expect, failed, not_applicable, not_tried, same},
    odd::ODD_NAMES,
};

pub(super) async fn ensure(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.volume(0).await;
    expect(kit.get(&*driver, &spec).await?.is_none(), "get: the volume is there before")?;
    same("ensure_volume", &kit.ensure(&*driver, &spec).await?, &Change::Created)?;
    kit.whole(&*driver, &spec).await?;
    let all = kit.run.ok("list", driver.list(&kit.run.cx())).await?;
    let listed = all.iter().filter(|volume| volume.uuid == spec.uuid).count();
    same("how often list has the volume", &listed, &1)?;
    same("destroy_volume", &kit.destroy(&*driver, &spec).await?, &Change::Changed)?;
    kit.gone(&*driver, &spec).await
}

pub(super) async fn ensure_again(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.volume(0).await;
    let _ = kit.ensure(&*driver, &spec).await?;
    let before = kit.bench.census().await;
    for time in ["second", "third"] {
        let again = kit.ensure(&*driver, &spec).await?;
        same(format_args!("the {time} ensure_volume"), &again, &Change::Unchanged)?;
    }
    kit.unwritten(&before).await
}

pub(super) async fn ensure_at_once(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.volume(0).await;
    let calls = (0..kit.run.options.parallel).map(|_| kit.ensure(&*driver, &spec));
    let changes = join_all(calls).await.into_iter().collect::<Check<Vec<_>>>()?;
    expect(changes.iter().any(|change| change.wrote()), "no call says that it made the volume")?;
    kit.whole(&*driver, &spec).await?;
    same("ensure_volume afterwards", &kit.ensure(&*driver, &spec).await?, &Change::Unchanged)
}

/// The same volume, one GiB larger.
pub(super) fn grown(spec: &VolumeSpec) -> Check<VolumeSpec> {
    let mut spec = spec.clone();
    spec.size_gib = match SizeGib::new(spec.size_gib.get() + 1) {
        Ok(size) => size,
        Err(error) => return failed(error),
    };
    Ok(spec)
}

pub(super) async fn grow(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.volume(0).await;
    let _ = kit.ensure(&*driver, &spec).await?;
    let larger = grown(&spec)?;
    same("ensure_volume, larger", &kit.ensure(&*driver, &larger).await?, &Change::Changed)?;
    kit.whole(&*driver, &larger).await?;
    same("ensure_volume again", &kit.ensure(&*driver, &larger).await?, &Change::Unchanged)
}

pub(super) async fn shrink(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.volume(0).await;
    let larger = grown(&spec)?;
    let _ = kit.ensure(&*driver, &larger).await?;
    let before = kit.bench.census().await;
    let cx = kit.run.cx();
    let call = driver.ensure_volume(&cx, &spec);
    kit.run.fails("ensure_volume, smaller", &[ErrorKind::InvalidSpec], call).await?;
    kit.whole(&*driver, &larger).await?;
    kit.unwritten(&before).await
}

pub(super) async fn no_space(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.volume(0).await;
    let (larger, second) = (grown(&spec)?, kit.volume(1).await);
    let _ = kit.ensure(&*driver, &spec).await?;
    kit.bench.fill_backend().await.check()?;
    let seen = {
        let cx = kit.run.cx();
        let exhausted = &[ErrorKind::Exhausted];
        let call = driver.ensure_volume(&cx, &larger);
        let grown = kit.run.fails("ensure_volume, larger, without room", exhausted, call).await;
        let call = driver.ensure_volume(&cx, &second);
        let made = kit.run.fails("ensure_volume without room", exhausted, call).await;
        grown.and(made)
    };
    kit.bench.mend().await;
    let _ = seen?;
    let again = kit.ensure(&*driver, &spec).await?;
    same("ensure_volume of the old size", &again, &Change::Unchanged)?;
    kit.whole(&*driver, &spec).await?;
    same("ensure_volume, larger", &kit.ensure(&*driver, &larger).await?, &Change::Changed)?;
    kit.whole(&*driver, &larger).await
}

pub(super) async fn other_format(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.volume(0).await;
    let _ = kit.ensure(&*driver, &spec).await?;
    let mut other = spec.clone();
    let is_raw = spec.format == DiskFormat::Raw;
    other.format = if is_raw { DiskFormat::Qcow2 } else { DiskFormat::Raw };
    let cx = kit.run.cx();
    let call = driver.ensure_volume(&cx, &other);
    let kinds = &[ErrorKind::InvalidSpec, ErrorKind::Unsupported];
    kit.run.fails("ensure_volume with another format", kinds, call).await?;
    kit.whole(&*driver, &spec).await
}

pub(super) async fn odd_names(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    for name in ODD_NAMES {
        let mut spec = kit.volume(0).await;
        spec.name = match name.parse() {
            Ok(name) => name,
            Err(error) => return failed(error),
        };
        match kit.run.call("ensure_volume", driver.ensure_volume(&kit.run.cx(), &spec)).await? {
            Ok(_) => kit.whole(&*driver, &spec).await?,
            Err(error) if error.kind() == ErrorKind::InvalidSpec => {}
            Err(error) => return failed(format_args!("ensure_volume named {name:?}: {error:?}")),
        }
        let _ = kit.destroy(&*driver, &spec).await?;
    }
    Ok(())
}

pub(super) async fn source(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let Some(source) = kit.bench.source().await else {
        return not_applicable("the driver makes no copies of images");
    };
    let mut spec = kit.volume(0).await;
    spec.source = Some(source);
    same("ensure_volume", &kit.ensure(&*driver, &spec).await?, &Change::Created)?;
    kit.whole(&*driver, &spec).await?;
    same("ensure_volume again", &kit.ensure(&*driver, &spec).await?, &Change::Unchanged)?;
    let mut without = spec.clone();
    without.source = None;
    let again = kit.ensure(&*driver, &without).await?;
    same("ensure_volume without the source", &again, &Change::Unchanged)?;
    let larger = grown(&spec)?;
    same("ensure_volume, larger", &kit.ensure(&*driver, &larger).await?, &Change::Changed)?;
    let size = kit.status(&*driver, &spec).await?.size_bytes;
    same("the size that a guest sees", &size, &larger.size_gib.bytes())
}

pub(super) async fn source_missing(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    if kit.bench.source().await.is_none() {
        return not_applicable("the driver makes no copies of images");
    }
    let mut spec = kit.volume(0).await;
    let format = spec.format;
    let path = "/nonexistent/conformance-image".parse();
    let (Ok(image), Ok(path)) = ("registry.invalid/no/such:image".parse(), path) else {
        return failed("the kit's own reference is invalid");
    };
    spec.source = Some(VolumeSource::new(image, Some(path), format));
    let before = kit.bench.census().await;
    let cx = kit.run.cx();
    let call = driver.ensure_volume(&cx, &spec);
    kit.run.fails("ensure_volume of a missing source", &[ErrorKind::NotFound], call).await?;
    // What it began may be there half-made; a removal clears it.
    let _ = kit.destroy(&*driver, &spec).await?;
    kit.unwritten(&before).await
}

pub(super) async fn lifecycle_of_absent(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.volume(0).await;
    let before = kit.bench.census().await;
    let request = DetachRequest::new(spec.uuid, kit.bench.node(), vm(0)?);
    for _ in 0..2 {
        let gone = kit.destroy(&*driver, &spec).await?;
        same("destroy_volume of an absent volume", &gone, &Change::Unchanged)?;
        let cx = kit.run.cx();
        let call = driver.detach_volume(&cx, &request);
        let gone = kit.run.ok("detach_volume of an absent volume", call).await?;
        same("detach_volume of an absent volume", &gone, &Change::Unchanged)?;
    }
    kit.unwritten(&before).await
}

pub(super) async fn lookup_of_absent(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.volume(0).await;
    expect(kit.get(&*driver, &spec).await?.is_none(), "get: an absent volume is there")?;
    let request = kit.request(&*driver, &spec, 0)?;
    let cx = kit.run.cx();
    let call = driver.attach_volume(&cx, &request);
    let kinds = &[ErrorKind::NotFound];
    kit.run.fails("attach_volume of an absent volume", kinds, call).await?;
    expect(kit.get(&*driver, &spec).await?.is_none(), "get: a refused call made the volume")
}

pub(super) async fn create_after_destroy(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    for _ in 0..3 {
        let spec = kit.volume(0).await;
        same("ensure_volume", &kit.ensure(&*driver, &spec).await?, &Change::Created)?;
        let _ = kit.destroy(&*driver, &spec).await?;
    }
    Ok(())
}

pub(super) async fn side_by_side(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let made = (0..kit.run.options.parallel).map(|n| {
        let driver = Arc::clone(&driver);
        async move {
            let spec = kit.volume(n % 10).await;
            let _ = kit.ensure(&*driver, &spec).await?;
            Ok(spec)
        }
    });
    let specs = join_all(made).await.into_iter().collect::<Check<Vec<_>>>()?;
    let Some((first, rest)) = specs.split_first() else { return Ok(()) };
    let _ = kit.destroy(&*driver, first).await?;
    kit.gone(&*driver, first).await?;
    for spec in rest {
        kit.whole(&*driver, spec).await?;
    }
    Ok(())
}

pub(super) async fn fresh_start(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.volume(0).await;
    let _ = kit.ensure(&*driver, &spec).await?;
    let before = kit.status(&*driver, &spec).await?;
    drop(driver);
    let driver = kit.open().await?;
    let all = kit.run.ok("list", driver.list(&kit.run.cx())).await?;
    let Some(listed) = all.into_iter().find(|volume| volume.uuid == spec.uuid) else {
        return failed("list of a new instance does not have the volume");
    };
    same("the volume after a fresh start", &listed, &before)?;
    same("its spec as applied", &listed.spec, &Some(spec.clone()))?;
    same("ensure_volume", &kit.ensure(&*driver, &spec).await?, &Change::Unchanged)
}

pub(super) async fn foreign(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    // Not among the numbers that are cleared: the driver must refuse to remove it.
    let spec = kit.bench.volume(990).await;
    kit.bench.plant_foreign(&spec).await.check()?;
    let before = kit.bench.fingerprint_foreign(&spec).await;
    let touched = touch_foreign(kit, &*driver, &spec).await;
    let after = kit.bench.fingerprint_foreign(&spec).await;
    kit.bench.remove_foreign(&spec).await;
    touched?;
    expect(!before.is_empty(), "the bench has no fingerprint of what it planted")?;
    same("the foreign object", &after, &before)
}

async fn touch_foreign(kit: &Kit<'_>, driver: &dyn Volume, spec: &VolumeSpec) -> Check {
    let conflict = &[ErrorKind::Conflict];
    let cx = kit.run.cx();
    let call = driver.ensure_volume(&cx, spec);
    let error = kit.run.fails("ensure_volume over a foreign volume", conflict, call).await?;
    let text = error.chain();
    expect(
        text.contains(&spec.uuid.to_string()),
        format_args!("the conflict does not name the volume's UUID: {text}"),
    )?;
    let call = driver.destroy_volume(&cx, spec.uuid);
    kit.run.fails("destroy_volume of a foreign volume", conflict, call).await?;
    let call = driver.get(&cx, spec.uuid);
    kit.run.fails("get of a foreign volume", conflict, call).await?;
    let request = kit.request(driver, spec, 0)?;
    let call = driver.attach_volume(&cx, &request);
    let kinds = &[ErrorKind::Conflict, ErrorKind::NotFound];
    kit.run.fails("attach_volume of a foreign volume", kinds, call).await?;
    let all = kit.run.ok("list", driver.list(&cx)).await?;
    expect(!all.iter().any(|volume| volume.uuid == spec.uuid), "list has the foreign volume")
}

pub(super) async fn half_made_is_completed(kit: &Kit<'_>) -> Check {
    let states = kit.bench.half_made();
    if states.is_empty() {
        return not_tried("the bench plants no half-made volumes");
    }
    for (state, n) in states.into_iter().zip(0..) {
        let spec = kit.volume(n).await;
        kit.bench.plant_half_made(&spec, state).await.check()?;
        let driver = kit.open().await?;
        let change = kit.ensure(&*driver, &spec).await?;
        expect(change.wrote(), format_args!("{state}: ensure_volume changed nothing"))?;
        kit.whole(&*driver, &spec).await?;
        same(state, &kit.ensure(&*driver, &spec).await?, &Change::Unchanged)?;
    }
    Ok(())
}

pub(super) async fn half_made_is_destroyed(kit: &Kit<'_>) -> Check {
    let states = kit.bench.half_made();
    if states.is_empty() {
        return not_tried("the bench plants no half-made volumes");
    }
    let before = kit.bench.census().await;
    for (state, n) in states.into_iter().zip(0..) {
        let spec = kit.volume(n).await;
        kit.bench.plant_half_made(&spec, state).await.check()?;
        let driver = kit.open().await?;
        let change = kit.destroy(&*driver, &spec).await?;
        expect(change.wrote(), format_args!("{state}: destroy_volume changed nothing"))?;
        kit.gone(&*driver, &spec).await?;
        let diff = before.diff(&kit.bench.census().await);
        expect(diff.is_empty(), format_args!("{state} left behind: {}", diff.join(", ")))?;
    }
    Ok(())
}

pub(super) async fn backend_down(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.volume(0).await;
    kit.bench.break_backend().await.check()?;
    let seen = unavailable(kit, &*driver, &spec).await;
    kit.bench.mend().await;
    seen?;
    let gone = kit.destroy(&*driver, &spec).await?;
    same("destroy_volume after the repair", &gone, &Change::Unchanged)
}

async fn unavailable(kit: &Kit<'_>, driver: &dyn Volume, spec: &VolumeSpec) -> Check {
    let kinds = &[ErrorKind::Unavailable];
    let cx = kit.run.cx();
    kit.run.fails("list with the back-end down", kinds, driver.list(&cx)).await?;
    kit.run.fails("get with the back-end down", kinds, driver.get(&cx, spec.uuid)).await?;
    let call = driver.destroy_volume(&cx, spec.uuid);
    kit.run.fails("destroy_volume with the back-end down", kinds, call).await?;
    Ok(())
}
