//! What some drivers can do beyond their trait. An accessor of the trait answers `None` where a driver cannot, so that a
//! plan refuses what cannot be done before it starts.

use std::time::Duration;

use crate::{
    BoxFuture, Change, CpuCount, ImageRef, InstanceSpec, MemoryMib, Result, VmId, VolumeId,
};

driver_trait! {
    /// Brings a VM, its devices and its power to a whole spec in one call.
    pub trait WholeSpec {
        sync {}

        /// Makes the VM as the spec says: creates it with all devices and boots it in one go where it is not there, and
        /// applies what can be applied live where it is. What only a restart applies is kept for the next start
        /// (`restart_needed` in the status); the VM is never restarted for it.
        ///
        /// The same spec again: unchanged. A stop takes the caller's deadline as its grace; use `stop_vm` for another.
        ///
        /// # Errors
        /// As `create_vm`, `attach_disk`, `attach_nic` and `start_vm` of [`Hypervisor`](crate::Hypervisor).
        async fn ensure_vm(&self, cx: &Context, [], spec: &InstanceSpec) -> Result<Change>;
    }
}

/// One client's view of a serial console. Bytes are the guest's, and hostile: who shows them escapes what a terminal
/// would obey where that matters.
pub trait ConsoleStream: Send {
    /// The next bytes; empty when the console is gone. Cancel-safe.
    fn read(&mut self) -> BoxFuture<'_, Result<Vec<u8>>>;

    /// Sends bytes to the guest. Not cancel-safe: a dropped future may have sent a part.
    fn write<'a>(&'a mut self, bytes: &'a [u8]) -> BoxFuture<'a, Result<()>>;
}

driver_trait! {
    /// The serial console.
    pub trait Console {
        sync {}

        /// Opens the console of a VM. Of what the guest wrote before, the last `history` bytes come first. Any number of
        /// clients may be there; each sees all output.
        ///
        /// # Errors
        /// `NotFound` without such a VM; `Unavailable` when it does not run.
        async fn open_console(&self, cx: &Context, [vm: VmId, history: usize]) -> Result<Box<dyn ConsoleStream>>;

        /// The last `bytes` bytes that the guest wrote to its console, of this run and earlier ones as far as kept. Works
        /// on a stopped VM.
        ///
        /// # Errors
        /// `NotFound` without such a VM.
        async fn console_log(&self, cx: &Context, [vm: VmId, bytes: usize]) -> Result<Vec<u8>>;
    }
}

driver_trait! {
    /// Sizes changed while the VM runs.
    pub trait Resize {
        sync {}

        /// Tells the running VM that a disk's backing has grown to `bytes`. Not running, or known already: unchanged.
        /// A smaller size is refused.
        ///
        /// # Errors
        /// `NotFound` without such a disk; `InvalidSpec` for a smaller size.
        async fn resize_disk(&self, cx: &Context, [vm: VmId, volume: VolumeId, bytes: u64]) -> Result<Change>;

        /// Changes the number of CPUs of the running VM.
        ///
        /// # Errors
        /// `Unsupported` beyond what the VM was started with.
        async fn resize_cpus(&self, cx: &Context, [vm: VmId, cpus: CpuCount]) -> Result<Change>;

        /// Changes the memory of the running VM.
        ///
        /// # Errors
        /// `Unsupported` beyond what the VM was started with.
        async fn resize_memory(&self, cx: &Context, [vm: VmId, memory: MemoryMib]) -> Result<Change>;
    }
}

/// A snapshot of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct SnapshotInfo {
    /// Its name within the VM.
    pub name: String,
    /// Whether it holds the memory too.
    pub with_memory: bool,
    /// The space that it takes, in bytes.
    pub size_bytes: u64,
}

impl SnapshotInfo {
    /// A snapshot.
    #[must_use]
    pub const fn new(name: String, with_memory: bool, size_bytes: u64) -> Self {
        Self { name, with_memory, size_bytes }
    }
}

