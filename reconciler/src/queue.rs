//! Who is worked on next. One wake-up for an object, the earliest that was asked for; one worker for an object.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use drivers_api::CancelFlag;
use tokio::{sync::Notify, time::Instant};

use crate::wanted::Key;

/// The objects that wait, and those that are worked on.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    changed: Notify,
    idle: Notify,
}

#[derive(Debug, Default)]
struct State {
    due: BTreeSet<(Instant, Key)>,
    entries: HashMap<Key, Entry>,
    /// Counts events, to tell those before a look from those after it.
    clock: u64,
}

/// An object that waits or is worked on.
#[derive(Debug, Default)]
struct Entry {
    due: Option<Instant>,
    running: Option<CancelFlag>,
    /// The last event that came while it was worked on.
    event: Option<u64>,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has an object worked on at a time, or earlier where that was asked for. One that is worked on comes again after.
    pub(crate) fn wake(&self, key: &Key, at: Instant) {
        self.lock().wake(key, at);
        self.changed.notify_one();
    }

    /// As `wake`, now.
    pub(crate) fn wake_now(&self, key: &Key) {
        self.wake(key, Instant::now());
    }

    /// The host told something of an object. A look that begins later covers it.
    pub(crate) fn event(&self, key: &Key, delay: Duration) {
        let mut state = self.lock();
        state.clock += 1;
        let clock = state.clock;
        match state.entries.get_mut(key).filter(|entry| entry.running.is_some()) {
            Some(entry) => entry.event = Some(clock),
            None => state.wake(key, Instant::now() + delay),
        }
        drop(state);
        self.changed.notify_one();
    }

    /// The time of events, as of now.
    pub(crate) fn clock(&self) -> u64 {
        self.lock().clock
    }

    /// Ends the running calls of an object early.
    pub(crate) fn cancel(&self, key: &Key) {
        let state = self.lock();
        let flag = state.entries.get(key).and_then(|entry| entry.running.clone());
        drop(state);
        if let Some(flag) = flag {
            flag.cancel();
        }
    }

    /// Ends all running calls early.
    pub(crate) fn cancel_all(&self) {
        let flags: Vec<CancelFlag> =
            self.lock().entries.values().filter_map(|entry| entry.running.clone()).collect();
        for flag in flags {
            flag.cancel();
        }
    }

    /// Waits until no object is worked on.
    pub(crate) async fn idle(&self) {
        loop {
            let finished = self.idle.notified();
            if self.lock().entries.values().all(|entry| entry.running.is_none()) {
                return;
            }
            finished.await;
        }
    }

    /// The next object that is due. Cancel-safe.
    pub(crate) async fn next(&self) -> (Key, CancelFlag) {
        loop {
            let wait = {
                let mut state = self.lock();
                match state.due.first().map(|(at, _)| *at) {
                    Some(at) if at <= Instant::now() => {
                        if let Some((_, key)) = state.due.pop_first() {
                            let flag = CancelFlag::new();
                            let entry = state.entries.entry(key.clone()).or_default();
                            *entry = Entry { due: None, running: Some(flag.clone()), event: None };
                            return (key, flag);
                        }
                        None
                    }
                    first => first,
                }
            };
            let later = async {
                match wait {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            // Both arms only wait: what is due is looked up anew.
            tokio::select! {
                () = self.changed.notified() => {}
                () = later => {}
            }
        }
    }

    /// Takes an object that nobody works on, whether due or not; what was due stays so.
    pub(crate) fn claim(&self, key: &Key) -> bool {
        let mut state = self.lock();
        if state.entries.get(key).is_some_and(|entry| entry.running.is_some()) {
            return false;
        }
        let entry = state.entries.entry(key.clone()).or_default();
        entry.running = Some(CancelFlag::new());
        if let Some(at) = entry.due {
            state.due.remove(&(at, key.clone()));
        }
        true
    }

    /// Whether an object waits for its turn already.
    pub(crate) fn is_due(&self, key: &Key, by: Instant) -> bool {
        self.lock().entries.get(key).and_then(|entry| entry.due).is_some_and(|due| due <= by)
    }

    /// The work on an object is done; `looked` is the time of events at which its last look began.
    pub(crate) fn finish(&self, key: &Key, looked: u64, delay: Duration) {
        let mut state = self.lock();
        let Some(entry) = state.entries.get_mut(key) else { return };
        entry.running = None;
        let missed = entry.event.take().is_some_and(|event| event > looked);
        if missed {
            let at = Instant::now() + delay;
            entry.due = Some(entry.due.map_or(at, |due| due.min(at)));
        }
        match entry.due {
            Some(at) => {
                state.due.insert((at, key.clone()));
            }
            None => {
                state.entries.remove(key);
            }
        }
        drop(state);
        self.changed.notify_one();
        self.idle.notify_waiters();
    }
}

impl State {
    fn wake(&mut self, key: &Key, at: Instant) {
        let entry = self.entries.entry(key.clone()).or_default();
        if entry.due.is_some_and(|due| due <= at) {
            return;
        }
        let before = entry.due.replace(at);
        if entry.running.is_none() {
            if let Some(before) = before {
                self.due.remove(&(before, key.clone()));
            }
            self.due.insert((at, key.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wanted::Kind;

    fn key(name: &str) -> Key {
        Key::new(Kind::Instance, name.parse().unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn of_many_wake_ups_the_earliest_wins_and_there_is_one() {
        let (queue, begun) = (Queue::default(), Instant::now());
        for seconds in [30, 10, 20] {
            queue.wake(&key("a"), begun + Duration::from_secs(seconds));
        }
        let (got, _) = queue.next().await;
        assert_eq!((got, begun.elapsed().as_secs()), (key("a"), 10));
        queue.finish(&key("a"), 0, Duration::ZERO);
        let none = tokio::time::timeout(Duration::from_secs(100), queue.next()).await;
        assert!(none.is_err(), "a second wake-up was left over");
    }

    #[tokio::test(start_paused = true)]
    async fn an_object_that_is_worked_on_comes_again_after_and_not_beside() {
        let queue = Queue::default();
        queue.wake_now(&key("a"));
        queue.next().await;
        queue.wake_now(&key("a"));
        assert!(tokio::time::timeout(Duration::from_secs(1), queue.next()).await.is_err());
        queue.finish(&key("a"), 0, Duration::ZERO);
        assert_eq!(queue.next().await.0, key("a"));
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_before_the_last_look_is_covered_by_it_and_one_after_is_not() {
        let queue = Queue::default();
        queue.wake_now(&key("a"));
        queue.next().await;
        queue.event(&key("a"), Duration::ZERO);
        let looked = queue.clock();
        queue.finish(&key("a"), looked, Duration::ZERO);
        assert!(tokio::time::timeout(Duration::from_secs(1), queue.next()).await.is_err());
        queue.wake_now(&key("a"));
        queue.next().await;
        let looked = queue.clock();
        queue.event(&key("a"), Duration::ZERO);
        queue.finish(&key("a"), looked, Duration::ZERO);
        assert_eq!(queue.next().await.0, key("a"));
    }
}
