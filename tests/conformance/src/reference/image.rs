//! The image driver over the reference host, and the registry that it pulls from.

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use drivers_api::{
    ArtifactKind, Change, CollectReport, Context, Digest, DiskFormat, Error, ErrorKind, HostInfo,
    HostPath, Image, ImageCollect, ImageFiles, ImageRef, ImageSource, ImageStatus, Outcome, Result,
    Uuid,
};

use super::{
    Op,
    host::{Call, Host, refuse},
};
use crate::Census;

/// How large every published image is, in bytes.
const IMAGE_BYTES: u64 = 1 << 20;

#[derive(Default)]
pub(super) struct Cache {
    /// In the order in which they were last asked for, the oldest first.
    entries: Vec<ImageStatus>,
    /// Downloads that were not finished.
    partial: BTreeSet<Digest>,
    registry: BTreeMap<ImageRef, (Digest, ArtifactKind)>,
    downloads: BTreeMap<Digest, u64>,
    source_down: bool,
}

impl Cache {
    fn find(&self, reference: &ImageRef) -> Option<&ImageStatus> {
        self.entries.iter().find(|entry| entry.reference == *reference)
    }

    /// Whether an image is there under a reference or a path.
    pub(super) fn has(&self, reference: &ImageRef, path: Option<&HostPath>) -> bool {
        match path {
            Some(path) => self.entries.iter().any(|entry| entry.files.main_path() == path),
            None => self.find(reference).is_some(),
        }
    }

    pub(super) fn count(&self, census: &mut Census) {
        census.extend("images", self.entries.iter().map(|entry| &entry.reference));
        census.extend("temporary", &self.partial);
    }
}

/// The digest of a text of this crate; stands for one of content, and is none.
fn digest_of(text: &str) -> Option<Digest> {
    let word = |seed: u64| {
        text.bytes()
            .fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
    };
    let hex: String =
        (0..4).map(|at| format!("{:016x}", word(0xcbf2_9ce4_8422_2325 ^ at))).collect();
    format!("sha256:{hex}").parse().ok()
}

/// The lock of one content.
fn content_key(digest: &Digest) -> Option<Uuid> {
    let mut bytes = [0_u8; 16];
    for (byte, at) in bytes.iter_mut().zip((0..32).step_by(2)) {
        *byte = u8::from_str_radix(digest.hex().get(at..at + 2)?, 16).ok()?;
    }
    Uuid::from_bytes(bytes)
}

fn files(digest: &Digest, kind: ArtifactKind) -> Option<ImageFiles> {
    let path = |name: &str| format!("/reference/images/{}/{name}", digest.hex()).parse().ok();
    Some(match kind {
        ArtifactKind::Disk => ImageFiles::Disk {
            path: path("disk")?,
            format: DiskFormat::Qcow2,
            virtual_size: 1 << 30,
        },
        ArtifactKind::Kernel => {
            ImageFiles::Kernel { kernel: path("kernel")?, initrd: path("initrd"), cmdline: None }
        }
        ArtifactKind::Uki => ImageFiles::Uki { path: path("uki")? },
        _ => return None,
    })
}

/// The image driver over a [`Host`]. Made by [`Host::image`].
#[derive(Clone, Debug)]
pub struct ReferenceImage {
    host: Host,
}

impl ReferenceImage {
    pub(super) const fn new(host: Host) -> Self {
        Self { host }
    }

    /// Asks the registry what a reference is.
    fn resolve(&self, reference: &ImageRef) -> Result<(Digest, ArtifactKind)> {
        let op = Op::Pull;
        let state = self.host.lock();
        if state.cache.source_down {
            return Err(refuse(ErrorKind::Unavailable, op, reference, "the registry is down"));
        }
        let found = state.cache.registry.get(reference).cloned();
        found.ok_or_else(|| {
            refuse(ErrorKind::NotFound, op, reference, "the registry does not have it")
                .with_remedy("check the reference")
        })
    }

    async fn download(&self, call: &Call, digest: &Digest) -> Result<()> {
        {
            let mut state = self.host.lock();
            state.cache.partial.insert(digest.clone());
            *state.cache.downloads.entry(digest.clone()).or_default() += 1;
            state.wrote();
        }
        call.between().await
    }

    /// Publishes an entry; answers what that changed.
    fn publish(
        &self,
        reference: &ImageRef,
        digest: &Digest,
        files: ImageFiles,
    ) -> Outcome<ImageStatus> {
        let mut state = self.host.lock();
        state.cache.partial.remove(digest);
        let status = ImageStatus::new(reference.clone(), digest.clone(), files, IMAGE_BYTES);
        let before = state.cache.find(reference).cloned();
        let change = match before {
            None => Change::Created,
            Some(before) => Change::changed_if(before != status),
        };
        state.cache.entries.retain(|entry| entry.reference != *reference);
        state.cache.entries.push(status.clone());
        if change.wrote() {
            state.wrote();
        }
        Outcome::new(change, status)
    }
}

#[async_trait]
impl Image for ReferenceImage {
    fn collect(&self) -> Option<&dyn ImageCollect> {
        Some(self)
    }

    async fn host_info(&self, cx: &Context) -> Result<HostInfo> {
        self.host.info(cx, "reference-image").await
    }

