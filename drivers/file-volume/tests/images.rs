//! Volumes from images, and images that are an attack.

#![cfg(test)]

mod common;

use std::{fs, os::unix::fs::MetadataExt, path::Path};

use common::*;
use drivers_api::{Change, Context, DiskFormat, ErrorKind, Volume};
use rustix::fs::inotify;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data");

#[tokio::test]
async fn every_pair_of_formats_is_a_copy_that_outlives_its_image() {
    let bench = Bench::new();
    let driver = bench.driver();
    let mut n = 0;
    for of in [DiskFormat::Qcow2, DiskFormat::Raw] {
        for format in [DiskFormat::Qcow2, DiskFormat::Raw] {
            n += 1;
            let image = if of == DiskFormat::Qcow2 {
                bench.qcow2_image("image", 8, "the image").await
            } else {
                bench.file("image", b"the image")
            };
            let wanted = copy_of(n, 1, format, &image, of);
            assert_eq!(ensure(&driver, &wanted).await.unwrap(), Change::Created);
            fs::remove_file(&image).unwrap();
            let disk = bench.volume_dir(id(n)).join(format!("disk.{}", format.as_str()));
            assert_eq!(guest_reads(&disk, format.as_str(), 9).await, "the image");
            assert_eq!(virtual_size(&disk, format.as_str()).await, GIB);
            if format == DiskFormat::Qcow2 {
                check_image(&disk).await;
            }
            // Again, with the image gone: the source is looked at only once.
            assert_eq!(ensure(&driver, &wanted).await.unwrap(), Change::Unchanged);
        }
    }
    let before = bench.census();
    let found = driver.list(&Context::new()).await.unwrap();
    assert!(found.iter().all(|status| status.complete && status.message.is_none()), "{found:?}");
    assert_eq!(bench.census(), before);
    for n in 1..=n {
        assert_eq!(destroy(&driver, n).await.unwrap(), Change::Changed);
    }
    assert!(driver.list(&Context::new()).await.unwrap().is_empty());
}

#[tokio::test]
async fn an_overlay_shares_the_images_bytes_and_writes_its_own() {
    let bench = Bench::new();
    let driver = bench.driver();
    let image = bench.qcow2_image("image", 8, "the image").await;
    let inode = fs::metadata(&image).unwrap().ino();
    for n in 1..=2 {
        let wanted = copy_of(n, 1, DiskFormat::Qcow2, &image, DiskFormat::Qcow2);
        assert!(ensure(&driver, &wanted).await.unwrap().wrote());
        let base = bench.volume_dir(id(n)).join("base.qcow2");
        assert_eq!(fs::metadata(base).unwrap().ino(), inode, "a hard link, no copy");
    }
    let disk = |n| bench.volume_dir(id(n)).join("disk.qcow2");
    tool("qemu-io", &["-f", "qcow2", "-c", "write -P 0x42 0 64k", text_of(&disk(1))]).await;
    assert_eq!(guest_reads(&disk(1), "qcow2", 9).await, "BBBBBBBBB");
    assert_eq!(guest_reads(&disk(2), "qcow2", 9).await, "the image");
    assert_eq!(ensure(&driver, &spec(1, 700, DiskFormat::Qcow2)).await.unwrap(), Change::Changed);
    check_image(&disk(1)).await;
    assert_eq!(guest_reads(&disk(1), "qcow2", 9).await, "BBBBBBBBB");
    // Beyond the room of its tables, by the tool.
    assert_eq!(ensure(&driver, &spec(2, 9_000, DiskFormat::Qcow2)).await.unwrap(), Change::Changed);
    check_image(&disk(2)).await;
    assert_eq!(virtual_size(&disk(2), "qcow2").await, 9_000 * GIB);
    assert_eq!(guest_reads(&disk(2), "qcow2", 9).await, "the image");
    assert!(driver.attach_volume(&Context::new(), &attach(2, 1)).await.is_ok());
}

