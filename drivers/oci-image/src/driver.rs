//! The driver's face.

use std::{fs::File, sync::Arc, time::Duration};

use async_trait::async_trait;
use drivers_api::{
    Change, CollectReport, Context, Digest, Error, HostInfo, HostPath, Image, ImageCollect,
    ImageRef, ImageSource, ImageStatus, Outcome, Result,
};
use host::{bound::bounded, files::FileError};

use crate::{
    cache::{Cache, Entry, Held, RefRecord},
    collect,
    config::OciImageConfig,
    error::{ImageError, to_error},
    fetch::blob::digest_of_file,
    pull::{Puller, StopGuard, blocking},
    unpack::StopFlag,
};

/// How long a download that was given up may take to let go of its file.
const LET_GO: Duration = Duration::from_secs(1);

/// The image driver.
#[derive(Debug)]
pub struct OciImage {
    config: Arc<OciImageConfig>,
    cache: Arc<Cache>,
    puller: Arc<Puller>,
}

impl OciImage {
    /// Opens the cache of the configuration; it is made where it is not there. Blocks for a few file operations.
    ///
    /// # Errors
    /// `InvalidSpec` for a configuration that cannot work; `Conflict` when the directory is another node's, a newer
    /// version's or no cache; `Unavailable` while another process has it open.
    pub fn open(config: OciImageConfig) -> Result<Self> {
        config.check()?;
        let config = Arc::new(config);
        let cache = Cache::open(&config.dir, config.node)?;
        let puller = Arc::new(Puller::new(Arc::clone(&config), Arc::clone(&cache)));
        Ok(Self { config, cache, puller })
    }

    /// Reads every byte of a cached image and compares it with the digests of its publication. A damaged image is taken
    /// out of the cache, so that the next pull has it anew.
    ///
    /// Sizes and times of change are looked at on every call anyway; this finds what leaves both as they are.
    ///
    /// # Errors
    /// `NotFound` when it is not in the cache; `Unavailable` when it cannot be read, or is pulled at this moment.
    pub async fn verify(&self, cx: &Context, reference: &ImageRef) -> Result<bool> {
        let (cache, wanted) = (Arc::clone(&self.cache), reference.clone());
        // Reading ends when the caller's time does.
        let guard = StopGuard::default();
        let stop = guard.flag();
        self.work(cx, "verify", reference, move || {
            let Some((_, entry)) = cache.cached(&wanted)? else { return Err(absent(&wanted)) };
            if is_intact(&entry, &stop)? {
                return Ok(true);
            }
            tracing::error!(image = %wanted, "an image in the cache is damaged and is removed");
            let held = cache.catalogue();
            let trash = crate::cache::staging::take_away(&cache, &entry.dir)?;
            drop(held);
            if let Some(trash) = trash {
                trash.remove()?;
            }
            Ok(false)
        })
        .await
    }

    /// Opens the files of a cached image, so that they can be read and linked whatever happens to the cache. Counts as a
    /// use.
    ///
    /// # Errors
    /// `NotFound` when it is not in the cache.
    pub async fn hold(&self, cx: &Context, reference: &ImageRef) -> Result<Held> {
        let (cache, wanted) = (Arc::clone(&self.cache), reference.clone());
        self.work(cx, "hold", reference, move || {
            let _held = cache.catalogue();
            let Some((record, entry)) = cache.cached(&wanted)? else { return Err(absent(&wanted)) };
            let files = entry
                .paths()
                .map(|(_, path)| Ok(File::open(&path).map_err(FileError::of("open", &path))?))
                .collect::<crate::error::Result<_>>()?;
            cache.touch(&wanted);
            Ok(Held { files, status: entry.status(&wanted, &record.digest) })
        })
        .await
    }

    /// Runs blocking work within the caller's time.
    async fn work<T: Send + 'static>(
        &self,
        cx: &Context,
        operation: &'static str,
        object: impl std::fmt::Display,
        work: impl FnOnce() -> crate::error::Result<T> + Send + 'static,
    ) -> Result<T> {
        let object = object.to_string();
        let answer = async {
            blocking(work).await.map_err(|error| to_error(&Arc::new(error), operation, &object))
        };
        bounded(cx, operation, &object, answer).await
    }

    /// Removes what an interrupted pull of a deleted reference was downloading.
    async fn clear_downloads(&self, left: Vec<Digest>, reference: &ImageRef) -> Result<()> {
        for digest in left {
            // A download that was just given up lets go in a moment; one that goes on is another image's, and stays.
            let lock = self.cache.blob_lock(&digest).lock_owned();
            let Ok(held) = tokio::time::timeout(LET_GO, lock).await else { continue };
            let cache = Arc::clone(&self.cache);
            blocking(move || {
                let removed = collect::remove_partial(&cache, &digest);
                drop(held);
                removed
            })
            .await
            .map_err(|error| to_error(&Arc::new(error), "delete", reference))?;
        }
        Ok(())
    }

    async fn find(
        &self,
        cx: &Context,
        operation: &'static str,
        reference: &ImageRef,
        used: bool,
    ) -> Result<Option<(RefRecord, Entry)>> {
        let (cache, wanted) = (Arc::clone(&self.cache), reference.clone());
        self.work(cx, operation, reference, move || {
            let found = cache.cached(&wanted)?;
            if used && found.is_some() {
                cache.touch(&wanted);
            }
            Ok(found)
        })
        .await
    }
}

