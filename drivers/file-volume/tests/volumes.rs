//! The life of a volume: made, grown, listed, removed.

#![cfg(test)]

mod common;

use std::fs;

use common::*;
use drivers_api::{Change, Context, DiskFormat, ErrorKind, Mark, Volume};

const FORMATS: [DiskFormat; 2] = [DiskFormat::Raw, DiskFormat::Qcow2];

#[tokio::test]
async fn a_volume_is_made_once_and_a_repeat_writes_nothing() {
    let bench = Bench::new();
    let driver = bench.driver();
    for (n, format) in (1..).zip(FORMATS) {
        let wanted = spec(n, 1, format);
        assert_eq!(ensure(&driver, &wanted).await.unwrap(), Change::Created);
        let before = bench.census();
        assert_eq!(ensure(&driver, &wanted).await.unwrap(), Change::Unchanged);
        assert_eq!(bench.census(), before);
        let name = format!("disk.{}", format.as_str());
        let disk = bench.volume_dir(id(n)).join(name);
        assert_eq!(virtual_size(&disk, format.as_str()).await, GIB);
        if format == DiskFormat::Qcow2 {
            check_image(&disk).await;
        }
    }
}

#[tokio::test]
async fn a_driver_with_an_empty_memory_finds_all_volumes_with_mark_and_spec() {
    let bench = Bench::new();
    for (n, format) in (1..).zip(FORMATS) {
        assert!(ensure(&bench.driver(), &spec(n, 2, format)).await.unwrap().wrote());
    }
    let driver = bench.driver();
    let found = driver.list(&Context::new()).await.unwrap();
    assert_eq!(found.len(), 2);
    for (status, (n, format)) in found.iter().zip((1..).zip(FORMATS)) {
        assert_eq!(status.mark, Mark::new(node(1), id(n).uuid()));
        assert_eq!(status.spec, Some(spec(n, 2, format)));
        assert_eq!((status.size_bytes, status.complete), (2 * GIB, true));
        assert!(status.allocated_bytes < 1 << 20);
        assert_eq!(driver.get(&Context::new(), id(n)).await.unwrap().as_ref(), Some(status));
    }
    assert_eq!(driver.get(&Context::new(), id(9)).await.unwrap(), None);
}

#[tokio::test]
async fn a_volume_grows_and_never_shrinks() {
    let bench = Bench::new();
    let driver = bench.driver();
    for (n, format) in (1..).zip(FORMATS) {
        assert!(ensure(&driver, &spec(n, 1, format)).await.unwrap().wrote());
        // 600 GiB needs more first-level entries than 1 GiB, in the same cluster.
        assert_eq!(ensure(&driver, &spec(n, 600, format)).await.unwrap(), Change::Changed);
        assert_eq!(ensure(&driver, &spec(n, 600, format)).await.unwrap(), Change::Unchanged);
        let status = driver.get(&Context::new(), id(n)).await.unwrap().unwrap();
        assert_eq!(status.size_bytes, 600 * GIB);
        let before = bench.census();
        let error = ensure(&driver, &spec(n, 599, format)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidSpec);
        assert_eq!(error.field(), Some("size_gib"));
        assert!(error.to_string().contains("grow-only"), "{error}");
        assert_eq!(bench.census(), before);
    }
    let disk = bench.volume_dir(id(2)).join("disk.qcow2");
    assert_eq!(virtual_size(&disk, "qcow2").await, 600 * GIB);
    check_image(&disk).await;
}

#[tokio::test]
async fn a_qcow2_volume_grows_beyond_what_its_tables_have_room_for() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 4096, DiskFormat::Qcow2)).await.unwrap().wrote());
    let grown = ensure(&driver, &spec(1, 5000, DiskFormat::Qcow2)).await.unwrap();
    assert_eq!(grown, Change::Changed);
    let disk = bench.volume_dir(id(1)).join("disk.qcow2");
    assert_eq!(virtual_size(&disk, "qcow2").await, 5000 * GIB);
    check_image(&disk).await;
    let largest = spec(2, 1 << 20, DiskFormat::Qcow2);
    assert_eq!(ensure(&driver, &largest).await.unwrap(), Change::Created);
    check_image(&bench.volume_dir(id(2)).join("disk.qcow2")).await;
}

#[tokio::test]
async fn a_growth_keeps_the_data() {
    let bench = Bench::new();
    let driver = bench.driver();
    for (n, format) in (1..).zip(FORMATS) {
        assert!(ensure(&driver, &spec(n, 1, format)).await.unwrap().wrote());
        let disk = bench.volume_dir(id(n)).join(format!("disk.{}", format.as_str()));
        let write = "write -P 0x41 0 64k";
        tool("qemu-io", &["-f", format.as_str(), "-c", write, text_of(&disk)]).await;
        assert_eq!(ensure(&driver, &spec(n, 900, format)).await.unwrap(), Change::Changed);
        assert_eq!(guest_reads(&disk, format.as_str(), 4).await, "AAAA");
    }
}

