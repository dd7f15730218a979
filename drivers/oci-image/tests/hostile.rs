//! Artifacts and registries that mean harm.

#![cfg(test)]

mod common;

use std::path::Path;

use common::{Bed, data, expect_kind, gzip, noise, raw_disk, read_data, tar};
use drivers_api::{Context, DiskFormat, ErrorKind, Image, ImageFiles, ImageRef};
use testbed::{
    netns::{in_netns, tool},
    registry::{Artifact, Blob, FakeRegistry, Layout, Manifest, Reply, digest_of},
};

const GZIP_LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const ESCAPE: &str = "/tmp/agent-escape";
const CANARY: &str = "/tmp/agent-canary/secret";

/// Runs a body with a `/tmp` of its own, since the inputs name fixed paths there.
fn in_private_tmp<F: Future<Output = ()>>(body: impl FnOnce() -> F + Send + 'static) {
    in_netns(|| async {
        tool(&["mount", "-t", "tmpfs", "-o", "mode=1777,size=2g", "bcd-test", "/tmp"]);
        plant_canary();
        body().await;
    });
}

/// The canary of the inputs.
fn plant_canary() {
    std::fs::create_dir_all(Path::new(CANARY).parent().unwrap()).unwrap();
    std::fs::create_dir_all(ESCAPE).unwrap();
    std::fs::write(CANARY, vec![b'S'; 10 << 20]).unwrap();
}

#[test]
fn pth_01_no_layer_entry_escapes_the_cache() {
    in_private_tmp(|| async {
        let registry = FakeRegistry::start().await.unwrap();
        let layout = Layout::read(&data("pth01-oci-layout")).unwrap();
        registry.put_layout("pth", &layout);
        assert_eq!(layout.tags.len(), 13);
        for (tag, _) in &layout.tags {
            let bed = Bed::new();
            let reference = format!("{}/pth:{tag}", registry.host());
            if tag == "control" {
                let outcome = bed.pull(&reference).await.unwrap();
                let path = outcome.value.files.main_path().as_path().to_owned();
                assert_eq!(std::fs::read(&path).unwrap(), b"fine\n");
                assert!(
                    path.canonicalize().unwrap().starts_with(bed.cache().canonicalize().unwrap())
                );
            } else {
                let error = bed.refused(&reference).await;
                assert_eq!(error.kind(), ErrorKind::InvalidSpec, "{tag}: {error}");
            }
            let escaped = std::fs::read_dir(ESCAPE).unwrap().count();
            assert_eq!(escaped, 0, "{tag} wrote outside of the cache");
            assert!(std::fs::read(CANARY).unwrap().iter().all(|byte| *byte == b'S'), "{tag}");
        }
    });
}

#[tokio::test]
async fn pth_02_no_malformed_digest_is_asked_for_or_opened() {
    let registry = FakeRegistry::start().await.unwrap();
    let layout = Layout::read(&data("pth02-oci-layout")).unwrap();
    assert_eq!(layout.tags.len(), 10);
    let good = digest_of(b"x");
    for (tag, bad) in &layout.tags {
        let bad = bad.replace('\n', "\\n");
        let index = format!(
            "{{\"schemaVersion\":2,\"manifests\":[{{\"mediaType\":\"application/vnd.oci.image.manifest.v1+json\",\
             \"digest\":\"{bad}\",\"size\":500,\"platform\":{{\"os\":\"linux\",\"architecture\":\"amd64\"}}}}]}}"
        );
        let layer = format!(
            "{{\"schemaVersion\":2,\"config\":{{\"mediaType\":\"x\",\"digest\":\"{good}\",\"size\":1}},\"layers\":\
             [{{\"mediaType\":\"application/vnd.bcd.disk.raw.v1\",\"digest\":\"{bad}\",\"size\":1}}]}}"
        );
        for (kind, text) in [("index", index), ("layer", layer)] {
            let manifest = Manifest { bytes: text.into_bytes(), media_type: String::new() };
            registry.put_manifest("pth", &format!("{kind}-{tag}"), &manifest);
            let bed = Bed::new();
            let error = bed.refused(&format!("{}/pth:{kind}-{tag}", registry.host())).await;
            expect_kind(&error, ErrorKind::InvalidSpec, "invalid digest");
        }
    }
    let asked = registry.seen();
    assert_eq!(asked.len(), 20, "one request each: the tag's");
    assert!(asked.iter().all(|seen| !seen.path.contains("..") && !seen.path.contains("blobs")));
    for bad in ["registry.test/x@sha256:../../y", "reg.test/x:tag/../y"] {
        assert!(bad.parse::<ImageRef>().is_err(), "{bad}");
    }
    assert!(format!("reg.test/x:{}", "t".repeat(300)).parse::<ImageRef>().is_err());
}

