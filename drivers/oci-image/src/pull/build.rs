//! Downloads and unpacks a content, and publishes it.

use std::{
    fs::File,
    io::{Read, Write},
    path::PathBuf,
    sync::Arc,
};

use drivers_api::{Digest, HostPath, Progress};
use host::files::{self, FileError};
use reqwest::Url;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use sha2::{Digest as _, Sha256};
use tokio::sync::OwnedMutexGuard;

use super::{
    Puller, StopGuard, blocking, free_bytes,
    resolve::{Job, SingleFile},
    stopped,
};
use crate::{
    cache::{
        Entry, FileRecord,
        staging::{Staging, adopt},
    },
    error::{ImageError, Result},
    fetch::{
        auth::Session,
        blob::{BUFFER, Wanted, hex},
    },
    flight::Reporter,
    manifest::Descriptor,
    media::{Claim, Packing, Role, disk_claim},
    plan::{Content, Part, Plan},
    unpack::{Budget, StopFlag, layer, unpack_file},
};

/// A download that is checked and not yet used. The lock keeps others from its file.
#[derive(Debug)]
struct Blob {
    path: PathBuf,
    lock: OwnedMutexGuard<()>,
}

/// What one content needs while it is built.
#[derive(Debug)]
struct Site {
    staging: Arc<Staging>,
    budget: Budget,
    stop: StopGuard,
    reporter: Reporter,
    done: u64,
    total: Option<u64>,
}

/// What a plain blob is downloaded as.
struct Source<'a> {
    url: Url,
    what: String,
    digest: &'a Digest,
    size: Option<u64>,
    session: Option<&'a Session>,
}

impl Puller {
    /// Builds a content, unless it is there.
    pub(crate) async fn build(
        self: Arc<Self>,
        key: String,
        job: Job,
        reporter: Reporter,
    ) -> Result<Arc<Entry>> {
        let (cache, here) = (Arc::clone(&self.cache), key.clone());
        if let Some(entry) = blocking(move || cache.entry(&here)).await? {
            return Ok(Arc::new(entry));
        }
        let _slot = self
            .slots
            .acquire()
            .await
            .map_err(|_| ImageError::Internal("the driver is closed".to_owned()))?;
        let total = match &job {
            Job::Oci { plan, .. } => Some(plan.download_bytes()),
            Job::Nothing | Job::Http { .. } | Job::File { .. } => None,
        };
        let mut site = self.site(reporter, total).await?;
        let (files, cmdline) = match job {
            Job::Oci { session, plan } => {
                let Plan { content, cmdline, .. } = plan;
                (self.content(&mut site, &session, content).await?, cmdline)
            }
            Job::Http { url, file } => (vec![self.http(&mut site, url, file).await?], None),
            Job::File { path, file } => (vec![self.file(&mut site, path, file).await?], None),
            Job::Nothing => return Err(ImageError::Vanished),
        };
        let Site { staging, .. } = site;
        let staging = Arc::try_unwrap(staging)
            .map_err(|_| ImageError::Internal("a staging directory is in use".to_owned()))?;
        let entry = blocking(move || staging.publish(&key, files, cmdline)).await?;
        Ok(Arc::new(entry))
    }

    /// Makes room and a place.
    async fn site(&self, reporter: Reporter, total: Option<u64>) -> Result<Site> {
        let (cache, config) = (Arc::clone(&self.cache), Arc::clone(&self.config));
        let (staging, limit) = blocking(move || {
            let needed = total.unwrap_or(0);
            if needed > config.max_image_bytes {
                let limit = config.max_image_bytes;
                return Err(ImageError::TooLarge { what: "the image".to_owned(), limit });
            }
            let no_room = |free| ImageError::NoRoom { what: "the image".to_owned(), needed, free };
            let free = free_bytes(cache.root())?.saturating_sub(config.reserve_bytes);
            if needed > free {
                return Err(no_room(free));
            }
            let mut limit = config.max_image_bytes;
            if let Some(most) = config.max_cache_bytes {
                let left = most.saturating_sub(cache.used_bytes()?);
                if needed > left {
                    return Err(no_room(left));
                }
                limit = limit.min(left);
            }
            Ok((Staging::new(&cache)?, limit))
        })
        .await?;
        Ok(Site {
            staging: Arc::new(staging),
            budget: Budget::new(limit),
            stop: StopGuard::default(),
            reporter,
            done: 0,
            total,
        })
    }

