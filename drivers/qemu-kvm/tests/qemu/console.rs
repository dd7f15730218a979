//! The serial console on real QEMU.

use std::time::Duration;

use crate::common::*;
use drivers_api::{Console, ConsoleStream, ErrorKind, Hypervisor};
use tokio::time::timeout;

async fn read_until(console: &mut Box<dyn ConsoleStream>, wanted: &str) -> String {
    let mut text = String::new();
    let read = async {
        while !text.contains(wanted) {
            let bytes = console.read().await.unwrap();
            assert!(!bytes.is_empty(), "ended before {wanted:?}: {text}");
            text.push_str(&String::from_utf8_lossy(&bytes));
        }
    };
    timeout(Duration::from_secs(20), read).await.expect("the guest writes in time");
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn every_client_sees_history_and_all_that_comes_and_the_end() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (cx, id) = (within(60), vm(1));
    assert_eq!(kind(driver.console_log(&cx, id, 10).await), ErrorKind::NotFound);
    assert_eq!(kind(driver.open_console(&cx, id, 0).await.map(drop)), ErrorKind::NotFound);
    bed.running(&driver, id, "i").await;
    let mut first = driver.open_console(&cx, id, 4096).await.unwrap();
    let mut second = driver.open_console(&cx, id, 0).await.unwrap();
    first.write(b"one two three ").await.unwrap();
    let seen = read_until(&mut first, "three ").await;
    assert!(seen.starts_with("TINY-GUEST-UP"), "{seen}");
    assert_eq!(read_until(&mut second, "three ").await, "one two three ");
    second.write(b"four").await.unwrap();
    assert_eq!(read_until(&mut first, "four").await, "four");

    driver.stop_vm(&cx, id, Duration::from_secs(20)).await.map(drop).unwrap();
    assert!(read_until(&mut second, "POWER-OFF").await.contains("four"));
    while !second.read().await.unwrap().is_empty() {}
    assert_eq!(kind(driver.open_console(&cx, id, 0).await.map(drop)), ErrorKind::Unavailable);
    let log = driver.console_log(&cx, id, 1 << 16).await.unwrap();
    let log = String::from_utf8(log).unwrap();
    assert!(log.contains("one two three four") && log.trim_end().ends_with("POWER-OFF"), "{log}");
    assert_eq!(driver.console_log(&cx, id, 5).await.unwrap(), b"OFF\r\n");

    // Kept over runs.
    driver.start_vm(&cx, id).await.map(drop).unwrap();
    wait_for_text(&driver, id, "POWER-OFF\r\nTINY-GUEST-UP").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_guest_writes_while_no_agent_is_there_is_not_lost() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let id = vm(1);
    bed.running(&driver, id, "i tick").await;
    drop(driver);
    tokio::time::sleep(Duration::from_millis(3500)).await;
    let driver = bed.driver().await;
    wait_for_text(&driver, id, "TICK").await;
    let log =
        String::from_utf8(driver.console_log(&within(5), id, 1 << 16).await.unwrap()).unwrap();
    let ticks: Vec<u32> = log
        .lines()
        .filter_map(|line| line.trim().strip_prefix("TICK "))
        .map(|hex| u32::from_str_radix(hex, 16).unwrap())
        .collect();
    assert!(ticks.len() >= 3, "{log}");
    assert!(ticks.windows(2).all(|pair| pair[1] == pair[0] + 1), "no gap and none twice: {log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_console_that_nobody_reads_delays_nobody() {
    let bed = Bed::new();
    let mut config = bed.config();
    config.serial_log_bytes = 40;
    let driver = driver_qemu_kvm::QemuKvm::open(config).await.unwrap();
    let (cx, id) = (within(60), vm(1));
    bed.running(&driver, id, "i").await;
    let mut lazy = driver.open_console(&cx, id, 0).await.unwrap();
    let mut keen = driver.open_console(&cx, id, 0).await.unwrap();
    for turn in 0..10 {
        let word = format!("<{turn:03}>");
        keen.write(word.as_bytes()).await.unwrap();
        read_until(&mut keen, &word).await;
    }
    let size: u64 = entries(&bed.state(id))
        .iter()
        .filter(|name| name.starts_with("serial.log"))
        .map(|name| std::fs::metadata(bed.state(id).join(name)).unwrap().len())
        .sum();
    assert!((5..=40).contains(&size), "the log is bounded: {size}");
    assert!(!lazy.read().await.unwrap().is_empty());
}
