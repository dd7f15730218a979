//! A hypervisor driver over QEMU, spoken to by QMP.
//!
//! QEMU is started by this driver, outlives it, and is found again from the host alone:
//!
//! * [`paths`] says which files a VM has; [`record`] reads and writes them.
//! * [`vmm`] starts a VMM so that there are never two, and finds it again.
//! * [`scope`] gives it a cgroup of its own before the guest runs.
//! * [`live`] holds a VMM that runs, with its [`qmp`] monitor and its [`console`].
//! * [`observe`] answers what is there; [`plan`], [`argv`] and [`devices`] decide what is to be, without touching the host;
//!   [`apply`] does it.
//!
//! ```text
//!            create            start                        stop, guest off, crash
//! (absent) ─────────> Stopped ───────> Starting ──> Running ───────────────────────> Stopped
//!     ^                  │                             │ disk full: Paused ──start──> Running
//!     └──────delete──────┘                             │ monitor silent: Unknown
//! ```

#![expect(
    rustdoc::private_intra_doc_links,
    reason = "this page is for who works on the driver; the public part is the configuration and the constructor"
)]

mod accel;
mod apply;
mod argv;
mod boot;
mod config;
mod console;
mod devices;
mod driver;
mod error;
mod hypervisor;
mod live;
mod observe;
mod ofd;
mod paths;
mod plan;
mod qmp;
mod record;
mod scope;
mod seed;
mod tap;
mod vmm;

pub use accel::probed as probed_kvm;
pub use config::{AccelChoice, QemuConfig, UidRange};
pub use hypervisor::QemuKvm;
pub use scope::is_slice;

/// The driver's id.
pub const DRIVER: &str = "qemu-kvm";

/// The points at which a test can kill the process or inject an error.
pub const FAULT_POINTS: &[&str] = &[
    "qemu.create.mark-written",
    "qemu.create.files-placed",
    "qemu.create.spec-written",
    "qemu.create.done",
    "qemu.create.files-replaced",
    "qemu.create.spec-replaced",
    "qemu.start.prepared",
    "qemu.start.spawned",
    "qemu.start.launched",
    "qemu.start.confined",
    "qemu.start.ready",
    "qemu.start.continued",
    "qemu.stop.ended",
    "qemu.delete.ended",
    "qemu.delete.set-aside",
    "qemu.delete.swept",
    "qemu.delete.done",
    "qemu.attach-disk.recorded",
    "qemu.attach-disk.opened",
    "qemu.attach-disk.plugged",
    "qemu.detach-disk.recorded",
    "qemu.detach-disk.marked",
    "qemu.detach-disk.unplugged",
    "qemu.attach-nic.recorded",
    "qemu.attach-nic.plugged",
    "qemu.detach-nic.recorded",
    "qemu.detach-nic.marked",
    "qemu.detach-nic.unplugged",
];
