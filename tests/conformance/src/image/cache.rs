//! The cache's contents.

use drivers_api::{Change, ErrorKind, Image, ImageRef};
use futures_util::future::join_all;

use super::Kit;
use crate::kit::{Check, expect, not_applicable, not_tried, same};

pub(super) async fn pull(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let reference = kit.image(0).await;
    kit.gone(&*driver, &reference).await?;
    let answer = kit.pull(&*driver, &reference).await?;
    same("pull", &answer.change, &Change::Created)?;
    let status = kit.there(&*driver, &reference).await?;
    same("what pull answers", &answer.value, &status)?;
    expect(status.size_bytes > 0, "the image takes no space")
}

pub(super) async fn pull_again(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let reference = kit.image(0).await;
    let first = kit.pull(&*driver, &reference).await?;
    let before = kit.bench.census().await;
    let downloads = kit.bench.downloads(kit.run.number(0)).await;
    for time in ["second", "third"] {
        let again = kit.pull(&*driver, &reference).await?;
        same(format_args!("the {time} pull"), &again.change, &Change::Unchanged)?;
        same("its answer", &again.value, &first.value)?;
    }
    let again = kit.bench.downloads(kit.run.number(0)).await;
    same("how often the content was sent", &again, &downloads)?;
    kit.unwritten(&before).await
}

pub(super) async fn pull_at_once(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let reference = kit.image(0).await;
    let before = kit.bench.downloads(kit.run.number(0)).await;
    let calls = (0..kit.run.options.parallel).map(|_| kit.pull(&*driver, &reference));
    let answers = join_all(calls).await.into_iter().collect::<Check<Vec<_>>>()?;
    expect(answers.iter().any(|answer| answer.change.wrote()), "no call says that it pulled")?;
    let status = kit.there(&*driver, &reference).await?;
    for answer in &answers {
        same("the answers of pulls at once", &answer.value, &status)?;
    }
    let after = kit.bench.downloads(kit.run.number(0)).await;
    match (before, after) {
        (Some(before), Some(after)) => {
            same("how often the content was sent", &(after - before), &1)
        }
        _ => Ok(()),
    }
}

pub(super) async fn pull_absent(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let reference = kit.bench.absent().await;
    let before = kit.bench.census().await;
    let cx = kit.run.cx();
    let call = driver.pull(&cx, &reference);
    kit.run.fails("pull of what the source does not have", &[ErrorKind::NotFound], call).await?;
    kit.gone(&*driver, &reference).await?;
    kit.unwritten(&before).await
}

pub(super) async fn local_path(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let reference = kit.image(0).await;
    let cx = kit.run.cx();
    let call = driver.local_path(&cx, &reference);
    kit.run.fails("local_path of what is not cached", &[ErrorKind::NotFound], call).await?;
    let _ = kit.pull(&*driver, &reference).await?;
    let path = kit.run.ok("local_path", driver.local_path(&cx, &reference)).await?;
    let _ = kit.delete(&*driver, &reference).await?;
    let call = driver.local_path(&cx, &reference);
    let kinds = &[ErrorKind::NotFound];
    kit.run.fails("local_path of what was deleted", kinds, call).await?;
    let left = tokio::fs::metadata(path.as_path()).await.is_ok();
    expect(!left, format_args!("the deleted image's file {path} is there"))
}

pub(super) async fn in_cache(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let reference = kit.image(0).await;
    let absent = kit.bench.absent().await;
    same("in_cache of an unknown reference", &kit.cached(&*driver, &absent).await?, &false)?;
    same("in_cache before a pull", &kit.cached(&*driver, &reference).await?, &false)?;
    let _ = kit.pull(&*driver, &reference).await?;
    same("in_cache after a pull", &kit.cached(&*driver, &reference).await?, &true)?;
    let _ = kit.delete(&*driver, &reference).await?;
    same("in_cache after a deletion", &kit.cached(&*driver, &reference).await?, &false)
}

