//! One change at a time to one object.
//!
//! A change goes on when its caller is gone, also when the whole driver was dropped meanwhile. So what keeps changes apart
//! belongs to the state directory and not to the driver: a driver that is opened over the same directory in this process
//! waits for what an earlier one has begun. Other processes are kept away by the agent's lock on its state.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
};

use drivers_api::{NetworkId, PortId, Uuid};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::{
    nft::Leaving,
    records::{Entry, PortRecord, Records},
};

/// What all drivers of this process over one state directory share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) locks: Locks,
    /// Held from the look at all records until the new record is written, so that of two specs that exclude each other
    /// one is refused; and while forwarding is switched.
    pub(crate) admission: AsyncMutex<()>,
    /// Ports that are admitted and whose records are being written: to admit another they count as written. So the
    /// writing, which waits for the disk, is not under the lock.
    pub(crate) admitted: Mutex<BTreeMap<PortId, Arc<PortRecord>>>,
    /// What of the records is not to have rules.
    pub(crate) leaving: Mutex<Leaving>,
}

/// A port that is admitted, until its record is written or given up.
#[derive(Debug)]
pub(crate) struct Admitted {
    shared: Arc<Shared>,
    port: PortId,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut admitted = self.shared.admitted.lock().unwrap_or_else(PoisonError::into_inner);
        admitted.remove(&self.port);
    }
}

impl Shared {
    /// Counts the port as written until the answer is dropped. Call it under the admission lock.
    pub(crate) fn admit(self: &Arc<Self>, record: &Arc<PortRecord>) -> Admitted {
        let port = record.spec.uuid;
        let mut admitted = self.admitted.lock().unwrap_or_else(PoisonError::into_inner);
        admitted.insert(port, Arc::clone(record));
        Admitted { shared: Arc::clone(self), port }
    }

    /// Whether a network is being removed.
    pub(crate) fn is_leaving(&self, network: NetworkId) -> bool {
        let leaving = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        leaving.networks.contains(&network)
    }

    /// The records with those that are being written.
    pub(crate) fn with_admitted(&self, mut records: Arc<Records>) -> Arc<Records> {
        let admitted = self.admitted.lock().unwrap_or_else(PoisonError::into_inner);
        if !admitted.is_empty() {
            let all = Arc::make_mut(&mut records);
            let more = admitted.iter().map(|(id, record)| (*id, Entry::Good(Arc::clone(record))));
            all.ports.extend(more);
        }
        records
    }

    /// That of a directory, which must be there. Blocks.
    pub(crate) fn of(dir: &Path) -> io::Result<Arc<Self>> {
        static ALL: Mutex<Option<HashMap<PathBuf, Weak<Shared>>>> = Mutex::new(None);
        let dir = dir.canonicalize()?;
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        let all = all.get_or_insert_default();
        if let Some(shared) = all.get(&dir).and_then(Weak::upgrade) {
            return Ok(shared);
        }
        all.retain(|_, shared| shared.strong_count() > 0);
        let shared = Arc::new(Self::default());
        all.insert(dir, Arc::downgrade(&shared));
        Ok(shared)
    }
}

/// A lock for each object that is being changed. Objects that nobody changes take no memory.
#[derive(Debug, Default)]
pub(crate) struct Locks(Mutex<HashMap<Uuid, Weak<AsyncMutex<()>>>>);

impl Locks {
    /// Waits for the object's lock. Cancel-safe.
    pub(crate) async fn lock(&self, object: Uuid) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match locks.get(&object).and_then(Weak::upgrade) {
                Some(lock) => lock,
                None => {
                    locks.retain(|_, lock| lock.strong_count() > 0);
                    let lock = Arc::new(AsyncMutex::new(()));
                    locks.insert(object, Arc::downgrade(&lock));
                    lock
                }
            }
        };
        lock.lock_owned().await
    }
}
