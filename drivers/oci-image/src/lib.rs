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

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    fn points_in(dir: &Path, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                points_in(&path, found);
            } else {
                let text = std::fs::read_to_string(&path).unwrap();
                let names = text.split("fault::point(\"").skip(1);
                found.extend(names.filter_map(|rest| rest.split('"').next()).map(str::to_owned));
            }
        }
    }

    #[test]
    fn every_fault_point_is_listed() {
        let mut found = BTreeSet::new();
        points_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
        // This test's own text has the marker too.
        found.retain(|name| name.starts_with("image."));
        let listed: BTreeSet<String> =
            super::FAULT_POINTS.iter().map(ToString::to_string).collect();
        assert_eq!(found, listed);
    }
}
