//! Each fault point, as an error and as the death of the process: a repeat converges, and a removal leaves nothing.

#![cfg(test)]

#[path = "host/common.rs"]
#[expect(dead_code, reason = "this file uses a part of it")]
mod common;

use std::{
    collections::BTreeSet,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use common::{census, network, port};
use driver_linux_bridge::{FAULT_POINTS, LinuxBridge};
use drivers_api::{
    Change, Context, ErrorKind, Network, NetworkSpec, NetworkType, PortSpec, Result,
};
use host::run::Run;
use testbed::netns::in_netns;

/// Held by each test: what is armed is armed for the whole process.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The directory of the agent that the child of a test is.
const DIR: &str = "BCD_TEST_DIR";

fn specs() -> (NetworkSpec, PortSpec) {
    let (mut net, mut one) = (network(1, NetworkType::Nat), port(1, 1));
    net.cidr6 = Some("fd77:1::/64".parse().unwrap());
    net.gateway6 = Some("fd77:1::1".parse().unwrap());
    one.addresses.push("fd77:1::11".parse().unwrap());
    (net, one)
}

async fn make(driver: &LinuxBridge) -> Result<Change> {
    let (net, one) = specs();
    let cx = Context::new();
    let made = driver.ensure_network(&cx, &net).await?;
    Ok(made.and(driver.attach_port(&cx, &one).await?.change))
}

async fn remove(driver: &LinuxBridge) -> Result<Change> {
    let (net, one) = specs();
    let cx = Context::new();
    let gone = driver.detach_port(&cx, one.uuid).await?;
    Ok(gone.and(driver.destroy_network(&cx, net.uuid).await?))
}

/// Everything is there and healthy, and a repeat writes nothing.
async fn is_whole(driver: &LinuxBridge, point: &str) {
    let cx = Context::new();
    for status in driver.list(&cx).await.unwrap() {
        assert!(status.healthy, "{point}: {:?}", status.messages);
    }
    for status in driver.list_ports(&cx).await.unwrap() {
        assert!(status.healthy, "{point}: {:?}", status.messages);
    }
    assert_eq!(make(driver).await.unwrap(), Change::Unchanged, "{point}");
}

/// Nothing is there that was not before.
fn is_clear(dir: &Path, before: &[String], point: &str) {
    assert_eq!(census(dir), before, "{point}");
    let left = testbed::netns::Netns::current().unwrap().pids().unwrap();
    assert_eq!(left, Vec::<i32>::new(), "{point}: processes are left");
}

#[test]
fn after_an_error_at_any_point_a_repeat_converges_and_a_removal_leaves_nothing() {
    let _alone = alone();
    in_netns(|| async {
        let mut reached = BTreeSet::new();
        for point in FAULT_POINTS {
            let dir = common::dir();
            let driver = common::open(dir.path());
            let before = census(dir.path());
            host::fault::arm(&format!("{point}=error"));
            let mut failures = 0;
            // Twice: the first failure is the armed one, after which nothing may fail.
            for _ in 0..2 {
                match make(&driver).await {
                    Ok(_) => break,
                    Err(error) => {
                        assert!(error.chain().contains("armed fault point"), "{point}: {error:?}");
                        failures += 1;
                    }
                }
            }
            is_whole(&driver, point).await;
            for _ in 0..2 {
                match remove(&driver).await {
                    Ok(_) => break,
                    Err(error) => {
                        assert_ne!(error.kind(), ErrorKind::Conflict, "{point}: {error:?}");
                        failures += 1;
                    }
                }
            }
            assert!(failures <= 1, "{point} fails again");
            if failures == 1 {
                reached.insert(*point);
            }
            host::fault::disarm();
            is_clear(dir.path(), &before, point);
        }
        assert_eq!(
            reached,
            FAULT_POINTS.iter().copied().collect(),
            "points that this life does not pass"
        );
    });
}

#[test]
fn after_a_kill_at_any_point_a_fresh_start_converges_or_clears_everything() {
    let _alone = alone();
    in_netns(|| async {
        for point in FAULT_POINTS {
            for finishes in [true, false] {
                let dir = common::dir();
                drop(common::open(dir.path()));
                let before = census(dir.path());
                kill_at(dir.path(), point).await;
                let driver = common::open(dir.path());
                if finishes {
                    succeeded(make(&driver).await, point);
                    is_whole(&driver, point).await;
                }
                succeeded(remove(&driver).await, point);
                is_clear(dir.path(), &before, point);
            }
        }
    });
}

fn succeeded(answer: Result<Change>, point: &str) {
    if let Err(error) = answer {
        panic!("after {point}: {error:?}");
    }
}

/// Lets a process live a whole life of the network, until it is killed at the point.
async fn kill_at(dir: &Path, point: &str) {
    let child = Run::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_child_of_the_kills_lives_one_life", "--nocapture"])
        .env(DIR, dir)
        .env("BCD_FAULT", format!("{point}=kill"));
    let output = child.output(&Context::new()).await.unwrap();
    let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(signal, Some(9), "{point} was not passed: {text}");
}

/// The process that the kills hit; as a test of its own it makes sure that a life without a fault succeeds.
#[test]
fn the_child_of_the_kills_lives_one_life() {
    async fn live(dir: &Path) {
        let driver = common::open(dir);
        assert_eq!(make(&driver).await.unwrap(), Change::Created);
        assert_eq!(remove(&driver).await.unwrap(), Change::Changed);
    }
    match std::env::var_os(DIR) {
        Some(dir) => {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(live(Path::new(&dir)));
        }
        None => {
            let _alone = alone();
            in_netns(|| async { live(common::dir().path()).await });
        }
    }
}
