//! What the host has room for: the running VMs and those about to start against the host's size.

use std::collections::{BTreeSet, HashMap};

use drivers_api::{Error, ErrorKind, VmId};

use crate::{
    settings::Capacity,
    wanted::{InstanceSpec, Key},
};

/// What one VM takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) cpus: u64,
    pub(crate) memory_mib: u64,
}

impl Load {
    pub(crate) fn of(spec: &InstanceSpec) -> Self {
        Self { cpus: spec.cpus.get().into(), memory_mib: spec.memory_mib.get() }
    }
}

/// Sums of loads against a capacity.
#[derive(Debug)]
pub(crate) struct Ledger {
    capacity: Capacity,
    promised: HashMap<VmId, Load>,
    cpus: u64,
    memory_mib: u64,
    starved: BTreeSet<Key>,
}

impl Ledger {
    pub(crate) fn new(capacity: Capacity) -> Self {
        Self {
            capacity,
            promised: HashMap::new(),
            cpus: 0,
            memory_mib: 0,
            starved: BTreeSet::new(),
        }
    }

    /// Whether a VM fits beside all others.
    pub(crate) fn room(&self, vm: VmId, load: Load) -> Result<(), Error> {
        let own = self.promised.get(&vm).copied().unwrap_or(Load { cpus: 0, memory_mib: 0 });
        let cpus = self.cpus.saturating_sub(own.cpus);
        let memory = self.memory_mib.saturating_sub(own.memory_mib);
        shortage(&self.capacity, Load { cpus, memory_mib: memory }, load).map_or(Ok(()), |reason| {
            Err(Error::new(ErrorKind::Exhausted, "find room for", format!("vm {vm}"), reason)
                .with_remedy("stop another instance, give this one less, or raise the limit"))
        })
    }

    /// Sets a VM's load aside, if it fits.
    pub(crate) fn promise(&mut self, vm: VmId, load: Load) -> Result<(), Error> {
        self.room(vm, load)?;
        self.record(vm, load);
        Ok(())
    }

    /// Counts a VM that runs, whether it fits or not.
    pub(crate) fn record(&mut self, vm: VmId, load: Load) {
        self.forget(vm);
        self.cpus = self.cpus.saturating_add(load.cpus);
        self.memory_mib = self.memory_mib.saturating_add(load.memory_mib);
        self.promised.insert(vm, load);
    }

    /// A VM does not run; answers who waits for room.
    pub(crate) fn release(&mut self, vm: VmId) -> BTreeSet<Key> {
        if self.forget(vm) { std::mem::take(&mut self.starved) } else { BTreeSet::new() }
    }

    /// An instance waits for room.
    pub(crate) fn wait(&mut self, key: Key) {
        self.starved.insert(key);
    }

    fn forget(&mut self, vm: VmId) -> bool {
        let Some(load) = self.promised.remove(&vm) else { return false };
        self.cpus = self.cpus.saturating_sub(load.cpus);
        self.memory_mib = self.memory_mib.saturating_sub(load.memory_mib);
        true
    }
}

/// Why a load does not fit beside another; `None` where it does.
pub(crate) fn shortage(capacity: &Capacity, taken: Load, more: Load) -> Option<String> {
    let cpus = taken.cpus.saturating_add(more.cpus);
    if let Some(host) = capacity.cpus {
        let limit = scaled(host.into(), capacity.cpu_overcommit);
        if cpus > limit {
            let reason = format!(
                "{} CPUs are wanted, {} of {limit} are taken ({host} CPUs, over-commit {})",
                more.cpus, taken.cpus, capacity.cpu_overcommit
            );
            return Some(reason);
        }
    }
    let memory = taken.memory_mib.saturating_add(more.memory_mib);
    let host = capacity.memory_mib?;
    let limit = scaled(host, capacity.memory_overcommit);
    (memory > limit).then(|| {
        format!(
            "{} MiB are wanted, {} of {limit} are taken ({host} MiB, over-commit {})",
            more.memory_mib, taken.memory_mib, capacity.memory_overcommit
        )
    })
}

/// A size times a factor, rounded down. The factor is taken in thousandths, so that integers decide.
fn scaled(size: u64, factor: f64) -> u64 {
    let bounded = (factor * 1000.0).clamp(0.0, 1_000_000.0);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped to 0 to 1,000,000 just above"
    )]
    let thousandths = bounded as u64;
    size.saturating_mul(thousandths) / 1000
}
