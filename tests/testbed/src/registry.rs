//! Registries for tests: a real one, a scripted one, and artifacts to put into them.
//!
//! * [`RealRegistry`]: Debian's `docker-registry` with a configuration of its own on a free loopback port.
//! * [`FakeRegistry`]: answers what a real registry cannot be made to answer, and counts what it was asked.
//! * [`Artifact`], [`Blob`], [`Layout`]: manifests with their blobs, made here or read from an OCI layout on disk.

mod artifact;
mod fake;
mod real;
mod wire;

pub use artifact::{Artifact, Blob, Layout, Manifest, digest_of};
pub use fake::{FakeRegistry, Reply, Seen};
pub use real::RealRegistry;
