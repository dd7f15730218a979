//! One pass for one object: look, plan, execute, until nothing is left to do; then write the status.
//!
//! ```text
//! Pending -> Progressing -> Ready | RestartNeeded
//!                |  ^           |
//!                v  |           | a change, an event, drift
//!   Blocked  Retrying  Failed  Unknown       (each with what it waits for)
//!
//! any -> Deleting -> gone
//! ```

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use drivers_api::{CancelFlag, Error, ErrorKind};
use tokio::time::Instant;

use crate::{
    call::Caller,
    engine::Engine,
    execute::{execute, vm_of},
    observe::{is_shown, listings, look_at, parts},
    observed::observed,
    plan::{Action, Plan, Planned, Step, Verdict},
    resolve::port_id,
    status::{Failure, Phase, Status, StatusEvent},
    wanted::{Key, Wanted, WantedSpec},
};

/// What a pass leaves behind.
struct Outcome<'a> {
    object: &'a Wanted,
    phase: Phase,
    message: String,
    blocked_by: Option<Key>,
    failure: Option<Failure>,
    /// Whether the pass changed the host.
    changed: bool,
}

/// Works on one object, and answers the time of events at its last look.
pub(crate) async fn run(engine: Arc<Engine>, key: Key, cancel: CancelFlag) -> u64 {
    let caller = Caller::new(Arc::clone(&engine), key.clone(), cancel);
    let mut looked = engine.queue.clock();
    let mut last_steps: Option<Vec<Step>> = None;
    let mut changed = false;
    for round in 0..engine.settings.rounds.max(1) {
        if engine.is_stopping() {
            return looked;
        }
        let Some((object, _using)) = engine.begin(&key) else { return looked };
        if !may_begin(&engine, &object) {
            return looked;
        }
        caller.take_place().await;
        looked = engine.queue.clock();
        let since = engine.board().clock();
        look(&caller, &key, &object).await;
        let Some((object, plan)) = engine.plan_of(&key) else { return looked };
        if plan.steps.is_empty() {
            settle(&engine, &object, plan, since, changed).await;
            return looked;
        }
        let steps: Vec<Step> = plan.steps.iter().map(|planned| planned.step.clone()).collect();
        let idle = last_steps.as_ref() == Some(&steps) && !changed_last(&engine, &key);
        if idle || round + 1 == engine.settings.rounds.max(1) {
            not_converging(&engine, &object, &plan, changed);
            return looked;
        }
        last_steps = Some(steps);
        begin_steps(&engine, &object, &plan);
        let done = plan.done;
        let report = execute(&caller, &object, plan.steps).await;
        changed |= !report.executed.is_empty();
        engine.with_note(&key, |note| {
            if !report.executed.is_empty() || round == 0 {
                note.executed.clone_from(&report.executed);
            }
        });
        if let Some((planned, error)) = report.failure {
            fail(&engine, &object, Some(&planned), &error, changed);
            return looked;
        }
        if let Some(done) = done {
            acknowledge(&engine, &object, done).await;
        }
    }
    looked
}

/// Looks at everything that the object has, or may have, on the host.
async fn look(caller: &Caller, key: &Key, object: &Wanted) {
    let engine = &caller.engine;
    let touched = engine.with_note(key, |note| note.touched.clone());
    let mut all = engine.with_world(|world| parts(world, object));
    all.extend(touched.iter().cloned());
    look_at(caller, all).await;
    if !touched.is_empty() {
        let shown = engine.with_world(|world| {
            touched.into_iter().filter(|part| is_shown(world, part)).collect::<Vec<_>>()
        });
        engine.with_note(key, |note| note.touched.retain(|part| !shown.contains(part)));
    }
}

/// Whether the last executed steps changed anything.
fn changed_last(engine: &Engine, key: &Key) -> bool {
    engine.with_note(key, |note| !note.executed.is_empty())
}