/// The image cache is on another filesystem: `/dev/shm` is a tmpfs on every Linux host.
#[tokio::test]
async fn volumes_share_one_copy_of_an_image_from_another_filesystem_until_the_last_is_gone() {
    let bench = Bench::new();
    let cache = Bench::under(Path::new("/dev/shm"));
    let (here, there) = (fs::metadata(bench.dir.path()), fs::metadata(cache.dir.path()));
    assert_ne!(here.unwrap().dev(), there.unwrap().dev(), "this test needs two filesystems");
    let driver = bench.driver();
    let image = cache.qcow2_image("image", 8, "the image").await;
    let calls = (1..=8).map(|n| {
        let driver = driver.clone();
        let wanted = copy_of(n, 1, DiskFormat::Qcow2, &image, DiskFormat::Qcow2);
        tokio::spawn(async move { ensure(&driver, &wanted).await })
    });
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(call.await.unwrap().unwrap(), Change::Created);
    }
    let bases = bench.pool().join("bases");
    assert_eq!(fs::read_dir(&bases).unwrap().count(), 1, "one copy for all");
    // Another image is another copy, also under the same path.
    fs::remove_file(&image).unwrap();
    let image = cache.qcow2_image("image", 8, "an update").await;
    let other = copy_of(9, 1, DiskFormat::Qcow2, &image, DiskFormat::Qcow2);
    assert!(ensure(&driver, &other).await.unwrap().wrote());
    assert_eq!(fs::read_dir(&bases).unwrap().count(), 2);
    let disk = |n| bench.volume_dir(id(n)).join("disk.qcow2");
    assert_eq!(guest_reads(&disk(9), "qcow2", 9).await, "an update");
    for n in 1..=8 {
        assert_eq!(guest_reads(&disk(n), "qcow2", 9).await, "the image");
        assert_eq!(destroy(&driver, n).await.unwrap(), Change::Changed);
    }
    assert_eq!(fs::read_dir(&bases).unwrap().count(), 1, "no user, no copy");
    assert_eq!(guest_reads(&disk(9), "qcow2", 9).await, "an update");
}

#[tokio::test]
async fn a_volume_smaller_than_its_image_is_refused_before_any_effect() {
    let bench = Bench::new();
    let driver = bench.driver();
    let image = bench.qcow2_image("image", 1025, "large").await;
    let before = bench.census();
    let wanted = copy_of(1, 1, DiskFormat::Qcow2, &image, DiskFormat::Qcow2);
    let error = ensure(&driver, &wanted).await.unwrap_err();
    assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidSpec, Some("size_gib")));
    let gone = copy_of(1, 1, DiskFormat::Raw, Path::new("/nowhere/image"), DiskFormat::Raw);
    assert_eq!(ensure(&driver, &gone).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(bench.census(), before);
}

