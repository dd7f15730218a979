//! From a reference to an image in the cache.
//!
//! A pull resolves its reference ([`resolve`]), takes a seat in the download of that content ([`build`]), and lets the
//! reference name the content.

mod build;
mod resolve;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use drivers_api::{Change, Digest, ImageRef, SecretResolver};
use tokio::sync::Semaphore;

use crate::{
    cache::{Cache, Entry, RefRecord},
    config::OciImageConfig,
    error::{ImageError, Result},
    fetch::Fetcher,
    flight::Reporter,
    unpack::StopFlag,
};

/// How often content that vanished between its download and its naming is downloaded again.
const ROUNDS: u32 = 3;

/// What pulls.
#[derive(Debug)]
pub(crate) struct Puller {
    pub(crate) config: Arc<OciImageConfig>,
    pub(crate) cache: Arc<Cache>,
    pub(crate) fetcher: Fetcher,
    pub(crate) slots: Semaphore,
}

impl Puller {
    pub(crate) fn new(config: Arc<OciImageConfig>, cache: Arc<Cache>) -> Self {
        let slots = Semaphore::new(config.concurrency);
        Self { fetcher: Fetcher::new(Arc::clone(&config)), config, cache, slots }
    }

    /// Pulls a reference.
    pub(crate) async fn pull(
        self: Arc<Self>,
        reference: ImageRef,
        secrets: Option<Arc<dyn SecretResolver>>,
        reporter: Reporter,
    ) -> Result<(Change, Arc<Entry>, Digest)> {
        let answer = Arc::clone(&self).pulled(&reference, secrets, reporter).await;
        if answer.is_err() {
            let cache = Arc::clone(&self.cache);
            blocking(move || cache.close_journal(&reference)).await?;
        }
        answer
    }

    async fn pulled(
        self: Arc<Self>,
        reference: &ImageRef,
        secrets: Option<Arc<dyn SecretResolver>>,
        reporter: Reporter,
    ) -> Result<(Change, Arc<Entry>, Digest)> {
        let (cache, wanted) = (Arc::clone(&self.cache), reference.clone());
        let before = blocking(move || cache.cached(&wanted)).await?.map(|(record, _)| record);
        for _ in 0..ROUNDS {
            let resolved = self.resolve(reference, secrets.clone()).await?;
            let _pin = self.cache.pin(&resolved.key);
            self.note(reference, resolved.job.blobs()).await?;
            let (this, key) = (Arc::clone(&self), resolved.key.clone());
            let seat = self
                .cache
                .contents
                .board(&resolved.key, |reporter| this.build(key, resolved.job, reporter));
            let built = seat.wait(|progress| reporter.report(progress.clone())).await;
            let entry = match built {
                Ok(entry) => entry,
                Err(error) if matches!(*error, ImageError::Vanished) => continue,
                Err(error) => return Err(shared(error)),
            };
            let record = RefRecord {
                reference: reference.clone(),
                digest: resolved.digest,
                content: entry.key.clone(),
            };
            let change = match &before {
                None => Change::Created,
                Some(before) => Change::changed_if(*before != record),
            };
            let (cache, digest) = (Arc::clone(&self.cache), record.digest.clone());
            if let Some(entry) = blocking(move || cache.bind(&record)).await? {
                return Ok((change, Arc::new(entry), digest));
            }
        }
        Err(ImageError::Vanished)
    }
}

impl Puller {
    /// Writes down what is about to be downloaded.
    async fn note(&self, reference: &ImageRef, blobs: Vec<Digest>) -> Result<()> {
        if blobs.is_empty() {
            return Ok(());
        }
        let (cache, reference) = (Arc::clone(&self.cache), reference.clone());
        blocking(move || cache.write_journal(&reference, &blobs)).await
    }
}

/// The error of a shared download, for one who waited for it.
fn shared(error: Arc<ImageError>) -> ImageError {
    Arc::try_unwrap(error).unwrap_or_else(|error| {
        let contract = crate::error::to_error(&error, "pull", "");
        ImageError::Inner(contract)
    })
}

/// Runs blocking work off the executor. It goes on when the caller stops waiting.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|_| Err(ImageError::Internal("a worker thread panicked".to_owned())))
}

/// Raises a stop flag when dropped: blocking work of a future that was given up ends at its next piece.
#[derive(Debug, Default)]
pub(crate) struct StopGuard(StopFlag);

impl StopGuard {
    pub(crate) fn flag(&self) -> StopFlag {
        Arc::clone(&self.0)
    }
}

impl Drop for StopGuard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Whether work was given up.
pub(crate) fn stopped(flag: &AtomicBool) -> bool {
    flag.load(Ordering::Relaxed)
}

/// The bytes that an unprivileged writer still has on the file system.
fn free_bytes(dir: &Path) -> Result<u64> {
    let found = rustix::fs::statvfs(dir)
        .map_err(|error| host::files::FileError::of("look at", dir)(error.into()))?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}