#[tokio::test]
async fn another_format_is_refused_and_changes_nothing() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap().wrote());
    let before = bench.census();
    let error = ensure(&driver, &spec(1, 1, DiskFormat::Qcow2)).await.unwrap_err();
    assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidSpec, Some("format")));
    assert_eq!(bench.census(), before);
}

#[tokio::test]
async fn a_new_name_is_recorded_without_touching_the_disk() {
    let bench = Bench::new();
    let driver = bench.driver();
    let mut wanted = spec(1, 1, DiskFormat::Raw);
    assert!(ensure(&driver, &wanted).await.unwrap().wrote());
    wanted.name = "renamed".parse().unwrap();
    assert_eq!(ensure(&driver, &wanted).await.unwrap(), Change::Changed);
    assert_eq!(ensure(&driver, &wanted).await.unwrap(), Change::Unchanged);
    let status = driver.get(&Context::new(), id(1)).await.unwrap().unwrap();
    assert_eq!(status.spec, Some(wanted));
}

/// Case IDM-02.
#[tokio::test]
async fn removal_and_release_of_the_absent_succeed_twice_and_make_nothing() {
    let bench = Bench::new();
    let driver = bench.driver();
    let before = bench.census();
    for _ in 0..2 {
        assert_eq!(destroy(&driver, 1).await.unwrap(), Change::Unchanged);
        let released = driver.detach_volume(&Context::new(), &detach(1, 1)).await.unwrap();
        assert_eq!(released, Change::Unchanged);
    }
    assert_eq!(bench.census(), before);
    let error = driver.attach_volume(&Context::new(), &attach(1, 1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

/// Case IDM-02: absence that was not seen is no success.
#[tokio::test]
async fn a_pool_that_is_gone_or_replaced_is_unavailable_and_not_empty() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap().wrote());
    let away = bench.dir.path().join("away");
    fs::rename(bench.pool(), &away).unwrap();
    for replaced in [false, true] {
        if replaced {
            // What an unmounted filesystem looks like.
            fs::create_dir(bench.pool()).unwrap();
        }
        let cx = Context::new();
        let errors = [
            destroy(&driver, 1).await.unwrap_err(),
            ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap_err(),
            driver.detach_volume(&cx, &detach(1, 1)).await.unwrap_err(),
            driver.attach_volume(&cx, &attach(1, 1)).await.unwrap_err(),
            driver.get(&cx, id(1)).await.unwrap_err(),
            driver.list(&cx).await.unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        }
    }
    assert_eq!(fs::read_dir(bench.pool()).unwrap().count(), 0, "nothing is made elsewhere");
    fs::remove_dir(bench.pool()).unwrap();
    fs::rename(away, bench.pool()).unwrap();
    assert_eq!(destroy(&driver, 1).await.unwrap(), Change::Changed);
}

#[tokio::test]
async fn a_removed_volume_leaves_nothing() {
    let bench = Bench::new();
    let driver = bench.driver();
    let before = bench.census();
    for (n, format) in (1..).zip(FORMATS) {
        assert!(ensure(&driver, &spec(n, 1, format)).await.unwrap().wrote());
        assert_eq!(destroy(&driver, n).await.unwrap(), Change::Changed);
        assert_eq!(destroy(&driver, n).await.unwrap(), Change::Unchanged);
        assert_eq!(driver.get(&Context::new(), id(n)).await.unwrap(), None);
    }
    assert_eq!(bench.census(), before);
}

#[tokio::test]
async fn what_has_no_mark_is_never_touched() {
    let bench = Bench::new();
    let driver = bench.driver();
    let dir = bench.volume_dir(id(1));
    let planted: [&dyn Fn(); 3] = [
        &|| fs::write(&dir, "a file").unwrap(),
        &|| {
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("disk.raw"), "somebody's").unwrap();
        },
        &|| std::os::unix::fs::symlink("/etc", &dir).unwrap(),
    ];
    for plant in planted {
        plant();
        let before = bench.census();
        let cx = Context::new();
        let errors = [
            ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap_err(),
            destroy(&driver, 1).await.unwrap_err(),
            driver.attach_volume(&cx, &attach(1, 1)).await.unwrap_err(),
            driver.get(&cx, id(1)).await.unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
        }
        assert!(driver.list(&cx).await.unwrap().is_empty());
        assert_eq!(bench.census(), before);
        if dir.is_symlink() || dir.is_file() {
            fs::remove_file(&dir).unwrap();
        } else {
            fs::remove_dir_all(&dir).unwrap();
        }
    }
}

#[tokio::test]
async fn a_stranger_among_a_volumes_files_stops_its_removal() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap().wrote());
    let backup = bench.volume_dir(id(1)).join("backup.raw");
    fs::write(&backup, "precious").unwrap();
    let error = destroy(&driver, 1).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Conflict && error.to_string().contains("backup.raw"));
    fs::remove_file(backup).unwrap();
    assert_eq!(destroy(&driver, 1).await.unwrap(), Change::Changed);
}

