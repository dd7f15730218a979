//! The cache: delete, collection, races between them, owners, other sources.

#![cfg(test)]

mod common;

use std::{fs::File, os::unix::fs::MetadataExt, sync::Arc, time::Duration};

use common::{Bed, config, expect_change, expect_kind, gzip, kernel, noise, raw_disk, within};
use driver_oci_image::OciImage;
use drivers_api::{Change, Context, ErrorKind, Image, ImageFiles, ImageRef};
use testbed::registry::{FakeRegistry, digest_of};

fn cx() -> Context {
    within(Duration::from_secs(30))
}

#[tokio::test]
async fn delete_removes_the_content_with_its_last_reference_and_repeats_do_nothing() {
    let registry = FakeRegistry::start().await.unwrap();
    let digest = registry.put("d", "1", &raw_disk(&noise(1, 5000)));
    let bed = Bed::new();
    let by_tag: ImageRef = format!("{}/d:1", registry.host()).parse().unwrap();
    let by_digest: ImageRef = format!("{}/d@{digest}", registry.host()).parse().unwrap();
    assert_eq!(bed.driver.delete(&cx(), &by_tag).await.unwrap(), Change::Unchanged);
    bed.got(by_tag.as_str()).await;
    bed.got(by_digest.as_str()).await;
    assert_eq!(bed.driver.delete(&cx(), &by_tag).await.unwrap(), Change::Changed);
    assert!(bed.driver.in_cache(&cx(), &by_digest).await.unwrap());
    assert!(bed.driver.get(&cx(), &by_tag).await.unwrap().is_none());
    let error = bed.driver.local_path(&cx(), &by_tag).await.unwrap_err();
    expect_kind(&error, ErrorKind::NotFound, "pull");
    assert_eq!(bed.driver.delete(&cx(), &by_digest).await.unwrap(), Change::Changed);
    assert_eq!(bed.driver.delete(&cx(), &by_digest).await.unwrap(), Change::Unchanged);
    for name in ["content", "refs", "partial", "staging"] {
        assert_eq!(bed.files(name), Vec::<String>::new(), "{name}");
    }
}

