//! The statuses, and who waits for whose.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::{
    status::{Phase, Status},
    wanted::Key,
};

/// All statuses, with who waits for a change of which.
#[derive(Debug, Default)]
pub(crate) struct Board {
    statuses: BTreeMap<Key, Status>,
    waiters: HashMap<Key, BTreeSet<Key>>,
    /// When each object changed last, in the board's own time.
    changes: HashMap<Key, u64>,
    /// When a pass of each object ended last, and with it the use of what it names.
    ended: HashMap<Key, u64>,
    clock: u64,
}

/// What a new status means to others.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// It differs in more than the seconds until the next try.
    pub(crate) changed: bool,
    /// The object has become ready.
    pub(crate) readiness: bool,
    /// Who waited for a change.
    pub(crate) waiters: BTreeSet<Key>,
}

impl Board {
    pub(crate) fn get(&self, key: &Key) -> Option<&Status> {
        self.statuses.get(key)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Status> {
        self.statuses.values()
    }

    /// The board's time, for [`Board::wait`].
    pub(crate) const fn clock(&self) -> u64 {
        self.clock
    }

    /// Puts a status up.
    pub(crate) fn put(&mut self, status: Status) -> News {
        let key = status.key.clone();
        let old = self.statuses.get(&key);
        let changed = old.is_none_or(|old| !same(old, &status));
        let news = |old: &Status| {
            !is_ready(Some(old))
                || old.observed_generation != status.observed_generation
                || old.uuid != status.uuid
        };
        let readiness = is_ready(Some(&status)) && old.is_none_or(news);
        self.statuses.insert(key.clone(), status);
        let waiters = if changed { self.change(&key) } else { BTreeSet::new() };
        News { changed, readiness, waiters }
    }

    /// Takes a status down; answers who waited for it.
    pub(crate) fn remove(&mut self, key: &Key) -> BTreeSet<Key> {
        self.statuses.remove(key);
        let waiters = self.change(key);
        self.changes.remove(key);
        self.ended.remove(key);
        waiters
    }

    /// Something of an object changed; answers who waited for that.
    pub(crate) fn change(&mut self, key: &Key) -> BTreeSet<Key> {
        self.clock += 1;
        self.changes.insert(key.clone(), self.clock);
        self.waiters.remove(key).unwrap_or_default()
    }

    /// A pass of an object ended, and with it the use of what it names; answers who of these waited for that. Others are not
    /// told: two that wait for each other would wake each other in circles.
    pub(crate) fn end_of_use(&mut self, key: &Key, named: &[Key]) -> BTreeSet<Key> {
        if named.is_empty() {
            return BTreeSet::new();
        }
        self.clock += 1;
        self.ended.insert(key.clone(), self.clock);
        let Some(waiters) = self.waiters.get_mut(key) else { return BTreeSet::new() };
        let told: BTreeSet<Key> =
            named.iter().filter(|named| waiters.remove(*named)).cloned().collect();
        if waiters.is_empty() {
            self.waiters.remove(key);
        }
        told
    }

    /// `key` waits for a change of `blocker` after `since`, or with `use_ends` for the end of a pass of it. False: there was
    /// one already.
    pub(crate) fn wait(&mut self, blocker: &Key, key: &Key, since: u64, use_ends: bool) -> bool {
        let later = |times: &HashMap<Key, u64>| times.get(blocker).is_some_and(|at| *at > since);
        if later(&self.changes) || (use_ends && later(&self.ended)) {
            return false;
        }
        self.waiters.entry(blocker.clone()).or_default().insert(key.clone());
        true
    }
}

/// Whether the object is as wanted.
pub(crate) fn is_ready(status: Option<&Status>) -> bool {
    status.is_some_and(|status| matches!(status.phase, Phase::Ready | Phase::RestartNeeded))
}

/// Whether two statuses say the same, but for the seconds until the next try.
fn same(old: &Status, new: &Status) -> bool {
    let failure = |status: &Status| {
        status.failure.clone().map(|mut failure| {
            failure.next_try_s = None;
            failure
        })
    };
    old.key == new.key
        && old.uuid == new.uuid
        && old.phase == new.phase
        && old.observed_generation == new.observed_generation
        && old.message == new.message
        && old.blocked_by == new.blocked_by
        && old.executed == new.executed
        && old.observed == new.observed
        && failure(old) == failure(new)
}
