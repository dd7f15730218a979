//! Each fault point, as an error and as the death of the process: a repeat converges, and a removal leaves nothing.

#![cfg(test)]

mod common;

use std::{collections::BTreeSet, fs, path::Path};

use common::*;
use driver_file_volume::{FAULT_POINTS, FileVolume, FileVolumeConfig};
use drivers_api::{Change, Context, DiskFormat, ErrorKind, Result, Volume};
use host::run::Run;

/// The pool and the images that the child of a test works on.
const POOL: &str = "BCD_TEST_POOL";
const STORY: &str = "BCD_TEST_STORY";

/// Short lives of one volume that together come by all points.
const STORIES: [&str; 5] = ["raw", "qcow2", "overlay", "copied-base", "converted"];

/// The images that stories start from: on the pool's filesystem and on another.
struct Images {
    here: Bench,
    there: Bench,
}

impl Images {
    async fn make() -> Self {
        let images = Self { here: Bench::new(), there: Bench::under(Path::new("/dev/shm")) };
        images.here.qcow2_image("image", 4, "the image").await;
        images.there.qcow2_image("image", 4, "the image").await;
        images
    }

    fn spec(&self, story: &str, gib: u64) -> drivers_api::VolumeSpec {
        spec_of(story, gib, self.here.dir.path(), self.there.dir.path())
    }
}

fn spec_of(story: &str, gib: u64, here: &Path, there: &Path) -> drivers_api::VolumeSpec {
    let (here, there) = (here.join("image"), there.join("image"));
    match story {
        "raw" => spec(1, gib, DiskFormat::Raw),
        "qcow2" => spec(1, gib, DiskFormat::Qcow2),
        "overlay" => copy_of(1, gib, DiskFormat::Qcow2, &here, DiskFormat::Qcow2),
        "copied-base" => copy_of(1, gib, DiskFormat::Qcow2, &there, DiskFormat::Qcow2),
        "converted" => copy_of(1, gib, DiskFormat::Raw, &here, DiskFormat::Qcow2),
        other => panic!("no story {other}"),
    }
}

/// Made, attached to a VM of another user, grown, released, removed.
async fn live(
    driver: &FileVolume,
    spec: impl Fn(u64) -> drivers_api::VolumeSpec,
) -> Result<Change> {
    let cx = Context::new();
    let mut request = attach(1, 1);
    request.owner_uid = Some(64_001);
    let made = ensure(driver, &spec(1)).await?;
    let attached = driver.attach_volume(&cx, &request).await?.change;
    let grown = ensure(driver, &spec(600)).await?;
    let released = driver.detach_volume(&cx, &detach(1, 1)).await?;
    let removed = driver.destroy_volume(&cx, id(1)).await?;
    Ok(made.and(attached).and(grown).and(released).and(removed))
}

fn open(pool: &Path) -> FileVolume {
    FileVolume::open(FileVolumeConfig::new(node(1), "host-1", pool)).unwrap()
}

/// What runs in the child: one story, in which the fault acts that the environment names.
async fn child() -> bool {
    let Some(pool) = std::env::var_os(POOL) else { return false };
    let story = std::env::var(STORY).unwrap();
    let (name, dirs) = story.split_once('|').unwrap();
    let (here, there) = dirs.split_once('|').unwrap();
    let driver = open(Path::new(&pool));
    let spec = |gib| spec_of(name, gib, Path::new(here), Path::new(there));
    // An error of an armed point ends the story, as it ends a pass of the reconciler.
    let ended = live(&driver, spec).await;
    assert!(
        ended.as_ref().err().is_none_or(|error| error.kind() == ErrorKind::Internal),
        "{ended:?}"
    );
    true
}

/// Runs a story in a process of its own; answers the points that it came by and whether it died.
async fn run(
    test: &str,
    pool: &Path,
    images: &Images,
    story: &str,
    fault: &str,
) -> (Vec<String>, bool) {
    let trace = tempfile::NamedTempFile::new().unwrap();
    let dirs =
        format!("{story}|{}|{}", text_of(images.here.dir.path()), text_of(images.there.dir.path()));
    let output = Run::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(POOL, pool)
        .env(STORY, dirs)
        .env("BCD_FAULT", fault)
        .env("BCD_FAULT_TRACE", trace.path())
        .output(&Context::new())
        .await
        .unwrap();
    let died = std::os::unix::process::ExitStatusExt::signal(&output.status) == Some(9);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(died || output.status.success(), "{story} with {fault}: {stderr}");
    let points = fs::read_to_string(trace.path()).unwrap();
    (points.lines().map(str::to_owned).collect(), died)
}

/// The points of each story, in the order in which it comes by them.
async fn points_of(test: &str, images: &Images, story: &str) -> BTreeSet<String> {
    let bench = Bench::new();
    let (points, died) = run(test, &bench.pool(), images, story, "").await;
    assert!(!died);
    points.into_iter().collect()
}