fn absent(reference: &ImageRef) -> ImageError {
    ImageError::not_found(reference.to_string(), "it is not in the cache; pull it first")
}

fn is_intact(entry: &Entry, stop: &StopFlag) -> crate::error::Result<bool> {
    for (record, path) in entry.paths() {
        let mut file = File::open(&path).map_err(FileError::of("open", &path))?;
        if digest_of_file(&mut file, &path, stop)? != record.digest.as_str() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The digest that a reference itself gives.
fn pinned(reference: &ImageRef) -> Option<Digest> {
    let digest = match reference.source().ok()? {
        ImageSource::Oci { digest, .. } => digest?,
        ImageSource::Http { digest, .. } | ImageSource::File { digest, .. } => digest,
        _ => return None,
    };
    digest.parse().ok()
}

#[async_trait]
impl Image for OciImage {
    fn collect(&self) -> Option<&dyn ImageCollect> {
        Some(self)
    }

    async fn host_info(&self, cx: &Context) -> Result<HostInfo> {
        host::bound::check(cx, "describe", "host")?;
        let hostname = self.config.hostname.clone();
        let mut info = HostInfo::new(Some(self.config.node), hostname, "oci-image");
        info.architecture = self.config.platform;
        Ok(info)
    }

    async fn pull(&self, cx: &Context, reference: &ImageRef) -> Result<Outcome<ImageStatus>> {
        if pinned(reference).is_some()
            && let Some((record, entry)) = self.find(cx, "pull", reference, true).await?
        {
            let status = entry.status(reference, &record.digest);
            return Ok(Outcome::new(Change::Unchanged, status));
        }
        bounded(cx, "pull", reference, async {
            let (puller, wanted) = (Arc::clone(&self.puller), reference.clone());
            let secrets = cx.secrets().cloned();
            let seat = self
                .cache
                .pulls
                .board(reference.as_str(), |reporter| puller.pull(wanted, secrets, reporter));
            let answer = seat.wait(|progress| cx.report(progress)).await;
            let (change, entry, digest) =
                answer.map_err(|error| to_error(&error, "pull", reference))?;
            Ok(Outcome::new(change, entry.status(reference, &digest)))
        })
        .await
    }

    async fn local_path(&self, cx: &Context, reference: &ImageRef) -> Result<HostPath> {
        let found = self.find(cx, "find", reference, true).await?;
        let (record, entry) = found.ok_or_else(|| {
            Error::not_found("find", reference).with_remedy("pull the image first")
        })?;
        Ok(entry.status(reference, &record.digest).files.main_path().clone())
    }

    async fn delete(&self, cx: &Context, reference: &ImageRef) -> Result<Change> {
        let (cache, wanted) = (Arc::clone(&self.cache), reference.clone());
        let (change, left) = self
            .work(cx, "delete", reference, move || {
                let left = cache.read_journal(&wanted)?;
                Ok((cache.unbind(&wanted)?, left))
            })
            .await?;
        bounded(cx, "delete", reference, self.clear_downloads(left, reference)).await?;
        Ok(change)
    }

    async fn in_cache(&self, cx: &Context, reference: &ImageRef) -> Result<bool> {
        Ok(self.find(cx, "look for", reference, false).await?.is_some())
    }

    async fn list(&self, cx: &Context) -> Result<Vec<ImageStatus>> {
        let cache = Arc::clone(&self.cache);
        self.work(cx, "list", "images", move || {
            let status = |cached: &crate::cache::Cached| {
                cached.entry.status(&cached.reference.reference, &cached.reference.digest)
            };
            Ok(cache.all()?.iter().map(status).collect())
        })
        .await
    }

    async fn get(&self, cx: &Context, reference: &ImageRef) -> Result<Option<ImageStatus>> {
        let found = self.find(cx, "get", reference, false).await?;
        Ok(found.map(|(record, entry)| entry.status(reference, &record.digest)))
    }
}

#[async_trait]
impl ImageCollect for OciImage {
    async fn collect(
        &self,
        cx: &Context,
        limit_bytes: u64,
        keep: &[ImageRef],
    ) -> Result<CollectReport> {
        let (cache, keep) = (Arc::clone(&self.cache), keep.to_vec());
        self.work(cx, "collect", "images", move || collect::collect(&cache, limit_bytes, &keep))
            .await
    }
}
