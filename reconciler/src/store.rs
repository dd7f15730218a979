//! Where the wanted state lives. The agent's store implements this; tests use [`MemoryStore`].

use std::sync::{Mutex, PoisonError};

use drivers_api::{BoxFuture, Uuid};
use tokio::sync::watch;

use crate::wanted::{Key, Wanted, WantedSet};

/// A store that cannot be written. The wanted state in memory stays as it was.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the wanted state: {0}")]
pub struct StoreError(pub String);

/// Which requests to an instance are done, as [`WantedStore::acknowledge`] records them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Done {
    /// The value of [`Wanted::reboots`] up to which reboots are done.
    pub reboots: u64,
    /// The value of [`Wanted::starts`] up to which starts are done.
    pub starts: u64,
}

impl Done {
    /// All requests of an object as it is now.
    #[must_use]
    pub const fn all_of(object: &Wanted) -> Self {
        Self { reboots: object.reboots, starts: object.starts }
    }

    /// The object with these requests recorded as done; a record never goes back.
    #[must_use]
    pub fn record(self, object: &Wanted) -> Wanted {
        Wanted {
            reboots_done: object.reboots_done.max(self.reboots),
            starts_done: object.starts_done.max(self.starts),
            ..object.clone()
        }
    }
}

/// The wanted state, as the reconciler sees it. It reads snapshots, drops tombstones and records which requests are done;
/// it never changes what is wanted.
pub trait WantedStore: Send + Sync {
    /// What is wanted now, tombstones included. Cheap: no input or output.
    fn snapshot(&self) -> WantedSet;

    /// Counts the changes; a receiver sees each new number.
    fn revision(&self) -> watch::Receiver<u64>;

    /// Drops the tombstone of an object whose host side is seen to be gone; its successor, if it has one, becomes the
    /// document ([`WantedSet::forget`] is that change). Only if the document is still the tombstone of this identity; else
    /// nothing. Durable when it returns.
    fn forget<'a>(&'a self, key: &'a Key, uuid: Uuid) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Records which requests are done ([`Done::record`] is the change), without a new generation. Only if the document is
    /// of this identity; else nothing. Durable when it returns.
    fn acknowledge<'a>(
        &'a self,
        key: &'a Key,
        uuid: Uuid,
        done: Done,
    ) -> BoxFuture<'a, Result<(), StoreError>>;
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
            self.put(object.deleted());
            true
        })
    }

    /// Puts an object in, as an agent's `apply` does: see [`MemoryStore::apply_all`].
    pub fn apply(&self, object: Wanted) {
        self.apply_all([object]);
    }

    /// Puts objects in: a changed one gets the next generation, one whose name is being deleted waits as the tombstone's
    /// successor.
    pub fn apply_all(&self, objects: impl IntoIterator<Item = Wanted>) {
        self.change(|set| {
            let merge = |object: Wanted| match set.get(&object.key()) {
                None => object,
                Some(old) if old.deleting => old.with_successor(object),
                Some(old) => old.next(object),
            };
            set.with_all(objects.into_iter().map(merge))
        });
    }

    /// Changes one object in place, such as its requests; answers whether it is there.
    pub fn edit(&self, key: &Key, edit: impl FnOnce(&mut Wanted)) -> bool {
        let found = self.snapshot().get(key).map(|object| (**object).clone());
        found.is_some_and(|mut object| {
            edit(&mut object);
            self.put(object);
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
            self.change(|set| set.forget(key, uuid));
            Ok(())
        })
    }

    fn acknowledge<'a>(
        &'a self,
        key: &'a Key,
        uuid: Uuid,
        done: Done,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            self.change(|set| match set.get(key) {
                Some(object) if object.uuid == uuid => set.with(done.record(object)),
                Some(_) | None => set.clone(),
            });
            Ok(())
        })
    }
}
