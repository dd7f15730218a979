//! Closes the difference between what is wanted and what is there.
//!
//! Level-triggered, per object: a pass takes a snapshot of the wanted state ([`wanted`]) and of the host, plans
//! ([`plan`], pure: the same code answers `bcd-node plan`), executes the planned steps and writes the [`status`]. The
//! crate knows the drivers' traits and no driver.

mod admit;
mod allocate;
mod backoff;
mod board;
mod call;
mod check;
mod drivers;
mod engine;
mod execute;
mod gate;
mod index;
mod listers;
mod note;
mod observe;
mod observed;
mod pass;
pub mod plan;
mod queue;
mod reconciler;
mod resolve;
mod seen;
mod settings;
pub mod status;
pub mod store;
mod tasks;
pub mod wanted;

pub use drivers::Drivers;
pub use reconciler::Reconciler;
pub use settings::{Backoff, Capacity, Deadlines, Settings, StepHook};
