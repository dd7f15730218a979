//! What the engine remembers of an object between its passes. Lost with the agent, and rebuilt from the host.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use drivers_api::{ErrorKind, PortId, Uuid, VolumeId};
use tokio::time::Instant;

use crate::{
    backoff::{Dice, delay},
    observe::Part,
    settings::Settings,
    status::Executed,
};

/// What is remembered of one object.
#[derive(Debug, Default)]
pub(crate) struct Note {
    /// Whose it is: a successor of the same name starts with nothing.
    pub(crate) uuid: Option<Uuid>,
    /// How often it failed in a row.
    pub(crate) attempts: u32,
    /// When the row began, wall clock, for people.
    pub(crate) failing_since: u64,
    /// Until when a failure keeps host events from trying again.
    pub(crate) hold_until: Option<Instant>,
    /// The size of each disk as the running VM was told.
    pub(crate) told: BTreeMap<VolumeId, u64>,
    /// Somebody asked for a start.
    pub(crate) asked: bool,
    /// Restarts of a VM that ended by itself.
    pub(crate) crashes: Crashes,
    /// Calls that were abandoned and have not ended.
    pub(crate) abandoned: Vec<Abandoned>,
    /// What steps touched and no look has shown since: a step that was cut short may have made it.
    pub(crate) touched: BTreeSet<Part>,
    /// The ports of its NICs when it was last as wanted, and those that steps made since.
    pub(crate) ports: BTreeSet<PortId>,
    /// What the last pass that changed something did.
    pub(crate) executed: Vec<Executed>,
}

/// A call that was abandoned and has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Abandoned {
    /// What it was, for people.
    pub(crate) text: String,
    /// Whether it only looks: then another call beside it does no harm.
    pub(crate) looks: bool,
}

/// How many calls may be out for an object before nothing more is tried, where calls beside them do no harm.
pub(crate) const MOST_ABANDONED: usize = 3;

/// The row of a VM's restarts.
#[derive(Debug, Default)]
pub(crate) struct Crashes {
    /// All restarts of this agent's life.
    pub(crate) total: u32,
    row: u32,
    last_start: Option<Instant>,
    /// When the restart is due, once the end was seen.
    due: Option<Instant>,
}

impl Crashes {
    /// The VM is seen to have ended by itself: how long its restart waits.
    pub(crate) fn seen(&mut self, settings: &Settings, dice: &Dice) -> Duration {
        let now = Instant::now();
        let due = *self.due.get_or_insert_with(|| {
            let stable = self.last_start.is_some_and(|at| now - at >= settings.stable_after);
            if stable {
                self.row = 0;
            }
            match self.row {
                0 => now,
                row => now + delay(&settings.crash_backoff, row, dice),
            }
        });
        due.saturating_duration_since(now)
    }

    /// The VM was started again.
    pub(crate) fn restarted(&mut self) {
        if self.due.take().is_some() {
            self.row = self.row.saturating_add(1);
            self.total = self.total.saturating_add(1);
        }
        self.last_start = Some(Instant::now());
    }

    /// Somebody asked for something new: the row is over.
    pub(crate) const fn forgive(&mut self) {
        self.row = 0;
        self.due = None;
    }
}

impl Note {
    /// The abandoned call for whose end the object waits. Looks may be out beside others, up to a number; for a deletion
    /// that holds of all calls.
    pub(crate) fn waits_for(&self, deleting: bool) -> Option<&Abandoned> {
        let writes = self.abandoned.iter().find(|call| !call.looks && !deleting);
        writes.or_else(|| self.abandoned.first().filter(|_| self.abandoned.len() >= MOST_ABANDONED))
    }

    /// Nothing is held against the object any more.
    pub(crate) const fn forgive(&mut self) {
        self.attempts = 0;
        self.hold_until = None;
    }

    /// It failed once more: how long it waits.
    pub(crate) fn failed(
        &mut self,
        kind: ErrorKind,
        retry_after: Option<Duration>,
        settings: &Settings,
        dice: &Dice,
    ) -> Duration {
        if self.attempts == 0 {
            self.failing_since = wall_clock();
        }
        self.attempts = self.attempts.saturating_add(1);
        let usual = delay(&settings.backoff, self.attempts, dice);
        let wait = match kind.next_step() {
            drivers_api::NextStep::WaitForChange => settings.slow,
            drivers_api::NextStep::PlanAnew if self.attempts == 1 => Duration::ZERO,
            drivers_api::NextStep::Retry
            | drivers_api::NextStep::ObserveThenRetry
            | drivers_api::NextStep::PlanAnew
            | drivers_api::NextStep::Nothing => usual.max(retry_after.unwrap_or_default()),
        };
        self.hold_until = Some(Instant::now() + wait);
        wait
    }
}

/// Seconds since the epoch, for people.
pub(crate) fn wall_clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
