//! The reference driver: all four traits over a [`Host`] that exists in memory only.
//!
//! A [`Host`] is the machine: clones are the same machine, and it survives the drivers. [`Host::hypervisor`],
//! [`Host::network`], [`Host::volume`] and [`Host::image`] open drivers with an empty memory, as a restart of the agent
//! does. What the host does on its own (a guest that powers off, a tap that a person removes) and what goes wrong (a call
//! that fails, hangs, is slow) is told to the host.
//!
//! Every call has an `await` between any two effects, so that a dropped future leaves what a crash would leave.

mod bench;
mod console;
mod devices;
mod events;
mod host;
mod hypervisor;
mod image;
mod links;
mod network;
mod op;
mod vm;
mod volume;

pub use bench::ReferenceBench;
pub use host::{Fault, Host, When};
pub use hypervisor::ReferenceHypervisor;
pub use image::ReferenceImage;
pub use network::ReferenceNetwork;
pub use op::Op;
pub use volume::ReferenceVolume;