#[tokio::test]
async fn pro_05_bytes_that_are_not_those_of_the_digest_never_enter_the_cache() {
    let registry = FakeRegistry::start().await.unwrap();
    let layout = Layout::read(&data("pro05-oci-layout")).unwrap();
    registry.put_layout("pro", &layout);
    let host = registry.host();

    let bed = Bed::new();
    let error = bed.refused(&format!("{host}/pro:layer-swapped")).await;
    expect_kind(&error, ErrorKind::InvalidSpec, "digest mismatch");
    // The manifest's size is a lie only where an index states it.
    let index = Manifest { bytes: layout.index.clone(), media_type: String::new() };
    let lying = String::from_utf8(index.bytes).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&lying).unwrap();
    value["manifests"].as_array_mut().unwrap().remove(0);
    let index = Manifest { bytes: value.to_string().into_bytes(), media_type: String::new() };
    registry.put_manifest("pro", "lie", &index);
    let error = bed.refused(&format!("{host}/pro:lie")).await;
    expect_kind(&error, ErrorKind::InvalidSpec, "digest mismatch");

    // By digest, where the server answers with another valid manifest.
    let other = raw_disk(b"other");
    registry.put("pro", "other", &other);
    let wanted = digest_of(b"never stored");
    registry.put_manifest_as("pro", &wanted, &other.manifest());
    let error = bed.refused(&format!("{host}/pro@{wanted}")).await;
    expect_kind(&error, ErrorKind::InvalidSpec, &format!("wanted {wanted}"));
    expect_kind(&error, ErrorKind::InvalidSpec, &format!("got {}", other.manifest().digest()));

    // A header that names another digest than that of the bytes.
    registry.script(
        "/pro/manifests/other",
        1,
        Reply::WithHeader("Docker-Content-Digest", wanted.clone()),
    );
    let error = bed.refused(&format!("{host}/pro:other")).await;
    expect_kind(&error, ErrorKind::InvalidSpec, "digest mismatch");
    bed.got(&format!("{host}/pro:other")).await;
}

#[tokio::test]
async fn pro_05_a_blob_that_is_longer_or_shorter_than_its_descriptor_is_refused_after_one_request()
{
    let registry = FakeRegistry::start().await.unwrap();
    let bytes = noise(1, 100_000);
    let artifact = raw_disk(&bytes);
    let digest = digest_of(&bytes);
    let short = bytes[..99_999].to_vec();
    let long = [bytes.clone(), vec![0]].concat();
    for (what, stored) in [("short", short), ("long", long)] {
        registry.put("pro", what, &artifact);
        registry.put_blob_as(&digest, &stored);
        let bed = Bed::new();
        let before = registry.count(&digest);
        let error = bed.refused(&format!("{}/pro:{what}", registry.host())).await;
        expect_kind(&error, ErrorKind::InvalidSpec, "digest mismatch");
        assert!(registry.count(&digest) - before <= 2, "{what}");
    }
    let upper = format!(
        "{}/pro@sha256:{}",
        registry.host(),
        digest.trim_start_matches("sha256:").to_ascii_uppercase()
    );
    assert!(upper.parse::<ImageRef>().is_err(), "upper case is refused, not folded");
}

