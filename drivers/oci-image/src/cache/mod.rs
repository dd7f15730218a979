//! The cache on disk.
//!
//! ```text
//! DIR/                 0711
//!   cache.json         who owns it, and the layout's number
//!   lock               held by the process that has the cache open
//!   content/KEY/       0711, one image: its files (0444) and entry.json; complete or not there
//!   refs/HASH.json     0700/0600, one reference: what it resolved to; its mtime is its last use
//!   refs/HASH.pull     the blobs that a pull of that reference downloads; gone when it is done
//!   partial/HEX        0700/0600, blobs on their way, by digest
//!   staging/NAME/      0700, images being built or removed
//! ```
//!
//! An image appears by the rename of its complete, synced directory, and goes by the rename back. Who reads a file of it
//! keeps its bytes by an open descriptor or a hard link. All blocking functions here run off the executor.

pub(crate) mod busy;
mod layout;
pub(crate) mod record;
pub(crate) mod staging;

use std::{
    collections::HashMap,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, SystemTime},
};

use drivers_api::{Change, Digest, HostId, ImageRef};
use host::{
    fault,
    files::{self, FileError},
    lock::FileLock,
};

pub(crate) use self::record::{Entry, EntryRecord, FileRecord, RefRecord};
use crate::{
    error::{ImageError, Result},
    flight::Flights,
};

/// A use is written down again after so long; so a repeated call writes nothing.
const USE_GRAIN: Duration = Duration::from_secs(60);
/// The most bytes of a record.
const MAX_RECORD_BYTES: u64 = 64 << 10;

/// An open cache. One a process and directory, shared by all drivers that open it.
#[derive(Debug)]
pub(crate) struct Cache {
    root: PathBuf,
    node: HostId,
    _lock: FileLock,
    /// Held while references or content appear or go. Only blocking code takes it, for a few file operations.
    catalogue: Mutex<()>,
    blobs: Mutex<HashMap<Digest, Weak<tokio::sync::Mutex<()>>>>,
    /// Content that a pull is about to build or to name, with how many pulls do.
    pins: Mutex<HashMap<String, usize>>,
    /// Pulls by reference.
    pub(crate) pulls: Arc<Flights<(Change, Arc<Entry>, Digest)>>,
    /// Downloads by content.
    pub(crate) contents: Arc<Flights<Arc<Entry>>>,
}

/// A reference that is in the cache with its content.
#[derive(Debug)]
pub(crate) struct Cached {
    pub(crate) reference: RefRecord,
    pub(crate) entry: Entry,
    pub(crate) last_used: SystemTime,
}

impl Cache {
    /// Opens the cache, or joins the one that this process has open.
    pub(crate) fn open(dir: &Path, node: HostId) -> drivers_api::Result<Arc<Self>> {
        static OPEN: Mutex<Option<HashMap<PathBuf, Weak<Cache>>>> = Mutex::new(None);
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.get_or_insert_default();
        let root = layout::prepare(dir)?;
        if let Some(cache) = open.get(&root).and_then(Weak::upgrade) {
            layout::check_owner(&root, node)?;
            return Ok(cache);
        }
        let lock = layout::lock(&root, open.contains_key(&root))?;
        layout::make(&root, node)?;
        let cache = Arc::new(Self {
            root: root.clone(),
            node,
            _lock: lock,
            catalogue: Mutex::new(()),
            blobs: Mutex::default(),
            pins: Mutex::default(),
            pulls: Flights::new(),
            contents: Flights::new(),
        });
        cache.sweep_references();
        open.retain(|_, cache| cache.strong_count() > 0);
        open.insert(root, Arc::downgrade(&cache));
        Ok(cache)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) const fn node(&self) -> HostId {
        self.node
    }

    pub(crate) fn catalogue(&self) -> MutexGuard<'_, ()> {
        self.catalogue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock of a blob: two images may share one, and only one of them downloads it at a time.
    pub(crate) fn blob_lock(&self, digest: &Digest) -> Arc<tokio::sync::Mutex<()>> {
        let mut blobs = self.blobs.lock().unwrap_or_else(PoisonError::into_inner);
        blobs.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = blobs.get(digest).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::new(tokio::sync::Mutex::new(()));
        blobs.insert(digest.clone(), Arc::downgrade(&lock));
        lock
    }

    /// Keeps a content from being removed until the pin is dropped.
    pub(crate) fn pin(self: &Arc<Self>, key: &str) -> Pin {
        let mut pins = self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        *pins.entry(key.to_owned()).or_default() += 1;
        Pin { cache: Arc::clone(self), key: key.to_owned() }
    }

