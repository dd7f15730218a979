//! The handle of a running reconciler.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use drivers_api::{Error, Hypervisor, ObjectRef, VmId};
use tokio::{sync::broadcast, time::timeout};

use crate::{
    allocate::Sources,
    check::check,
    drivers::Drivers,
    engine::Engine,
    index::Index,
    plan::{self, Memory, Step, Verdict, World},
    resolve::{network_spec, port_id},
    settings::Settings,
    status::{Refusal, Status, StatusEvent, Unclaimed},
    store::WantedStore,
    tasks,
    wanted::{Key, Kind, ObjectName, Wanted, WantedSet, WantedSpec},
};

/// How long a shutdown waits for running steps.
const SHUTDOWN: Duration = Duration::from_secs(5);

/// A running reconciler. Cheap to clone; when the last clone is dropped it ends at once, as in a crash. VMs stay.
#[derive(Clone)]
pub struct Reconciler {
    handle: Arc<Handle>,
}

/// Ends the engine when nobody holds it any more.
struct Handle(Arc<Engine>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.kill();
    }
}

impl std::fmt::Debug for Reconciler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let engine = &self.handle.0;
        f.debug_struct("Reconciler")
            .field("drivers", &engine.drivers)
            .field("settings", &engine.settings)
            .finish_non_exhaustive()
    }
}

impl Reconciler {
    /// Starts reconciling on the current tokio runtime.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    #[must_use]
    pub fn start(store: Arc<dyn WantedStore>, drivers: Drivers, settings: Settings) -> Self {
        let engine = Arc::new(Engine::new(store, drivers, settings));
        tasks::start(&engine);
        Self { handle: Arc::new(Handle(engine)) }
    }

    fn engine(&self) -> &Arc<Engine> {
        &self.handle.0
    }

    /// Whether a set may become the wanted state; nothing is asked of the host. Only what differs from the present state
    /// is checked, and each refusal names an object that differs. Empty: it may.
    #[must_use]
    pub fn check(&self, proposed: &WantedSet) -> Vec<Refusal> {
        check(self.engine(), proposed)
    }

    /// The steps that would make the host as `proposed`, deletions first. Looks at the host and changes nothing. What is
    /// not there yet is taken to be made as wanted, so that the steps of all objects are shown.
    ///
    /// # Errors
    /// When a driver that an object needs which differs from the present state cannot be asked.
    pub async fn plan(&self, proposed: &WantedSet) -> Result<Vec<Step>, Error> {
        let engine = self.engine();
        self.look().await;
        let index = Index::of(proposed);
        let (known, mut removals, mut makes) = (engine.store.snapshot(), Vec::new(), Vec::new());
        let differs: std::collections::BTreeSet<Key> = known.diff(proposed).into_iter().collect();
        for object in proposed.iter() {
            let documents = std::iter::once(&**object).chain(object.successor.as_deref());
            for document in documents {
                let plan = plan_one(engine, proposed, &index, document);
                if let Verdict::Unknown(error) = &plan.verdict
                    && differs.contains(&document.key())
                    && plan.steps.is_empty()
                {
                    return Err(repeat(error));
                }
                let steps = plan.steps.into_iter().map(|planned| planned.step);
                if document.deleting { &mut removals } else { &mut makes }.push(steps);
            }
        }
        // Deletions in the reverse of the order in which things are made.
        Ok(removals.into_iter().rev().chain(makes).flatten().collect())
    }

    /// Lists everything; each driver is asked once, however many ask for it.
    async fn look(&self) -> BTreeMap<String, Arc<Error>> {
        let engine = self.engine();
        let since = engine.stamp();
        let all = engine.listers.iter().map(|lister| async move {
            let failure = lister.refresh(engine, since).await;
            failure.map(|error| (lister.driver.to_string(), error))
        });
        futures_util::future::join_all(all).await.into_iter().flatten().collect()
    }

    /// The status of an object; `None` when it is not wanted, or was accepted a moment ago.
    #[must_use]
    pub fn status(&self, key: &Key) -> Option<Status> {
        self.engine().board().get(key).cloned()
    }

    /// The statuses of all objects, by kind and name.
    #[must_use]
    pub fn statuses(&self) -> Vec<Status> {
        self.engine().board().all().cloned().collect()
    }

    /// What happens from now on. A subscriber that falls behind by 4096 events misses some, and is told how many.
    #[must_use]
    pub fn subscribe(&self) -> broadcast::Receiver<StatusEvent> {
        self.engine().events.subscribe()
    }

