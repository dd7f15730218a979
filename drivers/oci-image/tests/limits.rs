//! Images that would fill the host. One test: it measures the memory of its process.

#![cfg(test)]

mod common;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use common::{Bed, data, expect_kind, gzip, noise, raw_disk, read_data, tar};
use drivers_api::ErrorKind;
use testbed::registry::{Artifact, Blob, FakeRegistry, Layout};

const QUOTA: u64 = 256 << 20;

/// The most memory that this process had at once, in bytes (proc(5), `VmHWM`).
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Forgets the peak so far; answers what the process has now (proc(5), `clear_refs`).
fn fresh_peak() -> u64 {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    peak()
}

/// The bytes that a tree takes.
fn taken(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let mut bytes = 0;
    let Ok(listing) = std::fs::read_dir(dir) else { return 0 };
    for entry in listing {
        let Ok(entry) = entry else { continue };
        let Ok(found) = std::fs::symlink_metadata(entry.path()) else { continue };
        bytes += if found.is_dir() { taken(&entry.path()) } else { found.blocks() * 512 };
    }
    bytes
}

#[tokio::test]
async fn res_01_bombs_end_as_too_large_before_the_quota_with_little_memory() {
    let registry = FakeRegistry::start().await.unwrap();
    let host = registry.host();
    registry.put_layout("res", &Layout::read(&data("res01-oci-layout")).unwrap());
    let layer = |bytes: Vec<u8>| {
        let media = "application/vnd.oci.image.layer.v1.tar+zstd";
        Artifact::container("amd64", vec![Blob::new(media, bytes)])
    };
    let disk = |packing: &str, bytes: Vec<u8>| {
        let media = format!("application/vnd.bcd.disk.raw.v1+{packing}");
        Artifact::new(vec![Blob::new(media, bytes)])
    };
    registry.put("res", "zeros-layer", &layer(read_data("res01-zeros-1gib.zst")));
    registry.put("res", "zeros-disk", &disk("zstd", read_data("res01-zeros-1gib.zst")));
    registry.put("res", "window-layer", &layer(read_data("res01-zstd-huge-window.zst")));
    registry.put("res", "window-disk", &disk("zstd", read_data("res01-zstd-huge-window.zst")));
    registry.put("res", "isize", &disk("gzip", read_data("res01-gzip-lying-isize.gz")));
    let gzip_layer = "application/vnd.oci.image.layer.v1.tar+gzip";
    let many = |seed: u8| {
        let bytes = gzip(&tar(&[("a", &vec![seed; 20 << 20])]));
        Blob::new(gzip_layer, bytes)
    };
    registry.put("res", "sum", &Artifact::container("amd64", (0..16).map(many).collect()));
    registry.put("res", "good", &raw_disk(&noise(1, 1 << 20)));

    // Once, so that what is allocated for good is there before the measuring begins.
    Bed::new().got(&format!("{host}/res:good")).await;
    for (tag, kind, text) in [
        ("gzip-64m-x200", ErrorKind::Exhausted, "too large"),
        ("zeros-layer", ErrorKind::InvalidSpec, ""),
        ("zeros-disk", ErrorKind::Exhausted, "too large"),
        ("window-layer", ErrorKind::InvalidSpec, "unsupported window"),
        ("window-disk", ErrorKind::InvalidSpec, "unsupported window"),
        ("isize", ErrorKind::InvalidSpec, "corrupt"),
        ("sum", ErrorKind::Exhausted, "too large"),
    ] {
        let bed = Bed::with(|config| {
            config.max_image_bytes = 1 << 40;
            config.max_cache_bytes = Some(QUOTA);
        });
        let (watched, done) = (bed.cache(), Arc::new(AtomicBool::new(false)));
        let watch = tokio::task::spawn_blocking({
            let done = Arc::clone(&done);
            move || {
                let mut most = 0;
                while !done.load(Ordering::Relaxed) {
                    most = most.max(taken(&watched));
                    std::thread::yield_now();
                }
                most
            }
        });
        let before = fresh_peak();
        let error = bed.refused(&format!("{host}/res:{tag}")).await;
        if tag == "zeros-layer" {
            // A tar archive of zeros ends at its first block; the rest counts all the same.
            assert!([ErrorKind::Exhausted, ErrorKind::InvalidSpec].contains(&error.kind()));
        } else {
            expect_kind(&error, kind, text);
        }
        let grown = peak().saturating_sub(before);
        assert!(grown < 64 << 20, "{tag}: memory grew by {grown} bytes");
        done.store(true, Ordering::Relaxed);
        let most = watch.await.unwrap();
        assert!(most < QUOTA, "{tag} took {most} bytes");
        // Others go on.
        bed.got(&format!("{host}/res:good")).await;
    }
}
