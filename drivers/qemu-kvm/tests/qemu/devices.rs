//! Disks and NICs that come and go, on real QEMU with a guest that lets go of them or not.

use std::time::Duration;

use crate::common::*;
use drivers_api::{
    Backing, Change, DiskBus, ErrorKind, Hypervisor, InstanceSpec, NicHandle, Resize, VmPower,
    WholeSpec,
};
use testbed::netns::{in_netns, tool};

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_of_each_bus_is_plugged_and_pulled_while_the_vm_runs() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (cx, id) = (within(60), vm(1));
    let pid = bed.running(&driver, id, "i").await.pid;
    for (number, bus) in [(1, DiskBus::Virtio), (2, DiskBus::Scsi), (3, DiskBus::Nvme)] {
        let mut disk = bed.disk(number);
        disk.bus = bus;
        assert_eq!(driver.attach_disk(&cx, id, &disk).await.unwrap(), Change::Changed, "{bus:?}");
        assert_eq!(driver.attach_disk(&cx, id, &disk).await.unwrap(), Change::Unchanged);
        assert_eq!(status(&driver, id).await.disks, std::slice::from_ref(&disk));
        let detach = driver.detach_disk(&cx, id, disk.volume_uuid).await;
        assert_eq!(detach.unwrap(), Change::Changed, "{bus:?}");
        let again = driver.detach_disk(&cx, id, disk.volume_uuid).await;
        assert_eq!(again.unwrap(), Change::Unchanged);
        let after = status(&driver, id).await;
        assert_eq!((after.disks, after.detaching, after.pid), (vec![], vec![], pid));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_keeps_a_disk_leaves_the_removal_pending_until_it_restarts() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (cx, id) = (within(60), vm(1));
    bed.running(&driver, id, "e").await;
    let disk = bed.disk(1);
    driver.attach_disk(&cx, id, &disk).await.map(drop).unwrap();
    let error = driver.detach_disk(&within(1), id, disk.volume_uuid).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Deadline);
    assert!(error.remedy().unwrap().contains("pending"), "{error:?}");
    assert_eq!(status(&driver, id).await.detaching, std::slice::from_ref(&disk.name));
    assert_eq!(kind(driver.attach_disk(&cx, id, &disk).await), ErrorKind::Unavailable);

    // Another agent goes on waiting.
    drop(driver);
    let driver = bed.driver().await;
    let pending = status(&driver, id).await;
    assert_eq!((pending.detaching, pending.disks.len()), (vec![disk.name.clone()], 1));
    let error = driver.detach_disk(&within(1), id, disk.volume_uuid).await;
    assert_eq!(kind(error), ErrorKind::Deadline);

    // A reset lets go of it for the guest.
    driver.reboot_vm(&cx, id, Duration::ZERO).await.map(drop).unwrap();
    let detach = driver.detach_disk(&within(20), id, disk.volume_uuid).await;
    assert_eq!(detach.unwrap(), Change::Changed);
    let after = status(&driver, id).await;
    assert_eq!((after.detaching, after.disks), (vec![], vec![]));
    driver.attach_disk(&cx, id, &disk).await.map(drop).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_clashes_with_a_disk_that_is_there_is_refused() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (cx, id) = (within(60), vm(1));
    driver.create_vm(&cx, &bed.spec(id, "i")).await.map(drop).unwrap();
    let disk = bed.disk(1);
    for running in [false, true] {
        if running {
            driver.start_vm(&cx, id).await.map(drop).unwrap();
        } else {
            driver.attach_disk(&cx, id, &disk).await.map(drop).unwrap();
        }
        let mut other = disk.clone();
        other.bus = DiskBus::Scsi;
        assert_eq!(kind(driver.attach_disk(&cx, id, &other).await), ErrorKind::Conflict);
        let mut other = bed.disk(2);
        other.name = disk.name.clone();
        assert_eq!(kind(driver.attach_disk(&cx, id, &other).await), ErrorKind::Conflict);
        let mut other = bed.disk(2);
        other.size_gib = 1;
        assert_eq!(kind(driver.attach_disk(&cx, id, &other).await), ErrorKind::InvalidSpec);
        let mut other = bed.disk(2);
        other.backing = Backing::Rbd {
            pool: "p".to_owned(),
            image: "i".to_owned(),
            monitors: vec![],
            user: "u".to_owned(),
            secret: "secret://ceph".parse().unwrap(),
        };
        assert_eq!(kind(driver.attach_disk(&cx, id, &other).await), ErrorKind::Unsupported);
        assert_eq!(status(&driver, id).await.disks, std::slice::from_ref(&disk));
    }
    let mut gone = bed.disk(3);
    std::fs::remove_file(gone.backing.path_or_uri()).unwrap();
    gone.name = "gone".parse().unwrap();
    assert_eq!(kind(driver.attach_disk(&cx, id, &gone).await), ErrorKind::NotFound);
    assert_eq!(status(&driver, id).await.disks, [disk], "a failed attachment leaves no record");
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_run_out_with_an_error_and_a_stopped_vm_takes_more() {
    let bed = Bed::new();
    let mut config = bed.config();
    config.spare_ports = 2;
    let driver = driver_qemu_kvm::QemuKvm::open(config).await.unwrap();
    let (cx, id) = (within(60), vm(1));
    bed.running(&driver, id, "i").await;
    for number in 1..=2 {
        driver.attach_disk(&cx, id, &bed.disk(number)).await.map(drop).unwrap();
    }
    assert_eq!(kind(driver.attach_disk(&cx, id, &bed.disk(3)).await), ErrorKind::Exhausted);
    driver.stop_vm(&cx, id, Duration::from_secs(10)).await.map(drop).unwrap();
    driver.attach_disk(&cx, id, &bed.disk(3)).await.map(drop).unwrap();
    driver.start_vm(&cx, id).await.map(drop).unwrap();
    assert_eq!(status(&driver, id).await.disks.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_has_grown_is_told_to_the_guest_and_never_shrunk() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (cx, id) = (within(60), vm(1));
    bed.running(&driver, id, "i").await;
    let disk = bed.disk(1);
    driver.attach_disk(&cx, id, &disk).await.map(drop).unwrap();
    let volume = disk.volume_uuid;
    assert_eq!(driver.resize_disk(&cx, id, volume, 8 << 20).await.unwrap(), Change::Unchanged);
    let path = disk.backing.path_or_uri();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(16 << 20).unwrap();
    assert_eq!(driver.resize_disk(&cx, id, volume, 16 << 20).await.unwrap(), Change::Changed);
    assert_eq!(driver.resize_disk(&cx, id, volume, 16 << 20).await.unwrap(), Change::Unchanged);
    assert_eq!(kind(driver.resize_disk(&cx, id, volume, 4 << 20).await), ErrorKind::InvalidSpec);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 16 << 20);
    let other = driver.resize_disk(&cx, id, crate::common::volume(9), 1 << 30).await;
    assert_eq!(kind(other), ErrorKind::NotFound);
}

