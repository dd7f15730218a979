//! What every driver needs of a Linux host, so that no two drivers write it twice.
//!
//! * [`run`]: the command runner, the only place that starts a short-lived process.
//! * [`daemon`]: starts a process that outlives the agent (a VMM, a DHCP server), with descriptors passed by number.
//! * [`process`]: finds such a process again without trusting a pid.
//! * [`files`]: files that are whole or absent after a crash, in directories that only their owner can enter.
//! * [`lock`]: locks that the kernel holds and a crash releases.
//! * [`scope`]: puts a process into a systemd scope of its own.
//! * [`bound`]: ends a wait at the caller's deadline or cancellation.
//! * [`events`]: hands a driver's events to its subscribers.
//! * [`readiness`]: waits for a descriptor of any kind.
//! * [`qcow2`]: reads a qcow2 header before anything else opens the file.
//! * [`fault`]: named points at which tests kill the process; compiled out of a release.

pub mod bound;
pub mod daemon;
pub mod events;
pub mod fault;
pub mod files;
pub mod lock;
pub mod process;
pub mod qcow2;
pub mod readiness;
pub mod run;
pub mod scope;