pub(super) async fn delete(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let before = kit.bench.census().await;
    let reference = kit.image(0).await;
    let _ = kit.pull(&*driver, &reference).await?;
    same("delete", &kit.delete(&*driver, &reference).await?, &Change::Changed)?;
    kit.gone(&*driver, &reference).await?;
    kit.unwritten(&before).await
}

pub(super) async fn delete_absent(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let before = kit.bench.census().await;
    for reference in [kit.image(0).await, kit.bench.absent().await] {
        for _ in 0..2 {
            let gone = kit.delete(&*driver, &reference).await?;
            same("delete of what is not cached", &gone, &Change::Unchanged)?;
        }
    }
    kit.unwritten(&before).await
}

pub(super) async fn alias(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let reference = kit.image(0).await;
    let number = kit.run.number(0);
    let Some(alias) = kit.bench.alias(number).await else {
        return not_tried("the bench has no second reference to one content");
    };
    let before = kit.bench.census().await;
    let downloads = kit.bench.downloads(number).await;
    let first = kit.pull(&*driver, &reference).await?.value;
    let second = kit.pull(&*driver, &alias).await?.value;
    same("the digests of one content", &second.digest, &first.digest)?;
    same("the files of one content", &second.files, &first.files)?;
    if let (Some(before), Some(after)) = (downloads, kit.bench.downloads(number).await) {
        same("how often the content was sent", &(after - before), &1)?;
    }
    same("delete of one reference", &kit.delete(&*driver, &reference).await?, &Change::Changed)?;
    kit.gone(&*driver, &reference).await?;
    let left = kit.there(&*driver, &alias).await?;
    same("the files after one reference is gone", &left.files, &first.files)?;
    let _ = kit.delete(&*driver, &alias).await?;
    kit.unwritten(&before).await
}

pub(super) async fn pull_after_delete(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let reference = kit.image(0).await;
    for _ in 0..3 {
        let answer = kit.pull(&*driver, &reference).await?;
        same("pull", &answer.change, &Change::Created)?;
        let _ = kit.there(&*driver, &reference).await?;
        let _ = kit.delete(&*driver, &reference).await?;
    }
    Ok(())
}

pub(super) async fn side_by_side(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let references = join_all((0..4).map(|n| kit.image(n))).await;
    let calls = references.iter().map(|reference| kit.pull(&*driver, reference));
    join_all(calls).await.into_iter().collect::<Check<Vec<_>>>()?;
    let Some((first, rest)) = references.split_first() else { return Ok(()) };
    let _ = kit.delete(&*driver, first).await?;
    kit.gone(&*driver, first).await?;
    for reference in rest {
        let _ = kit.there(&*driver, reference).await?;
    }
    Ok(())
}

pub(super) async fn fresh_start(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let reference = kit.image(0).await;
    let first = kit.pull(&*driver, &reference).await?.value;
    drop(driver);
    let driver = kit.open().await?;
    same("the image after a fresh start", &kit.there(&*driver, &reference).await?, &first)?;
    let again = kit.pull(&*driver, &reference).await?;
    same("pull after a fresh start", &again.change, &Change::Unchanged)
}

pub(super) async fn half_made_is_completed(kit: &Kit<'_>) -> Check {
    let states = kit.bench.half_made();
    if states.is_empty() {
        return not_tried("the bench plants no half-made images");
    }
    for state in states {
        let reference = kit.image(0).await;
        kit.bench.plant_half_made(&reference, state).await.check()?;
        let driver = kit.open().await?;
        kit.gone(&*driver, &reference).await?;
        let answer = kit.pull(&*driver, &reference).await?;
        expect(answer.change.wrote(), format_args!("{state}: pull says that it did nothing"))?;
        let _ = kit.there(&*driver, &reference).await?;
        let again = kit.pull(&*driver, &reference).await?;
        same(state, &again.change, &Change::Unchanged)?;
        let _ = kit.delete(&*driver, &reference).await?;
    }
    Ok(())
}