    pub(crate) fn is_pinned(&self, key: &str) -> bool {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner).contains_key(key)
    }

    pub(crate) fn partial(&self, digest: &Digest) -> PathBuf {
        self.root.join("partial").join(digest.hex())
    }

    pub(crate) fn content(&self, key: &str) -> PathBuf {
        self.root.join("content").join(key)
    }

    pub(crate) fn reference(&self, reference: &ImageRef) -> PathBuf {
        self.root.join("refs").join(record::ref_file(reference))
    }

    /// The content of that key, when it is there and looks as it was published.
    pub(crate) fn entry(&self, key: &str) -> Result<Option<Entry>> {
        record::read_entry(&self.content(key), key)
    }

    /// The record of a reference. One that cannot be understood counts as absent: a pull writes it anew.
    pub(crate) fn ref_record(&self, reference: &ImageRef) -> Result<Option<RefRecord>> {
        let path = self.reference(reference);
        let Some(bytes) = files::read_bounded(&path, MAX_RECORD_BYTES)? else {
            // Without its directory nothing was seen to be absent.
            let dir = self.root.join("refs");
            fs::metadata(&dir).map_err(FileError::of("look at", &dir))?;
            return Ok(None);
        };
        let found = RefRecord::parse(&path, &bytes);
        Ok(found.filter(|record| record.reference == *reference))
    }

    /// A reference with its content.
    pub(crate) fn cached(&self, reference: &ImageRef) -> Result<Option<(RefRecord, Entry)>> {
        let Some(record) = self.ref_record(reference)? else { return Ok(None) };
        Ok(self.entry(&record.content)?.map(|entry| (record, entry)))
    }

    /// All references whose content is there.
    pub(crate) fn all(&self) -> Result<Vec<Cached>> {
        let dir = self.root.join("refs");
        let fail = || FileError::of("list", &dir);
        let mut found = Vec::new();
        for file in fs::read_dir(&dir).map_err(fail())? {
            let path = file.map_err(fail())?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let Some(bytes) = files::read_bounded(&path, MAX_RECORD_BYTES)? else { continue };
            let Some(reference) = RefRecord::parse(&path, &bytes) else { continue };
            let last_used = match fs::symlink_metadata(&path).and_then(|found| found.modified()) {
                Ok(time) => time,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(fail()(error).into()),
            };
            if let Some(entry) = self.entry(&reference.content)? {
                found.push(Cached { reference, entry, last_used });
            }
        }
        found.sort_by(|a, b| a.reference.reference.cmp(&b.reference.reference));
        Ok(found)
    }

    /// The keys under `content`.
    pub(crate) fn keys(&self) -> Result<Vec<String>> {
        names(&self.root.join("content"))
    }

    /// The bytes that all content takes.
    pub(crate) fn used_bytes(&self) -> Result<u64> {
        let mut used = 0_u64;
        for key in self.keys()? {
            used = used.saturating_add(allocated(&self.content(&key))?);
        }
        Ok(used)
    }

    /// Writes down that a reference was used, at most once a minute.
    pub(crate) fn touch(&self, reference: &ImageRef) {
        let path = self.reference(reference);
        let used = fs::symlink_metadata(&path).and_then(|found| found.modified());
        let stale = used.is_ok_and(|used| used.elapsed().is_ok_and(|past| past >= USE_GRAIN));
        if stale {
            let now = fs::File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
            if let Err(error) = now {
                tracing::warn!(%error, path = %path.display(), "a use cannot be written down");
            }
        }
    }

    /// Lets a reference name a content; `None` when the content is not there any more. Writes nothing when it does so
    /// already.
    pub(crate) fn bind(&self, record: &RefRecord) -> Result<Option<Entry>> {
        let _held = self.catalogue();
        let Some(entry) = self.entry(&record.content)? else { return Ok(None) };
        if self.ref_record(&record.reference)?.as_ref() == Some(record) {
            self.touch(&record.reference);
        } else {
            let path = self.reference(&record.reference);
            files::write_atomic(&path, &record.to_json()?)?;
            fault::point("image.pull.reference-written")?;
        }
        files::remove_file(&self.journal(&record.reference))?;
        Ok(Some(entry))
    }

    /// Removes what a crash left beside the references: writes that were cut short, and journals of which no download is
    /// left to go on with.
    fn sweep_references(&self) {
        let dir = self.root.join("refs");
        if let Err(error) = files::sweep_temporaries(&dir) {
            tracing::warn!(%error, dir = %dir.display(), "what a crash left half-made stays");
        }
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|extension| extension != "pull") {
                continue;
            }
            let swept = read_journal_at(&path).and_then(|blobs| {
                let goes_on = blobs.iter().any(|digest| self.partial(digest).exists());
                if goes_on { Ok(false) } else { Ok(files::remove_file(&path)?) }
            });
            if let Err(error) = swept {
                tracing::warn!(%error, path = %path.display(), "the journal of a pull stays");
            }
        }
    }

    fn journal(&self, reference: &ImageRef) -> PathBuf {
        self.reference(reference).with_extension("pull")
    }

    /// Writes down what a pull downloads, so that a deletion finds what it left. Not synced: after a crash of the host a
    /// collection finds it too.
    pub(crate) fn write_journal(&self, reference: &ImageRef, blobs: &[Digest]) -> Result<()> {
        let path = self.journal(reference);
        let text: Vec<&str> = blobs.iter().map(Digest::as_str).collect();
        fs::write(&path, text.join("\n")).map_err(FileError::of("write", &path))?;
        Ok(())
    }

    /// Forgets the journal of a pull that failed and left nothing to go on with.
    pub(crate) fn close_journal(&self, reference: &ImageRef) -> Result<()> {
        let blobs = self.read_journal(reference)?;
        if !blobs.iter().any(|digest| self.partial(digest).exists()) {
            files::remove_file(&self.journal(reference))?;
        }
        Ok(())
    }

    /// What an interrupted pull of a reference was downloading.
    pub(crate) fn read_journal(&self, reference: &ImageRef) -> Result<Vec<Digest>> {
        read_journal_at(&self.journal(reference))
    }

    /// Removes a reference, and its content when no other reference names it.
    pub(crate) fn unbind(self: &Arc<Self>, reference: &ImageRef) -> Result<Change> {
        let trash = {
            let _held = self.catalogue();
            let busy = |what: &str| Err(ImageError::unavailable(reference.to_string(), what));
            if self.pulls.is_flying(reference.as_str()) {
                return busy("it is being pulled");
            }
            files::remove_file(&self.journal(reference))?;
            let path = self.reference(reference);
            let Some(record) = self.ref_record(reference)? else {
                // A record that cannot be understood is ours all the same.
                return Ok(Change::changed_if(files::remove_file(&path)?));
            };
            let dir = self.content(&record.content);
            let shared = self.is_shared(&record)?;
            if !shared {
                if self.is_pinned(&record.content) {
                    return busy("its content is being pulled");
                }
                if busy::is_read(&dir)? {
                    return busy("a clone or a VM reads it");
                }
            }
            // The reference first: content without one is found by the next collection, a reference without content
            // would be a promise that is not kept.
            files::remove_file(&path)?;
            files::sync_parent(&path)?;
            fault::point("image.delete.reference-removed")?;
            if shared { None } else { staging::take_away(self, &dir)? }
        };
        // Large files take long to free, and nobody needs to wait for that with the catalogue held.
        if let Some(trash) = trash {
            trash.remove()?;
        }
        fault::point("image.delete.content-removed")?;
        Ok(Change::Changed)
    }

    fn is_shared(&self, record: &RefRecord) -> Result<bool> {
        Ok(self.all()?.iter().any(|other| {
            other.reference.content == record.content
                && other.reference.reference != record.reference
        }))
    }
}

