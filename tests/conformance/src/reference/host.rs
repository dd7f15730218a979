//! The machine that exists in memory only.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use drivers_api::{Context, Error, ErrorKind, EventStream, HostId, HostInfo, Uuid};
use tokio::sync::watch;

use super::{
    Op,
    events::{self, Hub},
    hypervisor::ReferenceHypervisor,
    image::{Cache, ReferenceImage},
    links::Links,
    network::ReferenceNetwork,
    vm::Machines,
    volume::{Disks, ReferenceVolume},
};
use crate::Census;

/// When, in the course of a call, a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Before any effect.
    Before,
    /// After the first of its effects; a call with one effect: before it.
    HalfWay,
    /// After all effects.
    After,
}

/// A fault to come.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Fault {
    /// The call that fails.
    pub op: Op,
    /// Only calls for this object; `None`: for any.
    pub object: Option<Uuid>,
    /// The error's kind.
    pub kind: ErrorKind,
    /// When in the call.
    pub when: When,
    /// How many calls fail; `None`: all, until [`Host::heal`].
    pub times: Option<u64>,
}

impl Fault {
    /// The next call of `op` fails before any effect.
    #[must_use]
    pub const fn new(op: Op, kind: ErrorKind) -> Self {
        Self { op, object: None, kind, when: When::Before, times: Some(1) }
    }

    /// Only calls for this object.
    #[must_use]
    pub const fn on(mut self, object: Uuid) -> Self {
        self.object = Some(object);
        self
    }

    /// At another time in the call.
    #[must_use]
    pub const fn at(mut self, when: When) -> Self {
        self.when = when;
        self
    }

    /// Another number of times.
    #[must_use]
    pub const fn times(mut self, times: u64) -> Self {
        self.times = Some(times);
        self
    }

    /// Until [`Host::heal`].
    #[must_use]
    pub const fn for_ever(mut self) -> Self {
        self.times = None;
        self
    }
}

/// A machine that exists in memory only. Clones are the same machine.
#[derive(Clone)]
pub struct Host(Arc<Shared>);

struct Shared {
    node: HostId,
    state: Mutex<State>,
    /// One call at a time for an object.
    gates: Mutex<BTreeMap<Uuid, Arc<tokio::sync::Mutex<()>>>>,
    /// Counts up when something changed, so that who waits looks again.
    changes: watch::Sender<u64>,
}

/// What the machine holds.
#[derive(Default)]
pub(super) struct State {
    pub(super) machines: Machines,
    pub(super) links: Links,
    pub(super) disks: Disks,
    pub(super) cache: Cache,
    pub(super) vm_events: Hub,
    pub(super) network_events: Hub,
    pub(super) volume_events: Hub,
    faults: Vec<Fault>,
    hangs: Vec<(Op, Option<Uuid>)>,
    deaf: Vec<(Op, Option<Uuid>)>,
    /// Each call with a number that this divides is deaf too; 0: none.
    deaf_every: u64,
    begun: u64,
    /// How many calls were deaf.
    hung: u64,
    /// How often all hangs were ended.
    releases: u64,
    latency: BTreeMap<Option<Op>, Duration>,
    calls: BTreeMap<Op, u64>,
    writes: u64,
    log: Vec<(Op, Option<Uuid>)>,
    down: bool,
}

impl State {
    /// Counts one effect on the machine.
    pub(super) const fn wrote(&mut self) {
        self.writes += 1;
    }
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("node", &self.0.node).finish_non_exhaustive()
    }
}