#[tokio::test]
async fn a_record_that_cannot_be_read_destroys_nothing_and_is_listed() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap().wrote());
    assert!(ensure(&driver, &spec(2, 1, DiskFormat::Raw)).await.unwrap().wrote());
    let record = bench.volume_dir(id(1)).join("volume.json");
    for (text, why) in [("", "EOF"), ("{\"schema\":2,\"later\":true}", "newer version")] {
        fs::write(&record, text).unwrap();
        let before = bench.census();
        let cx = Context::new();
        for error in [
            destroy(&driver, 1).await.unwrap_err(),
            ensure(&driver, &spec(1, 2, DiskFormat::Raw)).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Conflict);
            assert!(error.remedy().is_some() && error.to_string().contains(why), "{error}");
        }
        let found = driver.list(&cx).await.unwrap();
        assert_eq!(found.len(), 2, "one broken volume hides no other");
        assert!(!found[0].complete && found[0].spec.is_none() && found[1].complete);
        assert!(found[0].message.as_ref().unwrap().contains(why));
        assert_eq!(bench.census(), before);
    }
}

#[tokio::test]
async fn a_disk_that_is_gone_is_told_and_not_made_anew() {
    let bench = Bench::new();
    let driver = bench.driver();
    let wanted = spec(1, 1, DiskFormat::Raw);
    assert!(ensure(&driver, &wanted).await.unwrap().wrote());
    fs::remove_file(bench.volume_dir(id(1)).join("disk.raw")).unwrap();
    let error = ensure(&driver, &wanted).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(error.to_string().contains("is gone"), "{error}");
    let status = driver.get(&Context::new(), id(1)).await.unwrap().unwrap();
    assert!(!status.complete && status.message.unwrap().contains("is gone"));
    assert_eq!(destroy(&driver, 1).await.unwrap(), Change::Changed);
}

/// Case VAL-01: what the checked identifier lets through is one volume in any spelling.
#[tokio::test]
async fn every_accepted_spelling_of_a_uuid_is_the_same_volume() {
    let bench = Bench::new();
    let driver = bench.driver();
    let before = bench.census();
    let cases: serde_json::Value =
        serde_json::from_slice(include_bytes!("data/val01-uuids.json")).unwrap();
    let mut accepted = 0;
    for case in cases.as_array().unwrap() {
        let text = case["spec"]["UUID"].as_str().unwrap();
        let expect = case["expect"].as_str().unwrap();
        match text.parse() {
            Ok(uuid) => {
                assert!(!expect.starts_with("reject"), "{text:?}: {expect}");
                let mut wanted = spec(1, 1, DiskFormat::Raw);
                wanted.uuid = uuid;
                assert!(ensure(&driver, &wanted).await.is_ok());
                accepted += 1;
            }
            Err(_) => assert!(!expect.starts_with("accept,"), "{text:?}: {expect}"),
        }
    }
    assert!(accepted >= 2, "both cases of the letters");
    let found = driver.list(&Context::new()).await.unwrap();
    let mut texts: Vec<_> = found.iter().map(|status| status.uuid.to_string()).collect();
    texts.dedup();
    assert_eq!(texts.len(), found.len());
    for status in found {
        let gone = driver.destroy_volume(&Context::new(), status.uuid).await.unwrap();
        assert_eq!(gone, Change::Changed);
    }
    assert_eq!(bench.census(), before);
}

#[tokio::test]
async fn concurrent_calls_for_one_volume_make_it_once() {
    let bench = Bench::new();
    // Two instances over one pool, as a careless embedder may have them.
    let drivers = [bench.driver(), bench.driver()];
    let calls = (0..20).map(|n| {
        let driver = drivers[n % 2].clone();
        tokio::spawn(async move { ensure(&driver, &spec(1, 1, DiskFormat::Qcow2)).await })
    });
    let mut created = 0;
    for call in calls.collect::<Vec<_>>() {
        if call.await.unwrap().unwrap() == Change::Created {
            created += 1;
        }
    }
    assert_eq!(created, 1);
}

#[tokio::test]
async fn a_call_that_is_over_before_it_starts_does_nothing() {
    let bench = Bench::new();
    let driver = bench.driver();
    let before = bench.census();
    let cancelled = Context::new();
    cancelled.cancel().cancel();
    let late = Context::new().with_deadline(tokio::time::Instant::now().into_std());
    for (cx, kind) in [(cancelled, ErrorKind::Cancelled), (late, ErrorKind::Deadline)] {
        let error = driver.ensure_volume(&cx, &spec(1, 1, DiskFormat::Raw)).await.unwrap_err();
        assert_eq!(error.kind(), kind);
        assert_eq!(driver.list(&cx).await.unwrap_err().kind(), kind);
    }
    assert_eq!(bench.census(), before);
}
