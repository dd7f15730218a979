//! Case RES-02: a full disk leaves what was there valid, and removal and release still work on it.

#![cfg(test)]

mod common;

use std::{fs, io::Write, os::unix::fs::FileExt, path::Path};

use common::*;
use drivers_api::{Change, Context, DiskFormat, ErrorKind, Volume};

/// A pool on a filesystem of `size` in memory; the mount goes away with the process's namespace.
async fn small_pool(size: &str) -> Bench {
    let root = Path::new("/tmp/small");
    mount_tmpfs(root, &format!("size={size},mode=0711")).await;
    Bench::under(root)
}

/// Leaves no byte free; answers how many bytes were taken.
fn fill(bench: &Bench) -> usize {
    let mut file = fs::File::create(bench.dir.path().join("fill")).unwrap();
    let mut taken = 0;
    for piece in [1 << 20, 4096, 1] {
        while file.write_all(&vec![1; piece]).is_ok() {
            taken += piece;
        }
    }
    taken
}

/// The error that a call without space answers.
fn assert_exhausted(error: &drivers_api::Error) {
    assert_eq!(error.kind(), ErrorKind::Exhausted, "{}", error.chain());
    assert!(error.chain().contains("No space left") || error.chain().contains("no space"));
    assert!(error.remedy().unwrap().contains("free space"));
}

#[tokio::test]
async fn a_copy_that_does_not_fit_leaves_nothing() {
    if !inside_own_mounts("a_copy_that_does_not_fit_leaves_nothing").await {
        return;
    }
    let bench = small_pool("64m").await;
    let driver = bench.driver();
    let before = bench.census();
    let images = Bench::new();
    // 128 MiB of data, so neither a copy nor a conversion fits.
    let raw = images.file("image.raw", &vec![7; 128 << 20]);
    let qcow2 = images.dir.path().join("image.qcow2");
    tool("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", text_of(&raw), text_of(&qcow2)])
        .await;
    for (image, of) in [(&raw, DiskFormat::Raw), (&qcow2, DiskFormat::Qcow2)] {
        for format in [DiskFormat::Raw, DiskFormat::Qcow2] {
            let error = ensure(&driver, &copy_of(1, 1, format, image, of)).await.unwrap_err();
            assert_exhausted(&error);
            assert_eq!(bench.census(), before, "{of:?} to {format:?}");
            assert!(driver.list(&Context::new()).await.unwrap().is_empty());
        }
    }
    // A sparse volume that is larger than the pool is made: its space is taken when it is written.
    for (n, format) in [(1, DiskFormat::Raw), (2, DiskFormat::Qcow2)] {
        assert_eq!(ensure(&driver, &spec(n, 1, format)).await.unwrap(), Change::Created);
        assert_eq!(ensure(&driver, &spec(n, 600, format)).await.unwrap(), Change::Changed);
    }
}

#[tokio::test]
async fn on_a_full_disk_a_growth_fails_whole_and_removal_and_release_work() {
    if !inside_own_mounts("on_a_full_disk_a_growth_fails_whole_and_removal_and_release_work").await
    {
        return;
    }
    let bench = small_pool("8m").await;
    let driver = bench.driver();
    let cx = Context::new();
    for (n, format) in [(1, DiskFormat::Raw), (2, DiskFormat::Qcow2)] {
        assert!(ensure(&driver, &spec(n, 1, format)).await.unwrap().wrote());
        let mut request = attach(n, 1);
        request.owner_uid = Some(64_001);
        assert!(driver.attach_volume(&cx, &request).await.unwrap().change.wrote());
    }
    let disk = |n: u8, format: &str| bench.volume_dir(id(n)).join(format!("disk.{format}"));
    tool("qemu-io", &["-f", "qcow2", "-c", "write -P 0x41 0 64k", text_of(&disk(2, "qcow2"))])
        .await;
    assert!(fill(&bench) > 1 << 20, "the disk was not full before");
    let before = bench.contents();
    for (n, format) in [(1, DiskFormat::Raw), (2, DiskFormat::Qcow2)] {
        assert_exhausted(&ensure(&driver, &spec(n, 600, format)).await.unwrap_err());
        assert_eq!(virtual_size(&disk(n, format.as_str()), format.as_str()).await, GIB);
        assert_exhausted(&ensure(&driver, &spec(9, 1, format)).await.unwrap_err());
    }
    check_image(&disk(2, "qcow2")).await;
    assert_eq!(guest_reads(&disk(2, "qcow2"), "qcow2", 4).await, "AAAA");
    assert_eq!(bench.contents(), before, "no temporary file is left");
    let found = driver.list(&cx).await.unwrap();
    assert!(found.iter().all(|status| status.complete && status.size_bytes == GIB));
    for n in 1..=2 {
        assert_eq!(driver.detach_volume(&cx, &detach(n, 1)).await.unwrap(), Change::Changed);
        assert_eq!(destroy(&driver, n).await.unwrap(), Change::Changed);
    }
    // The agent starts on the disk while it is full.
    assert!(bench.driver().list(&cx).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_growth_for_which_there_is_no_space_at_the_last_step_keeps_the_old_size() {
    let test = "a_growth_for_which_there_is_no_space_at_the_last_step_keeps_the_old_size";
    if !inside_own_mounts(test).await {
        return;
    }
    let bench = small_pool("8m").await;
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Qcow2)).await.unwrap().wrote());
    assert!(fill(&bench) > 1 << 20);
    // One page is free: enough for the record, not for the page of the first-level table that the growth clears.
    give_back(&bench.dir.path().join("fill"), 4096);
    let error = ensure(&driver, &spec(1, 4096, DiskFormat::Qcow2)).await.unwrap_err();
    assert_exhausted(&error);
    let disk = bench.volume_dir(id(1)).join("disk.qcow2");
    assert_eq!(virtual_size(&disk, "qcow2").await, GIB);
    check_image(&disk).await;
    let status = driver.get(&Context::new(), id(1)).await.unwrap().unwrap();
    assert_eq!((status.size_bytes, status.complete), (GIB, true));
    fs::remove_file(bench.dir.path().join("fill")).unwrap();
    let grown = ensure(&driver, &spec(1, 4096, DiskFormat::Qcow2)).await.unwrap();
    assert_eq!(grown, Change::Changed);
    check_image(&disk).await;
}

/// Makes a file shorter by some bytes.
fn give_back(path: &Path, bytes: u64) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    let length = file.metadata().unwrap().len();
    file.set_len(length - bytes).unwrap();
    // Its last page stays written.
    file.write_all_at(&[1], length - bytes - 1).unwrap();
}