#[tokio::test]
async fn what_is_pulled_or_read_is_not_deleted() {
    let registry = FakeRegistry::start().await.unwrap();
    registry.put("d", "1", &raw_disk(&noise(1, 400_000)));
    let bed = Bed::new();
    let reference: ImageRef = format!("{}/d:1", registry.host()).parse().unwrap();
    registry.throttle(Some(400_000));
    let pull = tokio::spawn({
        let (driver, reference) = (Arc::clone(&bed.driver), reference.clone());
        async move { driver.pull(&cx(), &reference).await }
    });
    while registry.count("/blobs/") == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let error = bed.driver.delete(&cx(), &reference).await.unwrap_err();
    expect_kind(&error, ErrorKind::Unavailable, "being pulled");
    let path = pull.await.unwrap().unwrap().value.files.main_path().as_path().to_owned();

    let reader = File::open(&path).unwrap();
    let error = bed.driver.delete(&cx(), &reference).await.unwrap_err();
    expect_kind(&error, ErrorKind::Unavailable, "reads it");
    let report = bed.driver.collect().unwrap().collect(&cx(), 0, &[]).await.unwrap();
    assert!(report.removed.is_empty());
    drop(reader);
    // A second name keeps the bytes: then the cache's own may go although the file is open.
    let link = bed.dir.path().join("link");
    std::fs::hard_link(&path, &link).unwrap();
    let _reader = File::open(&link).unwrap();
    assert_eq!(bed.driver.delete(&cx(), &reference).await.unwrap(), Change::Changed);
    assert_eq!(std::fs::read(&link).unwrap(), noise(1, 400_000));
    let held_file = bed.driver.hold(&cx(), &reference).await.unwrap_err();
    assert_eq!(held_file.kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn a_collection_removes_the_least_recently_used_first_and_never_what_is_kept() {
    let registry = FakeRegistry::start().await.unwrap();
    let bed = Bed::new();
    let mut references = Vec::new();
    for at in 0..4_u64 {
        registry.put("c", &format!("t{at}"), &raw_disk(&noise(at, 100_000)));
        let reference: ImageRef = format!("{}/c:t{at}", registry.host()).parse().unwrap();
        let size = bed.got(reference.as_str()).await.size_bytes;
        assert!(size >= 100_000);
        references.push(reference);
    }
    // Use as it is written down: t1 longest ago, then t0, t3, t2.
    for (at, hours) in [(1, 9), (0, 8), (3, 7), (2, 6)] {
        let wanted = references[at].as_str();
        for name in bed.files("refs") {
            let path = bed.cache().join("refs").join(name);
            if std::fs::read_to_string(&path).unwrap().contains(wanted) {
                let then = std::time::SystemTime::now() - Duration::from_secs(hours * 3600);
                File::options().write(true).open(&path).unwrap().set_modified(then).unwrap();
            }
        }
    }
    // A use moves t0 to the end.
    bed.driver.local_path(&cx(), &references[0]).await.unwrap();
    // What interrupted pulls left.
    std::fs::write(bed.cache().join("partial").join("a".repeat(64)), b"half").unwrap();
    std::fs::write(bed.cache().join("refs/.tmp-1-1-x"), b"half").unwrap();
    std::fs::create_dir(bed.cache().join("content/oci-orphan")).unwrap();
    let keep = [references[1].clone()];
    let collector = bed.driver.collect().unwrap();
    let report = collector.collect(&cx(), 250_000, &keep).await.unwrap();
    assert_eq!(report.removed, [references[3].clone(), references[2].clone()]);
    assert!(report.freed_bytes >= 200_000);
    assert!(bed.driver.in_cache(&cx(), &references[0]).await.unwrap());
    assert!(bed.driver.in_cache(&cx(), &references[1]).await.unwrap());
    assert_eq!(bed.files("content").len(), 2);
    assert_eq!(bed.files("refs").len(), 2);
    assert_eq!(bed.files("partial").len(), 0);
    let before = bed.census();
    let report = collector.collect(&cx(), 250_000, &keep).await.unwrap();
    assert!(report.removed.is_empty());
    assert_eq!(bed.census(), before, "nothing to collect: nothing written");
}

#[tokio::test]
async fn race_02_whoever_clones_while_it_is_collected_gets_all_of_it_or_not_found() {
    const ROUNDS: usize = 200;
    let registry = FakeRegistry::start().await.unwrap();
    let (a, b) = (noise(1, 200_000), noise(2, 200_000));
    registry.put("race", "a", &raw_disk(&a));
    registry.put("race", "b", &raw_disk(&b));
    let bed = Bed::new();
    let image =
        |tag: &str| -> ImageRef { format!("{}/race:{tag}", registry.host()).parse().unwrap() };
    let (ref_a, ref_b) = (image("a"), image("b"));
    let clones = tokio::spawn({
        let (driver, ref_a, a) = (Arc::clone(&bed.driver), ref_a.clone(), a.clone());
        async move {
            let (mut whole, mut absent) = (0, 0);
            for round in 0..ROUNDS {
                driver.pull(&cx(), &ref_a).await.map(|outcome| outcome.value).unwrap();
                // As a volume driver: resolve, be slow, open, clone from the descriptor.
                let Ok(path) = driver.local_path(&cx(), &ref_a).await else {
                    absent += 1;
                    continue;
                };
                tokio::time::sleep(Duration::from_millis(u64::try_from(round % 5).unwrap())).await;
                match File::open(path.as_path()) {
                    Ok(mut file) => {
                        tokio::time::sleep(Duration::from_millis(2)).await;
                        let mut bytes = Vec::new();
                        std::io::Read::read_to_end(&mut file, &mut bytes).unwrap();
                        assert!(bytes == a, "a truncated base");
                        whole += 1;
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
                        absent += 1;
                    }
                }
            }
            (whole, absent)
        }
    });
    let evict = tokio::spawn({
        let (driver, ref_b) = (Arc::clone(&bed.driver), ref_b.clone());
        async move {
            loop {
                driver.pull(&cx(), &ref_b).await.map(|outcome| outcome.value).unwrap();
                let keep = [ref_b.clone()];
                driver.collect().unwrap().collect(&cx(), 250_000, &keep).await.unwrap();
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
        }
    });
    let delete = tokio::spawn({
        let (driver, ref_a) = (Arc::clone(&bed.driver), ref_a.clone());
        async move {
            loop {
                match driver.delete(&cx(), &ref_a).await {
                    Ok(_) => {}
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    });
    let (whole, absent) = clones.await.unwrap();
    assert!(!evict.is_finished() && !delete.is_finished(), "one of the others failed");
    evict.abort();
    delete.abort();
    assert_eq!(whole + absent, ROUNDS);
    assert!(whole > 10, "{whole} whole, {absent} absent");
    bed.settled().await;
    bed.driver.collect().unwrap().collect(&cx(), 250_000, &[]).await.unwrap();
    let used: u64 =
        bed.driver.list(&cx()).await.unwrap().iter().map(|image| image.size_bytes).sum();
    assert!(used <= 250_000, "the limit is met again: {used}");
}

#[tokio::test]
async fn a_held_image_stays_and_its_descriptors_are_in_order() {
    let registry = FakeRegistry::start().await.unwrap();
    registry.put("h", "1", &kernel(5));
    let bed = Bed::new();
    let reference: ImageRef = format!("{}/h:1", registry.host()).parse().unwrap();
    bed.got(reference.as_str()).await;
    let held = bed.driver.hold(&cx(), &reference).await.unwrap();
    assert_eq!(held.files.len(), 2);
    assert_eq!(held.files[0].metadata().unwrap().len(), 70_000);
    assert!(bed.driver.delete(&cx(), &reference).await.is_err());
    drop(held);
    assert_eq!(bed.driver.delete(&cx(), &reference).await.unwrap(), Change::Changed);
}

#[tokio::test]
async fn files_by_http_and_from_allowed_directories_are_images_too() {
    let registry = FakeRegistry::start().await.unwrap();
    let disk = noise(1, 70_000);
    let packed = gzip(&disk);
    registry.put_file("/images/disk.raw.gz", &packed);
    registry.put_file("/images/linux.efi", b"MZ and more");
    let allowed = tempfile::tempdir().unwrap();
    let root = allowed.path().to_str().unwrap().to_owned();
    let bed = Bed::with(|config| config.file_roots = vec![root.parse().unwrap()]);
    let http = format!("http://{}/images/disk.raw.gz#{}", registry.host(), digest_of(&packed));
    let first = bed.pull(&http).await.unwrap();
    expect_change(&first, Change::Created);
    assert_eq!(std::fs::read(first.value.files.main_path().as_path()).unwrap(), disk);
    expect_change(&bed.pull(&http).await.unwrap(), Change::Unchanged);
    assert_eq!(registry.seen().len(), 1, "what is here is not asked for");
    let uki = format!("http://{}/images/linux.efi#{}", registry.host(), digest_of(b"MZ and more"));
    assert!(matches!(bed.got(&uki).await.files, ImageFiles::Uki { .. }));

    std::fs::write(allowed.path().join("a.img"), &disk).unwrap();
    std::fs::write(allowed.path().join("b.raw.gz"), &packed).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", allowed.path().join("out.img")).unwrap();
    std::os::unix::fs::symlink("a.img", allowed.path().join("in.img")).unwrap();
    for (name, bytes) in [("a.img", &disk), ("b.raw.gz", &packed), ("in.img", &disk)] {
        let status = bed.got(&format!("file://{root}/{name}#{}", digest_of(bytes))).await;
        assert_eq!(std::fs::read(status.files.main_path().as_path()).unwrap(), disk, "{name}");
    }
    let hostname = std::fs::read("/etc/hostname").unwrap();
    for (path, digest, kind) in [
        (format!("{root}/out.img"), digest_of(&hostname), ErrorKind::Denied),
        ("/etc/hostname".to_owned(), digest_of(&hostname), ErrorKind::Denied),
        (format!("{root}/none.img"), digest_of(b""), ErrorKind::NotFound),
        (format!("{root}/a.img"), digest_of(b"other"), ErrorKind::InvalidSpec),
        (root.clone(), digest_of(b""), ErrorKind::InvalidSpec),
        (format!("{root}/a.raw.xz"), digest_of(b""), ErrorKind::InvalidSpec),
    ] {
        let reference = format!("file://{path}#{digest}");
        let error = bed.pull(&reference).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{reference}: {error}");
    }
    bed.settled().await;
    assert_eq!(bed.files("partial").len(), 0);
    let plain = format!("http://198.51.100.1/a.raw#{}", digest_of(b""));
    expect_kind(&bed.pull(&plain).await.unwrap_err(), ErrorKind::Denied, "insecure");
}

#[tokio::test]
async fn a_cache_is_found_again_and_another_s_directory_is_left_alone() {
    let registry = FakeRegistry::start().await.unwrap();
    registry.put("o", "1", &raw_disk(&noise(1, 5000)));
    let bed = Bed::new();
    let reference = format!("{}/o:1", registry.host());
    let status = bed.got(&reference).await;
    // A second driver of this process shares the cache; a fresh one after it finds everything.
    let second = OciImage::open(config(bed.dir.path())).unwrap();
    assert_eq!(second.list(&cx()).await.unwrap(), std::slice::from_ref(&status));
    drop(second);
    let Bed { dir, driver } = bed;
    drop(driver);
    std::fs::create_dir(dir.path().join("cache/staging/dead")).unwrap();
    let again = OciImage::open(config(dir.path())).unwrap();
    assert_eq!(again.list(&cx()).await.unwrap(), [status]);
    assert!(!dir.path().join("cache/staging/dead").exists(), "what was being built is cleared");
    assert_eq!(std::fs::metadata(dir.path().join("cache")).unwrap().mode() & 0o777, 0o711);
    drop(again);

    let mut other = config(dir.path());
    other.node = "00000000-0000-4000-8000-000000000001".parse().unwrap();
    let error = OciImage::open(other).unwrap_err();
    expect_kind(&error, ErrorKind::Conflict, "belongs to node");
    let foreign = tempfile::tempdir().unwrap();
    std::fs::create_dir(foreign.path().join("cache")).unwrap();
    std::fs::write(foreign.path().join("cache/precious"), b"x").unwrap();
    let error = OciImage::open(config(foreign.path())).unwrap_err();
    expect_kind(&error, ErrorKind::Conflict, "precious");
    std::fs::write(
        dir.path().join("cache/cache.json"),
        format!("{{\"layout\":99,\"node\":\"{}\"}}", common::NODE),
    )
    .unwrap();
    let error = OciImage::open(config(dir.path())).unwrap_err();
    expect_kind(&error, ErrorKind::Conflict, "layout 99");
    let locked = tempfile::tempdir().unwrap();
    drop(OciImage::open(config(locked.path())).unwrap());
    let held = host::lock::FileLock::try_exclusive(&locked.path().join("cache/lock")).unwrap();
    let error = OciImage::open(config(locked.path())).unwrap_err();
    expect_kind(&error, ErrorKind::Unavailable, "has it open");
    drop(held);
    drop(OciImage::open(config(locked.path())).unwrap());
    let mut bad = config(dir.path());
    bad.concurrency = 0;
    assert_eq!(OciImage::open(bad).unwrap_err().field(), Some("concurrency"));
}

#[tokio::test]
async fn a_record_that_cannot_be_understood_hides_nothing_else() {
    let registry = FakeRegistry::start().await.unwrap();
    registry.put("r", "1", &raw_disk(b"one"));
    registry.put("r", "2", &raw_disk(b"two"));
    let bed = Bed::new();
    let (one, two) = (format!("{}/r:1", registry.host()), format!("{}/r:2", registry.host()));
    bed.got(&one).await;
    let broken = bed.files("refs")[0].clone();
    bed.got(&two).await;
    std::fs::write(bed.cache().join("refs").join(broken), b"{not json").unwrap();
    assert_eq!(bed.driver.list(&cx()).await.unwrap().len(), 1);
    assert!(!bed.driver.in_cache(&cx(), &one.parse().unwrap()).await.unwrap());
    bed.got(&one).await;
    assert_eq!(bed.driver.list(&cx()).await.unwrap().len(), 2);
}

#[tokio::test]
async fn calls_that_have_ended_before_they_began_do_nothing() {
    let bed = Bed::new();
    let past = Context::new().with_deadline(tokio::time::Instant::now().into_std());
    let reference: ImageRef = "127.0.0.1:1/x:1".parse().unwrap();
    for kind in [
        bed.driver.pull(&past, &reference).await.unwrap_err().kind(),
        bed.driver.delete(&past, &reference).await.unwrap_err().kind(),
        bed.driver.get(&past, &reference).await.unwrap_err().kind(),
        bed.driver.list(&past).await.unwrap_err().kind(),
        bed.driver.in_cache(&past, &reference).await.unwrap_err().kind(),
        bed.driver.local_path(&past, &reference).await.unwrap_err().kind(),
        bed.driver.host_info(&past).await.unwrap_err().kind(),
    ] {
        assert_eq!(kind, ErrorKind::Deadline);
    }
}

#[tokio::test]
async fn a_limit_holds_for_plain_files_before_and_while_they_are_downloaded() {
    let registry = FakeRegistry::start().await.unwrap();
    let bytes = noise(1, 100_000);
    registry.put("big", "1", &raw_disk(&bytes));
    let small = |config: &mut driver_oci_image::OciImageConfig| config.max_image_bytes = 50_000;
    let bed = Bed::with(small);
    let error = bed.refused(&format!("{}/big:1", registry.host())).await;
    expect_kind(&error, ErrorKind::Exhausted, "too large");
    assert_eq!(registry.count("/blobs/"), 0, "the manifest's sizes were enough");
    // A file's size is known by nobody before.
    registry.put_file("/a.raw", &bytes);
    let source = format!("http://{}/a.raw#{}", registry.host(), digest_of(&bytes));
    let error = Bed::with(small).refused(&source).await;
    expect_kind(&error, ErrorKind::Exhausted, "too large");
    // No room on the file system.
    let bed = Bed::with(|config| config.reserve_bytes = u64::MAX);
    let error = bed.refused(&format!("{}/big:1", registry.host())).await;
    expect_kind(&error, ErrorKind::Exhausted, "are free");
    let reference: ImageRef = format!("{}/big:1", registry.host()).parse().unwrap();
    let full = Bed::with(|config| config.max_cache_bytes = Some(120_000));
    full.got(reference.as_str()).await;
    registry.put("big", "2", &raw_disk(&noise(2, 100_000)));
    let other: ImageRef = format!("{}/big:2", registry.host()).parse().unwrap();
    let error = full.driver.pull(&within(Duration::from_secs(9)), &other).await.unwrap_err();
    expect_kind(&error, ErrorKind::Exhausted, "collect unused images");
    let collector = full.driver.collect().unwrap();
    let report = collector.collect(&within(Duration::from_secs(9)), 0, &[]).await.unwrap();
    assert_eq!(report.removed, [reference]);
    full.got(other.as_str()).await;
}

#[tokio::test]
async fn a_pull_and_a_delete_in_turn_never_fail_each_other() {
    let registry = FakeRegistry::start().await.unwrap();
    registry.put("turn", "1", &raw_disk(&noise(1, 2000)));
    let bed = Bed::new();
    let reference: ImageRef = format!("{}/turn:1", registry.host()).parse().unwrap();
    let alias: ImageRef = format!("oci://{}/turn:1", registry.host()).parse().unwrap();
    let deletes = tokio::spawn({
        let (driver, alias) = (Arc::clone(&bed.driver), alias.clone());
        async move {
            for _ in 0..60 {
                drop(driver.pull(&cx(), &alias).await.unwrap().value);
                // Refused only while the other reference's pull holds the same content.
                if let Err(error) = driver.delete(&cx(), &alias).await {
                    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
                }
            }
        }
    });
    for _ in 0..60 {
        drop(bed.driver.pull(&cx(), &reference).await.unwrap().value);
        if let Err(error) = bed.driver.delete(&cx(), &reference).await {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        }
    }
    deletes.await.unwrap();
}
