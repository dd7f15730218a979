//! One change at a time to one object.
//!
//! A change goes on when its caller is gone, also when the whole driver was dropped meanwhile. So what keeps changes apart
//! belongs to the state directory and not to the driver: a driver that is opened over the same directory in this process
//! waits for what an earlier one has begun. Other processes are kept away by the agent's lock on its state.

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
};

use drivers_api::Uuid;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::nft::Leaving;

/// What all drivers of this process over one state directory share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) locks: Locks,
    /// Held from the look at all records until the new record is written, so that of two specs that exclude each other
    /// one is refused; and while forwarding is switched.
    pub(crate) admission: AsyncMutex<()>,
    /// What of the records is not to have rules.
    pub(crate) leaving: Mutex<Leaving>,
}

impl Shared {
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
