//! Pulls of one large artifact: one asker, a hundred, and `skopeo copy`.

use std::{path::Path, sync::Arc, time::Duration};

use driver_oci_image::{OciImage, OciImageConfig};
use drivers_api::{Context, Image, ImageRef};
use host::run::Run;
use testbed::{
    netns::in_netns,
    registry::{Artifact, Blob, RealRegistry},
};
use tokio::time::Instant;

use crate::{Options, figures::Figures, rig::node};

/// Measures; see the module.
pub(crate) fn measure(options: &Options) -> Figures {
    let bytes: usize = if options.quick { 64 << 20 } else { 1 << 30 };
    let rounds = if options.quick { 1 } else { 3 };
    let best = in_netns(move || async move {
        let registry = RealRegistry::start().await.expect("docker-registry starts");
        let disk = Blob::new("application/vnd.bcd.disk.raw.v1", noise(bytes)).title("disk.raw");
        registry
            .push("big", "latest", &Artifact::new(vec![disk]))
            .await
            .expect("the registry takes the artifact");
        let mut best = [f64::INFINITY; 3];
        for _ in 0..rounds {
            // In turn, so that a machine that drifts drifts for all.
            let times =
                [pull(&registry, 1).await, pull(&registry, 100).await, skopeo(&registry).await];
            for (best, time) in best.iter_mut().zip(times) {
                *best = best.min(time.as_secs_f64());
            }
        }
        best
    });
    let [one, hundred, skopeo] = best;
    let mib = u32::try_from(bytes >> 20).unwrap_or(u32::MAX);
    let mut figures = Figures::default();
    figures.plain("one pull of the artifact", f64::from(mib) / one, "MiB/s", &format!("{mib} MiB"));
    figures.at_most(
        "100 askers of one artifact, beside one",
        hundred / one,
        "x",
        1.05,
        &format!("{hundred:.2} s, one {one:.2} s"),
    );
    figures.at_least(
        "one pull, beside skopeo copy",
        skopeo / one,
        "x",
        1.0,
        &format!("skopeo {skopeo:.2} s"),
    );
    figures
}

/// Bytes that do not compress.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut noise = Vec::with_capacity(bytes);
    while noise.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        noise.extend_from_slice(&state.to_le_bytes());
    }
    noise
}

async fn pull(registry: &RealRegistry, askers: usize) -> Duration {
    let dir = tempfile::tempdir_in(scratch()).expect("a directory");
    let driver = Arc::new(
        OciImage::open(OciImageConfig::new(node(), "bench", dir.path().join("images")))
            .expect("the cache opens"),
    );
    let reference: ImageRef =
        format!("{}/big:latest", registry.host()).parse().expect("a reference");
    let begun = Instant::now();
    let pulls: Vec<_> = (0..askers)
        .map(|_| {
            let (driver, reference) = (Arc::clone(&driver), reference.clone());
            tokio::spawn(async move {
                driver.pull(&Context::new(), &reference).await.map(|outcome| outcome.value)
            })
        })
        .collect();
    for pull in pulls {
        pull.await.expect("no panic").expect("the pull succeeds");
    }
    begun.elapsed()
}

async fn skopeo(registry: &RealRegistry) -> Duration {
    let dir = tempfile::tempdir_in(scratch()).expect("a directory");
    let to = format!("oci:{}:latest", dir.path().join("layout").display());
    let from = format!("docker://{}/big:latest", registry.host());
    let run = Run::new("skopeo")
        .args(["copy", "--quiet", "--src-tls-verify=false", "--insecure-policy", &from, &to])
        .limit(Duration::from_secs(120));
    let begun = Instant::now();
    run.success(&Context::new()).await.expect("skopeo copies");
    begun.elapsed()
}

/// A disk, not memory: both sides write there.
fn scratch() -> &'static Path {
    Path::new("/var/tmp")
}