/// What real tools write is read as they mean it: each is taken, or refused for its own feature.
#[tokio::test]
async fn images_of_every_kind_that_qemu_img_makes_are_told_apart() {
    let bench = Bench::new();
    let driver = bench.driver();
    let base = bench.qcow2_image("base", 4, "the image").await;
    let base = text_of(&base);
    let made: [(&str, &[&str], Option<&str>); 12] = [
        ("v2", &["compat=0.10"], None),
        ("zstd", &["compression_type=zstd"], None),
        ("subclusters", &["extended_l2=on,cluster_size=128k"], None),
        ("small-clusters", &["cluster_size=512"], None),
        ("large-clusters", &["cluster_size=2M"], None),
        ("refcounts", &["refcount_bits=1"], None),
        ("lazy", &["lazy_refcounts=on"], None),
        ("preallocated", &["preallocation=metadata"], None),
        ("raw-data", &["data_file=DIR/data,data_file_raw=on"], Some("an external data file")),
        ("aes", &[], Some("encryption")),
        ("luks", &[], Some("encryption")),
        ("overlay", &["backing_file=BASE,backing_fmt=qcow2"], Some("a backing file")),
    ];
    let dir = text_of(bench.dir.path()).to_owned();
    for (n, (name, options, refused)) in (1..).zip(made) {
        let path = bench.dir.path().join(name);
        let mut args = vec![
            "create".to_owned(),
            "-q".to_owned(),
            "-f".to_owned(),
            "qcow2".to_owned(),
            "-o".to_owned(),
        ];
        args.extend(options.iter().map(|option| option.replace("DIR", &dir).replace("BASE", base)));
        if refused == Some("encryption") {
            // The method's number in the header, as `qemu-img` would write it after seconds of key derivation.
            let method: u32 = if name == "aes" { 1 } else { 2 };
            let plain = ["create", "-q", "-f", "qcow2", text_of(&path), "4M"];
            tool("qemu-img", &plain).await;
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &method.to_be_bytes(), 32).unwrap();
        } else {
            args.extend([text_of(&path).to_owned(), "4M".to_owned()]);
            tool("qemu-img", &args.iter().map(String::as_str).collect::<Vec<_>>()).await;
        }
        let answer =
            ensure(&driver, &copy_of(n, 1, DiskFormat::Qcow2, &path, DiskFormat::Qcow2)).await;
        match (answer, refused) {
            (Ok(change), None) => assert_eq!(change, Change::Created, "{name}"),
            (Err(error), Some(feature)) => {
                assert_eq!(error.kind(), ErrorKind::InvalidSpec, "{name}");
                assert!(error.chain().contains(feature), "{name}: {}", error.chain());
            }
            (answer, refused) => panic!("{name}: {answer:?}, wanted {refused:?}"),
        }
    }
    tool("qemu-img", &["snapshot", "-c", "before", base]).await;
    let wanted = copy_of(20, 1, DiskFormat::Qcow2, Path::new(base), DiskFormat::Qcow2);
    let error = ensure(&driver, &wanted).await.unwrap_err();
    assert!(error.chain().contains("internal snapshots"), "{}", error.chain());
}

/// What a VMM adds to its own disk does not keep it from being grown and opened again.
#[tokio::test]
async fn a_volume_with_snapshots_and_bitmaps_grows_by_the_tool() {
    let bench = Bench::new();
    let driver = bench.driver();
    for (n, add) in [(1, ["snapshot", "-c", "before"]), (2, ["bitmap", "--add", "-f"])] {
        assert!(ensure(&driver, &spec(n, 1, DiskFormat::Qcow2)).await.unwrap().wrote());
        let disk = bench.volume_dir(id(n)).join("disk.qcow2");
        let mut args = add.to_vec();
        if n == 2 {
            args.push("qcow2");
        }
        args.push(text_of(&disk));
        if n == 2 {
            args.push("changes");
        }
        tool("qemu-img", &args).await;
        let grown = ensure(&driver, &spec(n, 2, DiskFormat::Qcow2)).await.unwrap();
        assert_eq!(grown, Change::Changed);
        assert_eq!(virtual_size(&disk, "qcow2").await, 2 * GIB);
        check_image(&disk).await;
        assert!(driver.attach_volume(&Context::new(), &attach(n, 1)).await.is_ok());
    }
}

/// Tells whether a file was opened.
struct Watch(std::os::fd::OwnedFd);

impl Watch {
    fn on(path: &Path) -> Self {
        let fd = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&fd, path, inotify::WatchFlags::OPEN).unwrap();
        Self(fd)
    }

    fn was_opened(&self) -> bool {
        rustix::io::read(&self.0, &mut [0_u8; 256]).is_ok()
    }
}

/// A canary where the images of case IMG-01 look for it, and a tool that tells when it is run.
struct Trap {
    canary: Watch,
    shadow: Watch,
    tool_ran: std::path::PathBuf,
    tool: std::path::PathBuf,
}

