//! One change at a time to one object.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use drivers_api::Uuid;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

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
