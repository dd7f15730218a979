//! The wanted state on disk: SQLite, one JSON document a row with its schema number.
//!
//! * One process: an exclusive kernel lock on the state directory, checked again before each commit and watched, so that a
//!   holder whose lock file was replaced stops writing.
//! * One writer thread: requests that wait together are committed together (group commit), and the executor never blocks
//!   on the disk. Readers take a snapshot in memory.
//! * Nothing is destroyed: a file that is damaged or of a newer version is opened for reading only and left as it is
//!   ([`Access::ReadOnly`]). An older one is copied aside before it is migrated, in one transaction.
//!
//! ```text
//! open ── lock ── look (read only) ──┬─ newer, damaged ──> ReadOnly: snapshot of what can be read, writes refused
//!                                    └─ new, current, older (copy, migrate) ──> ReadWrite: writer thread
//! ```

mod database;
mod writer;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use drivers_api::{BoxFuture, Error, ErrorKind, Uuid};
use host::lock::{FileLock, LockError};
use reconciler::{
    store::{Done, StoreError, WantedStore},
    wanted::{Key, Wanted, WantedSet},
};
use tokio::sync::watch;

pub use database::SCHEMA;

/// The points at which a crash is tested.
pub const FAULT_POINTS: &[&str] = &[
    "store.create.file-made",
    "store.migrate.copied",
    "store.migrate.stepped",
    "store.write.begun",
    "store.write.row-written",
    "store.write.before-commit",
    "store.write.committed",
];

/// The name of the database in the state directory.
pub const FILE_NAME: &str = "wanted.db";
/// The name of the lock file in the state directory.
pub const LOCK_NAME: &str = "lock";

/// How long the lock of an agent that crashed may outlast it, in a child that it was about to start.
const CRASHED: Duration = Duration::from_secs(5);

/// Why the store was not opened at all.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another agent has the state directory.
    #[error("the state directory {} is in use by {holder}: stop that agent first, or use another state_dir", path.display())]
    InUse {
        /// The state directory.
        path: PathBuf,
        /// Who has it.
        holder: String,
    },
    /// The directory cannot be used.
    #[error("the state directory cannot be used")]
    Directory(#[source] host::files::FileError),
    /// The database cannot be made or read for a reason that is not its content: permission, no space, I/O.
    #[error("the store {} cannot be opened", path.display())]
    Database {
        /// The database.
        path: PathBuf,
        /// Why.
        #[source]
        source: rusqlite::Error,
    },
    /// A step beside the database failed: the copy before a migration, the writer thread.
    #[error("the store {} cannot be opened: {reason}", path.display())]
    Step {
        /// The database.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// Why a store is only read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// A newer agent wrote it.
    Newer {
        /// The schema that was found.
        found: i64,
    },
    /// It is damaged.
    Damaged {
        /// What is wrong with it.
        reason: String,
    },
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Newer { found } => write!(
                f,
                "the store has schema {found} and this agent (bcd-node {}) knows schema {SCHEMA}: nothing is changed; \
                 run the newer agent again, or put back the copy {FILE_NAME}.schema-{SCHEMA} from before the upgrade",
                env!("CARGO_PKG_VERSION")
            ),
            Self::Damaged { reason } => write!(
                f,
                "the store is damaged ({reason}): nothing is changed and VMs run on; stop the agent, move {FILE_NAME} \
                 of the state directory aside, put back a copy or start with an empty store, and apply your manifests again: what runs is adopted"
            ),
        }
    }
}

/// What may be done with the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// All of it.
    ReadWrite,
    /// Reading: why, and what to do.
    ReadOnly(Trouble),
}

/// A change of the wanted state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Objects put in or replaced.
    Put(Vec<Wanted>),
    /// A tombstone dropped, if it is still the tombstone of this identity.
    Forget(Key, Uuid),
    /// Requests recorded as done, if the document is of this identity.
    Acknowledge(Key, Uuid, Done),
}

impl Op {
    fn apply(&self, set: &WantedSet) -> WantedSet {
        match self {
            Self::Put(objects) => set.with_all(objects.iter().cloned()),
            Self::Forget(key, uuid) => set.forget(key, *uuid),
            Self::Acknowledge(key, uuid, done) => match set.get(key) {
                Some(object) if object.uuid == *uuid => set.with(done.record(object)),
                Some(_) | None => set.clone(),
            },
        }
    }
}

/// What is shared between the handle, its clones and the writer.
#[derive(Debug)]
struct Shared {
    set: Mutex<WantedSet>,
    revision: watch::Sender<u64>,
    lost: watch::Sender<Option<String>>,
}

impl Shared {
    fn snapshot(&self) -> WantedSet {
        self.set.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn publish(&self, set: WantedSet, revision: u64) {
        *self.set.lock().unwrap_or_else(PoisonError::into_inner) = set;
        self.revision.send_replace(revision);
    }
}

/// The wanted state. Dropping it ends the writer after what is queued and releases the lock.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    access: Access,
    fresh: bool,
    shared: Arc<Shared>,
    /// `None` once it is closed.
    lock: Mutex<Option<Arc<FileLock>>>,
    writer: Mutex<Option<Arc<writer::Writer>>>,
}