    async fn content(
        &self,
        site: &mut Site,
        session: &Session,
        content: Content,
    ) -> Result<Vec<FileRecord>> {
        match content {
            Content::Files(parts) => {
                let mut files = Vec::new();
                for Part { claim, packing, blob } in parts {
                    let blob = self.download(site, &oci_source(session, &blob)?).await?;
                    files.push(place(site, blob, claim, packing).await?);
                }
                Ok(files)
            }
            Content::Container(layers) => Ok(vec![self.container(site, session, layers).await?]),
        }
    }

    async fn container(
        &self,
        site: &mut Site,
        session: &Session,
        layers: Vec<(Descriptor, Packing, u64)>,
    ) -> Result<FileRecord> {
        let mut found = None;
        for (descriptor, packing, times) in layers {
            let blob = self.download(site, &oci_source(session, &descriptor)?).await?;
            let what = format!("layer {}", descriptor.digest);
            found = on_site(site, blob, move |blob, staging, budget, stop| {
                let target = staging.file(Role::Disk);
                let mut work = layer::Scan { budget, stop, times, found };
                layer::scan(&what, blob, packing, &target, &mut work)?;
                Ok(work.found)
            })
            .await?;
        }
        let disk = found.ok_or_else(|| {
            ImageError::malformed("container image", "no layer holds a file under disk/")
        })?;
        let staging = Arc::clone(&site.staging);
        blocking(move || staging.seal(Role::Disk, disk_claim(&disk.name), &disk.digest)).await
    }

    async fn http(&self, site: &mut Site, url: Url, file: SingleFile) -> Result<FileRecord> {
        let source = Source {
            what: format!("file {}", url.path()),
            url,
            digest: &file.digest,
            size: None,
            session: None,
        };
        let blob = self.download(site, &source).await?;
        place(site, blob, file.claim, file.packing).await
    }

    async fn file(&self, site: &mut Site, path: HostPath, file: SingleFile) -> Result<FileRecord> {
        let lock = self.cache.blob_lock(&file.digest).lock_owned().await;
        let (partial, roots) = (self.cache.partial(&file.digest), self.config.file_roots.clone());
        let (stop, limit, wanted) = (site.stop.flag(), site.budget.left(), file.digest.clone());
        let blob = blocking(move || {
            files::remove_file(&partial)?;
            let copied = open_under(&roots, &path)
                .and_then(|source| copy_file(source, &path, &partial, (&wanted, limit), &stop));
            if copied.is_err() {
                files::remove_file(&partial)?;
            }
            copied.map(|()| Blob { path: partial, lock })
        })
        .await?;
        place(site, blob, file.claim, file.packing).await
    }

    async fn download(&self, site: &mut Site, source: &Source<'_>) -> Result<Blob> {
        let lock = self.cache.blob_lock(source.digest).lock_owned().await;
        let path = self.cache.partial(source.digest);
        let wanted = Wanted {
            url: source.url.clone(),
            what: &source.what,
            digest: source.digest,
            size: source.size,
            limit: site.budget.left(),
            path: path.clone(),
        };
        let (done, total, reporter) = (site.done, site.total, site.reporter.clone());
        let progress = |have: u64| {
            let amount = done.saturating_add(have);
            let progress = Progress::new("download", source.what.clone());
            reporter.report(progress.with_amount(amount, total));
        };
        let lock = self.fetcher.download(&wanted, source.session, lock, progress).await?;
        host::fault::point("image.pull.downloaded")?;
        site.done = site.done.saturating_add(source.size.unwrap_or(0));
        Ok(Blob { path, lock })
    }
}

fn oci_source<'a>(session: &'a Session, blob: &'a Descriptor) -> Result<Source<'a>> {
    Ok(Source {
        url: session.url("blobs", blob.digest.as_str())?,
        what: format!("blob {}", blob.digest),
        digest: &blob.digest,
        size: Some(blob.size),
        session: Some(session),
    })
}

