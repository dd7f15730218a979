//! The driver contract as a kit that any driver passes or fails.
//!
//! A driver's author implements the *bench* of the trait (how to open the driver, what to try on it) and writes one line:
//!
//! ```no_run
//! # async fn example(bench: impl conformance::VolumeBench) {
//! conformance::check_volume(&bench, &conformance::Options::default()).await.assert_passed();
//! # }
//! ```
//!
//! Each rule of the contract is a named case with the sentence that it holds. A case that the bench cannot set up is
//! shown as *not tried* with the reason; it never passes unseen. The test belongs into a test binary of its own
//! (`tests/conformance.rs`), since the kit counts the descriptors and children of the process; several runs of the kit in
//! one process wait for each other, and belong into one test one after the other. The runtime needs its time and IO drivers enabled, as `#[tokio::test]` has them, and
//! must not have its time paused.
//!
//! [`reference`](mod@reference) is a driver of all four traits over a host that exists in memory only, with faults, drift and counters:
//! it passes the kit, and tests of what is above the drivers use it.

mod bench;
mod census;
#[expect(clippy::let_underscore_must_use, reason = "cases look at the host, not at each answer")]
mod hypervisor;
#[expect(clippy::let_underscore_must_use, reason = "cases look at the host, not at each answer")]
mod image;
mod kit;
#[expect(clippy::let_underscore_must_use, reason = "cases look at the host, not at each answer")]
mod network;
mod odd;
mod options;
mod report;
mod runner;
#[expect(clippy::let_underscore_must_use, reason = "cases look at the host, not at each answer")]
mod volume;

pub mod reference;

pub use async_trait::async_trait;
pub use bench::{AnyBench, HypervisorBench, ImageBench, NetworkBench, Plant, VolumeBench};
pub use census::Census;
pub use hypervisor::check_hypervisor;
pub use image::check_image;
pub use network::check_network;
pub use options::Options;
pub use report::{CaseReport, DriverKind, Report, Verdict};
pub use volume::check_volume;

/// Checks a driver of any kind.
pub async fn check(bench: &AnyBench, options: &Options) -> Report {
    match bench {
        AnyBench::Hypervisor(bench) => check_hypervisor(bench.as_ref(), options).await,
        AnyBench::Network(bench) => check_network(bench.as_ref(), options).await,
        AnyBench::Volume(bench) => check_volume(bench.as_ref(), options).await,
        AnyBench::Image(bench) => check_image(bench.as_ref(), options).await,
    }
}