impl Host {
    /// An empty machine. Its node is the same each time.
    #[must_use]
    #[expect(
        clippy::expect_used,
        clippy::missing_panics_doc,
        reason = "a constant that is not nil"
    )]
    pub fn new() -> Self {
        let node = Uuid::from_bytes(*b"reference-host-1").expect("it is not nil");
        Self::with_node(HostId::new(node))
    }

    /// An empty machine of a node.
    #[must_use]
    pub fn with_node(node: HostId) -> Self {
        let (changes, _) = watch::channel(0);
        let (state, gates) = (Mutex::default(), Mutex::default());
        Self(Arc::new(Shared { node, state, gates, changes }))
    }

    /// The node whose mark the drivers set.
    #[must_use]
    pub fn node(&self) -> HostId {
        self.0.node
    }

    /// A hypervisor driver with an empty memory. It has the whole spec, console and resize abilities;
    /// [`ReferenceHypervisor::without_whole_spec`] takes the first away.
    #[must_use]
    pub fn hypervisor(&self) -> Arc<ReferenceHypervisor> {
        Arc::new(ReferenceHypervisor::new(self.clone()))
    }

    /// A network driver with an empty memory, for all types of network.
    #[must_use]
    pub fn network(&self) -> Arc<ReferenceNetwork> {
        Arc::new(ReferenceNetwork::new(self.clone()))
    }

    /// A volume driver with an empty memory.
    #[must_use]
    pub fn volume(&self) -> Arc<ReferenceVolume> {
        Arc::new(ReferenceVolume::new(self.clone()))
    }

    /// An image driver with an empty memory.
    #[must_use]
    pub fn image(&self) -> Arc<ReferenceImage> {
        Arc::new(ReferenceImage::new(self.clone()))
    }

    /// Whether the host answers its drivers at all. While it is down, every call fails as unavailable.
    pub fn set_down(&self, down: bool) {
        self.lock().down = down;
    }

    /// Adds a fault to come.
    pub fn inject(&self, fault: Fault) {
        self.lock().faults.push(fault);
    }

    /// The next call of `op` fails with `kind` before any effect.
    pub fn fail_next(&self, op: Op, kind: ErrorKind) {
        self.inject(Fault::new(op, kind));
    }

    /// Takes back all faults that are still to come.
    pub fn heal(&self) {
        self.lock().faults.clear();
    }

    /// Calls of `op` for `object` (`None`: for any) hang from now on, until [`Host::release`]. They still end at their
    /// deadline or cancellation.
    pub fn hang(&self, op: Op, object: Option<Uuid>) {
        self.lock().hangs.push((op, object));
    }

    /// Calls of `op` for `object` (`None`: for any) do not return from now on, until [`Host::release`]: neither their
    /// deadline nor a cancellation ends them, as a driver must not behave. They have their effects when released.
    pub fn hang_deaf(&self, op: Op, object: Option<Uuid>) {
        self.lock().deaf.push((op, object));
    }

    /// Of the calls to come each `nth` never returns, as with [`Host::hang_deaf`]; 0: none.
    pub fn hang_every(&self, nth: u64) {
        let mut state = self.lock();
        (state.deaf_every, state.begun) = (nth, 0);
    }

    /// How many calls did not return before a [`Host::release`].
    #[must_use]
    pub fn hung(&self) -> u64 {
        self.lock().hung
    }

    /// No further call hangs; those that never return still do not, until [`Host::release`].
    pub fn stop_hanging(&self) {
        let mut state = self.lock();
        state.hangs.clear();
        state.deaf.clear();
        state.deaf_every = 0;
    }

    /// Ends all hangs; calls that hang go on.
    pub fn release(&self) {
        self.stop_hanging();
        self.lock().releases += 1;
        self.woken();
    }

    /// Each call takes this long before its first effect and again after its last, on tokio's clock.
    pub fn set_latency(&self, latency: Duration) {
        self.lock().latency.insert(None, latency);
    }

    /// As [`Host::set_latency`] for one call.
    pub fn set_latency_of(&self, op: Op, latency: Duration) {
        self.lock().latency.insert(Some(op), latency);
    }

    /// How many effects there were on the machine through its drivers.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.lock().writes
    }

    /// How many calls of `op` there were, failed ones included.
    #[must_use]
    pub fn calls(&self, op: Op) -> u64 {
        self.lock().calls.get(&op).copied().unwrap_or_default()
    }

    /// All calls that may write, in the order in which they began, since the last [`Host::take_log`].
    #[must_use]
    pub fn take_log(&self) -> Vec<(Op, Option<Uuid>)> {
        std::mem::take(&mut self.lock().log)
    }

    /// What is on the machine, by class: `vms`, `vmms`, `networks`, `ports`, `groups`, `volumes`, `attachments`,
    /// `images`, `temporary`.
    #[must_use]
    pub fn census(&self) -> Census {
        let mut census = Census::new();
        let state = self.lock();
        state.machines.count(&mut census);
        state.links.count(&mut census);
        state.disks.count(&mut census);
        state.cache.count(&mut census);
        census
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call begins: counts it, waits as long as it is slow or hangs, and fails where a fault strikes.
    pub(super) async fn begin(
        &self,
        cx: &Context,
        op: Op,
        object: Option<Uuid>,
    ) -> drivers_api::Result<Call> {
        let deaf = {
            let mut state = self.lock();
            *state.calls.entry(op).or_default() += 1;
            if !op.is_read() {
                state.log.push((op, object));
            }
            state.begun += 1;
            state.deaf_every != 0 && state.begun.is_multiple_of(state.deaf_every)
        };
        let mut call = Call { host: self.clone(), cx: cx.clone(), op, object, turn: None };
        if self.lock().down {
            return Err(call.error(ErrorKind::Unavailable, "the host does not answer"));
        }
        call.strike(When::Before)?;
        if deaf || matches(&self.lock().deaf, op, object) {
            call.be_deaf().await;
        }
        call.pause(true).await?;
        if let Some(object) = object.filter(|_| !op.is_read()) {
            call.turn = Some(call.turn(object).await?);
        }
        Ok(call)
    }

    /// Tells all who wait that something changed.
    pub(super) fn woken(&self) {
        self.0.changes.send_modify(|count| *count += 1);
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.0.changes.subscribe()
    }

    pub(super) async fn info(&self, cx: &Context, driver: &str) -> drivers_api::Result<HostInfo> {
        let call = self.begin(cx, Op::HostInfo, None).await?;
        call.end(HostInfo::new(Some(self.node()), "reference", driver)).await
    }

    pub(super) fn subscribe(&self, pick: impl Fn(&State) -> &Hub) -> EventStream {
        events::subscribe(pick(&self.lock()))
    }
}

