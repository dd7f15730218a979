//! Anything may happen in any order; once it is quiet the host is as wanted, and no VM was restarted for nothing.
//!
//! A world is one seed: the same seed is the same run. When one fails, its events are cut down to those that matter and
//! printed with the seed.
//!
//! * `BCD_MODEL_SEED=n` runs that world alone.
//! * `BCD_MODEL_OPS=n` is how many operations are tried.
//! * `BCD_MODEL_FIRST=n` is the first seed, so that a soak is not the same each time.

#![expect(
    clippy::wildcard_enum_match_arm,
    clippy::print_stderr,
    reason = "a test whose helpers clippy takes for code"
)]

mod check;
mod event;
mod world;

use event::{Chance, Event, events};
use world::World;

/// Operations of a run of the tests.
const OPERATIONS: u64 = 100_000;

/// How often a world comes to rest.
const RESTS: usize = 6;

/// How many runs are spent on cutting a failure down.
const SHRINKS: usize = 400;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

/// How long a world may take on a slow machine; one takes a tenth of a second.
const LONGEST: std::time::Duration = std::time::Duration::from_secs(60);

/// Ends the tests with the seed of a world that runs in circles: time that is paused does not pass there.
struct Watch(std::sync::mpsc::Sender<()>);

impl Watch {
    fn over(seed: u64) -> Self {
        let (alive, dropped) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let waited = dropped.recv_timeout(LONGEST);
            if waited == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                eprintln!("BCD_MODEL_SEED={seed} runs in circles: no end after {LONGEST:?}");
                std::process::abort();
            }
        });
        Self(alive)
    }
}

/// What the events do to a world; an error is what does not hold.
fn run(seed: u64, events: &[Event]) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let watch = Watch::over(seed);
    let shown = number("BCD_MODEL_SEED").is_some();
    let outcome = runtime.block_on(async {
        let mut world = World::new(seed);
        for event in events {
            if shown {
                eprintln!("  {event:?}");
            }
            world.happen(event).await?;
        }
        Ok(())
    });
    drop(watch.0);
    outcome
}

/// Fewer events that fail too: halves are left out, then quarters, and so on.
fn cut_down(seed: u64, mut events: Vec<Event>) -> Vec<Event> {
    let (mut size, mut left) = (events.len().div_ceil(2), SHRINKS);
    while size > 0 && left > 0 {
        let (mut at, mut shorter) = (0, false);
        while at < events.len() && left > 0 {
            let end = (at + size).min(events.len());
            let mut fewer = events.clone();
            fewer.drain(at..end);
            // Without a rest nothing is checked.
            if !matches!(fewer.last(), Some(Event::Rest(_))) {
                fewer.push(Event::Rest(None));
            }
            left -= 1;
            if fewer.len() < events.len() && run(seed, &fewer).is_err() {
                events = fewer;
                shorter = true;
            } else {
                at = end;
            }
        }
        if !shorter {
            size /= 2;
        }
    }
    events
}

/// Operations of a world: what happens, and what is asked for on a calm host.
fn operations(events: &[Event]) -> u64 {
    let calm = events.iter().filter(|event| !matches!(event, Event::Rest(None)));
    u64::try_from(calm.count()).unwrap()
}

fn world_holds(seed: u64) -> u64 {
    let all = events(&mut Chance::new(seed), RESTS);
    if let Err(reason) = run(seed, &all) {
        let few = cut_down(seed, all);
        let shown = run(seed, &few).err().unwrap_or(reason);
        let list: Vec<String> = few.iter().map(|event| format!("  {event:?}")).collect();
        panic!(
            "BCD_MODEL_SEED={seed} fails after:\n{}\n{shown}\nreplay: BCD_MODEL_SEED={seed} cargo test -p reconciler model",
            list.join("\n")
        );
    }
    operations(&all)
}

/// A share of the worlds: this one of so many, so that several cores are used.
fn share(of: u64, at: u64) {
    if let Some(seed) = number("BCD_MODEL_SEED") {
        if at == 0 {
            world_holds(seed);
        }
        return;
    }
    let wanted = number("BCD_MODEL_OPS").unwrap_or(OPERATIONS).div_ceil(of);
    let first = number("BCD_MODEL_FIRST").unwrap_or_default();
    let (mut done, mut worlds) = (0, 0);
    while done < wanted {
        done += world_holds(first + worlds * of + at);
        worlds += 1;
    }
    eprintln!("{done} operations in {worlds} worlds held");
}

#[test]
fn whatever_happens_the_host_is_as_wanted_once_it_is_quiet_in_even_worlds() {
    share(2, 0);
}

#[test]
fn whatever_happens_the_host_is_as_wanted_once_it_is_quiet_in_odd_worlds() {
    share(2, 1);
}
