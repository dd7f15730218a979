//! Several workers over one pool: other processes, other drivers, calls at once.

#![cfg(test)]

mod common;

use std::{fs, path::Path};

use common::*;
use driver_file_volume::{FileVolume, FileVolumeConfig};
use drivers_api::{Change, Context, DiskFormat, ErrorKind, Volume};
use host::run::Run;

const POOL: &str = "BCD_TEST_POOL";
const IMAGE: &str = "BCD_TEST_IMAGE";

/// Makes and removes the same two volumes again and again; another process may be at it.
async fn quarrel(pool: &str, image: &str) {
    let driver = loop {
        match FileVolume::open(FileVolumeConfig::new(node(1), "host-1", pool)) {
            Ok(driver) => break driver,
            // The other process opens the pool at this moment.
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}"),
        }
    };
    let pause = || tokio::time::sleep(std::time::Duration::from_millis(1));
    let mut done = 0;
    while done < 60 {
        let n = 1 + done % 2;
        let wanted = copy_of(n, 1, DiskFormat::Qcow2, Path::new(image), DiskFormat::Qcow2);
        for answer in [ensure(&driver, &wanted).await, destroy(&driver, n).await] {
            match answer {
                Ok(_) => done += 1,
                // As a reconciler does, only sooner.
                Err(error) if error.kind() == ErrorKind::Unavailable => pause().await,
                Err(error) => panic!("{error:?}"),
            }
        }
        let found = driver.list(&Context::new()).await.unwrap();
        assert!(found.len() <= 2, "{found:?}");
    }
}

/// Case LCK-01.
#[tokio::test]
async fn processes_that_fight_over_the_same_volumes_break_none_of_them() {
    const TEST: &str = "processes_that_fight_over_the_same_volumes_break_none_of_them";
    if let (Ok(pool), Ok(image)) = (std::env::var(POOL), std::env::var(IMAGE)) {
        return quarrel(&pool, &image).await;
    }
    let bench = Bench::new();
    let images = Bench::under(Path::new("/dev/shm"));
    let image = images.qcow2_image("image", 4, "the image").await;
    drop(bench.driver());
    let children = (0..3).map(|_| {
        let run = Run::new(std::env::current_exe().unwrap())
            .args(["--exact", TEST, "--nocapture", "--test-threads=1"])
            .env(POOL, bench.pool())
            .env(IMAGE, &image);
        tokio::spawn(async move { run.success(&Context::new()).await })
    });
    for child in children.collect::<Vec<_>>() {
        child.await.unwrap().unwrap_or_else(|error| panic!("{error}"));
    }
    let driver = bench.driver();
    for n in 1..=2 {
        let wanted = copy_of(n, 1, DiskFormat::Qcow2, &image, DiskFormat::Qcow2);
        assert!(ensure(&driver, &wanted).await.is_ok());
        let disk = bench.volume_dir(id(n)).join("disk.qcow2");
        assert_eq!(guest_reads(&disk, "qcow2", 9).await, "the image");
        assert_eq!(destroy(&driver, n).await.unwrap(), Change::Changed);
    }
    assert_eq!(bench.contents().len(), 1, "{:#?}", bench.contents());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn clones_and_removals_at_once_never_lose_a_copied_base() {
    let bench = Bench::new();
    let images = Bench::under(Path::new("/dev/shm"));
    let image = images.qcow2_image("image", 4, "the image").await;
    let driver = bench.driver();
    let workers = (1..=6).map(|n| {
        let (driver, image) = (driver.clone(), image.clone());
        let base = bench.volume_dir(id(n)).join("base.qcow2");
        tokio::spawn(async move {
            for _ in 0..40 {
                let wanted = copy_of(n, 1, DiskFormat::Qcow2, &image, DiskFormat::Qcow2);
                assert_eq!(ensure(&driver, &wanted).await.unwrap(), Change::Created);
                let status = driver.get(&Context::new(), id(n)).await.unwrap().unwrap();
                assert!(status.complete, "{status:?}");
                assert_eq!(fs::read(&base).unwrap(), fs::read(&image).unwrap());
                assert_eq!(destroy(&driver, n).await.unwrap(), Change::Changed);
            }
        })
    });
    for worker in workers.collect::<Vec<_>>() {
        worker.await.unwrap();
    }
    drop(bench.driver());
    assert_eq!(bench.contents().len(), 1, "{:#?}", bench.contents());
}

#[tokio::test]
async fn a_call_that_is_dropped_in_a_conversion_leaves_nothing() {
    let bench = Bench::new();
    // A tool that hangs, as one does on a broken disk.
    let tool = bench.file("qemu-img", b"#!/bin/sh\nexec sleep 600\n");
    fs::set_permissions(&tool, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let mut config = bench.config();
    config.qemu_img = tool;
    let driver = FileVolume::open(config).unwrap();
    let image = bench.qcow2_image("image", 4, "the image").await;
    let wanted = copy_of(1, 1, DiskFormat::Raw, &image, DiskFormat::Qcow2);
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_millis(300);
    let cx = Context::new().with_deadline(deadline.into_std());
    let error = driver.ensure_volume(&cx, &wanted).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Deadline);
    // The next call waits for the lock, which the removal of the remains holds.
    assert_eq!(destroy(&driver, 1).await.unwrap(), Change::Unchanged);
    assert_eq!(bench.contents().len(), 1, "{:#?}", bench.contents());
    assert_eq!(ensure(&bench.driver(), &wanted).await.unwrap(), Change::Created);
}

#[test]
fn a_directory_with_other_things_in_it_becomes_no_pool() {
    let bench = Bench::new();
    fs::create_dir(bench.pool()).unwrap();
    fs::write(bench.pool().join("thesis.tex"), "years of work").unwrap();
    let mode = |path: &Path| std::os::unix::fs::MetadataExt::mode(&fs::metadata(path).unwrap());
    let (before, before_mode) = (bench.census(), mode(&bench.pool()));
    let error = FileVolume::open(bench.config()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(error.to_string().contains("no volume pool"), "{error}");
    assert_eq!((bench.census(), mode(&bench.pool())), (before, before_mode));
    fs::remove_file(bench.pool().join("thesis.tex")).unwrap();
    fs::create_dir(bench.pool().join("lost+found")).unwrap();
    drop(bench.driver());
}
