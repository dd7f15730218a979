//! What the host keeps of each network and port: one file each, with the mark and the spec as applied.
//!
//! A record is written before the first effect and removed after the last, so that whatever a crash leaves has a record.
//! Records are read again when their directory changed (its modification time), so that a fresh start, and a file that
//! somebody removed by hand, are seen.

use std::{
    collections::BTreeMap,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use drivers_api::{HostId, NetworkId, NetworkSpec, PortId, PortSpec, Uuid};
use host::files::{self, FileError};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The version of the files. A file of a later version is left alone.
const VERSION: u32 = 1;
/// No record is near this size; a larger file is not ours.
const MOST_BYTES: u64 = 1 << 20;

/// What could not be done with the records.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    #[error("{source}")]
    File {
        #[source]
        source: FileError,
    },
    #[error("the record cannot be written as JSON")]
    Encode {
        #[source]
        source: serde_json::Error,
    },
}

impl From<FileError> for RecordError {
    fn from(source: FileError) -> Self {
        Self::File { source }
    }
}

/// A network as it is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct NetworkRecord {
    pub(crate) version: u32,
    pub(crate) node: HostId,
    /// The connection tracking zone, and the host part of the helper address: unique among the networks of this host.
    pub(crate) zone: u16,
    pub(crate) spec: NetworkSpec,
}

impl NetworkRecord {
    pub(crate) const fn new(node: HostId, zone: u16, spec: NetworkSpec) -> Self {
        Self { version: VERSION, node, zone, spec }
    }
}

/// A port as it is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PortRecord {
    pub(crate) version: u32,
    pub(crate) node: HostId,
    pub(crate) spec: PortSpec,
}

impl PortRecord {
    pub(crate) const fn new(node: HostId, spec: PortSpec) -> Self {
        Self { version: VERSION, node, spec }
    }
}

/// A kind of record.
trait Record: Serialize + DeserializeOwned {
    const DIR: &'static str;
    fn object(&self) -> Uuid;
    fn version(&self) -> u32;
}

impl Record for NetworkRecord {
    const DIR: &'static str = "networks";
    fn object(&self) -> Uuid {
        self.spec.uuid.uuid()
    }
    fn version(&self) -> u32 {
        self.version
    }
}

impl Record for PortRecord {
    const DIR: &'static str = "ports";
    fn object(&self) -> Uuid {
        self.spec.uuid.uuid()
    }
    fn version(&self) -> u32 {
        self.version
    }
}

/// One file of the directory.
#[derive(Clone, Debug)]
pub(crate) enum Entry<R> {
    /// Read and understood.
    Good(Arc<R>),
    /// There, but not readable: why.
    Bad(String),
}

impl<R> Entry<R> {
    pub(crate) fn good(&self) -> Option<&Arc<R>> {
        match self {
            Self::Good(record) => Some(record),
            Self::Bad(_) => None,
        }
    }
}

/// All records at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Records {
    pub(crate) networks: BTreeMap<NetworkId, Entry<NetworkRecord>>,
    pub(crate) ports: BTreeMap<PortId, Entry<PortRecord>>,
}

impl Records {
    pub(crate) fn network(&self, network: NetworkId) -> Option<&Arc<NetworkRecord>> {
        self.networks.get(&network).and_then(Entry::good)
    }

    pub(crate) fn port(&self, port: PortId) -> Option<&Arc<PortRecord>> {
        self.ports.get(&port).and_then(Entry::good)
    }

    pub(crate) fn good_networks(&self) -> impl Iterator<Item = &Arc<NetworkRecord>> {
        self.networks.values().filter_map(Entry::good)
    }

    pub(crate) fn good_ports(&self) -> impl Iterator<Item = &Arc<PortRecord>> {
        self.ports.values().filter_map(Entry::good)
    }

    pub(crate) fn ports_of(&self, network: NetworkId) -> impl Iterator<Item = &Arc<PortRecord>> {
        self.good_ports().filter(move |port| port.spec.network_uuid == network)
    }
}

/// When a directory was last changed: seconds and nanoseconds of its modification, and its inode.
type Stamp = (i64, i64, u64);

#[derive(Debug, Default)]
struct Cache {
    /// `None` before the first reading.
    stamps: Option<(Stamp, Stamp)>,
    /// How many changes of our own are under way: while there are some, the stamps say nothing about others.
    under_way: usize,
    records: Arc<Records>,
}

