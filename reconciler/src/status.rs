//! What is known of a wanted object: where it stands, what was done, what failed and when it is tried next.

use std::time::Duration;

use drivers_api::{Error, ErrorKind, Uuid};
use serde::{Deserialize, Serialize};

use crate::{plan::Step, wanted::Key};

/// Where an object stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Phase {
    /// Accepted; not looked at yet.
    Pending,
    /// Steps are being executed.
    Progressing,
    /// The host is as wanted.
    Ready,
    /// The host is as wanted but for what only a restart of the VM applies.
    RestartNeeded,
    /// It waits for another object, which `Status::blocked_by` names.
    Blocked,
    /// A step failed; it is tried again at `Failure::next_try`.
    Retrying,
    /// A step failed, and only a change of the wanted state or of the host by a person helps.
    Failed,
    /// A deletion is on its way.
    Deleting,
    /// The host cannot be asked; nothing is done to the object until it can.
    Unknown,
}

/// A failed step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// The step.
    pub step: Step,
    /// The driver.
    pub driver: String,
    /// The error's kind.
    pub kind: ErrorKind,
    /// The error with its causes.
    pub message: String,
    /// What a person can do, where the error says so.
    pub remedy: Option<String>,
    /// How often this generation failed in a row.
    pub attempt: u32,
    /// Seconds until it is tried again, when this was written; `None` when it waits for a change.
    pub next_try_s: Option<f64>,
    /// When it first failed: seconds since the epoch, wall clock, for people.
    pub since: u64,
}

impl Failure {
    /// Of an error at a step.
    #[must_use]
    pub fn new(
        step: Step,
        driver: impl Into<String>,
        error: &Error,
        attempt: u32,
        since: u64,
    ) -> Self {
        Self {
            step,
            driver: driver.into(),
            kind: error.kind(),
            message: error.chain(),
            remedy: error.remedy().map(str::to_owned),
            attempt,
            next_try_s: None,
            since,
        }
    }
}

/// A step that was executed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Executed {
    /// The step.
    pub step: Step,
    /// What it did.
    pub change: drivers_api::Change,
    /// How long it took.
    pub took: Duration,
}

/// The status of an object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The object.
    pub key: Key,
    /// Its identity on the host.
    pub uuid: Uuid,
    /// Where it stands.
    pub phase: Phase,
    /// The generation that the last finished pass brought about; the object has converged when it equals the wanted
    /// one and the phase is `Ready`.
    pub observed_generation: u64,
    /// One line for people.
    pub message: String,
    /// The object that it waits for.
    pub blocked_by: Option<Key>,
    /// The failed step.
    pub failure: Option<Failure>,
    /// The steps of the last pass that changed something, with their times.
    pub executed: Vec<Executed>,
    /// What the host shows: state, pid, accelerator, addresses, device, path, size. Keys are stable per kind:
    /// Instance: `state`, `pid`, `accel`, `addresses`, `last_exit`, `restarts`; Network: `device`; Volume: `size_bytes`,
    /// `allocated_bytes`, `attached_to`; Image: `digest`, `size_bytes`.
    pub observed: serde_json::Map<String, serde_json::Value>,
}

/// What a subscriber of [`Reconciler::subscribe`](crate::Reconciler::subscribe) is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StatusEvent {
    /// The status of an object changed, in more than the seconds until the next try.
    Changed(Status),
    /// A step was executed and changed the host.
    Step(Executed),
    /// A step failed.
    Failed(Failure),
    /// An object was seen to be gone, and is no longer wanted.
    Gone {
        /// The object.
        key: Key,
        /// Its identity.
        uuid: Uuid,
    },
    /// A driver told something of the host.
    Host {
        /// The driver's id.
        driver: String,
        /// The object that it concerns, where that is wanted.
        key: Option<Key>,
        /// What a person reads.
        message: String,
    },
}

/// Why a wanted set cannot be accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The object at fault.
    pub key: Key,
    /// The field, by its path in the manifest: `spec.disks[1].volume`.
    pub field: String,
    /// Why.
    pub reason: String,
    /// What would be right, where that can be said.
    pub hint: Option<String>,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}: {}", self.key, self.field, self.reason)?;
        self.hint.as_ref().map_or(Ok(()), |hint| write!(f, " ({hint})"))
    }
}

/// An object on the host with this node's mark that nobody wants: made for a store that was lost. It is never touched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unclaimed {
    /// The driver's id.
    pub driver: String,
    /// What it is.
    pub object: drivers_api::ObjectRef,
    /// What it was called, where the host keeps that.
    pub name: Option<String>,
}
