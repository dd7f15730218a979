//! What people read: lines while it runs, a summary, and `docs/fault-matrix.md`.

use std::{collections::BTreeMap, io::Write as _, time::Duration};

use crate::{
    matrix::{Matrix, Played, UNREACHED},
    round::{Outcome, Reference, Then},
    scenario::{self, Scenario},
};

/// A line on standard output. Nobody is left to be told when it cannot be written.
pub(crate) fn line(text: &str) {
    drop(writeln!(std::io::stdout().lock(), "{text}"));
}

/// A story that ran without a fault.
pub(crate) fn story(story: Scenario, reference: &Reference) {
    let points = reference.points.len();
    line(&format!("story    {:<12} passes {points} points without a fault", story.name));
}

/// A round that was played.
pub(crate) fn round(one: &Played) {
    let round = &one.round;
    let then = match round.then {
        Then::Same => "same wanted state",
        Then::Removed => "objects removed",
    };
    let (outcome, more) = match &one.outcome {
        Outcome::Held(took) => ("held", format!("{:.1} s", took.as_secs_f64())),
        Outcome::NotReached => ("MISSED", "the agent did not come to the point".to_owned()),
        Outcome::Failed(failure) => ("FAILED", failure.to_string()),
    };
    let (name, point, nth) = (round.scenario.name, &round.point, round.nth);
    line(&format!("{outcome:<8} {name:<12} {point:<36} @{nth:<3} {then:<17} {more}"));
}

/// What came of it all.
pub(crate) fn summary(matrix: &Matrix) {
    for (story, failure) in &matrix.broken {
        line(&format!("FAILED   {story}: without a fault: {failure}"));
    }
    for point in &matrix.unreached {
        line(&format!("FAILED   {point}: no story reaches this point"));
    }
    for point in &matrix.wrongly_listed {
        line(&format!("FAILED   {point}: listed as unreached, and a story reaches it"));
    }
    let count = |holds: fn(&Outcome) -> bool| {
        matrix.played.iter().filter(|one| holds(&one.outcome)).count()
    };
    line(&format!(
        "{} rounds in {:.0} s: {} held, {} failed, {} did not reach their point; {} left out for lack of time",
        matrix.played.len(),
        matrix.took.as_secs_f64(),
        count(|outcome| matches!(outcome, Outcome::Held(_))),
        count(|outcome| matches!(outcome, Outcome::Failed(_))),
        count(|outcome| matches!(outcome, Outcome::NotReached)),
        matrix.skipped,
    ));
}

fn cell(outcome: Option<&Outcome>) -> String {
    match outcome {
        None => String::new(),
        Some(Outcome::Held(took)) => format!("{:.1} s, no difference", took.as_secs_f64()),
        Some(Outcome::NotReached) => "not reached".to_owned(),
        Some(Outcome::Failed(_)) => "**failed**".to_owned(),
    }
}

/// `docs/fault-matrix.md`.
pub(crate) fn document(matrix: &Matrix, host: &str) -> String {
    let mut text = String::from(HEAD);
    let slowest = matrix.played.iter().filter_map(took).max().unwrap_or_default();
    let points: std::collections::BTreeSet<&str> =
        matrix.played.iter().map(|one| one.round.point.as_str()).collect();
    text.push_str(&format!("This run: {} rounds at {} points in {:.0} s on {host}; {} failed. The slowest took {:.1} s from the agent's start until \
         the node was as wanted; a part of each is the start of the agent and of the command line in a debug build.\n\n",
        matrix.played.len(),
        points.len(),
        matrix.took.as_secs_f64(),
        matrix.played.iter().filter(|one| !matches!(one.outcome, Outcome::Held(_))).count(),
        slowest.as_secs_f64()));
    for story in scenario::ALL {
        text.push_str(&format!("## {}\n\n{}.\n\n", capital(story.name), capital(story.what)));
        text.push_str(
            "| killed at | passing | same wanted state | objects removed |\n|---|---|---|---|\n",
        );
        let mut rows: BTreeMap<usize, (String, [Option<&Outcome>; 2])> = BTreeMap::new();
        let mut keys: Vec<(&str, usize)> = Vec::new();
        for one in matrix.played.iter().filter(|one| one.round.scenario.name == story.name) {
            let key = (one.round.point.as_str(), one.round.nth);
            let at = keys.iter().position(|other| *other == key).unwrap_or_else(|| {
                keys.push(key);
                keys.len() - 1
            });
            let passing = format!("| `{}` | {} of {} ", key.0, key.1, one.times);
            let row = rows.entry(at).or_insert((passing, [None, None]));
            let [same, removed] = &mut row.1;
            *(if one.round.then == Then::Same { same } else { removed }) = Some(&one.outcome);
        }
        for (head, [same, removed]) in rows.values() {
            text.push_str(&format!("{head}| {} | {} |\n", cell(*same), cell(*removed)));
        }
        text.push('\n');
    }
    text.push_str("## Points that no story reaches\n\n| point | why |\n|---|---|\n");
    for (point, why) in UNREACHED {
        text.push_str(&format!("| `{point}` | {why} |\n"));
    }
    text
}

fn took(one: &Played) -> Option<Duration> {
    match one.outcome {
        Outcome::Held(took) => Some(took),
        Outcome::NotReached | Outcome::Failed(_) => None,
    }
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|letter| letter.to_uppercase().to_string());
    first.unwrap_or_default() + letters.as_str()
}

const HEAD: &str = "\
# Fault matrix

Written by `make crash` (`bcd-crash --write-docs`) from a whole run; do not edit.

The real agent, with QEMU, bridges, nftables, dnsmasq, files and a registry, is killed (SIGKILL) at each of its fault points that a story
passes: at the first passing and, where there is more than one, at the last. Each round has a node and a network namespace of its own. The
guest is one of 8 KiB that idles and obeys its power button, so that a round takes seconds. What follows the kill:

* **Same wanted state**: the agent is started again. A command that got no answer is given again. In the end every object is ready, there is
  one VMM for the VM, and it is the process of before unless the story restarts it. The census is that of a run that nothing interrupted:
  links with their addresses, the nftables ruleset, processes with their arguments, files with modes and owners. Then everything is
  deleted, as in the other column.
* **Objects removed**: the agent is started again and all objects are deleted. In the end the census is that after a deletion that nothing
  interrupted: no link, rule, process or file of the node's is left; locks, the store and what the cache of images keeps for its collector
  stay.

The time is from the start of the second agent until the node is as wanted. Not compared: the order of rules within the ruleset, counters,
handles, contents of files.

";
