//! Which VM starts next: at most so many at once, and in the order of `start_order`.
//!
//! After the start of the agent an instance waits for those of a lower order, as long as these are on their way: one that
//! fails, or is taking its time beyond the window, is not waited for. A start that takes long gives its place up.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::{sync::oneshot, time::Instant};

use crate::wanted::Key;

/// Lets starts through.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: usize,
    /// Who waits, by order and arrival.
    waiting: BTreeMap<(i32, u64), oneshot::Sender<()>>,
    arrivals: u64,
    /// Instances that are expected to start, by order.
    expected: BTreeMap<i32, BTreeSet<Key>>,
    orders: HashMap<Key, i32>,
    until: Instant,
}

/// A place in the gate; given back when dropped.
#[derive(Debug)]
pub(crate) struct Pass(Arc<Gate>);

impl Drop for Pass {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.free += 1;
        state.admit();
    }
}

impl State {
    /// Lets in who may come: the lowest order first, none before an expected one of a lower order.
    fn admit(&mut self) {
        let ordered = Instant::now() < self.until;
        while self.free > 0 {
            let Some(first) = self.waiting.first_entry() else { return };
            let (order, _) = *first.key();
            let lowest = self.expected.first_key_value().map(|(lowest, _)| *lowest);
            if ordered && lowest.is_some_and(|lowest| lowest < order) {
                return;
            }
            // Who has gone meanwhile takes no place.
            if first.remove().send(()).is_ok() {
                self.free -= 1;
            }
        }
    }
}

impl Gate {
    pub(crate) fn new(places: usize, until: Instant) -> Arc<Self> {
        let state = State {
            free: places.max(1),
            waiting: BTreeMap::new(),
            arrivals: 0,
            expected: BTreeMap::new(),
            orders: HashMap::new(),
            until,
        };
        Arc::new(Self { state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An instance will start soon.
    pub(crate) fn expect(&self, key: &Key, order: i32) {
        let mut state = self.lock();
        if Instant::now() < state.until {
            state.expected.entry(order).or_default().insert(key.clone());
            state.orders.insert(key.clone(), order);
        }
    }

    /// An instance runs, or is not waited for any longer.
    pub(crate) fn settled(&self, key: &Key) {
        let mut state = self.lock();
        let Some(order) = state.orders.remove(key) else { return };
        if let Some(keys) = state.expected.get_mut(&order) {
            keys.remove(key);
            if keys.is_empty() {
                state.expected.remove(&order);
            }
        }
        state.admit();
    }

    /// Waits for a place. Dropped only with the whole engine: a place that was just given would be lost.
    pub(crate) async fn enter(self: &Arc<Self>, order: i32) -> Pass {
        let (sender, mut receiver) = oneshot::channel();
        let until = {
            let mut state = self.lock();
            state.arrivals += 1;
            let arrival = state.arrivals;
            state.waiting.insert((order, arrival), sender);
            state.admit();
            state.until
        };
        let ordered = Instant::now() < until;
        tokio::select! {
            biased;
            _ = &mut receiver => {}
            () = tokio::time::sleep_until(until), if ordered => {
                self.lock().admit();
                // The sender is dropped only together with the gate, which this future holds.
                drop(receiver.await);
            }
        }
        Pass(Arc::clone(self))
    }
}