    /// What is on the host with this node's mark and wanted by nobody. Images are a cache and carry no mark.
    ///
    /// # Errors
    /// When a driver cannot be asked.
    pub async fn unclaimed(&self) -> Result<Vec<Unclaimed>, Error> {
        if let Some((_, error)) = self.look().await.into_iter().next() {
            return Err(repeat(&error));
        }
        let engine = self.engine();
        let host = engine.settings.host;
        Ok(engine.with_world(|world| {
            let mut all = Vec::new();
            let wanted = |uuid| world.index.owner(uuid).is_some();
            let mut add = |driver: &str, object: ObjectRef, name: Option<String>| {
                all.push(Unclaimed { driver: driver.to_owned(), object, name });
            };
            for (driver, vm) in world.seen.all_vms() {
                if vm.mark.node == host && !wanted(vm.uuid.uuid()) {
                    let name = vm.spec.as_ref().map(|spec| spec.name.to_string());
                    add(driver, ObjectRef::Vm(vm.uuid), name);
                }
            }
            for (driver, network) in world.seen.all_networks() {
                if network.mark.node == host && !wanted(network.uuid.uuid()) {
                    let name = network.spec.as_ref().map(|spec| spec.name.to_string());
                    add(driver, ObjectRef::Network(network.uuid), name);
                }
            }
            for (driver, port) in world.seen.all_ports() {
                let owner = port.spec.as_ref().map(|spec| spec.vm_uuid.uuid());
                let claimed =
                    owner.is_some_and(wanted) || world.index.port_owner(port.uuid).is_some();
                if port.mark.node == host && !claimed {
                    let name = port.spec.as_ref().map(|spec| spec.name.to_string());
                    add(driver, ObjectRef::Port(port.uuid), name);
                }
            }
            for (driver, volume) in world.seen.all_volumes() {
                if volume.mark.node == host && !wanted(volume.uuid.uuid()) {
                    let name = volume.spec.as_ref().map(|spec| spec.name.to_string());
                    add(driver, ObjectRef::Volume(volume.uuid), name);
                }
            }
            all
        }))
    }

    /// The hypervisor and the identity of an instance, for its console and log. `None` when no such instance is wanted or
    /// its driver is not there.
    #[must_use]
    pub fn vm(&self, name: &ObjectName) -> Option<(Arc<dyn Hypervisor>, VmId)> {
        let engine = self.engine();
        let key = Key::new(Kind::Instance, name.clone());
        let object = Arc::clone(engine.store.snapshot().get(&key)?);
        let WantedSpec::Instance(spec) = &object.spec else { return None };
        let (_, driver) = engine.drivers.find_hypervisor(spec.driver.as_deref())?;
        Some((Arc::clone(driver), VmId::new(object.uuid)))
    }

    /// Ends reconciling: no new step is begun, running ones are cancelled and waited for a short time. VMs stay.
    pub async fn shutdown(&self) {
        let engine = self.engine();
        engine.stop();
        if timeout(SHUTDOWN, engine.queue.idle()).await.is_err() {
            tracing::warn!("some driver calls did not end; they are left to the next start");
        }
        engine.kill();
    }
}

/// The plan of one document of a proposed set, as if all others were as wanted.
fn plan_one(engine: &Engine, set: &WantedSet, index: &Index, object: &Wanted) -> plan::Plan {
    let seen = engine.seen();
    let world = World {
        wanted: set,
        index,
        seen: &seen,
        drivers: &engine.drivers,
        settings: &engine.settings,
        ready: &|key| set.get(key).is_some_and(|object| object.live().is_some()),
        in_use: &|_| None,
        assume: true,
    };
    let memory = memory(engine, &world, object);
    plan::plan(&world, &memory, object)
}

/// What is remembered of an instance, as far as a plan that is only shown needs it.
fn memory(engine: &Engine, world: &World<'_>, object: &Wanted) -> Memory {
    let WantedSpec::Instance(spec) = &object.spec else { return Memory::empty() };
    let (told, asked) = engine.with_note(&object.key(), |note| (note.told.clone(), note.asked));
    let allocator = engine.allocator();
    let addresses = spec.nics.iter().filter_map(|nic| {
        let key = Key::new(Kind::Network, nic.network.clone());
        let port = port_id(object.uuid, &nic.name)?;
        let document = world.wanted.get(&key)?;
        let WantedSpec::Network(network) = &document.spec else { return None };
        let network = network_spec(document, network).ok()?;
        let (index, seen) = (world.index, world.seen);
        let from = Sources { index, seen, network: &network, key: &key };
        Some((port, allocator.peek(from, port, nic)))
    });
    Memory { addresses: Ok(addresses.collect()), told, asked, ..Memory::empty() }
}

/// An error that is kept elsewhere, once more.
pub(crate) fn repeat(error: &Error) -> Error {
    let copy = Error::new(
        error.kind(),
        error.operation().to_owned(),
        error.object(),
        error.chain_reason(),
    );
    match error.remedy() {
        Some(remedy) => copy.with_remedy(remedy.to_owned()),
        None => copy,
    }
}

/// An error's reason with its causes.
trait ChainReason {
    fn chain_reason(&self) -> String;
}

impl ChainReason for Error {
    fn chain_reason(&self) -> String {
        let mut text = self.reason().to_owned();
        let mut next = std::error::Error::source(self);
        while let Some(cause) = next {
            text.push_str(": ");
            text.push_str(&cause.to_string());
            next = cause.source();
        }
        text
    }
}
