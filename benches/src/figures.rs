//! Figures and how they are shown.

use std::time::Duration;

use serde_json::{Value, json};

/// One measured figure beside its goal.
#[derive(Debug)]
struct Figure {
    name: String,
    ours: String,
    peer: String,
    goal: Option<Goal>,
    value: f64,
}

/// What a figure should be, and whether it is.
#[derive(Debug)]
struct Goal {
    text: String,
    met: bool,
}

/// The figures of a run.
#[derive(Debug, Default)]
pub(crate) struct Figures(Vec<Figure>);

impl Figures {
    /// A figure that must be at most `goal`.
    pub(crate) fn at_most(&mut self, name: &str, value: f64, unit: &str, goal: f64, peer: &str) {
        let goal = Goal { text: format!("<= {goal} {unit}"), met: value <= goal };
        self.push(name, (value, unit), peer, Some(goal));
    }

    /// A figure that must be at least `goal`.
    pub(crate) fn at_least(&mut self, name: &str, value: f64, unit: &str, goal: f64, peer: &str) {
        let goal = Goal { text: format!(">= {goal} {unit}"), met: value >= goal };
        self.push(name, (value, unit), peer, Some(goal));
    }

    /// A figure without a goal.
    pub(crate) fn plain(&mut self, name: &str, value: f64, unit: &str, peer: &str) {
        self.push(name, (value, unit), peer, None);
    }

    fn push(&mut self, name: &str, (value, unit): (f64, &str), peer: &str, goal: Option<Goal>) {
        let ours = format!("{value:.2} {unit}");
        self.0.push(Figure { name: name.to_owned(), ours, peer: peer.to_owned(), goal, value });
    }

    /// Adds another part's figures.
    pub(crate) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// As JSON, for who keeps them.
    pub(crate) fn to_json(&self) -> Value {
        let row = |figure: &Figure| {
            json!({ "name": figure.name, "value": figure.value, "text": figure.ours, "peer": figure.peer,
                "goal": figure.goal.as_ref().map(|goal| &goal.text), "met": figure.goal.as_ref().map(|goal| goal.met) })
        };
        self.0.iter().map(row).collect()
    }

    /// As a table, to standard output.
    pub(crate) fn print(&self) {
        say(&format!(
            "{:<58} {:>16} {:>16}  {:<6} {}",
            "figure", "measured", "goal", "met", "beside"
        ));
        for Figure { name, ours, peer, goal, .. } in &self.0 {
            let (goal, met) = match goal {
                Some(Goal { text, met: true }) => (text.as_str(), "yes"),
                Some(Goal { text, met: false }) => (text.as_str(), "NO"),
                None => ("", ""),
            };
            say(&format!("{name:<58} {ours:>16} {goal:>16}  {met:<6} {peer}"));
        }
    }
}

/// A line for the person who runs the bench.
#[expect(clippy::print_stdout, reason = "the bench is a program for people")]
pub(crate) fn say(line: &str) {
    println!("{line}");
}

/// Times of one thing, many times.
#[derive(Debug, Default)]
pub(crate) struct Times(Vec<Duration>);

impl Times {
    /// Adds one.
    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// The time below which this part of all are, in milliseconds; 0.5 is the median.
    pub(crate) fn quantile_ms(&self, part: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let last = sorted.len().saturating_sub(1);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "an index into a short list"
        )]
        let at = (part * last as f64).round() as usize;
        sorted.get(at).map_or(f64::NAN, |time| time.as_secs_f64() * 1000.0)
    }
}