/// Whether an object may be worked on now; if not, its status says why.
fn may_begin(engine: &Engine, object: &Wanted) -> bool {
    let key = object.key();
    let abandoned = engine.with_note(&key, |note| {
        if note.uuid.replace(object.uuid).is_some_and(|before| before != object.uuid) {
            note.forgive();
        }
        note.waits_for(object.deleting).cloned()
    });
    if let Some(call) = abandoned {
        let phase = if object.deleting { Phase::Deleting } else { Phase::Unknown };
        let message = format!("waits for a call that has not returned: {}", call.text);
        put(engine, Outcome::new(object, phase, message));
        return false;
    }
    if object.deleting {
        return true;
    }
    let missing = engine.with_world(|world| {
        let lists = listings(world, object);
        lists.into_iter().find_map(|(listing, driver)| world.seen.unlisted(listing, &driver))
    });
    match missing {
        None => true,
        Some(error) => {
            // The end of the list compares everything, and so wakes this object.
            let phase = Phase::Unknown;
            put(engine, Outcome::new(object, phase, error.chain()));
            false
        }
    }
}

impl<'a> Outcome<'a> {
    const fn new(object: &'a Wanted, phase: Phase, message: String) -> Self {
        Self { object, phase, message, blocked_by: None, failure: None, changed: false }
    }
}

/// Writes the status.
fn put(engine: &Engine, outcome: Outcome<'_>) {
    let object = outcome.object;
    let key = object.key();
    let before = engine.board().get(&key).filter(|status| status.uuid == object.uuid).cloned();
    let reached = matches!(outcome.phase, Phase::Ready | Phase::RestartNeeded);
    let observed_generation = if reached {
        object.generation
    } else {
        before.map_or(0, |status| status.observed_generation)
    };
    let (executed, restarts) =
        engine.with_note(&key, |note| (note.executed.clone(), note.crashes.total));
    let status = Status {
        uuid: object.uuid,
        phase: outcome.phase,
        observed_generation,
        message: outcome.message,
        blocked_by: outcome.blocked_by,
        failure: outcome.failure,
        executed,
        observed: engine.with_world(|world| observed(world, object, restarts)),
        key: key.clone(),
    };
    if !matches!(outcome.phase, Phase::Pending | Phase::Progressing | Phase::Blocked) {
        engine.gate.settled(&key);
    }
    engine.publish(status, outcome.changed);
}

fn begin_steps(engine: &Engine, object: &Wanted, plan: &Plan) {
    let phase = if object.deleting { Phase::Deleting } else { Phase::Progressing };
    let first = plan.steps.first().map(|planned| planned.step.to_string()).unwrap_or_default();
    let mut outcome = Outcome::new(object, phase, first);
    // What failed is told until it succeeds.
    let before = engine.board().get(&object.key()).cloned();
    let same = |status: &Status| status.uuid == object.uuid;
    let attempts = engine.with_note(&object.key(), |note| note.attempts);
    outcome.failure =
        before.filter(same).and_then(|status| status.failure).filter(|_| attempts > 0);
    put(engine, outcome);
}

/// The host does not become as wanted though every step succeeds.
fn not_converging(engine: &Engine, object: &Wanted, plan: &Plan, changed: bool) {
    if let Verdict::Unknown(error) = &plan.verdict {
        fail(engine, object, plan.steps.first(), error, changed);
        return;
    }
    let left = plan.steps.iter().map(|planned| planned.step.to_string());
    let reason = format!(
        "the steps succeeded and the host is still not as wanted; left: {}",
        left.collect::<Vec<_>>().join("; ")
    );
    let error = Error::new(ErrorKind::Internal, "converge", object.key(), reason)
        .with_remedy("the driver does not show what it was asked to make: report it with the log");
    fail(engine, object, plan.steps.first(), &error, changed);
}

/// Nothing is left to do now: writes what that means, and when to look again.
pub(crate) async fn settle(
    engine: &Arc<Engine>,
    object: &Wanted,
    plan: Plan,
    since: u64,
    changed: bool,
) {
    if let Some(done) = plan.done {
        acknowledge(engine, object, done).await;
    }
    let key = object.key();
    let deleting = object.deleting;
    let mut outcome = Outcome::new(object, Phase::Ready, String::new());
    outcome.changed = changed;
    match plan.verdict {
        Verdict::Satisfied(note) => {
            engine.with_note(&key, crate::note::Note::forgive);
            outcome.message = note.unwrap_or_default();
            release_ports(engine, object);
        }
        Verdict::RestartNeeded(what) => {
            engine.with_note(&key, crate::note::Note::forgive);
            outcome.phase = Phase::RestartNeeded;
            outcome.message = what;
        }
        Verdict::Blocked { by, why } => {
            engine.with_note(&key, crate::note::Note::forgive);
            outcome.phase = if deleting { Phase::Deleting } else { Phase::Blocked };
            outcome.message = why;
            outcome.blocked_by.clone_from(&by);
            put(engine, outcome);
            let look_again = match by {
                Some(by) if engine.board().wait(&by, &key, since, deleting) => engine.settings.slow,
                // It changed since this pass looked.
                Some(_) => Duration::ZERO,
                // Nobody tells when something that is not wanted goes.
                None => engine.settings.backoff.most,
            };
            engine.queue.wake(&key, Instant::now() + look_again);
            return;
        }
        Verdict::Waiting { after, why } => {
            outcome.phase = Phase::Retrying;
            outcome.message = why;
            engine.queue.wake(&key, Instant::now() + after);
        }
        Verdict::Unknown(error) | Verdict::Stuck(error) => {
            if error.kind() == ErrorKind::Exhausted && vm_of(object).is_some() {
                engine.ledger().wait(key);
            }
            fail(engine, object, None, &error, changed);
            return;
        }
        Verdict::Clear => {
            clear(engine, object).await;
            return;
        }
    }
    put(engine, outcome);
}