/// From whatever a fault left: what is listed has our mark, each call repeated converges, and a removal leaves nothing.
async fn converges(bench: &Bench, images: &Images, story: &str, what: &str, repeat: bool) {
    let driver = bench.driver();
    let cx = Context::new();
    let found = driver.list(&cx).await.unwrap();
    assert!(
        found.iter().all(|status| status.uuid == id(1) && status.mark.node == node(1)),
        "{what}"
    );
    let got = driver.get(&cx, id(1)).await.unwrap();
    assert_eq!(got.as_ref(), found.first(), "{what}");
    if repeat {
        let change = live(&driver, |gib| {
            // A volume that is at the grown size already is not asked to shrink.
            let least = got.as_ref().map_or(1, |status| status.size_bytes / GIB);
            images.spec(story, gib.max(least))
        })
        .await
        .unwrap_or_else(|error| panic!("{what}: {}", error.chain()));
        assert!(change.wrote(), "{what}");
    } else {
        if got.is_some_and(|status| !status.attachments.is_empty()) {
            let released = driver.detach_volume(&cx, &detach(1, 1)).await.unwrap();
            assert_eq!(released, Change::Changed, "{what}");
        }
        assert!(destroy(&driver, 1).await.is_ok(), "{what}");
    }
    assert_eq!(destroy(&driver, 1).await.unwrap(), Change::Unchanged, "{what}");
    let left = bench.census();
    assert_eq!(left.len(), 1, "{what}: only the pool's marker stays: {left:#?}");
}

#[tokio::test]
async fn a_process_killed_at_any_point_leaves_what_a_repeat_finishes_and_a_removal_clears() {
    const TEST: &str =
        "a_process_killed_at_any_point_leaves_what_a_repeat_finishes_and_a_removal_clears";
    if child().await {
        return;
    }
    let images = Images::make().await;
    let mut seen = BTreeSet::new();
    for story in STORIES {
        let points = points_of(TEST, &images, story).await;
        for point in points.difference(&seen.clone()) {
            for repeat in [true, false] {
                let what = format!("{story}, killed at {point}, repeat {repeat}");
                let bench = Bench::new();
                let (_, died) =
                    run(TEST, &bench.pool(), &images, story, &format!("{point}=kill")).await;
                assert!(died, "{what}: it lived");
                converges(&bench, &images, story, &what, repeat).await;
            }
            seen.insert(point.clone());
        }
    }
    let listed: BTreeSet<String> = FAULT_POINTS.iter().map(|point| (*point).to_owned()).collect();
    assert_eq!(seen, listed, "the stories come by each point of the list, and by no other");
}

#[tokio::test]
async fn an_error_at_any_point_leaves_what_a_repeat_finishes_and_a_removal_clears() {
    const TEST: &str = "an_error_at_any_point_leaves_what_a_repeat_finishes_and_a_removal_clears";
    if child().await {
        return;
    }
    let images = Images::make().await;
    let mut seen = BTreeSet::new();
    for story in STORIES {
        let points = points_of(TEST, &images, story).await;
        for point in points.difference(&seen.clone()) {
            for repeat in [true, false] {
                let what = format!("{story}, error at {point}, repeat {repeat}");
                let bench = Bench::new();
                let (passed, died) =
                    run(TEST, &bench.pool(), &images, story, &format!("{point}=error")).await;
                assert!(!died && passed.last() == Some(point), "{what}: {passed:?}");
                if point.starts_with("file.create.") && point != "file.create.published" {
                    let found = bench.driver().list(&Context::new()).await.unwrap();
                    assert!(found.is_empty(), "{what}: a failed creation clears its own remains");
                }
                converges(&bench, &images, story, &what, repeat).await;
            }
            seen.insert(point.clone());
        }
    }
    assert_eq!(seen.len(), FAULT_POINTS.len());
}

#[tokio::test]
async fn a_volume_in_the_making_is_listed_as_incomplete() {
    const TEST: &str = "a_volume_in_the_making_is_listed_as_incomplete";
    if child().await {
        return;
    }
    let images = Images::make().await;
    for (point, recorded) in
        [("file.create.directory-made", false), ("file.create.disk-made", true)]
    {
        let bench = Bench::new();
        let (_, died) =
            run(TEST, &bench.pool(), &images, "overlay", &format!("{point}=kill")).await;
        assert!(died);
        let driver = bench.driver();
        let found = driver.list(&Context::new()).await.unwrap();
        assert_eq!(found.len(), 1);
        assert!(!found[0].complete && found[0].message.as_ref().unwrap().contains("half-made"));
        assert_eq!(found[0].spec.is_some(), recorded);
        let error = driver.attach_volume(&Context::new(), &attach(1, 1)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(destroy(&driver, 1).await.unwrap(), Change::Changed);
    }
}

#[tokio::test]
async fn remains_of_writes_and_removals_are_swept() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap().wrote());
    let before = bench.contents();
    fs::write(bench.volume_dir(id(1)).join(".tmp-1-0-volume.json"), "{").unwrap();
    assert_eq!(driver.list(&Context::new()).await.unwrap().len(), 1);
    let trash = bench.pool().join(format!(".del-{}", id(2)));
    fs::create_dir(&trash).unwrap();
    fs::write(trash.join("disk.raw"), "").unwrap();
    fs::write(bench.pool().join(".tmp-1-0-pool.json"), "{").unwrap();
    fs::create_dir_all(bench.pool().join("bases")).unwrap();
    fs::write(bench.pool().join("bases/1-2-3.qcow2"), "no user").unwrap();
    fs::write(bench.pool().join("bases/1-2-4.qcow2.part"), "unfinished").unwrap();
    drop(bench.driver());
    assert_eq!(bench.contents(), before);
}

/// The list of points is what the sources name.
#[test]
fn the_list_of_fault_points_is_complete() {
    let mut named = BTreeSet::new();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for dir in [sources.clone(), sources.join("apply")] {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                let text = fs::read_to_string(path).unwrap();
                let points = text.split("fault::point(\"").skip(1);
                named.extend(points.map(|rest| rest.split('"').next().unwrap().to_owned()));
            }
        }
    }
    let listed: BTreeSet<String> = FAULT_POINTS.iter().map(|point| (*point).to_owned()).collect();
    assert_eq!(named, listed);
}