#[tokio::test]
async fn pro_05_a_flipped_byte_in_the_cache_is_found_before_the_file_is_used() {
    use std::os::unix::fs::{FileExt, PermissionsExt};
    let registry = FakeRegistry::start().await.unwrap();
    registry.put("pro", "flip", &raw_disk(&noise(1, 5000)));
    let bed = Bed::new();
    let reference = format!("{}/pro:flip", registry.host());
    let parsed: ImageRef = reference.parse().unwrap();
    let cx = Context::new();
    let flip = |keep_time: bool| {
        let path = bed.cache().join("content").join(&bed.files("content")[0]).join("disk");
        let times = std::fs::metadata(&path).unwrap().modified().unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_at(b"!", 77).unwrap();
        if keep_time {
            file.set_modified(times).unwrap();
        }
    };
    // A write moves the time of change, which every look compares.
    bed.got(&reference).await;
    flip(false);
    assert!(!bed.driver.in_cache(&cx, &parsed).await.unwrap());
    let error = bed.driver.local_path(&cx, &parsed).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    bed.got(&reference).await;
    assert!(bed.driver.verify(&cx, &parsed).await.unwrap());
    // A failing disk does not; the full check finds it.
    flip(true);
    assert!(bed.driver.in_cache(&cx, &parsed).await.unwrap());
    assert!(!bed.driver.verify(&cx, &parsed).await.unwrap());
    assert!(!bed.driver.in_cache(&cx, &parsed).await.unwrap());
    bed.got(&reference).await;
    assert!(bed.driver.verify(&cx, &parsed).await.unwrap());
}

#[test]
fn img_01_a_qcow2_image_that_names_another_file_is_refused_at_the_pull() {
    in_private_tmp(|| async {
        let registry = FakeRegistry::start().await.unwrap();
        for name in [
            "img01-control-clean",
            "img01-backing-shadow",
            "img01-backing-canary",
            "img01-backing-relative",
            "img01-backing-nofmt",
            "img01-datafile-canary",
        ] {
            let bytes = read_data(&format!("{name}.qcow2"));
            let media = "application/vnd.bcd.disk.qcow2.v1";
            let layer = |path: &str| Blob::new(GZIP_LAYER, gzip(&tar(&[(path, &bytes)])));
            registry.put("img", "plain", &Artifact::new(vec![Blob::new(media, bytes.clone())]));
            registry.put(
                "img",
                "named",
                &Artifact::container("amd64", vec![layer("disk/a.qcow2")]),
            );
            registry.put(
                "img",
                "unnamed",
                &Artifact::container("amd64", vec![layer("disk/a.img")]),
            );
            for tag in ["plain", "named", "unnamed"] {
                let bed = Bed::new();
                let reference = format!("{}/img:{tag}", registry.host());
                if name == "img01-control-clean" {
                    let outcome = bed.pull(&reference).await.unwrap();
                    let ImageFiles::Disk { format, .. } = outcome.value.files else {
                        panic!("a disk")
                    };
                    assert_eq!(format, DiskFormat::Qcow2);
                    continue;
                }
                let error = bed.refused(&reference).await;
                let feature = if name.contains("datafile") { "data file" } else { "backing file" };
                expect_kind(&error, ErrorKind::InvalidSpec, feature);
                for secret in ["/etc/shadow", "agent-canary", "SSSS"] {
                    assert!(!error.chain().contains(secret), "{error}");
                }
            }
        }
    });
}

#[test]
fn img_02_a_vmdk_descriptor_is_plain_bytes_or_refused_and_never_recognised() {
    in_private_tmp(|| async {
        let registry = FakeRegistry::start().await.unwrap();
        for name in ["device-extent", "flat-canary", "flat-relative", "two-extents"] {
            let bytes = read_data(&format!("img02-{name}.vmdk"));
            for (title, raw) in [("disk.raw", true), ("disk.img", true), ("disk.qcow2", false)] {
                let blob = Blob::new("application/octet-stream", bytes.clone()).title(title);
                registry.put("img", "v", &Artifact::new(vec![blob]));
                let bed = Bed::new();
                let reference = format!("{}/img:v", registry.host());
                if raw {
                    let outcome = bed.pull(&reference).await.unwrap();
                    let ImageFiles::Disk { path, format, .. } = outcome.value.files else {
                        panic!()
                    };
                    assert_eq!(format, DiskFormat::Raw);
                    assert_eq!(std::fs::read(path.as_path()).unwrap(), bytes);
                } else {
                    let error = bed.refused(&reference).await;
                    expect_kind(&error, ErrorKind::InvalidSpec, "qcow2");
                }
            }
        }
    });
}