/// The directory of records. All calls block.
#[derive(Debug)]
pub(crate) struct Store {
    dir: PathBuf,
    cache: Mutex<Cache>,
}

impl Store {
    /// Opens the directory and makes it where it is not there.
    pub(crate) fn open(dir: &Path) -> Result<Self, RecordError> {
        files::private_dir(dir)?;
        // Of a killed agent: of other state that is kept here, and of records.
        files::sweep_temporaries(dir)?;
        for kind in [NetworkRecord::DIR, PortRecord::DIR] {
            files::private_dir(&dir.join(kind))?;
            files::sweep_temporaries(&dir.join(kind))?;
        }
        Ok(Self { dir: dir.to_owned(), cache: Mutex::default() })
    }

    /// Where other state of the driver is kept.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// All records.
    pub(crate) fn snapshot(&self) -> Result<Arc<Records>, RecordError> {
        let stamps = self.stamps()?;
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = cache.stamps.is_some() && cache.under_way > 0;
        if !is_known && cache.stamps != Some(stamps) {
            let mut records = Records::default();
            for (id, entry) in read_all::<NetworkRecord>(&self.dir)? {
                records.networks.insert(NetworkId::new(id), entry);
            }
            for (id, entry) in read_all::<PortRecord>(&self.dir)? {
                records.ports.insert(PortId::new(id), entry);
            }
            // The stamps are from before the reading: a change meanwhile leads to another reading, never to a stale one.
            cache.stamps = Some(stamps);
            cache.records = Arc::new(records);
        }
        Ok(Arc::clone(&cache.records))
    }

    pub(crate) fn put_network(&self, record: &NetworkRecord) -> Result<(), RecordError> {
        let id = record.spec.uuid;
        self.change(
            || write(&self.dir, record),
            |records| {
                records.networks.insert(id, Entry::Good(Arc::new(record.clone())));
            },
        )
    }

    pub(crate) fn put_port(&self, record: &PortRecord) -> Result<(), RecordError> {
        let id = record.spec.uuid;
        self.change(
            || write(&self.dir, record),
            |records| {
                records.ports.insert(id, Entry::Good(Arc::new(record.clone())));
            },
        )
    }

    /// Answers whether there was one.
    pub(crate) fn remove_network(&self, network: NetworkId) -> Result<bool, RecordError> {
        self.change(
            || remove::<NetworkRecord>(&self.dir, network.uuid()),
            |records| {
                records.networks.remove(&network);
            },
        )
    }

    /// Answers whether there was one.
    pub(crate) fn remove_port(&self, port: PortId) -> Result<bool, RecordError> {
        self.change(
            || remove::<PortRecord>(&self.dir, port.uuid()),
            |records| {
                records.ports.remove(&port);
            },
        )
    }

    /// Changes a file, and takes the change over without reading everything again. Many may be under way at once: they
    /// wait for the disk together.
    fn change<T>(
        &self,
        work: impl FnOnce() -> Result<T, RecordError>,
        take_over: impl FnOnce(&mut Records),
    ) -> Result<T, RecordError> {
        let lock = || self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        lock().under_way += 1;
        let answer = work();
        let mut cache = lock();
        if answer.is_ok() {
            take_over(Arc::make_mut(&mut cache.records));
        } else {
            // What became of the file is not known: everything is read again.
            cache.stamps = None;
        }
        cache.under_way -= 1;
        if cache.under_way == 0 && cache.stamps.is_some() {
            cache.stamps = Some(self.stamps()?);
        }
        drop(cache);
        answer
    }

    fn stamps(&self) -> Result<(Stamp, Stamp), RecordError> {
        let stamp = |name: &str| -> Result<Stamp, RecordError> {
            let path = self.dir.join(name);
            let found = std::fs::metadata(&path).map_err(FileError::of("look at", &path))?;
            Ok((found.mtime(), found.mtime_nsec(), found.ino()))
        };
        Ok((stamp(NetworkRecord::DIR)?, stamp(PortRecord::DIR)?))
    }
}

fn file_of<R: Record>(dir: &Path, object: Uuid) -> PathBuf {
    dir.join(R::DIR).join(format!("{object}.json"))
}