impl Store {
    /// Opens the store in `dir`, which is made when it is not there. Blocks: call it before the executor runs.
    ///
    /// # Errors
    /// When another agent has it, or the directory or file cannot be used. A newer or damaged store is no error: see
    /// [`Store::access`].
    pub fn open(dir: &Path) -> Result<Self, OpenError> {
        host::files::private_dir(dir).or_else(through_link(dir)).map_err(OpenError::Directory)?;
        let lock = FileLock::exclusive_after_crash(&dir.join(LOCK_NAME), CRASHED);
        let lock = lock.map_err(|error| match error {
            LockError::Held { holder, .. } => OpenError::InUse { path: dir.to_owned(), holder },
            LockError::File(error) => OpenError::Directory(error),
        })?;
        let lock = Arc::new(lock);
        database::sweep(dir);
        let opened = database::open(&dir.join(FILE_NAME))?;
        let shared = Arc::new(Shared {
            set: Mutex::new(WantedSet::new(opened.objects)),
            revision: watch::Sender::new(opened.revision),
            lost: watch::Sender::new(None),
        });
        let (writer, access) = match opened.state {
            database::State::Writable(connection) => {
                let writer =
                    writer::Writer::start(connection, &shared, &lock).map_err(|error| {
                        OpenError::Step { path: dir.join(FILE_NAME), reason: error.to_string() }
                    })?;
                (Some(Arc::new(writer)), Access::ReadWrite)
            }
            database::State::Untouched(trouble) => {
                tracing::error!(%trouble, "the store is opened for reading only");
                (None, Access::ReadOnly(trouble))
            }
        };
        let (lock, writer) = (Mutex::new(Some(lock)), Mutex::new(writer));
        Ok(Self { dir: dir.to_owned(), access, fresh: opened.fresh, shared, lock, writer })
    }

    /// What may be done with it.
    #[must_use]
    pub const fn access(&self) -> &Access {
        &self.access
    }

    /// Whether it was made just now: the first start, or a start after the store was lost.
    #[must_use]
    pub const fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// The state directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Tells once when the exclusion on the state directory is lost; nothing is written from then on.
    #[must_use]
    pub fn lost(&self) -> watch::Receiver<Option<String>> {
        self.shared.lost.subscribe()
    }

    /// Looks whether the lock is still the one at its path, and tells [`Store::lost`] if not.
    #[must_use]
    pub fn holds_lock(&self) -> bool {
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner).clone();
        lock.is_some_and(|lock| writer::still_ours(&lock, &self.shared))
    }

    /// Commits what is queued, closes the file and gives the state directory free, whoever still holds the store. Blocks
    /// for the time of a commit. Later changes are refused; what was read stays.
    pub fn close(&self) {
        drop(self.writer.lock().unwrap_or_else(PoisonError::into_inner).take());
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Commits changes, all or none, durably. Answers the new revision.
    ///
    /// # Errors
    /// `Unavailable` for a store that is only read or whose exclusion is lost, `Exhausted` without space, `Internal`. The
    /// old state is intact.
    pub async fn commit(&self, ops: Vec<Op>) -> drivers_api::Result<u64> {
        if ops.is_empty() {
            return Ok(*self.shared.revision.borrow());
        }
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match (writer, &self.access) {
            (Some(writer), _) => writer.commit(ops).await,
            (None, Access::ReadOnly(trouble)) => Err(read_only(trouble)),
            (None, Access::ReadWrite) => Err(writer::gone()),
        }
    }
}

/// The refusal of a write to a store that is only read.
#[must_use]
pub fn read_only(trouble: &Trouble) -> Error {
    Error::new(ErrorKind::Unavailable, "write", "the wanted state", trouble)
}

/// A state directory that is reached through a symbolic link is the operator's wish; the lock is on the same inode.
fn through_link(
    dir: &Path,
) -> impl FnOnce(host::files::FileError) -> Result<(), host::files::FileError> {
    move |error| match std::fs::canonicalize(dir) {
        Ok(real) if real != dir => host::files::private_dir(&real),
        Ok(_) | Err(_) => Err(error),
    }
}

impl WantedStore for Store {
    fn snapshot(&self) -> WantedSet {
        self.shared.snapshot()
    }

    fn revision(&self) -> watch::Receiver<u64> {
        self.shared.revision.subscribe()
    }

    fn forget<'a>(&'a self, key: &'a Key, uuid: Uuid) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let ops = vec![Op::Forget(key.clone(), uuid)];
            self.commit(ops).await.map(drop).map_err(|error| StoreError(error.chain()))
        })
    }

    fn acknowledge<'a>(
        &'a self,
        key: &'a Key,
        uuid: Uuid,
        done: Done,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let ops = vec![Op::Acknowledge(key.clone(), uuid, done)];
            self.commit(ops).await.map(drop).map_err(|error| StoreError(error.chain()))
        })
    }
}

#[cfg(test)]
mod tests;