/// Keeps a content in the cache.
#[derive(Debug)]
pub(crate) struct Pin {
    cache: Arc<Cache>,
    key: String,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut pins = self.cache.pins.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = pins.get_mut(&self.key) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                pins.remove(&self.key);
            }
        }
    }
}

/// The bytes that the files of a content directory take; 0 when it is gone.
pub(crate) fn allocated(dir: &Path) -> Result<u64> {
    let fail = || FileError::of("list", dir);
    let listing = match fs::read_dir(dir) {
        Ok(listing) => listing,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(fail()(error).into()),
    };
    let mut bytes = 0_u64;
    for file in listing {
        match file.and_then(|file| file.metadata()) {
            Ok(found) => bytes = bytes.saturating_add(found.blocks().saturating_mul(512)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(fail()(error).into()),
        }
    }
    Ok(bytes)
}

/// The names in a directory.
pub(crate) fn names(dir: &Path) -> Result<Vec<String>> {
    let fail = || FileError::of("list", dir);
    let mut names = Vec::new();
    for file in fs::read_dir(dir).map_err(fail())? {
        names.push(file.map_err(fail())?.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    Ok(names)
}

/// Files of the cache that are held open: as long as this lives, they are not removed from the cache, and their bytes stay
/// whatever happens.
#[derive(Debug)]
pub struct Held {
    /// The descriptors, in the order disk, kernel, initrd, UKI.
    pub files: Vec<fs::File>,
    /// The image.
    pub status: drivers_api::ImageStatus,
}

fn read_journal_at(path: &Path) -> Result<Vec<Digest>> {
    let bytes = files::read_bounded(path, MAX_RECORD_BYTES)?;
    let text = String::from_utf8(bytes.unwrap_or_default()).unwrap_or_default();
    Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
}