    async fn pull(&self, cx: &Context, reference: &ImageRef) -> Result<Outcome<ImageStatus>> {
        let op = Op::Pull;
        let source = reference.source().map_err(|error| error.in_field("reference"))?;
        let pinned = !matches!(source, ImageSource::Oci { digest: None, .. });
        let call = self.host.begin(cx, op, None).await?;
        let cached = self.host.lock().cache.find(reference).cloned();
        if let Some(status) = cached.filter(|_| pinned) {
            return call.end(Outcome::new(Change::Unchanged, status)).await;
        }
        let (digest, kind) = self.resolve(reference)?;
        let Some(files) = files(&digest, kind) else {
            return Err(Error::invalid("reference", "the artifact holds nothing that we know"));
        };
        // One download of one content: who comes second waits, and finds it.
        let _turn = match content_key(&digest) {
            Some(key) => Some(call.turn(key).await?),
            None => None,
        };
        let there = self.host.lock().cache.entries.iter().any(|entry| entry.digest == digest);
        if !there {
            self.download(&call, &digest).await?;
        }
        let outcome = self.publish(reference, &digest, files);
        call.end(outcome).await
    }

    async fn local_path(&self, cx: &Context, reference: &ImageRef) -> Result<HostPath> {
        let op = Op::LocalPath;
        let call = self.host.begin(cx, op, None).await?;
        let entry = self.host.lock().cache.find(reference).cloned();
        let Some(entry) = entry else {
            return Err(refuse(ErrorKind::NotFound, op, reference, "it is not in the cache")
                .with_remedy("pull it first"));
        };
        call.end(entry.files.main_path().clone()).await
    }

    async fn delete(&self, cx: &Context, reference: &ImageRef) -> Result<Change> {
        let call = self.host.begin(cx, Op::DeleteImage, None).await?;
        let removed = {
            let mut state = self.host.lock();
            let entries = &mut state.cache.entries;
            let before = entries.len();
            entries.retain(|entry| entry.reference != *reference);
            let partial = state.cache.registry.get(reference).map(|(digest, _)| digest.clone());
            let cleared = partial.is_some_and(|digest| state.cache.partial.remove(&digest));
            let removed = state.cache.entries.len() != before || cleared;
            if removed {
                state.wrote();
            }
            removed
        };
        call.end(Change::changed_if(removed)).await
    }

    async fn in_cache(&self, cx: &Context, reference: &ImageRef) -> Result<bool> {
        let call = self.host.begin(cx, Op::InCache, None).await?;
        let found = self.host.lock().cache.find(reference).is_some();
        call.end(found).await
    }

    async fn list(&self, cx: &Context) -> Result<Vec<ImageStatus>> {
        let call = self.host.begin(cx, Op::ListImages, None).await?;
        let all = self.host.lock().cache.entries.clone();
        call.end(all).await
    }

    async fn get(&self, cx: &Context, reference: &ImageRef) -> Result<Option<ImageStatus>> {
        let call = self.host.begin(cx, Op::GetImage, None).await?;
        let found = self.host.lock().cache.find(reference).cloned();
        call.end(found).await
    }
}

#[async_trait]
impl ImageCollect for ReferenceImage {
    async fn collect(
        &self,
        cx: &Context,
        limit_bytes: u64,
        keep: &[ImageRef],
    ) -> Result<CollectReport> {
        let call = self.host.begin(cx, Op::CollectImages, None).await?;
        let mut removed = Vec::new();
        {
            let mut state = self.host.lock();
            state.cache.partial.clear();
            let mut total = IMAGE_BYTES * u64::try_from(state.cache.entries.len()).unwrap_or(0);
            state.cache.entries.retain(|entry| {
                let goes = total > limit_bytes && !keep.contains(&entry.reference);
                if goes {
                    total -= IMAGE_BYTES;
                    removed.push(entry.reference.clone());
                }
                !goes
            });
            if !removed.is_empty() {
                state.wrote();
            }
        }
        let freed = IMAGE_BYTES * u64::try_from(removed.len()).unwrap_or(0);
        call.end(CollectReport::new(removed, freed)).await
    }
}

/// The registry, and what happens to the cache without a driver.
impl Host {
    /// Has the registry answer a reference, with content of its own. A reference with a digest gets that digest.
    pub fn publish_image(&self, reference: &ImageRef, kind: ArtifactKind) {
        self.publish_content(reference, kind, reference.as_str());
    }

    /// As [`Host::publish_image`], with the content that `content` names: two references with one content are stored
    /// once, and another content under a tag is a moved tag.
    pub fn publish_content(&self, reference: &ImageRef, kind: ArtifactKind, content: &str) {
        let named = match reference.source() {
            Ok(ImageSource::Oci { digest, .. }) => digest.and_then(|digest| digest.parse().ok()),
            Ok(ImageSource::Http { digest, .. } | ImageSource::File { digest, .. }) => {
                digest.parse().ok()
            }
            _ => None,
        };
        if let Some(digest) = named.or_else(|| digest_of(content)) {
            self.lock().cache.registry.insert(reference.clone(), (digest, kind));
        }
    }

    /// Whether the registry answers.
    pub fn set_registry_down(&self, down: bool) {
        self.lock().cache.source_down = down;
    }

    /// How many times the content that the registry has under a reference was sent.
    #[must_use]
    pub fn downloads(&self, reference: &ImageRef) -> u64 {
        let state = self.lock();
        let digest = state.cache.registry.get(reference).map(|(digest, _)| digest);
        digest.and_then(|digest| state.cache.downloads.get(digest)).copied().unwrap_or_default()
    }

    /// Removes an entry from the cache by hand. Answers whether it was there.
    pub fn evict_image(&self, reference: &ImageRef) -> bool {
        let entries = &mut self.lock().cache.entries;
        let before = entries.len();
        entries.retain(|entry| entry.reference != *reference);
        entries.len() != before
    }

    /// Leaves an unfinished download behind, as a pull that was killed does.
    pub fn plant_half_made_image(&self, reference: &ImageRef) {
        let mut state = self.lock();
        let digest = state.cache.registry.get(reference).map(|(digest, _)| digest.clone());
        state.cache.partial.extend(digest);
    }
}
