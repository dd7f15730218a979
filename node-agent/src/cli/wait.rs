//! `--wait`: until what was asked for is so, or cannot become so.

use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use super::{
    CliError, Done,
    client::{Client, refused},
    exit,
    output::note,
};
use crate::api::proto;

/// How long an object must stand as failed before the wait ends: a change that was just accepted may mend it.
const SETTLE: Duration = Duration::from_secs(3);

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    /// The host is as wanted.
    Converged,
    /// It is gone.
    Gone,
}

/// One object that is waited for.
pub(crate) struct Awaited {
    key: proto::Key,
    uuid: String,
    generation: u64,
    goal: Goal,
    reached: bool,
    shown: String,
    failed: Option<Instant>,
}

impl Awaited {
    pub(crate) fn new(key: proto::Key, uuid: String, generation: u64, goal: Goal) -> Self {
        Self { key, uuid, generation, goal, reached: false, shown: String::new(), failed: None }
    }

    fn name(&self) -> String {
        format!("{} {}", self.key.kind, self.key.name)
    }

    fn take(&mut self, update: &proto::WatchUpdate) {
        let Some(object) = update.object.as_ref().filter(|_| !update.gone) else {
            self.reached = self.goal == Goal::Gone;
            self.shown = "gone".to_owned();
            // An object that is waited for and goes was deleted by somebody else: that is final.
            self.failed = (!self.reached).then(|| Instant::now() - SETTLE);
            return;
        };
        let status: Value = serde_json::from_str(&object.status).unwrap_or_default();
        let text = |key: &str| status.get(key).and_then(Value::as_str).unwrap_or_default();
        let phase = text("phase");
        let observed =
            status.get("observed_generation").and_then(Value::as_u64).unwrap_or_default();
        let settled = object.uuid == self.uuid
            && observed >= self.generation
            && object.pending_requests == 0
            && matches!(phase, "Ready" | "RestartNeeded");
        self.reached = self.goal == Goal::Converged && settled;
        let message = text("message");
        self.shown = if message.is_empty() || message == phase {
            phase.to_owned()
        } else {
            format!("{phase}: {message}")
        };
        match (phase, self.failed) {
            ("Failed", None) => self.failed = Some(Instant::now()),
            ("Failed", Some(_)) => {}
            _ => self.failed = None,
        }
    }
}

/// Waits; says on standard error what happens meanwhile.
pub(crate) async fn wait(client: &mut Client, mut awaited: Vec<Awaited>, seconds: u64) -> Done {
    let begun = Instant::now();
    let deadline = begun + Duration::from_secs(seconds.min(365 * 86_400));
    let objects = awaited
        .iter()
        .map(|one| proto::Watched { key: Some(one.key.clone()), uuid: one.uuid.clone() })
        .collect();
    let request = proto::WatchRequest { objects };
    let mut updates = client.watch(request).await.map_err(|status| refused(&status))?.into_inner();
    loop {
        if awaited.iter().all(|one| one.reached) {
            let took = begun.elapsed().as_secs_f64();
            note(&format!("done after {took:.1} s"));
            return Ok(exit::OK);
        }
        let failed = awaited.iter().filter_map(|one| one.failed).min().map(|at| at + SETTLE);
        let end = failed.unwrap_or(deadline).min(deadline);
        tokio::select! {
            // All are cancel-safe: a message is taken whole or not at all.
            update = updates.message() => match update {
                Ok(Some(update)) => take(&mut awaited, &update),
                Ok(None) => return Err(CliError::new("the agent ended; what was accepted goes on at its next start")),
                Err(status) => return Err(refused(&status)),
            },
            () = tokio::time::sleep_until(end) => return Err(not_reached(&awaited, end >= deadline, seconds)),
            interrupted = tokio::signal::ctrl_c() => {
                drop(interrupted);
                let text = "stopped waiting; the agent goes on with what was accepted. See: bcd-node get";
                return Err(CliError::with_code(exit::INTERRUPTED, text));
            }
        }
    }
}

fn take(awaited: &mut [Awaited], update: &proto::WatchUpdate) {
    for one in awaited.iter_mut().filter(|one| Some(&one.key) == update.key.as_ref()) {
        let before = one.shown.clone();
        one.take(update);
        if one.shown != before {
            note(&format!("{}: {}", one.name(), one.shown));
        }
    }
}

fn not_reached(awaited: &[Awaited], late: bool, seconds: u64) -> CliError {
    let mut lines = Vec::new();
    for one in awaited.iter().filter(|one| !one.reached && (late || one.failed.is_some())) {
        let shown = if one.shown.is_empty() { "not seen yet" } else { &one.shown };
        lines.push(format!("{}: {shown}", one.name()));
    }
    lines.push(if late {
        format!("not reached within {seconds} s; the agent goes on")
    } else {
        "this needs a change of the manifest or of the host; the agent looks again from time to time".to_owned()
    });
    CliError::with_code(exit::NOT_REACHED, lines.join("\n"))
}