impl Trap {
    /// In mounts of its own, so that nobody else opens what is watched.
    async fn set(bench: &Bench) -> Self {
        let canary = Path::new("/tmp/agent-canary/secret");
        mount_tmpfs(canary.parent().unwrap(), "size=16m").await;
        fs::write(canary, vec![b'S'; 10 << 20]).unwrap();
        let shadow = bench.file("shadow", b"root:*:19000:0:99999:7:::\n");
        tool("mount", &["--bind", text_of(&shadow), "/etc/shadow"]).await;
        let tool = bench.file("qemu-img", b"");
        let tool_ran = bench.dir.path().join("tool-ran");
        fs::write(&tool, format!("#!/bin/sh\ntouch {}\nexit 1\n", text_of(&tool_ran))).unwrap();
        fs::set_permissions(&tool, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let trap = Self { canary: Watch::on(canary), shadow: Watch::on(&shadow), tool_ran, tool };
        drop(fs::File::open(canary).unwrap());
        drop(fs::File::open("/etc/shadow").unwrap());
        assert!(trap.canary.was_opened() && trap.shadow.was_opened(), "the trap works");
        trap
    }

    fn check(&self, what: &str) {
        assert!(!self.canary.was_opened(), "{what}: the canary was opened");
        assert!(!self.shadow.was_opened(), "{what}: /etc/shadow was opened");
        assert!(!self.tool_ran.exists(), "{what}: a tool was run");
    }
}

/// Case IMG-01.
#[tokio::test]
async fn a_header_that_names_another_file_is_refused_before_anything_opens_it() {
    if !inside_own_mounts("a_header_that_names_another_file_is_refused_before_anything_opens_it")
        .await
    {
        return;
    }
    let bench = Bench::new();
    let trap = Trap::set(&bench).await;
    let mut config = bench.config();
    config.qemu_img = trap.tool.clone();
    let driver = driver_file_volume::FileVolume::open(config).unwrap();
    let before = bench.census();
    let hostile = [
        ("img01-backing-shadow.qcow2", "a backing file"),
        ("img01-backing-canary.qcow2", "a backing file"),
        ("img01-backing-relative.qcow2", "a backing file"),
        ("img01-backing-nofmt.qcow2", "a backing file"),
        ("img01-datafile-canary.qcow2", "an external data file"),
    ];
    for (name, feature) in hostile {
        let image = Path::new(DATA).join(name);
        // As the image of a volume, of either format.
        for format in [DiskFormat::Qcow2, DiskFormat::Raw] {
            let wanted = copy_of(1, 1, format, &image, DiskFormat::Qcow2);
            let error = ensure(&driver, &wanted).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidSpec, "{name}");
            let text = error.chain();
            assert!(
                text.contains(feature) && !text.contains("canary/") && !text.contains("shadow ")
            );
            assert_eq!(bench.census(), before, "{name}");
        }
        // As a file that is there already, without a mark and under the mark of a volume of ours.
        let dir = bench.volume_dir(id(1));
        fs::create_dir(&dir).unwrap();
        fs::copy(&image, dir.join("disk.qcow2")).unwrap();
        let error = ensure(&driver, &spec(1, 1, DiskFormat::Qcow2)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        fs::remove_dir_all(&dir).unwrap();
        assert!(ensure(&driver, &spec(1, 1, DiskFormat::Qcow2)).await.unwrap().wrote());
        fs::copy(&image, dir.join("disk.qcow2")).unwrap();
        for error in [
            ensure(&driver, &spec(1, 1, DiskFormat::Qcow2)).await.unwrap_err(),
            ensure(&driver, &spec(1, 9, DiskFormat::Qcow2)).await.unwrap_err(),
            driver.attach_volume(&Context::new(), &attach(1, 1)).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Conflict, "{name}");
            assert!(error.chain().contains(feature), "{name}: {}", error.chain());
        }
        let status = driver.get(&Context::new(), id(1)).await.unwrap().unwrap();
        assert!(!status.complete && status.message.unwrap().contains(feature), "{name}");
        assert_eq!(destroy(&driver, 1).await.unwrap(), Change::Changed);
        trap.check(name);
    }
    let clean = Path::new(DATA).join("img01-control-clean.qcow2");
    let wanted = copy_of(1, 1, DiskFormat::Qcow2, &clean, DiskFormat::Qcow2);
    assert_eq!(ensure(&driver, &wanted).await.unwrap(), Change::Created);
    assert!(driver.attach_volume(&Context::new(), &attach(1, 1)).await.is_ok());
    trap.check("control");
}

