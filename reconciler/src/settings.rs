//! What an operator may set, with defaults that fit a single host.

use std::{fmt, sync::Arc, time::Duration};

use drivers_api::{BoxFuture, Change, Error, HostId, SecretResolver};

use crate::plan::{Action, Step};

/// How much the host has, and how far it is promised twice.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Capacity {
    /// The host's CPUs; `None`: not limited.
    pub cpus: Option<u32>,
    /// The memory for VMs, in MiB: what the host has less what it needs itself; `None`: not limited.
    pub memory_mib: Option<u64>,
    /// How many virtual CPUs stand on one CPU.
    pub cpu_overcommit: f64,
    /// How many MiB are promised for one.
    pub memory_overcommit: f64,
}

impl Capacity {
    /// No limit.
    #[must_use]
    pub const fn unlimited() -> Self {
        Self { cpus: None, memory_mib: None, cpu_overcommit: 4.0, memory_overcommit: 1.0 }
    }

    /// A host of this size, with four virtual CPUs to a CPU and no memory promised twice.
    #[must_use]
    pub const fn new(cpus: u32, memory_mib: u64) -> Self {
        Self {
            cpus: Some(cpus),
            memory_mib: Some(memory_mib),
            cpu_overcommit: 4.0,
            memory_overcommit: 1.0,
        }
    }
}

/// How long a failed object waits before it is tried again. Exponential, with jitter, capped; on the monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Backoff {
    /// The longest wait after the first failure; it doubles with each further one.
    pub first: Duration,
    /// The longest wait at all.
    pub most: Duration,
    /// The part of a wait that chance takes off, 0 to 1. 1 is full jitter, of which a tenth of the wait always stays.
    pub jitter: f64,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { first: Duration::from_secs(1), most: Duration::from_secs(60), jitter: 1.0 }
    }
}

/// How long a driver may take, by what is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Deadlines {
    /// A look at one object or a list.
    pub observe: Duration,
    /// A pull of an image.
    pub pull: Duration,
    /// Making, growing and removing a volume.
    pub volume: Duration,
    /// Making and starting a VM.
    pub vm: Duration,
    /// Beyond the grace of a stop or reboot.
    pub beyond_grace: Duration,
    /// Taking a disk or NIC from a running guest.
    pub unplug: Duration,
    /// Everything else.
    pub other: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            observe: Duration::from_secs(10),
            pull: Duration::from_secs(1800),
            volume: Duration::from_secs(600),
            vm: Duration::from_secs(60),
            beyond_grace: Duration::from_secs(15),
            unplug: Duration::from_secs(20),
            other: Duration::from_secs(30),
        }
    }
}

impl Deadlines {
    /// The deadline of an action; `grace` is that of a stop or reboot.
    #[must_use]
    pub fn of(&self, action: Action, grace: Duration) -> Duration {
        match action {
            Action::Observe => self.observe,
            Action::Pull => self.pull,
            Action::EnsureVolume | Action::DestroyVolume => self.volume,
            Action::EnsureVm | Action::CreateVm | Action::StartVm | Action::DeleteVm => self.vm,
            Action::StopVm | Action::RebootVm => grace.saturating_add(self.beyond_grace),
            Action::DetachDisk | Action::DetachNic => self.unplug,
            Action::RemoveImage
            | Action::AttachVolume
            | Action::DetachVolume
            | Action::EnsureNetwork
            | Action::DestroyNetwork
            | Action::AttachPort
            | Action::DetachPort
            | Action::AttachDisk
            | Action::ResizeDisk
            | Action::AttachNic => self.other,
        }
    }
}

/// A seam around each step, for tests and fault injection.
pub trait StepHook: Send + Sync {
    /// Before the driver is called. An error takes the place of the call, which is not made.
    fn before<'a>(&'a self, step: &'a Step) -> BoxFuture<'a, Result<(), Error>> {
        let _ = step;
        Box::pin(std::future::ready(Ok(())))
    }

    /// After the driver answered. An error takes the place of the answer.
    fn after<'a>(
        &'a self,
        step: &'a Step,
        answer: Result<Change, &'a Error>,
    ) -> BoxFuture<'a, Result<(), Error>> {
        let _ = (step, answer.is_ok());
        Box::pin(std::future::ready(Ok(())))
    }
}

/// The settings of a [`Reconciler`](crate::Reconciler).
#[derive(Clone)]
#[non_exhaustive]
pub struct Settings {
    /// This host: the node of every mark that is ours.
    pub host: HostId,
    /// What the host has for VMs.
    pub capacity: Capacity,
    /// How many objects are worked on at once. A driver call that takes longer than `slow_call` no longer counts.
    pub workers: usize,
    /// After this time a call no longer holds its worker's place, so that calls that hang keep nobody waiting.
    pub slow_call: Duration,
    /// How long a call may take beyond its deadline, or after it was cancelled, before nobody waits for it any more. Its
    /// object is left alone until the call ends; only a deletion is tried beside it, and finishes after it.
    pub abandon_after: Duration,
    /// The deadlines of driver calls.
    pub deadlines: Deadlines,
    /// The waits after failures.
    pub backoff: Backoff,
    /// The waits before restarts of a VM that keeps ending by itself. The first restart is at once.
    pub crash_backoff: Backoff,
    /// A VM that ran this long has no past: its next restart is a first one.
    pub stable_after: Duration,
    /// How often everything is listed and compared.
    pub resync: Duration,
    /// How often an object is looked at that only a change by a person helps.
    pub slow: Duration,
    /// How long an event waits for others of its object, so that a burst is one look.
    pub event_delay: Duration,
    /// How many VMs start at once.
    pub parallel_starts: usize,
    /// How long after the start of the agent an instance waits for those of a lower `start_order`.
    pub start_order_wait: Duration,
    /// How often one pass plans anew before it calls it a failure that the host does not become as wanted.
    pub rounds: u32,
    /// Seeds the jitter of waits; `None`: by chance. For tests that replay a run.
    pub jitter_seed: Option<u64>,
    /// Resolves secret references for drivers.
    pub secrets: Option<Arc<dyn SecretResolver>>,
    /// Called around each step.
    pub hook: Option<Arc<dyn StepHook>>,
}

impl Settings {
    /// Defaults for a host, without a limit of capacity.
    #[must_use]
    pub fn new(host: HostId) -> Self {
        Self {
            host,
            capacity: Capacity::unlimited(),
            workers: 32,
            slow_call: Duration::from_secs(1),
            abandon_after: Duration::from_secs(10),
            deadlines: Deadlines::default(),
            backoff: Backoff::default(),
            crash_backoff: Backoff::default(),
            stable_after: Duration::from_secs(60),
            resync: Duration::from_secs(30),
            slow: Duration::from_secs(300),
            event_delay: Duration::from_millis(10),
            parallel_starts: 8,
            start_order_wait: Duration::from_secs(30),
            rounds: 4,
            jitter_seed: None,
            secrets: None,
            hook: None,
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("host", &self.host)
            .field("capacity", &self.capacity)
            .field("workers", &self.workers)
            .field("deadlines", &self.deadlines)
            .field("backoff", &self.backoff)
            .field("resync", &self.resync)
            .field("slow", &self.slow)
            .finish_non_exhaustive()
    }
}
