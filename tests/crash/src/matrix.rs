//! All rounds: which there are, who plays them, and what came of them.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    failure::{Failure, Result},
    node::Guests,
    report,
    round::{self, Outcome, Passed, Reference, Round, Then},
    scenario::{self, Scenario},
};

/// Points that no story reaches, and why that is so.
pub(crate) const UNREACHED: &[(&str, &str)] = &[
    (
        "store.migrate.copied",
        "there is one schema so far, so no older store can be made; the tests of node-agent's store migrate one with steps of their own",
    ),
    ("store.migrate.stepped", "as store.migrate.copied"),
    (
        "image.collect.references-removed",
        "the cache is collected when it is too large or the disk is full; the tests of drivers/oci-image kill it there",
    ),
];

/// Every point of the agent and its drivers.
pub(crate) fn points() -> Vec<&'static str> {
    [
        driver_oci_image::FAULT_POINTS,
        driver_linux_bridge::FAULT_POINTS,
        driver_file_volume::FAULT_POINTS,
        driver_qemu_kvm::FAULT_POINTS,
        node_agent::store::FAULT_POINTS,
    ]
    .concat()
}

/// Which part of the matrix is played.
#[derive(Clone, Debug, Default)]
pub(crate) struct Part {
    /// Only rounds whose story and point hold this text.
    pub(crate) filter: String,
    /// Only this story.
    pub(crate) story: Option<String>,
    /// With which of its rounds each story begins.
    pub(crate) first: usize,
    /// No new round begins after so long.
    pub(crate) budget: Option<Duration>,
}

/// A round with its outcome.
#[derive(Clone, Debug)]
pub(crate) struct Played {
    pub(crate) round: Round,
    /// How often the story passes the point.
    pub(crate) times: usize,
    /// Whether it is about the last of several passings.
    pub(crate) is_last: bool,
    pub(crate) outcome: Outcome,
}

/// What came of it all.
#[derive(Debug)]
pub(crate) struct Matrix {
    pub(crate) played: Vec<Played>,
    /// Rounds for which no time was left.
    pub(crate) skipped: usize,
    /// Points that no story reaches and for which there is no reason.
    pub(crate) unreached: Vec<&'static str>,
    /// Points of the reasoned list that a story does reach.
    pub(crate) wrongly_listed: Vec<&'static str>,
    /// Stories that fail without a fault.
    pub(crate) broken: Vec<(&'static str, Failure)>,
    pub(crate) took: Duration,
}

impl Part {
    /// Whether it is the whole matrix.
    pub(crate) fn is_whole(&self) -> bool {
        self.filter.is_empty() && self.story.is_none() && self.budget.is_none()
    }

    fn stories(&self) -> VecDeque<Scenario> {
        let wanted = |story: &&Scenario| self.story.as_ref().is_none_or(|name| name == story.name);
        scenario::ALL.iter().filter(wanted).copied().collect()
    }

    /// The part of a day: another story each day, and each time that a story's turn comes other rounds of it first.
    pub(crate) fn of_day(day: usize) -> Self {
        let stories = scenario::ALL.len();
        // A prime: all rounds of a story come first in the end, whatever their number is.
        let first = (day / stories) * 7;
        let story = scenario::ALL.get(day % stories).map(|story| story.name.to_owned());
        Self { story, first, ..Self::default() }
    }
}

impl Matrix {
    /// Whether everything held.
    pub(crate) fn holds(&self) -> bool {
        let all = self.played.iter().all(|one| match one.outcome {
            Outcome::Held(_) => true,
            // How often a story passes a point varies where work is done together: writes of the store.
            Outcome::NotReached => one.is_last,
            Outcome::Failed(_) => false,
        });
        all && self.unreached.is_empty() && self.wrongly_listed.is_empty() && self.broken.is_empty()
    }
}

struct Shared {
    queue: Mutex<VecDeque<Played>>,
    played: Mutex<Vec<Played>>,
    references: BTreeMap<&'static str, Reference>,
    guests: Guests,
    logs: PathBuf,
    begun: Instant,
    budget: Option<Duration>,
    stop: Arc<AtomicBool>,
}

/// Plays the rounds on so many workers, until `stop` is set.
pub(crate) fn play(
    part: &Part,
    guests: Guests,
    workers: usize,
    logs: PathBuf,
    stop: Arc<AtomicBool>,
) -> Result<Matrix> {
    let begun = Instant::now();
    let (references, broken) = references(&guests, part, workers, &stop);
    let rounds = rounds(&references, part);
    let reached: BTreeSet<&str> = references
        .values()
        .flat_map(|reference| reference.points.iter().map(|passed| passed.point.as_str()))
        .collect();
    let listed: BTreeSet<&str> = UNREACHED.iter().map(|(point, _)| *point).collect();
    let all = points();
    let missing = |at: &&str| !reached.contains(at) && !listed.contains(at);
    // A part says nothing of what it leaves out.
    let unreached = match part.story {
        None => all.iter().copied().filter(missing).collect(),
        Some(_) => Vec::new(),
    };
    let wrongly_listed = listed.iter().copied().filter(|at| reached.contains(at)).collect();
    let shared = Arc::new(Shared {
        queue: Mutex::new(rounds.into()),
        played: Mutex::default(),
        references,
        guests,
        logs,
        begun,
        budget: part.budget,
        stop,
    });
    let threads: Vec<_> = (0..workers)
        .map(|_| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || work(&shared))
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| Failure("a worker panicked; see above".to_owned()))?;
    }
    let mut played = std::mem::take(&mut *lock(&shared.played));
    let order = |one: &Played| {
        let story = scenario::ALL.iter().position(|story| story.name == one.round.scenario.name);
        let point = all.iter().position(|point| *point == one.round.point);
        (story, point, one.round.nth, one.round.then == Then::Removed)
    };
    played.sort_by_key(order);
    let skipped = lock(&shared.queue).len();
    let took = begun.elapsed();
    Ok(Matrix { played, skipped, unreached, wrongly_listed, broken, took })
}

