//! Closes the difference between what is wanted and what is there.
//!
//! Level-triggered, per object: a pass takes a snapshot of the wanted state ([`wanted`]) and of the host, plans
//! ([`plan`], pure: the same code answers `bcd-node plan`), executes the planned steps and writes the [`status`]. The
//! crate knows the drivers' traits and no driver.

mod drivers;
mod engine;
pub mod plan;
mod settings;
pub mod status;
pub mod store;
pub mod wanted;

pub use drivers::Drivers;
pub use engine::Reconciler;
pub use settings::{Backoff, Capacity, Deadlines, Settings, StepHook};