fn nic(number: u8) -> NicHandle {
    NicHandle::new(
        format!("eth{number}").parse().unwrap(),
        format!("bbbbbbbb-9a4d-4e6f-8b7a-1c2d3e4f5a{number:02x}").parse().unwrap(),
        format!("tap{number}").parse().unwrap(),
        format!("02:00:00:00:00:{number:02x}").parse().unwrap(),
    )
}

fn make_tap(nic: &NicHandle) {
    tool(&["ip", "tuntap", "add", "dev", nic.device.as_str(), "mode", "tap"]);
}

#[test]
fn a_nic_is_plugged_and_pulled_and_its_tap_stays() {
    in_netns(|| async {
        let bed = Bed::new();
        let driver = bed.driver().await;
        let (cx, id) = (within(60), vm(1));
        let (first, second) = (nic(1), nic(2));
        driver.create_vm(&cx, &bed.spec(id, "i")).await.map(drop).unwrap();
        assert_eq!(driver.attach_nic(&cx, id, &first).await.unwrap(), Change::Changed);
        assert_eq!(driver.attach_nic(&cx, id, &first).await.unwrap(), Change::Unchanged);
        let error = driver.start_vm(&cx, id).await.unwrap_err();
        assert!(error.reason().contains("there is no tap tap1"), "{error:?}");
        assert!(!std::path::Path::new("/sys/class/net/tap1").exists(), "none is made");

        make_tap(&first);
        make_tap(&second);
        driver.start_vm(&cx, id).await.map(drop).unwrap();
        wait_for_text(&driver, id, "IDLE").await;
        assert_eq!(driver.attach_nic(&cx, id, &second).await.unwrap(), Change::Changed);
        assert_eq!(driver.attach_nic(&cx, id, &second).await.unwrap(), Change::Unchanged);
        assert_eq!(status(&driver, id).await.nics, [first.clone(), second.clone()]);

        let mut other = nic(3);
        other.device = second.device.clone();
        assert_eq!(kind(driver.attach_nic(&cx, id, &other).await), ErrorKind::Conflict);
        // The tap is another VM's.
        driver.create_vm(&cx, &bed.spec(vm(2), "i")).await.map(drop).unwrap();
        driver.attach_nic(&cx, vm(2), &first).await.map(drop).unwrap();
        assert_eq!(kind(driver.start_vm(&cx, vm(2)).await), ErrorKind::Conflict);

        for nic in [&second, &first] {
            let detach = driver.detach_nic(&cx, id, &nic.device).await;
            assert_eq!(detach.unwrap(), Change::Changed);
            let again = driver.detach_nic(&cx, id, &nic.device).await;
            assert_eq!(again.unwrap(), Change::Unchanged);
        }
        assert_eq!(status(&driver, id).await.nics, []);
        assert!(std::path::Path::new("/sys/class/net/tap1").exists());
        // Free again at once.
        assert_eq!(driver.attach_nic(&cx, id, &first).await.unwrap(), Change::Changed);
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_spec_is_brought_about_live_and_its_repeat_changes_nothing() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (cx, id) = (within(60), vm(1));
    let mut spec = InstanceSpec::new(bed.spec(id, "i"), vec![bed.disk(1), bed.disk(2)], vec![]);
    assert_eq!(driver.ensure_vm(&cx, &spec).await.unwrap(), Change::Created);
    assert_eq!(driver.ensure_vm(&cx, &spec).await.unwrap(), Change::Unchanged);
    let before = status(&driver, id).await;
    assert_eq!(before.disks, spec.disks);
    wait_for_text(&driver, id, "IDLE").await;

    spec.disks = vec![bed.disk(2), bed.disk(3)];
    assert_eq!(driver.ensure_vm(&cx, &spec).await.unwrap(), Change::Changed);
    assert_eq!(driver.ensure_vm(&cx, &spec).await.unwrap(), Change::Unchanged);
    let after = status(&driver, id).await;
    assert_eq!((&after.disks, after.pid), (&spec.disks, before.pid));
    assert!(!after.restart_needed);

    spec.disks[0].read_only = true;
    assert_eq!(driver.ensure_vm(&cx, &spec).await.unwrap(), Change::Changed);
    assert_eq!(driver.ensure_vm(&cx, &spec).await.unwrap(), Change::Unchanged);
    let waits = status(&driver, id).await;
    assert!(waits.restart_needed && waits.pid == before.pid && !waits.disks[0].read_only);

    spec.power = VmPower::Stopped;
    assert_eq!(driver.ensure_vm(&cx, &spec).await.unwrap(), Change::Changed);
    assert_eq!(driver.ensure_vm(&cx, &spec).await.unwrap(), Change::Unchanged);
    spec.power = VmPower::Running;
    assert_eq!(driver.ensure_vm(&cx, &spec).await.unwrap(), Change::Changed);
    let restarted = status(&driver, id).await;
    assert!(!restarted.restart_needed && restarted.disks == spec.disks);
}