/// A call in progress.
pub(super) struct Call {
    host: Host,
    cx: Context,
    op: Op,
    object: Option<Uuid>,
    /// Held until the call ends.
    turn: Option<Turn>,
}

/// The turn of one object.
pub(super) type Turn = tokio::sync::OwnedMutexGuard<()>;

impl Call {
    /// An await between two effects: here a future may be dropped, and a fault strikes half-way.
    pub(super) async fn between(&self) -> drivers_api::Result<()> {
        self.strike(When::HalfWay)?;
        self.bounded(tokio::task::yield_now()).await
    }

    /// The last await, after all effects.
    pub(super) async fn end<T>(self, value: T) -> drivers_api::Result<T> {
        self.strike(When::After)?;
        self.pause(false).await?;
        Ok(value)
    }

    /// Waits for the turn of an object; the turn ends when the answer is dropped.
    pub(super) async fn turn(&self, key: Uuid) -> drivers_api::Result<Turn> {
        let gate = Arc::clone(
            self.host
                .0
                .gates
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .entry(key)
                .or_default(),
        );
        self.bounded(gate.lock_owned()).await
    }

    /// Waits until a condition of the machine is no longer so.
    pub(super) async fn wait_while(&self, so: impl Fn() -> bool + Send) -> drivers_api::Result<()> {
        let mut changes = self.host.changes();
        self.bounded(async {
            // The sender lives as long as the host, which this call holds.
            while so() && changes.changed().await.is_ok() {}
        })
        .await
    }

    fn strike(&self, when: When) -> drivers_api::Result<()> {
        let mut state = self.host.lock();
        let hit = state.faults.iter_mut().find(|fault| {
            fault.op == self.op
                && fault.when == when
                && fault.times != Some(0)
                && (fault.object.is_none() || fault.object == self.object)
        });
        let Some(fault) = hit else { return Ok(()) };
        fault.times = fault.times.map(|times| times.saturating_sub(1));
        Err(self.error(fault.kind, "a fault was injected"))
    }

    /// Does not return before [`Host::release`], whatever the caller says.
    async fn be_deaf(&mut self) {
        let mut changes = self.host.changes();
        let before = {
            let mut state = self.host.lock();
            state.hung += 1;
            state.releases
        };
        // The sender lives as long as the host, which this call holds.
        while self.host.lock().releases == before && changes.changed().await.is_ok() {}
        self.cx = Context::new();
    }

    async fn pause(&self, may_hang: bool) -> drivers_api::Result<()> {
        let (latency, hangs) = {
            let state = self.host.lock();
            let latency = state.latency.get(&Some(self.op)).or_else(|| state.latency.get(&None));
            (latency.copied(), may_hang && self.hangs(&state))
        };
        self.bounded(async {
            match latency {
                Some(latency) if !latency.is_zero() => tokio::time::sleep(latency).await,
                Some(_) | None => tokio::task::yield_now().await,
            }
        })
        .await?;
        if !hangs {
            return Ok(());
        }
        self.wait_while(|| self.hangs(&self.host.lock())).await
    }

    fn hangs(&self, state: &State) -> bool {
        matches(&state.hangs, self.op, self.object)
    }

    /// Waits no longer than the caller allows.
    pub(super) async fn bounded<T>(
        &self,
        future: impl Future<Output = T>,
    ) -> drivers_api::Result<T> {
        // A timer fires up to a millisecond late: a deadline that has passed is seen here.
        let at = self.cx.deadline().map(tokio::time::Instant::from_std);
        if at.is_some_and(|at| at <= tokio::time::Instant::now()) {
            return Err(self.error(ErrorKind::Deadline, "the deadline passed"));
        }
        let deadline = async {
            match at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.cx.cancel().cancelled() => {
                Err(self.error(ErrorKind::Cancelled, "the caller cancelled the call"))
            }
            () = deadline => Err(self.error(ErrorKind::Deadline, "the deadline passed")),
            value = future => Ok(value),
        }
    }

    fn error(&self, kind: ErrorKind, reason: &str) -> Error {
        match self.object {
            Some(object) => Error::new(kind, self.op.as_str(), object, reason),
            None => Error::new(kind, self.op.as_str(), "the host", reason),
        }
    }
}

/// Whether a call is one of these; those of no object are all of their kind.
fn matches(all: &[(Op, Option<Uuid>)], op: Op, object: Option<Uuid>) -> bool {
    all.iter().any(|(one, of)| *one == op && (of.is_none() || *of == object))
}

/// An error of the reference driver.
pub(super) fn refuse(
    kind: ErrorKind,
    op: Op,
    object: impl std::fmt::Display,
    reason: impl std::fmt::Display,
) -> Error {
    Error::new(kind, op.as_str(), object, reason)
}
