//! The image driver: a cache of OCI artifacts and files on a host.
//!
//! A pull goes through these modules:
//!
//! ```text
//! driver ── flight ──> pull::resolve ──> fetch (gate, auth, redirects) ──> registry
//!                      │                 manifest, plan, media (pure)
//!                      └─> pull::build ─> fetch::blob (hash, resume) ─> unpack (budget, tar) ─> cache (publish)
//! ```
//!
//! * One download for any number of callers ([`OciImage`] instances of one process and directory share them); each caller has
//!   its own deadline; the download ends when the last one leaves.
//! * Every byte is checked against its digest while it streams; only checked bytes are unpacked; an image appears in the cache
//!   by one rename.
//! * What an image is made of, and which sources there are: `docs/images.md`. Why the transfer is ours:
//!   `docs/decisions/0005-oci-client.md`.

mod cache;
mod collect;
mod config;
mod driver;
mod error;
mod fetch;
mod flight;
mod manifest;
mod media;
mod plan;
mod pull;
mod unpack;

pub use cache::Held;
pub use config::{
    DEFAULT_CONCURRENCY, DEFAULT_MAX_IMAGE_BYTES, DEFAULT_RESERVE_BYTES, OciImageConfig,
    RegistryCredentials,
};
pub use driver::OciImage;

/// Every point of this crate at which a test can end the process (see [`host::fault`]).
pub const FAULT_POINTS: &[&str] = &[
    "image.pull.downloaded",
    "image.pull.unpacked",
    "image.pull.staged",
    "image.pull.published",
    "image.pull.reference-written",
    "image.delete.reference-removed",
    "image.delete.content-moved",
    "image.delete.content-removed",
    "image.collect.references-removed",
];
