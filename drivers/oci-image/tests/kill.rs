//! The process is killed at each fault point, and the next one converges. Needs the feature `fault-points`:
//! `cargo test -p driver-oci-image --features fault-points --test kill`.

#![cfg(test)]
#![cfg(feature = "fault-points")]

mod common;

use std::time::Duration;

use common::{Bed, config, raw_disk, within};
use driver_oci_image::{FAULT_POINTS, OciImage};
use drivers_api::{Context, Image, ImageRef};
use testbed::registry::{FakeRegistry, digest_of};

/// Points are armed for the whole process: one test at a time.
static ARMED: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Does one operation once.
async fn act(bed: &Bed, operation: &str, reference: &ImageRef) -> drivers_api::Result<()> {
    let cx = within(Duration::from_secs(30));
    match operation {
        "pull" => bed.driver.pull(&cx, reference).await.map(drop),
        "delete" => bed.driver.delete(&cx, reference).await.map(drop),
        _ => bed.driver.collect().unwrap().collect(&cx, 0, &[]).await.map(drop),
    }
}

/// What the killed process does: told by the environment, so it does nothing as a plain test.
#[tokio::test]
async fn child() {
    let Ok(dir) = std::env::var("BCD_TEST_DIR") else { return };
    let reference: ImageRef = std::env::var("BCD_TEST_REF").unwrap().parse().unwrap();
    let driver = OciImage::open(config(dir.as_ref())).unwrap();
    let cx = within(Duration::from_secs(30));
    match std::env::var("BCD_TEST_DO").unwrap().as_str() {
        "pull" => drop(driver.pull(&cx, &reference).await.unwrap().value),
        "delete" => drop(driver.delete(&cx, &reference).await.unwrap().wrote()),
        _ => drop(driver.collect().unwrap().collect(&cx, 0, &[]).await.unwrap()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_any_point_the_next_start_converges_and_leaks_nothing() {
    let _armed = ARMED.lock().await;
    let registry = FakeRegistry::start().await.unwrap();
    let bytes = common::noise(3, 300_000);
    registry.put("k", "1", &raw_disk(&bytes));
    let reference = format!("{}/k:1", registry.host());
    let parsed: ImageRef = reference.parse().unwrap();
    for point in FAULT_POINTS {
        let bed = Bed::new();
        let operation = point.split('.').nth(1).unwrap();
        if operation != "pull" {
            bed.got(&reference).await;
        }
        let Bed { dir, driver } = bed;
        drop(driver);
        let run = host::run::Run::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--test-threads=1"])
            .env("BCD_TEST_DIR", dir.path())
            .env("BCD_TEST_REF", &reference)
            .env("BCD_TEST_DO", operation)
            .env("BCD_FAULT", format!("{point}=kill"));
        let output = run.output(&Context::new()).await.unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
        assert_eq!(signal, Some(9), "{point} was not reached: {:?}", output.status);
        // A write that another kill cut short.
        std::fs::write(dir.path().join("cache/refs/.tmp-1-0-x.json"), "half").unwrap();

        let driver = OciImage::open(config(dir.path())).unwrap();
        let bed = Bed { dir, driver: std::sync::Arc::new(driver) };
        let cx = within(Duration::from_secs(30));
        let refs = bed.files("refs");
        assert!(!refs.iter().any(|name| name.starts_with(".tmp-")), "{point}: {refs:?}");
        if *point == "image.pull.reference-written" {
            assert_eq!(refs.len(), 1, "{point}: the journal of a pull that is done goes: {refs:?}");
        }
        // Whole or not there, never in between.
        if let Some(status) = bed.driver.get(&cx, &parsed).await.unwrap() {
            let read = std::fs::read(status.files.main_path().as_path()).unwrap();
            assert_eq!(digest_of(&read), digest_of(&bytes), "{point}");
        }
        bed.got(&reference).await;
        assert!(bed.driver.verify(&cx, &parsed).await.unwrap(), "{point}");
        assert!(bed.driver.delete(&cx, &parsed).await.unwrap().wrote(), "{point}");
        bed.driver.collect().unwrap().collect(&cx, 0, &[]).await.unwrap();
        for name in ["content", "refs", "partial", "staging"] {
            assert_eq!(bed.files(name), Vec::<String>::new(), "{point}: {name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_at_any_point_is_told_and_a_repeat_converges() {
    let _armed = ARMED.lock().await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.put("e", "1", &raw_disk(&common::noise(4, 300_000)));
    let reference: ImageRef = format!("{}/e:1", registry.host()).parse().unwrap();
    for point in FAULT_POINTS {
        let bed = Bed::new();
        let operation = point.split('.').nth(1).unwrap();
        if operation != "pull" {
            bed.got(reference.as_str()).await;
        }
        host::fault::arm(&format!("{point}=error"));
        let error = act(&bed, operation, &reference).await.expect_err(point);
        host::fault::disarm();
        assert_eq!(error.kind(), drivers_api::ErrorKind::Internal, "{point}: {error}");
        act(&bed, operation, &reference).await.unwrap();
        bed.got(reference.as_str()).await;
        act(&bed, "delete", &reference).await.unwrap();
        act(&bed, "collect", &reference).await.unwrap();
        bed.settled().await;
        for name in ["content", "refs", "partial"] {
            assert_eq!(bed.files(name), Vec::<String>::new(), "{point}: {name}");
        }
    }
}
