//! The state of a running reconciler, and the plans made from it.
//!
//! Locks are taken in the order of the fields and never held across an `await`.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    future::Future,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use drivers_api::{Error, PortId, VmId, VmPower, VmState, VmStatus};
use tokio::{
    sync::{Notify, Semaphore, broadcast, watch},
    task::JoinHandle,
    time::Instant,
};

use crate::{
    admit::{Ledger, Load},
    allocate::{Allocator, Sources},
    backoff::Dice,
    board::{Board, is_ready},
    drivers::Drivers,
    gate::Gate,
    index::Index,
    listers::Lister,
    note::Note,
    plan::{self, Memory, Plan, World, ended_by_itself},
    queue::Queue,
    reconciler::repeat,
    resolve::{network_driver, network_spec, port_id},
    seen::{Listing, Seen, Stamp},
    settings::Settings,
    status::{Status, StatusEvent},
    store::WantedStore,
    wanted::{InstanceSpec, Key, Kind, Wanted, WantedSet, WantedSpec},
};

/// The wanted state as the engine follows it.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) set: WantedSet,
    pub(crate) index: Index,
}

/// Everything that the tasks of a reconciler share.
pub(crate) struct Engine {
    pub(crate) store: Arc<dyn WantedStore>,
    pub(crate) drivers: Drivers,
    pub(crate) settings: Settings,
    known: RwLock<Known>,
    /// Which objects a running pass may be using, with the objects whose passes these are.
    uses: Mutex<HashMap<Key, BTreeSet<Key>>>,
    seen: Mutex<Seen>,
    notes: Mutex<HashMap<Key, Note>>,
    allocator: Mutex<Allocator>,
    ledger: Mutex<Ledger>,
    board: Mutex<Board>,
    pub(crate) queue: Queue,
    pub(crate) gate: Arc<Gate>,
    pub(crate) places: Arc<Semaphore>,
    pub(crate) dice: Dice,
    pub(crate) listers: Vec<Lister>,
    /// Somebody wants everything compared with what was listed.
    pub(crate) compare: Notify,
    /// How many lists are on their way.
    pub(crate) listing: watch::Sender<usize>,
    pub(crate) events: broadcast::Sender<StatusEvent>,
    stamps: AtomicU64,
    stopping: AtomicBool,
    dead: watch::Sender<bool>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    pub(crate) fn new(store: Arc<dyn WantedStore>, drivers: Drivers, settings: Settings) -> Self {
        let set = store.snapshot();
        let known = Known { index: Index::of(&set), set };
        let until = Instant::now() + settings.start_order_wait;
        Self {
            listers: Lister::all_of(&drivers),
            gate: Gate::new(settings.parallel_starts, until),
            places: Arc::new(Semaphore::new(settings.workers.max(1))),
            seen: Mutex::new(Seen::new(settings.host)),
            ledger: Mutex::new(Ledger::new(settings.capacity)),
            known: RwLock::new(known),
            events: broadcast::Sender::new(4096),
            dead: watch::Sender::new(false),
            listing: watch::Sender::new(0),
            uses: Mutex::default(),
            notes: Mutex::default(),
            allocator: Mutex::default(),
            board: Mutex::default(),
            queue: Queue::default(),
            dice: Dice::new(settings.jitter_seed),
            compare: Notify::new(),
            stamps: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            store,
            drivers,
            settings,
        }
    }