/// Brings a checked blob into the image as the file of its role.
async fn place(site: &mut Site, blob: Blob, claim: Claim, packing: Packing) -> Result<FileRecord> {
    on_site(site, blob, move |blob, staging, budget, stop| {
        let target = staging.file(claim.role);
        let what = claim.role.as_str();
        let digest = if packing == Packing::Plain {
            let file = File::open(blob).map_err(FileError::of("open", blob))?;
            let size = file.metadata().map_err(FileError::of("look at", blob))?.len();
            budget.take(size).map_err(|error| crate::unpack::read_error(what, blob, error))?;
            let name = blob.file_name().unwrap_or_default().to_string_lossy();
            adopt(blob, &target)?;
            format!("sha256:{name}")
        } else {
            unpack_file(what, blob, packing, &target, budget, stop)?
        };
        host::fault::point("image.pull.unpacked")?;
        staging.seal(claim.role, claim.format, &digest)
    })
    .await
}

/// Runs blocking work on a blob, which is gone afterwards unless the work was given up.
async fn on_site<T: Send + 'static>(
    site: &mut Site,
    blob: Blob,
    work: impl FnOnce(&std::path::Path, &Staging, &mut Budget, &StopFlag) -> Result<T> + Send + 'static,
) -> Result<T> {
    site.reporter.report(Progress::new("unpack", "").with_amount(site.done, site.total));
    let mut budget = std::mem::replace(&mut site.budget, Budget::new(0));
    let (staging, stop) = (Arc::clone(&site.staging), site.stop.flag());
    let (answer, budget) = blocking(move || {
        let answer = work(&blob.path, &staging, &mut budget, &stop);
        if !matches!(answer, Err(ImageError::Abandoned)) {
            files::remove_file(&blob.path)?;
        }
        // Before the answer: the staging directory must have one owner when the next step takes it.
        drop(staging);
        drop(blob.lock);
        Ok((answer, budget))
    })
    .await?;
    site.budget = budget;
    answer
}

/// Opens a file of the host below one of the allowed directories. Links may not lead out of it.
fn open_under(roots: &[HostPath], path: &HostPath) -> Result<File> {
    let denied =
        || ImageError::denied(path.to_string(), "it is in none of the directories of `file_roots`");
    let (root, below) = roots
        .iter()
        .find_map(|root| Some((root, path.as_path().strip_prefix(root.as_path()).ok()?)))
        .ok_or_else(denied)?;
    let below = if below.as_os_str().is_empty() { std::path::Path::new(".") } else { below };
    let fail = |error: rustix::io::Errno| match error {
        rustix::io::Errno::NOENT => ImageError::not_found(path.to_string(), "no such file"),
        rustix::io::Errno::XDEV | rustix::io::Errno::LOOP => denied(),
        error => FileError::of("open", path.as_path())(error.into()).into(),
    };
    let dir = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(root.as_path(), dir, Mode::empty()).map_err(fail)?;
    // O_NONBLOCK: a FIFO must not hang the agent.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let file = rustix::fs::openat2(&root, below, flags, Mode::empty(), resolve).map_err(fail)?;
    let file = File::from(file);
    if !file.metadata().map_err(FileError::of("look at", path.as_path()))?.is_file() {
        return Err(ImageError::malformed(path.to_string(), "it is no regular file"));
    }
    Ok(file)
}

/// Copies a file and checks the copy.
fn copy_file(
    mut source: File,
    path: &HostPath,
    target: &std::path::Path,
    (wanted, limit): (&Digest, u64),
    stop: &StopFlag,
) -> Result<()> {
    let mut copy = files::create_new(target)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0_u8; BUFFER];
    let mut have = 0_u64;
    loop {
        if stopped(stop) {
            return Err(ImageError::Abandoned);
        }
        let count = source.read(&mut buffer).map_err(FileError::of("read", path.as_path()))?;
        let Some(bytes) = buffer.get(..count).filter(|bytes| !bytes.is_empty()) else { break };
        have = have.saturating_add(u64::try_from(count).unwrap_or(u64::MAX));
        if have > limit {
            return Err(ImageError::TooLarge { what: path.to_string(), limit });
        }
        hash.update(bytes);
        copy.write_all(bytes).map_err(FileError::of("write", target))?;
    }
    let got = hex(&hash.finalize());
    if got == wanted.as_str() {
        return Ok(());
    }
    Err(ImageError::Mismatch { what: path.to_string(), wanted: wanted.to_string(), got })
}