#[tokio::test]
async fn upg_02_the_platform_is_chosen_and_a_wrong_label_is_seen_through() {
    let registry = FakeRegistry::start().await.unwrap();
    let layout = Layout::read(&data("upg02-oci-layout")).unwrap();
    registry.put_layout("upg", &layout);
    let index: serde_json::Value = serde_json::from_slice(&layout.index).unwrap();
    let entries = |tag: &str| -> Vec<serde_json::Value> {
        let all = index["manifests"].as_array().unwrap();
        let name = "org.opencontainers.image.ref.name";
        all.iter().filter(|entry| entry["annotations"][name] == tag).cloned().collect()
    };
    let put = |tag: &str, entries: Vec<serde_json::Value>| {
        let index = serde_json::json!({ "schemaVersion": 2, "manifests": entries });
        let manifest =
            Manifest { bytes: index.to_string().into_bytes(), media_type: String::new() };
        registry.put_manifest("upg", tag, &manifest);
    };
    let host = registry.host();
    let bed = Bed::with(|config| config.platform = Some(drivers_api::Architecture::Amd64));

    put("multi", entries("multi"));
    let error = bed.refused(&format!("{host}/upg:multi")).await;
    expect_kind(&error, ErrorKind::NotFound, "no manifest for linux/amd64");
    expect_kind(&error, ErrorKind::NotFound, "linux/s390x, linux/ppc64le");
    assert_eq!(registry.seen().len(), 1, "nothing but the index was asked for");

    for tag in ["mislabelled", "noplatform"] {
        put(tag, entries(tag));
        let error = bed.refused(&format!("{host}/upg:{tag}")).await;
        expect_kind(&error, ErrorKind::NotFound, "config says linux/arm64");
    }

    // Two that match, after an attestation and an unknown platform: the first, every time.
    let (one, two) = (raw_disk(b"one"), raw_disk(b"two"));
    let entry = |artifact: &Artifact, os: &str, arch: &str| {
        let manifest = artifact.manifest();
        serde_json::json!({
            "mediaType": manifest.media_type, "digest": manifest.digest(),
            "size": manifest.bytes.len(), "platform": { "os": os, "architecture": arch },
        })
    };
    registry.put("upg", "one", &one);
    registry.put("upg", "two", &two);
    let unknown = entry(&two, "unknown", "unknown");
    put("two-match", vec![unknown, entry(&one, "linux", "amd64"), entry(&two, "linux", "amd64")]);
    for _ in 0..3 {
        let bed = Bed::new();
        let outcome = bed.pull(&format!("{host}/upg:two-match")).await.unwrap();
        let path = outcome.value.files.main_path().as_path().to_owned();
        assert_eq!(std::fs::read(path).unwrap(), b"one");
    }
}

#[tokio::test]
async fn a_manifest_of_more_than_4_mib_is_refused_while_it_streams() {
    let registry = FakeRegistry::start().await.unwrap();
    let manifest = Manifest { bytes: vec![b' '; (4 << 20) + 1], media_type: String::new() };
    registry.put_manifest("big", "1", &manifest);
    let bed = Bed::new();
    let error = bed.refused(&format!("{}/big:1", registry.host())).await;
    expect_kind(&error, ErrorKind::Exhausted, "too large");
}

#[tokio::test]
async fn a_compressed_file_that_is_cut_or_followed_by_rubbish_is_refused() {
    let registry = FakeRegistry::start().await.unwrap();
    let disk = noise(5, 300_000);
    for (packing, whole) in [("gzip", gzip(&disk)), ("zstd", common::zstd(&disk))] {
        let media = format!("application/vnd.bcd.disk.raw.v1+{packing}");
        let rubbish = [whole.clone(), b"rubbish rubbish".to_vec()].concat();
        for (what, bytes) in [("cut", whole[..whole.len() / 2].to_vec()), ("rubbish", rubbish)] {
            registry.put("cut", what, &Artifact::new(vec![Blob::new(media.clone(), bytes)]));
            let bed = Bed::new();
            let error = bed.refused(&format!("{}/cut:{what}", registry.host())).await;
            assert_eq!(error.kind(), ErrorKind::InvalidSpec, "{packing} {what}: {error}");
        }
        // Several members or frames, one after the other, are one file.
        let double = [whole.clone(), whole.clone()].concat();
        registry.put("cut", "double", &Artifact::new(vec![Blob::new(media, double)]));
        let status = Bed::new();
        let status = status.got(&format!("{}/cut:double", registry.host())).await;
        let ImageFiles::Disk { virtual_size, .. } = status.files else { panic!("a disk") };
        assert_eq!(virtual_size, 600_064, "rounded up to a sector");
    }
}
