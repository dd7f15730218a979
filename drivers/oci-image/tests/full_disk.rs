//! A full file system, real: a small tmpfs in a mount namespace of the test's own.

#![cfg(test)]

mod common;

use common::{Bed, expect_kind, gzip, noise, raw_disk};
use drivers_api::ErrorKind;
use testbed::{
    netns::{in_netns, tool},
    registry::{Artifact, Blob, FakeRegistry, digest_of},
};

#[test]
fn a_full_disk_is_exhausted_leaves_nothing_and_harms_no_other_image() {
    in_netns(|| async {
        let registry = FakeRegistry::start().await.unwrap();
        let mount = tempfile::tempdir().unwrap();
        let dir = mount.path().to_str().unwrap();
        tool(&["mount", "-t", "tmpfs", "-o", "size=8m", "bcd-test", dir]);
        let bed = Bed::with(|config| {
            config.dir = mount.path().join("cache");
            config.reserve_bytes = 0;
        });
        let names =
            |name: &str| std::fs::read_dir(mount.path().join("cache").join(name)).unwrap().count();
        let host = registry.host();
        registry.put("full", "small", &raw_disk(&noise(1, 1 << 20)));
        bed.got(&format!("{host}/full:small")).await;
        // The size is known: refused before a byte is asked for.
        registry.put("full", "known", &raw_disk(&noise(2, 16 << 20)));
        // The size is not known: the disk is full while it is downloaded.
        let bytes = noise(3, 16 << 20);
        registry.put_file("/big.raw", &bytes);
        // Small, but not when it is unpacked.
        let media = "application/vnd.bcd.disk.raw.v1+gzip";
        let bomb = Blob::new(media, gzip(&vec![0x55; 32 << 20]));
        registry.put("full", "unpacked", &Artifact::new(vec![bomb]));
        for reference in [
            format!("{host}/full:known"),
            format!("http://{host}/big.raw#{}", digest_of(&bytes)),
            format!("{host}/full:unpacked"),
        ] {
            let error = bed.pull(&reference).await.unwrap_err();
            expect_kind(&error, ErrorKind::Exhausted, "");
            for _ in 0..500 {
                if names("staging") == 0 {
                    break;
                }
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
            let left = (names("content"), names("refs"), names("partial"), names("staging"));
            assert_eq!(left, (1, 1, 0, 0), "{reference}");
        }
        assert_eq!(registry.count("/full/blobs/"), 2, "small and unpacked");
        registry.put("full", "other", &raw_disk(&noise(4, 1 << 20)));
        bed.got(&format!("{host}/full:other")).await;
        drop(bed);
        tool(&["umount", "-l", dir]);
    });
}