/// The object was seen to be gone: its document goes.
async fn clear(engine: &Arc<Engine>, object: &Wanted) {
    let key = object.key();
    // A look makes nothing.
    let out =
        engine.with_note(&key, |note| note.abandoned.iter().find(|call| !call.looks).cloned());
    if let Some(call) = out {
        let message = format!("gone; waits for a call that has not returned: {}", call.text);
        put(engine, Outcome::new(object, Phase::Deleting, message));
        return;
    }
    release_all(engine, object);
    if let Err(error) = engine.store.forget(&key, object.uuid).await {
        let error = Error::new(ErrorKind::Unavailable, "drop the document of", &key, "the store")
            .with_source(error);
        fail(engine, object, None, &error, false);
    }
}

/// Gives back what the memory holds for an object that is gone.
fn release_all(engine: &Engine, object: &Wanted) {
    let WantedSpec::Instance(spec) = &object.spec else { return };
    let ports = spec.nics.iter().filter_map(|nic| port_id(object.uuid, &nic.name));
    for port in ports {
        engine.allocator().release(port);
    }
    if let Some(vm) = vm_of(object) {
        let starved = engine.ledger().release(vm);
        engine.wake_all(&starved);
    }
}

/// Gives back the addresses of NICs that the instance no longer has.
fn release_ports(engine: &Engine, object: &Wanted) {
    let WantedSpec::Instance(spec) = &object.spec else { return };
    let ports: BTreeSet<_> =
        spec.nics.iter().filter_map(|nic| port_id(object.uuid, &nic.name)).collect();
    let gone = engine.with_note(&object.key(), |note| {
        let gone: Vec<_> = note.ports.difference(&ports).copied().collect();
        note.ports = ports;
        gone
    });
    for port in gone {
        engine.allocator().release(port);
    }
}

/// Records which requests are done. A record that cannot be written is tried with the next pass: the request may be repeated.
async fn acknowledge(engine: &Arc<Engine>, object: &Wanted, done: crate::store::Done) {
    let key = object.key();
    if let Err(error) = engine.store.acknowledge(&key, object.uuid, done).await {
        tracing::error!(object = %key, %error, "cannot record that a request is done");
        engine.queue.wake(&key, Instant::now() + engine.settings.backoff.first);
    }
    // At once: the next plan must not find the request still open and do it a second time.
    crate::tasks::follow(engine);
}

