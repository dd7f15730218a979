//! What happened lately, kept for `bcd-node events` and `describe`, and told to who listens.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};

use reconciler::{
    Reconciler,
    plan::Step,
    status::{Status, StatusEvent},
    wanted::Key,
};
use tokio::sync::broadcast::{self, error::RecvError};

/// How many events are kept.
const KEPT: usize = 1000;
/// How many events a listener may fall behind before it is told that it missed some.
const BACKLOG: usize = 1024;
/// The most characters of a message that is kept.
const MESSAGE: usize = 1000;

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Counts the events of this run of the agent, from 1.
    pub sequence: u64,
    /// When, by the wall clock, for people: milliseconds since the epoch.
    pub time_ms: u64,
    /// `accepted`, `status`, `step`, `failed`, `gone`, `host` or `missed`.
    pub kind: &'static str,
    /// The object that it concerns.
    pub key: Option<Key>,
    /// What a person reads. May hold words of tools and guests.
    pub message: String,
}

#[derive(Debug)]
struct Kept {
    next: u64,
    events: VecDeque<Arc<Event>>,
}

/// The latest events. Cheap to clone.
#[derive(Clone, Debug)]
pub struct EventLog {
    kept: Arc<Mutex<Kept>>,
    live: broadcast::Sender<Arc<Event>>,
}

impl Default for EventLog {
    fn default() -> Self {
        Self::new()
    }
}

impl EventLog {
    /// A log without events.
    #[must_use]
    pub fn new() -> Self {
        let kept = Kept { next: 1, events: VecDeque::new() };
        Self { kept: Arc::new(Mutex::new(kept)), live: broadcast::Sender::new(BACKLOG) }
    }

    /// Adds an event.
    pub fn add(&self, kind: &'static str, key: Option<Key>, message: impl Into<String>) {
        let message: String = message.into().chars().take(MESSAGE).collect();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let event = Arc::new(Event { sequence: kept.next, time_ms: now_ms(), kind, key, message });
        kept.next += 1;
        if kept.events.len() == KEPT {
            kept.events.pop_front();
        }
        kept.events.push_back(Arc::clone(&event));
        // Under the lock, so that listeners get them in their order. The only error is that nobody listens.
        drop(self.live.send(event));
    }

    /// The latest `most` events that `wanted` takes, oldest first, and a subscription to all that follow them.
    pub fn since(
        &self,
        most: usize,
        wanted: impl Fn(&Event) -> bool,
    ) -> (Vec<Arc<Event>>, broadcast::Receiver<Arc<Event>>) {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut latest: Vec<_> =
            kept.events.iter().rev().filter(|event| wanted(event)).take(most).cloned().collect();
        latest.reverse();
        (latest, self.live.subscribe())
    }

    /// Follows a reconciler until it ends. Run it as a task of its own.
    pub async fn follow(self, reconciler: Reconciler) {
        let mut events = reconciler.subscribe();
        drop(reconciler);
        loop {
            match events.recv().await {
                Ok(event) => self.take(event),
                Err(RecvError::Lagged(missed)) => {
                    self.add("missed", None, format!("{missed} events were missed"));
                }
                Err(RecvError::Closed) => return,
            }
        }
    }

    fn take(&self, event: StatusEvent) {
        match event {
            StatusEvent::Changed(status) => {
                let message = status_line(&status);
                self.add("status", Some(status.key), message);
            }
            StatusEvent::Step(done) => {
                let took = done.took.as_secs_f64() * 1000.0;
                let message =
                    format!("{} ({:?}, {took:.1} ms)", step_line(&done.step), done.change);
                self.add("step", Some(done.step.object), message);
            }
            StatusEvent::Failed(failure) => {
                let message = format!("{}: {}", step_line(&failure.step), failure.message);
                self.add("failed", Some(failure.step.object), message);
            }
            StatusEvent::Gone { key, uuid } => {
                self.add("gone", Some(key), format!("{uuid} is gone"));
            }
            StatusEvent::Host { driver, key, message } => {
                self.add("host", key, format!("{driver}: {message}"));
            }
            other => self.add("host", None, format!("{other:?}")),
        }
    }
}

/// A step without its object, which the event names.
fn step_line(step: &Step) -> String {
    let Step { action, driver, target, reason, .. } = step;
    format!("{action:?} {target} [{driver}]: {reason}")
}

fn status_line(status: &Status) -> String {
    if status.message.is_empty() {
        format!("{:?}", status.phase)
    } else {
        format!("{:?}: {}", status.phase, status.message)
    }
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_latest_events_are_kept_and_those_that_follow_are_told() {
        let log = EventLog::new();
        for number in 0..KEPT + 10 {
            log.add("host", None, number.to_string());
        }
        let (latest, mut live) = log.since(3, |_| true);
        let texts: Vec<_> = latest.iter().map(|event| event.message.as_str()).collect();
        assert_eq!(texts, ["1007", "1008", "1009"]);
        assert_eq!(log.since(usize::MAX, |_| true).0.len(), KEPT);
        log.add("host", None, "next");
        assert_eq!(live.recv().await.unwrap().message, "next");
    }
}