driver_trait! {
    /// Snapshots of whole VMs.
    pub trait Snapshots {
        sync {}

        /// Takes a snapshot. One of that name is there: unchanged.
        ///
        /// # Errors
        /// `NotFound` without such a VM; `Unsupported` in its present state; `Exhausted`.
        async fn take_snapshot(&self, cx: &Context, [vm: VmId], name: &str) -> Result<Change>;

        /// Brings the VM back to a snapshot.
        ///
        /// # Errors
        /// `NotFound` without such a VM or snapshot.
        async fn revert_snapshot(&self, cx: &Context, [vm: VmId], name: &str) -> Result<Change>;

        /// Removes a snapshot. Not there: unchanged.
        ///
        /// # Errors
        /// Anything but "not found".
        async fn delete_snapshot(&self, cx: &Context, [vm: VmId], name: &str) -> Result<Change>;

        /// The snapshots of a VM.
        ///
        /// # Errors
        /// `Unavailable` when they cannot be read.
        async fn list_snapshots(&self, cx: &Context, [vm: VmId]) -> Result<Vec<SnapshotInfo>>;
    }
}

driver_trait! {
    /// Live migration between hosts of one driver.
    pub trait Migrate {
        sync {}

        /// Prepares this host to receive a VM; answers where the sender connects.
        ///
        /// # Errors
        /// `Conflict` when the VM is here already.
        async fn receive_vm(&self, cx: &Context, [], spec: &InstanceSpec) -> Result<String>;

        /// Sends a running VM to `destination`, the answer of the receiver. On failure the VM runs on here.
        ///
        /// # Errors
        /// `NotFound` without such a VM; `UnknownOutcome` when the switch-over could not be seen.
        async fn send_vm(&self, cx: &Context, [vm: VmId], destination: &str) -> Result<Change>;
    }
}

/// What the agent inside a guest says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct GuestInfo {
    /// The guest's name for itself.
    pub hostname: String,
    /// Its addresses.
    pub addresses: Vec<std::net::IpAddr>,
    /// Its operating system, as it says.
    pub os: String,
}

impl GuestInfo {
    /// What a guest said.
    #[must_use]
    pub const fn new(hostname: String, addresses: Vec<std::net::IpAddr>, os: String) -> Self {
        Self { hostname, addresses, os }
    }
}

driver_trait! {
    /// The agent inside the guest. What it answers is the guest's word: hostile, for people only.
    pub trait GuestAgent {
        sync {}

        /// Asks the guest about itself.
        ///
        /// # Errors
        /// `Unavailable` when no agent answers.
        async fn guest_info(&self, cx: &Context, [vm: VmId]) -> Result<GuestInfo>;

        /// Has the guest flush and hold its file systems, for at most `limit`.
        ///
        /// # Errors
        /// `Unavailable` when no agent answers; `Unsupported` by the guest.
        async fn freeze(&self, cx: &Context, [vm: VmId, limit: Duration]) -> Result<Change>;

        /// Lets the guest go on. Not held: unchanged.
        ///
        /// # Errors
        /// As `freeze`.
        async fn thaw(&self, cx: &Context, [vm: VmId]) -> Result<Change>;
    }
}

/// What a collection removed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct CollectReport {
    /// The references that were removed.
    pub removed: Vec<ImageRef>,
    /// The space that this freed, in bytes.
    pub freed_bytes: u64,
}

impl CollectReport {
    /// What was removed and how much it freed.
    #[must_use]
    pub const fn new(removed: Vec<ImageRef>, freed_bytes: u64) -> Self {
        Self { removed, freed_bytes }
    }
}

driver_trait! {
    /// Collection of images that nobody uses.
    pub trait ImageCollect {
        sync {}

        /// Removes least recently used entries that are not in `keep` until the cache takes at most `limit_bytes`, and
        /// what interrupted pulls left behind. An entry that is being read or pulled is never removed.
        ///
        /// # Errors
        /// `Unavailable` when the cache cannot be read; nothing is removed then.
        async fn collect(&self, cx: &Context, [limit_bytes: u64], keep: &[ImageRef]) -> Result<CollectReport>;
    }
}