/// Case IMG-01 from within: an escaped VMM rewrites the header of its own disk.
#[tokio::test]
async fn an_overlay_whose_base_was_exchanged_is_refused() {
    let bench = Bench::new();
    let driver = bench.driver();
    let image = bench.qcow2_image("image", 8, "the image").await;
    let wanted = copy_of(1, 1, DiskFormat::Qcow2, &image, DiskFormat::Qcow2);
    assert!(ensure(&driver, &wanted).await.unwrap().wrote());
    let disk = bench.volume_dir(id(1)).join("disk.qcow2");
    for (base, format) in [("/etc/shadow", "qcow2"), ("base.qcow2", "raw")] {
        tool(
            "qemu-img",
            &["rebase", "-u", "-f", "qcow2", "-b", base, "-F", format, text_of(&disk)],
        )
        .await;
        let error = driver.attach_volume(&Context::new(), &attach(1, 1)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(error.chain().contains("than its own") && !error.chain().contains("shadow"));
    }
    tool(
        "qemu-img",
        &["rebase", "-u", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", text_of(&disk)],
    )
    .await;
    assert!(driver.attach_volume(&Context::new(), &attach(1, 1)).await.is_ok());
}

/// Case IMG-02.
#[tokio::test]
async fn a_vmdk_descriptor_is_no_qcow2_and_as_raw_it_is_only_bytes() {
    if !inside_own_mounts("a_vmdk_descriptor_is_no_qcow2_and_as_raw_it_is_only_bytes").await {
        return;
    }
    let bench = Bench::new();
    let trap = Trap::set(&bench).await;
    let driver = bench.driver();
    let names =
        ["img02-flat-canary", "img02-flat-relative", "img02-two-extents", "img02-device-extent"];
    for name in names {
        for renamed in ["disk.raw", "disk.qcow2", "disk.img"] {
            let text = fs::read(Path::new(DATA).join(format!("{name}.vmdk"))).unwrap();
            let image = bench.file(renamed, &text);
            for format in [DiskFormat::Qcow2, DiskFormat::Raw] {
                let hostile = copy_of(1, 1, format, &image, DiskFormat::Qcow2);
                let error = ensure(&driver, &hostile).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidSpec);
                assert!(error.chain().contains("no qcow2"), "{}", error.chain());
                let raw = copy_of(1, 1, format, &image, DiskFormat::Raw);
                assert_eq!(ensure(&driver, &raw).await.unwrap(), Change::Created);
                let disk = bench.volume_dir(id(1)).join(format!("disk.{}", format.as_str()));
                let seen = guest_reads(&disk, format.as_str(), text.len()).await;
                assert_eq!(seen.as_bytes(), text, "the guest sees the text");
                assert_eq!(virtual_size(&disk, format.as_str()).await, GIB);
                let answer = driver.attach_volume(&Context::new(), &attach(1, 1)).await.unwrap();
                let drivers_api::Backing::File { format: answered, .. } = answer.value.backing
                else {
                    panic!("no file")
                };
                assert_eq!(answered, format, "the format is the spec's");
                assert!(
                    driver.detach_volume(&Context::new(), &detach(1, 1)).await.unwrap().wrote()
                );
                assert_eq!(destroy(&driver, 1).await.unwrap(), Change::Changed);
            }
            fs::remove_file(image).unwrap();
        }
        trap.check(name);
    }
}