pub(super) async fn half_made_is_deleted(kit: &Kit<'_>) -> Check {
    let states = kit.bench.half_made();
    if states.is_empty() {
        return not_tried("the bench plants no half-made images");
    }
    let before = kit.bench.census().await;
    for state in states {
        let reference = kit.image(0).await;
        kit.bench.plant_half_made(&reference, state).await.check()?;
        let driver = kit.open().await?;
        // What no pull can take up any more may be cleared by a pull and a deletion, or by the deletion alone.
        let _ = kit.delete(&*driver, &reference).await?;
        let _ = kit.pull(&*driver, &reference).await?;
        let _ = kit.delete(&*driver, &reference).await?;
        kit.gone(&*driver, &reference).await?;
        let diff = before.diff(&kit.bench.census().await);
        expect(diff.is_empty(), format_args!("{state} left behind: {}", diff.join(", ")))?;
    }
    Ok(())
}

pub(super) async fn source_down(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let (cached, other) = (kit.image(0).await, kit.image(1).await);
    let status = kit.pull(&*driver, &cached).await?.value;
    kit.bench.break_source().await.check()?;
    let seen = without_source(kit, &*driver, &cached, &other).await;
    kit.bench.mend().await;
    seen?;
    same("the cached image", &kit.there(&*driver, &cached).await?, &status)?;
    let answer = kit.pull(&*driver, &other).await?;
    same("pull after the repair", &answer.change, &Change::Created)
}

async fn without_source(
    kit: &Kit<'_>,
    driver: &dyn Image,
    cached: &ImageRef,
    other: &ImageRef,
) -> Check {
    let _ = kit.there(driver, cached).await?;
    let cx = kit.run.cx();
    let call = driver.pull(&cx, other);
    kit.run.fails("pull without the source", &[ErrorKind::Unavailable], call).await?;
    kit.gone(driver, other).await?;
    let gone = kit.delete(driver, other).await?;
    same("delete of what is not cached, without the source", &gone, &Change::Unchanged)
}

pub(super) async fn backend_down(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let reference = kit.image(0).await;
    kit.bench.break_backend().await.check()?;
    let seen = unavailable(kit, &*driver, &reference).await;
    kit.bench.mend().await;
    seen?;
    let gone = kit.delete(&*driver, &reference).await?;
    same("delete after the repair", &gone, &Change::Unchanged)
}

async fn unavailable(kit: &Kit<'_>, driver: &dyn Image, reference: &ImageRef) -> Check {
    let kinds = &[ErrorKind::Unavailable];
    let cx = kit.run.cx();
    kit.run.fails("list with the back-end down", kinds, driver.list(&cx)).await?;
    kit.run
        .fails("in_cache with the back-end down", kinds, driver.in_cache(&cx, reference))
        .await?;
    kit.run.fails("delete with the back-end down", kinds, driver.delete(&cx, reference)).await?;
    Ok(())
}

pub(super) async fn collect(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let Some(collect) = driver.collect() else {
        return not_applicable("the driver collects nothing");
    };
    let (kept, unused) = (kit.image(0).await, kit.image(1).await);
    for reference in [&kept, &unused] {
        let _ = kit.pull(&*driver, reference).await?;
    }
    let keep = std::slice::from_ref(&kept);
    let cx = kit.run.cx();
    let report = kit.run.ok("collect", collect.collect(&cx, u64::MAX, keep)).await?;
    expect(report.removed.is_empty(), "a collection below the limit removed something")?;
    let report = kit.run.ok("collect", collect.collect(&cx, 0, keep)).await?;
    expect(report.removed.contains(&unused), "a collection did not remove what nobody keeps")?;
    expect(report.freed_bytes > 0, "a collection freed nothing")?;
    kit.gone(&*driver, &unused).await?;
    kit.there(&*driver, &kept).await.map(drop)
}
