//! A reconciler over drivers, and objects for it.

use std::{sync::Arc, time::Duration};

use drivers_api::{HostId, Uuid};
use reconciler::{
    Drivers, Reconciler, Settings,
    status::Phase,
    store::MemoryStore,
    wanted::{Key, Kind, ObjectName, Wanted, WantedSpec},
};
use serde_json::{Value, json};
use tokio::time::Instant;

/// The node of every bench.
pub(crate) fn node() -> HostId {
    HostId::new(Uuid::from_bytes([0x42; 16]).expect("not nil"))
}

/// A reconciler with its store.
pub(crate) struct Rig {
    pub(crate) store: Arc<MemoryStore>,
    pub(crate) reconciler: Reconciler,
}

impl Rig {
    /// Over these drivers. Resyncs only when asked for by `resync`.
    pub(crate) fn new(drivers: Drivers, resync: Duration) -> Self {
        let store = Arc::new(MemoryStore::default());
        let mut settings = Settings::new(node());
        settings.resync = resync;
        let reconciler = Reconciler::start(Arc::clone(&store) as _, drivers, settings);
        Self { store, reconciler }
    }

    /// Waits until these objects are Ready; answers how long that took.
    pub(crate) async fn ready(&self, keys: &[Key]) -> Duration {
        let begun = Instant::now();
        let mut events = self.reconciler.subscribe();
        let mut left: std::collections::BTreeSet<Key> = keys.iter().cloned().collect();
        loop {
            left.retain(|key| {
                self.reconciler.status(key).is_none_or(|status| status.phase != Phase::Ready)
            });
            if left.is_empty() {
                return begun.elapsed();
            }
            assert!(
                begun.elapsed() < Duration::from_secs(120),
                "not ready: {:?}",
                left.first().and_then(|key| self.reconciler.status(key))
            );
            // An event, or a look now and then where some were missed.
            drop(tokio::time::timeout(Duration::from_millis(20), events.recv()).await);
        }
    }

    /// Marks objects as to be deleted and waits until they are gone.
    pub(crate) async fn remove(&self, keys: &[Key]) {
        for key in keys {
            self.store.delete(key);
        }
        let begun = Instant::now();
        use reconciler::store::WantedStore;
        while keys.iter().any(|key| self.store.snapshot().get(key).is_some()) {
            assert!(begun.elapsed() < Duration::from_secs(120), "not gone");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// A key by text.
pub(crate) fn key(kind: Kind, name: &str) -> Key {
    let name: ObjectName = name.parse().expect("a good name");
    Key::new(kind, name)
}

/// An object from the `spec` of a manifest.
pub(crate) fn wanted(kind: Kind, name: &str, spec: &Value) -> Wanted {
    let mut bytes = [kind as u8 + 1; 16];
    for (at, byte) in name.bytes().rev().take(12).enumerate() {
        if let Some(place) = bytes.get_mut(15 - at) {
            *place = byte;
        }
    }
    let uuid = Uuid::from_bytes(bytes).expect("not nil").to_string();
    let spec: WantedSpec = serde_json::from_value(json!({ "kind": kind.as_str(), "spec": spec }))
        .expect("a good spec");
    let mut document = json!({ "uuid": uuid, "name": name, "generation": 1 });
    let spec = serde_json::to_value(spec).expect("a spec is JSON");
    if let (Some(document), Some(spec)) = (document.as_object_mut(), spec.as_object()) {
        document.extend(spec.clone());
    }
    serde_json::from_value(document).expect("a good object")
}