    pub(crate) fn known(&self) -> RwLockReadGuard<'_, Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn known_mut(&self) -> RwLockWriteGuard<'_, Known> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn seen(&self) -> MutexGuard<'_, Seen> {
        lock(&self.seen)
    }

    pub(crate) fn allocator(&self) -> MutexGuard<'_, Allocator> {
        lock(&self.allocator)
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        lock(&self.ledger)
    }

    pub(crate) fn board(&self) -> MutexGuard<'_, Board> {
        lock(&self.board)
    }

    pub(crate) fn with_note<T>(&self, key: &Key, with: impl FnOnce(&mut Note) -> T) -> T {
        with(lock(&self.notes).entry(key.clone()).or_default())
    }

    /// Drops what is remembered of an object, unless a call of it is still out.
    pub(crate) fn drop_note(&self, key: &Key) {
        let mut notes = lock(&self.notes);
        let abandoned = notes.remove(key).map(|note| note.abandoned).unwrap_or_default();
        if !abandoned.is_empty() {
            notes.insert(key.clone(), Note { abandoned, ..Note::default() });
        }
    }

    /// A new stamp: later than all before it.
    pub(crate) fn stamp(&self) -> Stamp {
        self.stamps.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// No new step from now on.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.queue.cancel_all();
    }

    /// Ends all tasks where they stand.
    pub(crate) fn kill(&self) {
        self.stop();
        self.dead.send_replace(true);
    }

    /// Runs a future until it ends, or the engine does; it is dropped then, and the answer is `None`.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<Option<T>> {
        let mut dead = self.dead.subscribe();
        tokio::spawn(async move {
            tokio::select! {
                biased;
                _ = dead.wait_for(|dead| *dead) => None,
                value = future => Some(value),
            }
        })
    }

    /// As `spawn`, for what nobody waits for.
    pub(crate) fn run(&self, future: impl Future<Output = ()> + Send + 'static) {
        drop(self.spawn(future));
    }

    /// Tells the subscribers. Without any it is told to nobody.
    pub(crate) fn tell(&self, event: StatusEvent) {
        drop(self.events.send(event));
    }

    /// Wakes all of these.
    pub(crate) fn wake_all<'a>(&self, keys: impl IntoIterator<Item = &'a Key>) {
        let now = Instant::now();
        for key in keys {
            self.queue.wake(key, now);
        }
    }

    /// Whether the host side of an object is as wanted.
    fn is_ready(&self, known: &Known, key: &Key) -> bool {
        let Some(object) = known.set.get(key) else { return false };
        let board = self.board();
        let status = board.get(key);
        !object.deleting
            && is_ready(status)
            && status.is_some_and(|status| {
                status.uuid == object.uuid && status.observed_generation == object.generation
            })
    }

    /// Who may be using an object in a running pass.
    fn user_of(&self, key: &Key) -> Option<Key> {
        lock(&self.uses).get(key).and_then(|users| users.first().cloned())
    }

    /// A pass begins: what it may use is marked as in use. The document and the mark go together: who deletes one of these
    /// objects sees either the mark, or a wanted state in which this pass sees the deletion.
    pub(crate) fn begin(self: &Arc<Self>, key: &Key) -> Option<(Arc<Wanted>, Using)> {
        let known = self.known();
        let object = Arc::clone(known.set.get(key)?);
        let named = object.references();
        let mut uses = lock(&self.uses);
        for other in &named {
            uses.entry(other.clone()).or_default().insert(key.clone());
        }
        drop(uses);
        let using = Using { engine: Arc::clone(self), key: key.clone(), named };
        Some((object, using))
    }

    /// Makes something of the state as it is.
    pub(crate) fn with_world<T>(&self, with: impl FnOnce(&World<'_>) -> T) -> T {
        let known = self.known();
        let seen = self.seen();
        let ready = |key: &Key| self.is_ready(&known, key);
        let in_use = |key: &Key| self.user_of(key);
        with(&World {
            wanted: &known.set,
            index: &known.index,
            seen: &seen,
            drivers: &self.drivers,
            settings: &self.settings,
            ready: &ready,
            in_use: &in_use,
            assume: false,
        })
    }

    /// The plan of an object as things are, with the document that it is for.
    pub(crate) fn plan_of(&self, key: &Key) -> Option<(Arc<Wanted>, Plan)> {
        self.with_world(|world| {
            let object = Arc::clone(world.wanted.get(key)?);
            let memory = self.memory(world, &object);
            let plan = plan::plan(world, &memory, &object);
            Some((object, plan))
        })
    }

    /// What is remembered of an instance, brought up to what was seen of its VM.
    fn memory(&self, world: &World<'_>, object: &Wanted) -> Memory {
        let WantedSpec::Instance(spec) = &object.spec else { return Memory::empty() };
        let key = object.key();
        let vm = VmId::new(object.uuid);
        let driver = world.drivers.find_hypervisor(spec.driver.as_deref()).map(|(id, _)| id);
        let look = driver.map(|driver| world.seen.vm(driver, &vm));
        let unknown = look.as_ref().is_none_or(|look| look.unknown().is_some());
        let status = look.as_ref().and_then(|look| look.there());
        let runs = status.is_some_and(|status| status.state != VmState::Stopped);
        let mut memory = self.with_note(&key, |note| {
            if !runs && !unknown {
                note.told.clear();
            }
            let ended = status.filter(|status| ended_by_itself(status));
            let hold_start = ended
                .filter(|_| spec.power == VmPower::Running && !object.deleting)
                .map(|_| note.crashes.seen(&self.settings, &self.dice));
            let ports = note.ports.clone();
            let (told, asked) = (note.told.clone(), note.asked);
            Memory { told, hold_start, asked, ports, ..Memory::empty() }
        });
        if !unknown {
            self.count_load(vm, spec, status.filter(|_| runs));
        }
        if !object.deleting {
            memory.room = self.ledger().room(vm, Load::of(spec)).map_err(Arc::new);
            memory.addresses = self.addresses(world, object, spec).map_err(Arc::new);
        }
        memory
    }

    /// Counts what a VM takes, if it runs.
    fn count_load(&self, vm: VmId, spec: &InstanceSpec, running: Option<&Arc<VmStatus>>) {
        match running {
            Some(status) => {
                let applied = status.spec.as_ref();
                let load = applied.map_or_else(
                    || Load::of(spec),
                    |applied| Load {
                        cpus: applied.cpu_count.get().into(),
                        memory_mib: applied.memory_mib.get(),
                    },
                );
                self.ledger().record(vm, load);
            }
            None => {
                let starved = self.ledger().release(vm);
                self.wake_all(&starved);
            }
        }
    }

    /// The addresses of an instance's ports.
    fn addresses(
        &self,
        world: &World<'_>,
        object: &Wanted,
        spec: &InstanceSpec,
    ) -> Result<BTreeMap<PortId, Vec<std::net::IpAddr>>, Error> {
        let mut all = BTreeMap::new();
        let mut allocator = self.allocator();
        for nic in &spec.nics {
            let key = Key::new(Kind::Network, nic.network.clone());
            let Some(port) = port_id(object.uuid, &nic.name) else { continue };
            let Some(document) = world.wanted.get(&key) else { continue };
            let WantedSpec::Network(network) = &document.spec else { continue };
            // Before all ports were seen once, a free address may be one that a port has.
            let driver = network_driver(world, network)?;
            if let Some(error) = world.seen.unlisted(Listing::Ports, driver) {
                return Err(repeat(&error));
            }
            let network = network_spec(document, network)?;
            let (index, seen) = (world.index, world.seen);
            let from = Sources { index, seen, network: &network, key: &key };
            all.insert(port, allocator.assign(from, port, nic)?);
        }
        Ok(all)
    }

    /// Puts a status up, and wakes who waited for it. `others`: those that name the object too, when it became ready or its
    /// host side changed.
    pub(crate) fn publish(&self, status: Status, others: bool) {
        let key = status.key.clone();
        let news = self.board().put(status.clone());
        if news.changed {
            self.tell(StatusEvent::Changed(status));
        }
        self.wake_all(&news.waiters);
        if others || news.readiness {
            let users: Vec<Key> = self.known().index.users(&key).cloned().collect();
            self.wake_all(&users);
        }
    }

    /// Shows how far a long step is.
    pub(crate) fn progress(&self, key: &Key, message: String) {
        let status = self.board().get(key).cloned();
        if let Some(status) = status {
            self.publish(Status { message, ..status }, false);
        }
    }
}

/// What a running pass uses; no longer when dropped.
pub(crate) struct Using {
    engine: Arc<Engine>,
    key: Key,
    named: Vec<Key>,
}

impl Drop for Using {
    fn drop(&mut self) {
        {
            let mut uses = lock(&self.engine.uses);
            for named in &self.named {
                if let Some(users) = uses.get_mut(named) {
                    users.remove(&self.key);
                    if users.is_empty() {
                        uses.remove(named);
                    }
                }
            }
        }
        // Who waited for the end of the use is told.
        let waiters = self.engine.board().end_of_use(&self.key, &self.named);
        self.engine.wake_all(&waiters);
    }
}
