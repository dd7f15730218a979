//! Pulls from Debian's `docker-registry`.

#![cfg(test)]

mod common;

use std::{os::unix::fs::MetadataExt, time::Duration};

use common::{
    Bed, expect_change, expect_kind, gzip, kernel, noise, raw_disk, read_data, tar, within, zstd,
};
use drivers_api::{Change, Context, DiskFormat, ErrorKind, Image, ImageFiles};
use testbed::registry::{Artifact, Blob, Manifest, RealRegistry};

#[tokio::test]
async fn a_kernel_with_its_initrd_is_pulled_and_a_repeat_writes_nothing() {
    let registry = RealRegistry::start().await.unwrap();
    let artifact = kernel(1);
    let digest = registry.push("guests/hello", "v1", &artifact).await.unwrap();
    let bed = Bed::new();
    let reference = format!("{}/guests/hello:v1", registry.host());

    let first = bed.pull(&reference).await.unwrap();
    expect_change(&first, Change::Created);
    assert_eq!(first.value.digest.as_str(), digest);
    let ImageFiles::Kernel { kernel, initrd: Some(initrd), cmdline } = &first.value.files else {
        panic!("a kernel with an initrd was wanted: {:?}", first.value);
    };
    assert_eq!(cmdline.as_deref(), Some("console=ttyS0 quiet"));
    assert_eq!(std::fs::read(kernel.as_path()).unwrap(), artifact.layers[0].bytes);
    assert_eq!(std::fs::read(initrd.as_path()).unwrap(), artifact.layers[1].bytes);
    assert_eq!(std::fs::metadata(kernel.as_path()).unwrap().mode() & 0o7777, 0o444);
    let dir = kernel.as_path().parent().unwrap();
    assert_eq!(std::fs::metadata(dir).unwrap().mode() & 0o7777, 0o711);

    let before = bed.census();
    let again = bed.pull(&reference).await.unwrap();
    expect_change(&again, Change::Unchanged);
    assert_eq!(again.value, first.value);
    assert_eq!(bed.census(), before, "a repeat writes nothing");

    // By digest, with the registry gone: no request is needed.
    let pinned = format!("{}/guests/hello@{digest}", registry.host());
    expect_change(&bed.pull(&pinned).await.unwrap(), Change::Created);
    drop(registry);
    expect_change(&bed.pull(&pinned).await.unwrap(), Change::Unchanged);
    assert_eq!(bed.files("content").len(), 1, "one content under two references");
    assert_eq!(bed.driver.list(&Context::new()).await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_disk_is_the_same_whether_plain_gzip_or_zstd_and_its_zeros_take_no_space() {
    let registry = RealRegistry::start().await.unwrap();
    let mut disk = noise(7, 3 << 20);
    disk.resize(32 << 20, 0);
    let bed = Bed::new();
    let media = "application/vnd.bcd.disk.raw.v1";
    for (tag, blob) in [
        ("plain", Blob::new(media, disk.clone())),
        ("gzip", Blob::new(format!("{media}+gzip"), gzip(&disk))),
        ("zstd", Blob::new(format!("{media}+zstd"), zstd(&disk))),
        ("named", Blob::new("application/octet-stream", zstd(&disk)).title("disk.raw.zst")),
    ] {
        registry.push("d", tag, &Artifact::new(vec![blob])).await.unwrap();
        let outcome = bed.pull(&format!("{}/d:{tag}", registry.host())).await.unwrap();
        let ImageFiles::Disk { path, format, virtual_size } = &outcome.value.files else {
            panic!("a disk was wanted");
        };
        assert_eq!((*format, *virtual_size), (DiskFormat::Raw, 32 << 20));
        assert!(std::fs::read(path.as_path()).unwrap() == disk, "{tag}: other bytes");
        if tag != "plain" {
            assert!(outcome.value.size_bytes < 8 << 20, "{tag} takes {}", outcome.value.size_bytes);
        }
    }
    assert_eq!(bed.files("partial"), Vec::<String>::new());
}

#[tokio::test]
async fn a_container_disk_a_uki_and_a_qcow2_image_are_what_they_say() {
    let registry = RealRegistry::start().await.unwrap();
    let qcow2 = read_data("img01-control-clean.qcow2");
    let layer = "application/vnd.oci.image.layer.v1.tar+gzip";
    let bed = Bed::new();
    for (tag, name, format, size) in [
        ("named", "disk/fedora.qcow2", DiskFormat::Qcow2, 8 << 20),
        ("unnamed", "disk/disk.img", DiskFormat::Qcow2, 8 << 20),
        ("raw", "disk/disk.raw", DiskFormat::Raw, qcow2.len()),
    ] {
        let blob = Blob::new(layer, gzip(&tar(&[("etc/passwd", b"x"), (name, &qcow2)])));
        registry.push("c", tag, &Artifact::container("amd64", vec![blob])).await.unwrap();
        let outcome = bed.pull(&format!("{}/c:{tag}", registry.host())).await.unwrap();
        let ImageFiles::Disk { path, format: found, virtual_size } = &outcome.value.files else {
            panic!("a disk was wanted");
        };
        assert_eq!((*found, *virtual_size), (format, u64::try_from(size).unwrap()), "{tag}");
        assert_eq!(std::fs::read(path.as_path()).unwrap(), qcow2);
    }
    let mut pe = b"MZ".to_vec();
    pe.extend_from_slice(&noise(3, 5000));
    let uki = Artifact::new(vec![Blob::new("application/octet-stream", pe).title("linux.efi")]);
    registry.push("u", "latest", &uki).await.unwrap();
    let outcome = bed.pull(&format!("{}/u", registry.host())).await.unwrap();
    assert!(matches!(outcome.value.files, ImageFiles::Uki { .. }));
    let fake = Artifact::new(vec![Blob::new("application/vnd.bcd.uki.v1", "no PE file")]);
    registry.push("u", "fake", &fake).await.unwrap();
    let error = bed.pull(&format!("{}/u:fake", registry.host())).await.unwrap_err();
    expect_kind(&error, ErrorKind::InvalidSpec, "no PE file");
}

#[tokio::test]
async fn a_tag_that_moves_is_resolved_anew_and_an_index_is_followed() {
    let registry = RealRegistry::start().await.unwrap();
    let host = registry.host();
    let bed = Bed::new();
    registry.push("m", "latest", &raw_disk(&noise(1, 1000))).await.unwrap();
    let reference = format!("oci://{host}/m");
    let first = bed.pull(&reference).await.unwrap();
    expect_change(&first, Change::Created);
    registry.push("m", "latest", &raw_disk(&noise(2, 1000))).await.unwrap();
    let second = bed.pull(&reference).await.unwrap();
    expect_change(&second, Change::Changed);
    assert_ne!(first.value.digest, second.value.digest);

    let amd64 = registry.push("m", "a", &raw_disk(&noise(3, 1000))).await.unwrap();
    let size = raw_disk(&noise(3, 1000)).manifest().bytes.len();
    let index = format!(
        "{{\"schemaVersion\":2,\"mediaType\":\"application/vnd.oci.image.index.v1+json\",\"manifests\":[{{\"mediaType\":\
         \"application/vnd.oci.image.manifest.v1+json\",\"digest\":\"{amd64}\",\"size\":{size},\"platform\":{{\"os\":\
         \"linux\",\"architecture\":\"amd64\"}}}}]}}"
    );
    let index = Manifest {
        bytes: index.into_bytes(),
        media_type: "application/vnd.oci.image.index.v1+json".to_owned(),
    };
    registry.push_manifest("m", "multi", &index).await.unwrap();
    let outcome = bed.pull(&format!("{host}/m:multi")).await.unwrap();
    assert_eq!(outcome.value.digest.as_str(), index.digest());
    let pinned = format!("{host}/m@{}", index.digest());
    expect_change(&bed.pull(&pinned).await.unwrap(), Change::Created);
    expect_change(&bed.pull(&pinned).await.unwrap(), Change::Unchanged);
}

#[tokio::test]
async fn what_skopeo_copies_into_the_registry_is_pulled() {
    let registry = RealRegistry::start().await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let layout = dir.path().join("layout");
    let artifact = kernel(9);
    let blobs = layout.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).unwrap();
    let manifest = artifact.manifest();
    let digest = manifest.digest();
    let all = artifact.blobs().map(|blob| blob.bytes.clone()).chain([manifest.bytes.clone()]);
    for bytes in all {
        let digest = testbed::registry::digest_of(&bytes);
        std::fs::write(blobs.join(digest.trim_start_matches("sha256:")), &bytes).unwrap();
    }
    let index = format!(
        "{{\"schemaVersion\":2,\"manifests\":[{{\"mediaType\":\"{}\",\"digest\":\"{digest}\",\"size\":{}}}]}}",
        manifest.media_type,
        manifest.bytes.len()
    );
    std::fs::write(layout.join("index.json"), index).unwrap();
    std::fs::write(layout.join("oci-layout"), "{\"imageLayoutVersion\":\"1.0.0\"}").unwrap();
    let copy = host::run::Run::new("skopeo")
        .args(["copy", "--dest-tls-verify=false", "--preserve-digests"])
        .arg(format!("oci:{}", layout.display()))
        .arg(format!("docker://{}/sk/guest:1", registry.host()));
    copy.success(&Context::new()).await.unwrap();
    let bed = Bed::new();
    let outcome = bed.pull(&format!("{}/sk/guest:1", registry.host())).await.unwrap();
    assert_eq!(outcome.value.digest.as_str(), digest);
}

#[tokio::test]
async fn what_the_registry_does_not_have_is_not_found_and_a_silent_one_is_unavailable() {
    let registry = RealRegistry::start().await.unwrap();
    let host = registry.host();
    let bed = Bed::new();
    let error = bed.refused(&format!("{host}/none:1")).await;
    expect_kind(&error, ErrorKind::NotFound, "MANIFEST_UNKNOWN");
    drop(registry);
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let reference = format!("{}/x:1", silent.local_addr().unwrap()).parse().unwrap();
    let cx = within(Duration::from_millis(400));
    let error = bed.driver.pull(&cx, &reference).await.unwrap_err();
    expect_kind(&error, ErrorKind::Deadline, "deadline");
    drop(silent);
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = bed.refused(&format!("{closed}/x:1")).await;
    expect_kind(&error, ErrorKind::Unavailable, "does not answer");
    let error = bed.refused("registry.test/x:1").await;
    expect_kind(&error, ErrorKind::Unavailable, "does not answer");
}

#[tokio::test]
async fn what_our_own_script_pushes_is_pulled_as_it_was_meant() {
    let registry = RealRegistry::start().await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/push-image");
    let push = async |tag: &str, args: Vec<std::ffi::OsString>| {
        let reference = format!("{}/script/guest:{tag}", registry.host());
        let run = host::run::Run::new(script).arg(&reference).args(args);
        run.success(&Context::new()).await.unwrap();
        reference
    };
    let (vmlinuz, initrd) = (noise(1, 5000), noise(2, 6000));
    let args = vec![
        "--kernel".into(),
        file("vmlinuz", &vmlinuz).into(),
        "--initrd".into(),
        file("initrd.gz", &initrd).into(),
        "--cmdline".into(),
        file("cmdline", b"console=ttyS0 quiet\n").into(),
    ];
    let bed = Bed::new();
    let status = bed.got(&push("linux", args).await).await;
    let ImageFiles::Kernel { kernel, initrd: Some(found), cmdline } = &status.files else {
        panic!("a kernel with an initrd was wanted: {status:?}");
    };
    assert_eq!(cmdline.as_deref(), Some("console=ttyS0 quiet"));
    assert_eq!(std::fs::read(kernel.as_path()).unwrap(), vmlinuz);
    assert_eq!(std::fs::read(found.as_path()).unwrap(), initrd, "handed on as it is");
    let packed = zstd(&read_data("img01-control-clean.qcow2"));
    let args = vec!["--disk".into(), file("disk.qcow2.zst", &packed).into()];
    let status = bed.got(&push("disk", args).await).await;
    let ImageFiles::Disk { format, virtual_size, .. } = status.files else { panic!("a disk") };
    assert_eq!((format, virtual_size), (DiskFormat::Qcow2, 8 << 20));
}
