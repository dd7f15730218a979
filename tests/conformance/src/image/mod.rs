//! The cases of the image trait.

mod cache;
mod interrupted;

use std::sync::Arc;

use async_trait::async_trait;
use drivers_api::{Change, HostInfo, Image, ImageRef, ImageStatus, Outcome};

use crate::{
    Census, DriverKind, ImageBench, Options, Report,
    kit::{Case, Check, Run, Subject, cases, expect, failed, same},
    runner::run_cases,
};

/// Checks an image driver.
pub async fn check_image(bench: &dyn ImageBench, options: &Options) -> Report {
    let kit = Kit { bench, run: Run::new(options) };
    run_cases(&kit, DriverKind::Image, &all()).await
}

pub(super) struct Kit<'a> {
    bench: &'a dyn ImageBench,
    run: Run<'a>,
}

#[rustfmt::skip]
fn all<'k>() -> Vec<Case<Kit<'k>>> { cases! { Kit<'k>:
    "pull": "Pull fetches the OCI ref into the local cache." => cache::pull;
    "pull-again": "Pull: already-present is a no-op." => cache::pull_again;
    "pull-at-once": "In-progress concurrent pulls of the same ref deduplicate." => cache::pull_at_once;
    "pull-absent": "A pull of what the source does not have is not-found, and leaves nothing." => cache::pull_absent;
    "local-path": "LocalPath returns the absolute path of the cached artifact; an error when the ref is not in cache." => cache::local_path;
    "in-cache": "InCache is the cheap existence check: false, not an error, for what is not there." => cache::in_cache;
    "delete": "Delete removes an entry from the cache." => cache::delete;
    "delete-absent": "Delete: no-op if missing." => cache::delete_absent;
    "alias": "Several references may name one content, which is stored once, and goes with the last of them." => cache::alias;
    "pull-after-delete": "An image can be pulled again at once after its deletion." => cache::pull_after_delete;
    "side-by-side": "Calls for different objects run side by side." => cache::side_by_side;
    "fresh-start": "With an empty memory, list finds all that is there." => cache::fresh_start;
    "half-made": "An entry is published whole or not at all: a half-made one is not in the cache, and a pull finishes it." => cache::half_made_is_completed;
    "half-made-delete": "Delete clears what is half-made." => cache::half_made_is_deleted;
    "source-down": "What is cached is found without the source; a pull of the rest is unavailable." => cache::source_down;
    "back-end-down": "Already gone is success only when the absence was seen; else the answer is unavailable." => cache::backend_down;
    "collect": "A collection removes what is not kept, and nothing that is." => cache::collect;
    "deadline": "A driver gives up at the deadline, and leaves the host so that a repeat converges." => interrupted::deadline;
    "cancelled": "A call ends soon after its cancellation, and leaves the host so that a repeat converges." => interrupted::cancelled;
    "cancelled-beside": "Each caller of one download keeps its own deadline: one that gives up does not fail the others." => interrupted::cancelled_beside;
    "drop-pull": "Every await of pull may be the last one." => interrupted::drop_pull;
    "drop-delete": "Every await of delete may be the last one." => interrupted::drop_delete;
} }

#[async_trait]
impl Subject for Kit<'_> {
    fn run(&self) -> &Run<'_> {
        &self.run
    }

    async fn info(&self) -> Check<HostInfo> {
        let driver = self.open().await?;
        let info = self.run.ok("host_info", driver.host_info(&self.run.cx())).await?;
        expect(info.uuid.is_some(), "the host has no uuid")?;
        expect(!info.driver.is_empty(), "the driver's id is empty")?;
        expect(!info.hostname.is_empty(), "the host's name is empty")?;
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
            let alias = self.bench.alias(n).await;
            for reference in [self.bench.image(n).await].into_iter().chain(alias) {
                let _ = self.delete(&*driver, &reference).await?;
            }
        }
        Ok(())
    }

    async fn census(&self) -> Census {
        self.bench.census().await
    }
}

impl Kit<'_> {
    async fn open(&self) -> Check<Arc<dyn Image>> {
        self.run.ok("opening the driver", self.bench.open()).await
    }

    /// The case's `n`th image, which is cleared after the case. Four at most: a bench has each of them ready.
    async fn image(&self, n: u32) -> ImageRef {
        self.bench.image(self.run.number(n % 4)).await
    }

    async fn pull(&self, driver: &dyn Image, reference: &ImageRef) -> Check<Outcome<ImageStatus>> {
        self.run.ok("pull", driver.pull(&self.run.cx(), reference)).await
    }

    async fn delete(&self, driver: &dyn Image, reference: &ImageRef) -> Check<Change> {
        self.run.ok("delete", driver.delete(&self.run.cx(), reference)).await
    }

    async fn cached(&self, driver: &dyn Image, reference: &ImageRef) -> Check<bool> {
        self.run.ok("in_cache", driver.in_cache(&self.run.cx(), reference)).await
    }

    /// Checks that an image is there, the same by all look-ups, and answers it.
    async fn there(&self, driver: &dyn Image, reference: &ImageRef) -> Check<ImageStatus> {
        expect(self.cached(driver, reference).await?, "in_cache: false for what was pulled")?;
        let cx = self.run.cx();
        let Some(status) = self.run.ok("get", driver.get(&cx, reference)).await? else {
            return failed("get: the pulled image is not there");
        };
        same("the image's reference", &status.reference, reference)?;
        let path = self.run.ok("local_path", driver.local_path(&cx, reference)).await?;
        same("local_path", &path, status.files.main_path())?;
        let all = self.run.ok("list", driver.list(&cx)).await?;
        let listed: Vec<_> = all.iter().filter(|image| image.reference == *reference).collect();
        same("what list has under the reference", &listed, &vec![&status])?;
        Ok(status)
    }

    /// Checks that an image is not there.
    async fn gone(&self, driver: &dyn Image, reference: &ImageRef) -> Check {
        expect(!self.cached(driver, reference).await?, "in_cache: true for what is not there")?;
        let cx = self.run.cx();
        let status = self.run.ok("get", driver.get(&cx, reference)).await?;
        same("get", &status, &None)?;
        let all = self.run.ok("list", driver.list(&cx)).await?;
        expect(!all.iter().any(|image| image.reference == *reference), "list has the image")
    }

    async fn unwritten(&self, before: &Census) -> Check {
        let diff = before.diff(&self.bench.census().await);
        expect(diff.is_empty(), format_args!("the host was changed: {}", diff.join(", ")))
    }
}