/// A failure: writes it, and when the object is tried again.
pub(crate) fn fail(
    engine: &Engine,
    object: &Wanted,
    planned: Option<&Planned>,
    error: &Error,
    changed: bool,
) {
    let key = object.key();
    let newer = engine.known().set.get(&key).is_some_and(|now| {
        now.uuid != object.uuid
            || now.deleting != object.deleting
            || now.generation != object.generation
    });
    if engine.is_stopping() || (error.kind() == ErrorKind::Cancelled && newer) {
        // Ended by us for something newer, which has woken the object already.
        engine.queue.wake_now(&key);
        return;
    }
    let (settings, dice) = (&engine.settings, &engine.dice);
    let retry_after = error.retry_after();
    let (wait, attempt, since) = engine.with_note(&key, |note| {
        let wait = note.failed(error.kind(), retry_after, settings, dice);
        (wait, note.attempts, note.failing_since)
    });
    let step = planned.map_or_else(
        || Step {
            object: key.clone(),
            action: Action::Observe,
            driver: String::new(),
            target: key.to_string(),
            reason: "look before planning".to_owned(),
        },
        |planned| planned.step.clone(),
    );
    let driver = step.driver.clone();
    let mut failure = Failure::new(step, driver, error, attempt, since);
    failure.next_try_s = Some(wait.as_secs_f64());
    let seen = planned.is_some();
    let phase = match (object.deleting, error.kind()) {
        (true, _) => Phase::Deleting,
        (false, ErrorKind::InvalidSpec | ErrorKind::Unsupported | ErrorKind::NotApplicable) => {
            Phase::Failed
        }
        (false, ErrorKind::UnknownOutcome) => Phase::Unknown,
        (false, ErrorKind::Unavailable | ErrorKind::Deadline | ErrorKind::Internal) if !seen => {
            Phase::Unknown
        }
        (false, _) => Phase::Retrying,
    };
    tracing::warn!(
        object = %key, uuid = %object.uuid, driver = %failure.driver, step = ?failure.step.action,
        kind = %failure.kind, error = %failure.message, attempt,
        retryable = failure.kind.is_retryable(), next_try_s = wait.as_secs_f64(),
        "a step failed"
    );
    engine.tell(StatusEvent::Failed(failure.clone()));
    let mut outcome = Outcome::new(object, phase, failure.message.clone());
    outcome.failure = Some(failure);
    outcome.changed = changed;
    put(engine, outcome);
    engine.queue.wake(&key, Instant::now() + wait);
}

/// A pass that panicked: a fault of ours. The object is tried again like after any other failure.
pub(crate) fn panicked(engine: &Engine, key: &Key, text: &str) {
    let object = engine.known().set.get(key).cloned();
    let Some(object) = object else { return };
    let error = Error::new(ErrorKind::Internal, "reconcile", key, format!("it panicked: {text}"));
    fail(engine, &object, None, &error, false);
}

/// Writes the status of an object that is as it was listed; answers false where it needs a pass.
pub(crate) fn compare(engine: &Engine, key: &Key) -> bool {
    let Some((object, plan)) = engine.plan_of(key) else { return true };
    let pending = object.reboots > object.reboots_done || object.starts > object.starts_done;
    if !plan.steps.is_empty() || plan.done.is_some() || pending || object.deleting {
        return false;
    }
    let mut outcome = Outcome::new(&object, Phase::Ready, String::new());
    match plan.verdict {
        Verdict::Satisfied(note) => outcome.message = note.unwrap_or_default(),
        Verdict::RestartNeeded(what) => {
            outcome.phase = Phase::RestartNeeded;
            // What differs was said when it was changed; the host keeps only that it does.
            let before =
                engine.board().get(key).filter(|s| s.phase == Phase::RestartNeeded).cloned();
            outcome.message = before.map_or(what, |status| status.message);
        }
        // It waits for that change already.
        Verdict::Blocked { by: by @ Some(_), .. } => {
            return engine
                .board()
                .get(key)
                .is_some_and(|status| status.phase == Phase::Blocked && status.blocked_by == by);
        }
        Verdict::Blocked { .. }
        | Verdict::Waiting { .. }
        | Verdict::Unknown(_)
        | Verdict::Stuck(_)
        | Verdict::Clear => return false,
    }
    if engine.with_note(key, |note| {
        note.uuid = Some(object.uuid);
        note.forgive();
        note.waits_for(false).is_some()
    }) {
        return false;
    }
    release_ports(engine, &object);
    put(engine, outcome);
    true
}

/// Marks an object whose drivers cannot be listed: nothing is done, and nothing is said to be as wanted.
pub(crate) fn unlisted(engine: &Engine, key: &Key, error: &Error) {
    let object = engine.known().set.get(key).cloned();
    let Some(object) = object.filter(|object| !object.deleting) else { return };
    let failing = engine
        .board()
        .get(key)
        .is_some_and(|s| matches!(s.phase, Phase::Retrying | Phase::Failed | Phase::Blocked));
    if !failing {
        put(engine, Outcome::new(&object, Phase::Unknown, error.chain()));
    }
}

/// Until when a failure keeps host events from trying an object again.
pub(crate) fn held(engine: &Engine, key: &Key) -> Option<Duration> {
    let until = engine.with_note(key, |note| note.hold_until)?;
    let left = until.saturating_duration_since(Instant::now());
    (!left.is_zero()).then_some(left)
}
