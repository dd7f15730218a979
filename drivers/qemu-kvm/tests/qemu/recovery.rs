//! What is found on the host after somebody was killed, or after somebody else was there.

use std::{os::unix::fs::symlink, os::unix::net::UnixListener, time::Duration};

use crate::common::*;
use driver_qemu_kvm::QemuKvm;
use drivers_api::{Change, ErrorKind, Exit, Hypervisor, VmState};
use host::process::Identity;

/// A stopped VM, whose run directory is there.
async fn stopped(bed: &Bed, driver: &QemuKvm, number: u8) -> drivers_api::VmId {
    let id = vm(number);
    driver.create_vm(&within(30), &bed.spec(id, "i")).await.map(drop).unwrap();
    std::fs::create_dir(bed.run(id)).unwrap();
    id
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_crash_left_of_cut_short_writes_and_of_a_forced_stop_goes_at_the_next_start() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let id = stopped(&bed, &driver, 1).await;
    let own = bed.dir.path().join("state").join(id.to_string());
    let before = entries(&own);
    drop(driver);
    std::fs::write(own.join(".tmp-1-0-vm.json"), "half").unwrap();
    // As after the end of the VMM was seen and kept, and before the rest was cleared.
    for name in ["requested", "qemu.log", "running.json", ".tmp-1-0-running.json"] {
        std::fs::write(bed.run(id).join(name), "").unwrap();
    }
    let driver = bed.driver().await;
    assert_eq!(entries(&own), before);
    assert!(!bed.run(id).exists(), "{:?}", entries(&bed.run(id)));
    assert_eq!(state(&driver, id).await, VmState::Stopped);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_that_names_another_process_is_a_stopped_vm_and_signals_nobody() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let id = stopped(&bed, &driver, 1).await;
    // The test's own, which nobody may signal; it would end by any of the driver's signals.
    let bystander =
        host::daemon::Daemon::new("sleep").arg("1000").start().expect("a process to leave alone");
    let pid = bystander.identity.pid();
    let me = Identity::of(std::process::id()).unwrap().to_string();
    let other = bystander.identity.to_string();
    let one = Identity::of(1).unwrap().to_string();
    let later = {
        let (rest, ticks) = other.rsplit_once(' ').unwrap();
        format!("{rest} {}", ticks.parse::<u64>().unwrap() + 1000)
    };
    let texts = [
        &pid.to_string(),
        &other,
        &other.replace(' ', "\n"),
        &me,
        &one,
        &later,
        "1",
        "0",
        "-1",
        "4194304",
        "abc",
        "",
        &std::process::id().to_string(),
    ];
    for text in texts {
        std::fs::create_dir_all(bed.run(id)).unwrap();
        std::fs::write(bed.run(id).join("vmm"), text).unwrap();
        let seen = status(&driver, id).await;
        assert_eq!((seen.state, seen.pid), (VmState::Stopped, None), "{text:?}");
        let fresh = bed.driver().await;
        assert_eq!(state(&fresh, id).await, VmState::Stopped, "{text:?}");
        let stop = fresh.stop_vm(&within(10), id, Duration::from_secs(5)).await;
        assert_eq!(stop.unwrap(), Change::Unchanged, "{text:?}");
        assert!(!bystander.pidfd.has_ended(), "{text:?}");
    }
    std::fs::create_dir_all(bed.run(id)).unwrap();
    std::fs::write(bed.run(id).join("vmm"), &other).unwrap();
    assert_eq!(driver.start_vm(&within(30), id).await.unwrap(), Change::Changed);
    std::fs::write(bed.run(id).join("vmm"), &other).unwrap();
    assert_eq!(driver.delete_vm(&within(30), id).await.unwrap(), Change::Changed);
    assert_eq!(bed.vmms(), [0_u32; 0]);
    assert!(!bystander.pidfd.has_ended());
    bystander.pidfd.signal(rustix::process::Signal::KILL).unwrap();
    bystander.pidfd.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_left_behind_is_cleared_and_what_is_no_socket_is_refused() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let id = stopped(&bed, &driver, 1).await;
    drop(UnixListener::bind(bed.run(id).join("qmp0.sock")).unwrap());
    assert_eq!(driver.start_vm(&within(30), id).await.unwrap(), Change::Changed);

    let other_socket = bed.run(id).join("qmp0.sock");
    for (number, plant) in [(2, "link"), (3, "file"), (4, "directory")] {
        let victim = stopped(&bed, &driver, number).await;
        let place = bed.run(victim).join("qmp0.sock");
        match plant {
            "link" => symlink(&other_socket, &place).unwrap(),
            "file" => std::fs::write(&place, "x").unwrap(),
            _ => std::fs::create_dir(&place).unwrap(),
        }
        let error = driver.start_vm(&within(30), victim).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict, "{plant}: {error:?}");
        assert!(error.reason().contains(place.to_str().unwrap()), "{plant}: {error:?}");
        assert!(std::fs::symlink_metadata(&place).is_ok(), "{plant} was touched");
    }
    assert_eq!(state(&driver, id).await, VmState::Running, "the other VM's socket answers");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_whose_identity_was_never_written_is_found_by_its_lock() {
    let bed = Bed::new();
    let first = bed.driver().await;
    let id = vm(1);
    let pid = bed.running(&first, id, "i").await.pid;
    drop(first);
    std::fs::remove_file(bed.run(id).join("vmm")).unwrap();
    let second = bed.driver().await;
    let found = status(&second, id).await;
    assert_eq!((found.state, found.pid), (VmState::Running, pid));
    assert_eq!(second.start_vm(&within(10), id).await.unwrap(), Change::Unchanged);
    assert_eq!(bed.vmms().len(), 1);
    assert!(bed.run(id).join("vmm").exists(), "the next one finds it at once");
    drop(second);

    // The whole run directory gone: the VMM cannot be spoken to, and there is still no second one.
    std::fs::remove_dir_all(bed.run(id)).unwrap();
    let third = bed.driver().await;
    let lost = status(&third, id).await;
    assert_eq!((lost.state, lost.pid), (VmState::Unknown, pid));
    third.start_vm(&within(2), id).await.unwrap_err();
    assert_eq!(bed.vmms().len(), 1);
    let stop = third.stop_vm(&within(30), id, Duration::from_secs(1)).await;
    assert_eq!(stop.unwrap(), Change::Changed);
    assert_eq!(bed.vmms(), [0_u32; 0]);
    assert_eq!(third.start_vm(&within(10), id).await.unwrap(), Change::Changed);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_ours_is_a_conflict_and_stays_as_it_is() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let cx = within(30);
    for (number, mark) in [
        (1, None),
        (2, Some("nonsense".to_owned())),
        (
            3,
            Some(format!(
                "{{\"schema\": 1, \"node\": \"11111111-1111-1111-1111-111111111111\", \"vm\": \"{}\"}}",
                vm(3)
            )),
        ),
        (4, Some(format!("{{\"schema\": 1, \"node\": \"{NODE}\", \"vm\": \"{}\"}}", vm(9)))),
    ] {
        let id = vm(number);
        std::fs::create_dir(bed.state(id)).unwrap();
        std::fs::write(bed.state(id).join("precious"), "x").unwrap();
        if let Some(mark) = mark {
            std::fs::write(bed.state(id).join("mark.json"), mark).unwrap();
        }
        let before = entries(&bed.state(id));
        assert_eq!(kind(driver.create_vm(&cx, &bed.spec(id, "i")).await), ErrorKind::Conflict);
        assert_eq!(kind(driver.start_vm(&cx, id).await), ErrorKind::Conflict);
        assert_eq!(kind(driver.stop_vm(&cx, id, Duration::ZERO).await), ErrorKind::Conflict);
        assert_eq!(kind(driver.delete_vm(&cx, id).await), ErrorKind::Conflict);
        assert_eq!(kind(driver.get(&cx, id).await), ErrorKind::Conflict);
        assert_eq!(entries(&bed.state(id)), before);
    }
    assert_eq!(driver.list(&cx).await.unwrap(), []);
    drop(bed.driver().await);
    assert_eq!(entries(&bed.dir.path().join("state")).len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_or_newer_record_stops_and_deletes_nothing() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (cx, id) = (within(30), vm(1));
    let pid = bed.running(&driver, id, "i").await.pid;
    let record = bed.state(id).join("vm.json");
    let good = std::fs::read(&record).unwrap();
    for (text, word) in [("{", "damaged"), ("", "damaged"), ("{\"schema\": 99}", "schema 99")] {
        std::fs::write(&record, text).unwrap();
        let seen = status(&driver, id).await;
        assert_eq!((seen.state, seen.pid, &seen.spec), (VmState::Running, pid, &None), "{text}");
        assert!(seen.message.as_ref().unwrap().contains(word), "{seen:?}");
        assert_eq!(kind(driver.start_vm(&cx, id).await), ErrorKind::Unavailable);
    }
    let newer = driver.create_vm(&cx, &bed.spec(id, "i")).await;
    assert_eq!(kind(newer), ErrorKind::Unavailable, "a newer agent's record is not overwritten");
    std::fs::write(&record, "{").unwrap();
    driver.create_vm(&cx, &bed.spec(id, "i")).await.map(drop).unwrap();
    assert_eq!(std::fs::read(&record).unwrap(), good);
    assert_eq!(status(&driver, id).await.pid, pid);

    std::fs::write(&record, "{").unwrap();
    assert_eq!(driver.delete_vm(&cx, id).await.unwrap(), Change::Changed);
    assert_eq!(bed.vmms(), [0_u32; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn half_made_vms_are_listed_completed_or_deleted() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (cx, id) = (within(30), vm(1));
    let halve = || {
        std::fs::remove_file(bed.state(id).join("vm.json")).unwrap();
        std::fs::remove_dir_all(bed.state(id).join("boot")).unwrap();
    };
    driver.create_vm(&cx, &bed.spec(id, "i")).await.map(drop).unwrap();
    halve();
    let half = &driver.list(&cx).await.unwrap()[0];
    assert_eq!((half.state, &half.spec), (VmState::Stopped, &None));
    assert_eq!(kind(driver.start_vm(&cx, id).await), ErrorKind::NotFound);
    assert_eq!(driver.create_vm(&cx, &bed.spec(id, "i")).await.unwrap(), Change::Created);
    assert_eq!(driver.start_vm(&cx, id).await.unwrap(), Change::Changed);
    halve();
    assert_eq!(driver.delete_vm(&cx, id).await.unwrap(), Change::Changed);

    // Directories in the making and on their way out, as a killed agent leaves them.
    let state = bed.dir.path().join("state");
    for name in [".new", ".del"] {
        std::fs::create_dir(state.join(format!("{name}-{id}-77-1"))).unwrap();
    }
    assert_eq!(driver.delete_vm(&cx, id).await.unwrap(), Change::Changed);
    assert_eq!(entries(&state), [""; 0]);
    for name in [".new", ".del"] {
        std::fs::create_dir(state.join(format!("{name}-{id}-77-1"))).unwrap();
    }
    drop(bed.driver().await);
    assert_eq!(entries(&state), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_state_directory_that_is_gone_is_no_absence_of_vms() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (cx, id) = (within(30), vm(1));
    bed.running(&driver, id, "i").await;
    let (state, aside) = (bed.dir.path().join("state"), bed.dir.path().join("aside"));
    std::fs::rename(&state, &aside).unwrap();
    assert_eq!(kind(driver.list(&cx).await), ErrorKind::Unavailable);
    assert_eq!(kind(driver.get(&cx, id).await), ErrorKind::Unavailable);
    assert_eq!(kind(driver.delete_vm(&cx, id).await), ErrorKind::Unavailable);
    assert_eq!(kind(driver.stop_vm(&cx, id, Duration::ZERO).await), ErrorKind::Unavailable);
    std::fs::rename(&aside, &state).unwrap();
    assert_eq!(crate::common::state(&driver, id).await, VmState::Running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_uefi_vm_has_variables_of_its_own_and_the_template_stays() {
    let bed = Bed::new();
    let template = bed.dir.path().join("VARS.fd");
    std::fs::copy("/usr/share/OVMF/OVMF_VARS_4M.fd", &template)
        .expect("the package ovmf is needed");
    let before = std::fs::read(&template).unwrap();
    let mut config = bed.config();
    config.firmware_vars.clone_from(&template);
    let driver = QemuKvm::open(config).await.unwrap();
    let cx = within(60);
    let uefi = |number| {
        let mut spec = bed.spec(vm(number), "i");
        spec.boot = drivers_api::BootSpec::new(
            drivers_api::BootKind::Uki,
            "uki".to_owned(),
            Some(drivers_api::BootFiles::Uki {
                path: bed.kernel.to_str().unwrap().parse().unwrap(),
            }),
        );
        spec.memory_mib = drivers_api::MemoryMib::new(128).unwrap();
        spec
    };
    for number in 1..=3 {
        driver.create_vm(&cx, &uefi(number)).await.map(drop).unwrap();
    }
    driver.start_vm(&cx, vm(1)).await.map(drop).unwrap();
    driver.start_vm(&cx, vm(2)).await.map(drop).unwrap();
    std::fs::remove_file(bed.state(vm(3)).join("nvram.fd")).unwrap();
    for number in [1, 3] {
        assert_eq!(driver.delete_vm(&cx, vm(number)).await.unwrap(), Change::Changed);
        assert!(!bed.state(vm(number)).exists());
    }
    assert_eq!(std::fs::read(&template).unwrap(), before);
    assert_eq!(crate::common::state(&driver, vm(2)).await, VmState::Running);
    assert_eq!(status(&driver, vm(2)).await.last_exit, None::<Exit>);
}

#[test]
fn a_vm_is_stopped_and_deleted_on_a_full_disk() {
    testbed::netns::in_netns(|| async {
        let bed = Bed::new();
        let state = bed.dir.path().join("state");
        std::fs::create_dir(&state).unwrap();
        let mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "t"];
        testbed::netns::tool(&[mount.as_slice(), &[state.to_str().unwrap()]].concat());
        let driver = bed.driver().await;
        let (cx, id) = (within(60), vm(1));
        bed.running(&driver, id, "i").await;
        let mut filler = std::fs::File::create(state.join("filler")).unwrap();
        while std::io::Write::write_all(&mut filler, &[1; 4096]).is_ok() {}

        let error = driver.create_vm(&cx, &bed.spec(vm(2), "i")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted, "{error:?}");
        assert_eq!(entries(&state), [id.to_string(), "filler".to_owned()], "nothing half made");
        let error = driver.attach_disk(&cx, id, &bed.disk(1)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted, "{error:?}");
        assert_eq!(status(&driver, id).await.spec, Some(bed.spec(id, "i")), "the record is whole");
        let stop = driver.stop_vm(&cx, id, Duration::from_secs(20)).await;
        assert_eq!(stop.unwrap(), Change::Changed);
        assert_eq!(crate::common::state(&driver, id).await, VmState::Stopped);
        assert_eq!(driver.delete_vm(&cx, id).await.unwrap(), Change::Changed);
        assert_eq!(entries(&state), ["filler"]);
        testbed::netns::tool(&["umount", "-l", state.to_str().unwrap()]);
    });
}