type Broken = Vec<(&'static str, Failure)>;

fn references(
    guests: &Guests,
    part: &Part,
    workers: usize,
    stop: &AtomicBool,
) -> (BTreeMap<&'static str, Reference>, Broken) {
    let queue = Mutex::new(part.stories());
    let (references, broken) = (Mutex::new(BTreeMap::new()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(story) = next(&queue) {
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    match round::reference(guests, story) {
                        Ok(reference) => {
                            report::story(story, &reference);
                            lock(&references).insert(story.name, reference);
                        }
                        Err(failure) => lock(&broken).push((story.name, failure)),
                    }
                }
            });
        }
    });
    let inner = PoisonError::into_inner;
    (
        references.into_inner().unwrap_or_else(inner),
        broken.into_inner().unwrap_or_else(PoisonError::into_inner),
    )
}

fn next<T>(queue: &Mutex<VecDeque<T>>) -> Option<T> {
    lock(queue).pop_front()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The rounds of a part: each point of each story at its first passing with both sequels, and at its last, where it is
/// passed more than once, with the wanted state kept.
fn rounds(references: &BTreeMap<&'static str, Reference>, part: &Part) -> Vec<Played> {
    let mut all = Vec::new();
    for story in part.stories() {
        let Some(reference) = references.get(story.name) else { continue };
        let mut rounds: Vec<Played> = reference
            .points
            .iter()
            .flat_map(|passed| rounds_at(story, passed))
            .filter(|one| format!("{} {}", story.name, one.round.point).contains(&part.filter))
            .collect();
        let first = part.first.checked_rem(rounds.len()).unwrap_or_default();
        rounds.rotate_left(first);
        all.extend(rounds);
    }
    all
}

fn rounds_at(story: Scenario, passed: &Passed) -> Vec<Played> {
    let mut each = vec![(1, Then::Same), (1, Then::Removed)];
    if passed.times > 1 {
        each.push((passed.times, Then::Same));
    }
    let played = each.into_iter().map(|(nth, then)| Played {
        round: Round {
            scenario: story,
            point: passed.point.clone(),
            nth: passed.at_start + nth,
            then,
        },
        times: passed.at_start + passed.times,
        is_last: nth > 1,
        outcome: Outcome::NotReached,
    });
    played.collect()
}

fn work(shared: &Shared) {
    loop {
        let over = shared.budget.is_some_and(|budget| shared.begun.elapsed() > budget);
        if over || shared.stop.load(Ordering::SeqCst) {
            return;
        }
        let Some(mut one) = next(&shared.queue) else { return };
        let Some(reference) = shared.references.get(one.round.scenario.name) else { continue };
        // Once more when the point was not reached: some are passed only when two things come together.
        for _ in 0..2 {
            let (outcome, log) = round::play(&shared.guests, &one.round, reference);
            one.outcome = outcome;
            if matches!(one.outcome, Outcome::Failed(_)) {
                keep_log(shared, &one.round, &log);
            }
            if !matches!(one.outcome, Outcome::NotReached) {
                break;
            }
        }
        report::round(&one);
        lock(&shared.played).push(one);
    }
}

fn keep_log(shared: &Shared, round: &Round, log: &str) {
    let name =
        format!("{}-{}-{}-{:?}.log", round.scenario.name, round.point, round.nth, round.then);
    let path = shared.logs.join(name.replace(' ', "-"));
    let kept = std::fs::create_dir_all(&shared.logs).and_then(|()| std::fs::write(&path, log));
    match kept {
        Ok(()) => report::line(&format!("    the agents' log: {}", path.display())),
        Err(error) => report::line(&format!("    the agents' log cannot be kept: {error}")),
    }
}
