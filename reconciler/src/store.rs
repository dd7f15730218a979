//! Where the wanted state lives. The agent's store implements this; tests use [`MemoryStore`].

use std::sync::{Mutex, PoisonError};

use drivers_api::{BoxFuture, Uuid};
use tokio::sync::watch;

use crate::wanted::{Key, Wanted, WantedSet};

/// A store that cannot be written. The wanted state in memory stays as it was.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the wanted state: {0}")]
pub struct StoreError(pub String);

/// The wanted state, as the reconciler sees it. It reads snapshots and drops tombstones; it never changes what is wanted.
pub trait WantedStore: Send + Sync {
    /// What is wanted now, tombstones included. Cheap: no input or output.
    fn snapshot(&self) -> WantedSet;

    /// Counts the changes; a receiver sees each new number.
    fn revision(&self) -> watch::Receiver<u64>;

    /// Drops the tombstone of an object whose host side is seen to be gone. Only if the document is still the tombstone
    /// of this identity; else nothing. Durable when it returns.
    fn forget<'a>(&'a self, key: &'a Key, uuid: Uuid) -> BoxFuture<'a, Result<(), StoreError>>;
}

/// A store in memory, for tests.
#[derive(Debug)]
pub struct MemoryStore {
    set: Mutex<WantedSet>,
    revision: watch::Sender<u64>,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self { set: Mutex::new(WantedSet::default()), revision: watch::Sender::new(0) }
    }
}

impl MemoryStore {
    /// Puts an object in, or replaces it.
    pub fn put(&self, object: Wanted) {
        self.change(|set| set.with(object));
    }

    /// Marks an object as to be deleted; answers whether it is there.
    pub fn delete(&self, key: &Key) -> bool {
        let found = self.snapshot().get(key).cloned();
        found.is_some_and(|object| {
            self.put(Wanted {
                deleting: true,
                generation: object.generation + 1,
                ..(*object).clone()
            });
            true
        })
    }

    fn change(&self, change: impl FnOnce(&WantedSet) -> WantedSet) {
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        *set = change(&set);
        self.revision.send_modify(|revision| *revision += 1);
    }
}

impl WantedStore for MemoryStore {
    fn snapshot(&self) -> WantedSet {
        self.set.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn revision(&self) -> watch::Receiver<u64> {
        self.revision.subscribe()
    }

    fn forget<'a>(&'a self, key: &'a Key, uuid: Uuid) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            self.change(|set| match set.get(key) {
                Some(object) if object.deleting && object.uuid == uuid => set.without(key),
                Some(_) | None => set.clone(),
            });
            Ok(())
        })
    }
}