fn write<R: Record>(dir: &Path, record: &R) -> Result<(), RecordError> {
    let bytes =
        serde_json::to_vec_pretty(record).map_err(|source| RecordError::Encode { source })?;
    Ok(files::write_atomic(&file_of::<R>(dir, record.object()), &bytes)?)
}

fn remove<R: Record>(dir: &Path, object: Uuid) -> Result<bool, RecordError> {
    let path = file_of::<R>(dir, object);
    let was = files::remove_file(&path)?;
    if was {
        files::sync_parent(&path)?;
    }
    Ok(was)
}

fn read_all<R: Record>(dir: &Path) -> Result<Vec<(Uuid, Entry<R>)>, RecordError> {
    let dir = dir.join(R::DIR);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&dir).map_err(FileError::of("list", &dir))? {
        let name = entry.map_err(FileError::of("list", &dir))?.file_name();
        let id = name.to_str().and_then(|name| name.strip_suffix(".json"));
        let Some(id) = id.and_then(|id| id.parse::<Uuid>().ok()) else { continue };
        match read_one::<R>(&dir.join(&name), id) {
            Ok(Some(entry)) => found.push((id, entry)),
            // Removed since the directory was read.
            Ok(None) => {}
            Err(error) => found.push((id, Entry::Bad(crate::error::chain(&error)))),
        }
    }
    Ok(found)
}

fn read_one<R: Record>(path: &Path, id: Uuid) -> Result<Option<Entry<R>>, FileError> {
    let Some(bytes) = files::read_bounded(path, MOST_BYTES)? else { return Ok(None) };
    let bad = |why: String| Ok(Some(Entry::Bad(format!("{}: {why}", path.display()))));
    match serde_json::from_slice::<R>(&bytes) {
        Err(error) => bad(format!("unreadable ({error})")),
        Ok(record) if record.version() != VERSION => {
            bad(format!("of version {}, this agent knows {VERSION}", record.version()))
        }
        Ok(record) if record.object() != id => bad("about another object".to_owned()),
        Ok(record) => Ok(Some(Entry::Good(Arc::new(record)))),
    }
}

#[cfg(test)]
mod tests {
    use drivers_api::NetworkType;

    use super::*;

    fn record() -> NetworkRecord {
        let id: Uuid = "11111111-2222-4333-8444-555555555555".parse().unwrap();
        let spec =
            NetworkSpec::new(NetworkId::new(id), "n".parse().unwrap(), NetworkType::Isolated);
        NetworkRecord::new(HostId::new(id), 1, spec)
    }

    #[test]
    fn a_fresh_start_sweeps_what_writes_that_were_cut_short_left() {
        let dir = tempfile::tempdir().unwrap();
        drop(Store::open(dir.path()).unwrap());
        let left = [".", NetworkRecord::DIR, PortRecord::DIR]
            .map(|below| dir.path().join(below).join(".tmp-1-0-x.json"));
        for path in &left {
            std::fs::write(path, "half").unwrap();
        }
        drop(Store::open(dir.path()).unwrap());
        assert!(left.iter().all(|path| !path.exists()));
    }

    #[test]
    fn a_record_is_found_by_a_fresh_start_and_gone_after_its_removal() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        assert!(store.snapshot().unwrap().networks.is_empty());
        store.put_network(&record()).unwrap();
        for store in [&store, &Store::open(dir.path()).unwrap()] {
            let found = store.snapshot().unwrap();
            assert_eq!(**found.network(record().spec.uuid).unwrap(), record());
        }
        assert!(store.remove_network(record().spec.uuid).unwrap());
        assert!(!store.remove_network(record().spec.uuid).unwrap());
        assert!(store.snapshot().unwrap().networks.is_empty());
    }

    #[test]
    fn a_broken_and_a_newer_record_are_listed_as_such_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.put_network(&record()).unwrap();
        let path = dir.path().join("networks").join(format!("{}.json", record().spec.uuid));
        let newer =
            std::fs::read_to_string(&path).unwrap().replace("\"version\": 1", "\"version\": 9");
        for text in ["{", &newer] {
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, text).unwrap();
            let found = Store::open(dir.path()).unwrap().snapshot().unwrap();
            assert!(matches!(found.networks.get(&record().spec.uuid), Some(Entry::Bad(_))));
            assert!(path.exists());
        }
    }
}
