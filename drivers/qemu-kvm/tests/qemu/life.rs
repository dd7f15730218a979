//! The life of a VM on real QEMU: made, started, stopped, adopted, deleted.

use std::time::Duration;

use crate::common::*;
use drivers_api::{Change, Context, ErrorKind, Exit, Hypervisor, VmState};
use rustix::process::Signal;
use tokio::time::Instant;

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_is_made_started_stopped_and_deleted_and_each_repeat_changes_nothing() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (cx, id) = (within(60), vm(1));
    assert_eq!(driver.get(&cx, id).await.unwrap(), None);
    assert_eq!(driver.stop_vm(&cx, id, Duration::ZERO).await.unwrap(), Change::Unchanged);
    assert_eq!(driver.delete_vm(&cx, id).await.unwrap(), Change::Unchanged);
    assert_eq!(kind(driver.start_vm(&cx, id).await), ErrorKind::NotFound);

    let spec = bed.spec(id, "i");
    assert_eq!(driver.create_vm(&cx, &spec).await.unwrap(), Change::Created);
    assert_eq!(driver.create_vm(&cx, &spec).await.unwrap(), Change::Unchanged);
    let made = status(&driver, id).await;
    assert_eq!((made.state, made.spec.as_ref(), made.pid), (VmState::Stopped, Some(&spec), None));
    assert_eq!(made.mark.object, id.uuid());

    assert_eq!(driver.start_vm(&cx, id).await.unwrap(), Change::Changed);
    let runs = status(&driver, id).await;
    assert_eq!((runs.state, runs.accel.as_deref()), (VmState::Running, Some("tcg")));
    assert_eq!(driver.start_vm(&cx, id).await.unwrap(), Change::Unchanged);
    assert_eq!(status(&driver, id).await.pid, runs.pid);
    wait_for_text(&driver, id, "IDLE").await;

    assert_eq!(driver.stop_vm(&cx, id, Duration::from_secs(20)).await.unwrap(), Change::Changed);
    let stopped = status(&driver, id).await;
    assert_eq!(
        (stopped.state, stopped.pid, stopped.last_exit),
        (VmState::Stopped, None, Some(Exit::GuestShutdown))
    );
    assert_eq!(driver.stop_vm(&cx, id, Duration::ZERO).await.unwrap(), Change::Unchanged);
    assert!(!bed.run(id).exists(), "{:?}", entries(&bed.run(id)));

    assert_eq!(driver.start_vm(&cx, id).await.unwrap(), Change::Changed);
    assert_eq!(driver.delete_vm(&cx, id).await.unwrap(), Change::Changed);
    assert_eq!(driver.delete_vm(&cx, id).await.unwrap(), Change::Unchanged);
    assert_eq!(driver.list(&cx).await.unwrap(), []);
    assert_eq!(bed.vmms(), [0_u32; 0]);
    assert_eq!(entries(&bed.dir.path().join("state")), [""; 0]);
    assert_eq!(entries(&bed.dir.path().join("run")), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_ignores_the_button_is_ended_when_the_grace_is_over() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let id = vm(1);
    bed.running(&driver, id, "n").await;
    let begun = Instant::now();
    let stop = driver.stop_vm(&within(30), id, Duration::from_secs(4)).await;
    assert_eq!(stop.unwrap(), Change::Changed);
    let took = begun.elapsed();
    assert!(took >= Duration::from_secs(4) && took < Duration::from_secs(7), "{took:?}");
    assert_eq!(status(&driver, id).await.last_exit, Some(Exit::Requested));
    let log = String::from_utf8(
        drivers_api::Console::console_log(&driver, &within(5), id, 4096).await.unwrap(),
    )
    .unwrap();
    assert_eq!(log.matches("POWER-BUTTON").count(), 2, "pressed at 0 and 3 s: {log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_powers_itself_off_is_told_from_a_vmm_that_is_killed() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (cx, id) = (within(60), vm(1));
    let mut events = driver.events().unwrap();
    driver.create_vm(&cx, &bed.spec(id, "p")).await.map(drop).unwrap();
    // It may be off before the start returns.
    assert_eq!(driver.start_vm(&cx, id).await.unwrap(), Change::Changed);
    wait_for_event(&mut events, "the guest shut down").await;
    let off = status(&driver, id).await;
    assert_eq!((off.state, off.last_exit), (VmState::Stopped, Some(Exit::GuestShutdown)));

    driver.create_vm(&cx, &bed.spec(id, "i")).await.map(drop).unwrap();
    driver.start_vm(&cx, id).await.map(drop).unwrap();
    let pid = status(&driver, id).await.pid.unwrap();
    signal(pid, Signal::KILL);
    let took = wait_for_event(&mut events, "signal 9").await;
    assert!(took < Duration::from_secs(1), "{took:?}");
    let killed = status(&driver, id).await;
    assert_eq!((killed.state, killed.last_exit), (VmState::Stopped, Some(Exit::Signal(9))));
    assert_eq!(driver.start_vm(&cx, id).await.unwrap(), Change::Changed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_process_is_unknown_starts_no_second_one_and_is_killed_by_a_stop() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (silent, fine) = (vm(1), vm(2));
    let pid = bed.running(&driver, silent, "i").await.pid.unwrap();
    bed.running(&driver, fine, "i").await;
    signal(pid, Signal::STOP);

    let begun = Instant::now();
    let all = driver.list(&within(10)).await.unwrap();
    assert!(begun.elapsed() < Duration::from_millis(700), "{:?}", begun.elapsed());
    let states: Vec<_> = all.iter().map(|status| (status.uuid, status.state)).collect();
    assert_eq!(states, [(silent, VmState::Unknown), (fine, VmState::Running)]);
    assert!(all[0].message.as_ref().unwrap().contains("does not answer"), "{all:?}");
    assert_eq!(all[0].pid, Some(pid));

    let start = driver.start_vm(&within(2), silent).await;
    assert!(
        matches!(kind(start), ErrorKind::UnknownOutcome | ErrorKind::Deadline),
        "no second VMM is started"
    );
    assert_eq!(bed.vmms().len(), 2);

    let begun = Instant::now();
    let stop = driver.stop_vm(&within(20), silent, Duration::from_secs(1)).await;
    assert_eq!(stop.unwrap(), Change::Changed);
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert_eq!(status(&driver, silent).await.last_exit, Some(Exit::Requested));
    assert_eq!(state(&driver, fine).await, VmState::Running);
    assert_eq!(bed.vmms().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_driver_adopts_a_vm_with_its_process_console_and_end() {
    let bed = Bed::new();
    let first = bed.driver().await;
    let id = vm(1);
    let before = bed.running(&first, id, "i").await;
    drop(first);

    let second = bed.driver().await;
    let mut events = second.events().unwrap();
    let after = status(&second, id).await;
    assert_eq!(after, before, "the same process, spec and state");
    wait_for_text(&second, id, "TINY-GUEST-UP").await;
    assert_eq!(second.start_vm(&within(10), id).await.unwrap(), Change::Unchanged);
    let mut console = drivers_api::Console::open_console(&second, &within(5), id, 0).await.unwrap();
    console.write(b"hello").await.unwrap();
    wait_for_text(&second, id, "hello").await;

    let stop = second.stop_vm(&within(30), id, Duration::from_secs(20)).await;
    assert_eq!(stop.unwrap(), Change::Changed);
    wait_for_event(&mut events, "the guest shut down").await;
    assert_eq!(status(&second, id).await.last_exit, Some(Exit::GuestShutdown));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_that_nobody_saw_is_unseen_and_the_vm_starts_again() {
    let bed = Bed::new();
    let first = bed.driver().await;
    let id = vm(1);
    let pid = bed.running(&first, id, "i").await.pid.unwrap();
    drop(first);
    signal(pid, Signal::KILL);
    while bed.vmms().contains(&pid) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let second = bed.driver().await;
    let ended = status(&second, id).await;
    assert_eq!((ended.state, ended.last_exit), (VmState::Stopped, Some(Exit::Unseen)));
    assert_eq!(second.start_vm(&within(10), id).await.unwrap(), Change::Changed);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_starts_at_once_give_one_vmm() {
    let bed = Bed::new();
    let (one, two) = (bed.driver().await, bed.driver().await);
    let (cx, id, other) = (within(60), vm(1), vm(2));
    one.create_vm(&cx, &bed.spec(id, "i")).await.map(drop).unwrap();
    one.create_vm(&cx, &bed.spec(other, "i")).await.map(drop).unwrap();
    let starts = |drivers: [&driver_qemu_kvm::QemuKvm; 2], id| {
        let mut tasks = tokio::task::JoinSet::new();
        for driver in drivers.into_iter().cycle().take(10) {
            let (driver, cx) = (driver.clone(), cx.clone());
            tasks.spawn(async move { driver.start_vm(&cx, id).await });
        }
        tasks.join_all()
    };
    let answers = starts([&one, &one], id).await;
    let changed = answers.iter().filter(|answer| matches!(answer, Ok(Change::Changed))).count();
    let unchanged = answers.iter().filter(|answer| matches!(answer, Ok(Change::Unchanged))).count();
    assert_eq!((changed, unchanged), (1, 9), "{answers:?}");
    assert_eq!(bed.vmms().len(), 1);

    // Two agents on one host: that is no way to run them, and still no second VMM.
    for answer in starts([&one, &two], other).await {
        if let Err(error) = answer {
            let kinds = [ErrorKind::Unavailable, ErrorKind::UnknownOutcome, ErrorKind::Deadline];
            assert!(kinds.contains(&error.kind()), "{error:?}");
        }
    }
    assert_eq!(bed.vmms().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reboot_resets_the_guest_or_boots_it_anew() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (cx, id) = (within(60), vm(1));
    let pid = bed.running(&driver, id, "n").await.pid;
    let mut events = driver.events().unwrap();
    let reboot = driver.reboot_vm(&cx, id, Duration::from_millis(500)).await;
    assert_eq!(reboot.unwrap(), Change::Changed);
    wait_for_event(&mut events, "reset").await;
    assert_eq!(status(&driver, id).await.pid, pid, "the guest ignored the button and was reset");

    driver.stop_vm(&cx, id, Duration::ZERO).await.map(drop).unwrap();
    driver.create_vm(&cx, &bed.spec(id, "i")).await.map(drop).unwrap();
    let reboot = driver.reboot_vm(&cx, id, Duration::from_secs(20)).await;
    assert_eq!(reboot.unwrap(), Change::Changed, "a stopped VM is started");
    wait_for_text(&driver, id, "mode=i").await;
    let reboot = driver.reboot_vm(&cx, id, Duration::from_secs(20)).await;
    assert_eq!(reboot.unwrap(), Change::Changed);
    assert_eq!(state(&driver, id).await, VmState::Running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_spec_waits_for_the_next_start_and_an_emptied_cache_breaks_nothing() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (cx, id) = (within(60), vm(1));
    bed.running(&driver, id, "i").await;
    let mut renamed = bed.spec(id, "i");
    renamed.name = "another name".parse().unwrap();
    assert_eq!(driver.create_vm(&cx, &renamed).await.unwrap(), Change::Changed);
    assert!(!status(&driver, id).await.restart_needed, "a name needs no restart");
    let changed = bed.spec(id, "i tick");
    assert_eq!(driver.create_vm(&cx, &changed).await.unwrap(), Change::Changed);
    let waits = status(&driver, id).await;
    assert!(waits.restart_needed && waits.state == VmState::Running);
    assert_eq!(waits.spec, Some(changed.clone()));

    std::fs::remove_file(&bed.kernel).unwrap();
    assert_eq!(driver.create_vm(&cx, &changed).await.unwrap(), Change::Unchanged);
    driver.stop_vm(&cx, id, Duration::from_secs(20)).await.map(drop).unwrap();
    assert_eq!(driver.start_vm(&cx, id).await.unwrap(), Change::Changed);
    wait_for_text(&driver, id, "tick").await;
    assert!(!status(&driver, id).await.restart_needed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_ends_at_its_deadline_and_a_cancelled_one_at_once() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let id = vm(1);
    bed.running(&driver, id, "n").await;
    let begun = Instant::now();
    let stop = driver.stop_vm(&within(1), id, Duration::from_secs(60)).await;
    assert_eq!(kind(stop), ErrorKind::Deadline);
    assert!(begun.elapsed() < Duration::from_secs(2));
    assert_eq!(state(&driver, id).await, VmState::Running, "it was not ended before its grace");

    let cx = Context::new();
    cx.cancel().cancel();
    assert_eq!(kind(driver.start_vm(&cx, id).await), ErrorKind::Cancelled);
    assert_eq!(kind(driver.list(&cx).await), ErrorKind::Cancelled);
    assert_eq!(kind(driver.get(&within(0), id).await), ErrorKind::Deadline);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_qemu_refuses_says_why_and_leaves_nothing_running() {
    let bed = Bed::new();
    let driver = bed.driver().await;
    let (cx, id) = (within(60), vm(1));
    driver.create_vm(&cx, &bed.spec(id, "i")).await.map(drop).unwrap();
    let disk = bed.disk(1);
    driver.attach_disk(&cx, id, &disk).await.map(drop).unwrap();
    std::fs::remove_file(disk.backing.path_or_uri()).unwrap();
    let error = driver.start_vm(&cx, id).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.reason().contains("No such file or directory"), "{error:?}");
    assert_eq!(bed.vmms(), [0_u32; 0]);
    bed.disk(1);
    assert_eq!(driver.start_vm(&cx, id).await.unwrap(), Change::Changed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_runs_under_a_uid_of_its_own_that_owns_nothing_but_its_files() {
    let bed = Bed::new();
    let mut config = bed.config();
    let uids = driver_qemu_kvm::UidRange { base: 2_000_000, count: 1000 };
    config.uids = Some(uids);
    let driver = driver_qemu_kvm::QemuKvm::open(config).await.unwrap();
    let (cx, id) = (within(60), vm(1));
    let mut spec = bed.spec(id, "i");
    spec.cloud_init = Some(drivers_api::CloudInit::new(
        "#cloud-config\n".to_owned(),
        "instance-id: i\n".to_owned(),
    ));
    driver.create_vm(&cx, &spec).await.map(drop).unwrap();
    driver.start_vm(&cx, id).await.map(drop).unwrap();
    wait_for_text(&driver, id, "IDLE").await;
    let pid = status(&driver, id).await.pid.unwrap();
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let uid = uids.uid_of(id);
    assert_eq!(driver.vmm_uid(id), Some(uid));
    for field in ["Uid:", "Gid:"] {
        let line = text.lines().find(|line| line.starts_with(field)).unwrap();
        let ids: Vec<u32> =
            line.split_whitespace().skip(1).map(|number| number.parse().unwrap()).collect();
        assert_eq!(ids, [uid; 4], "{line}");
    }
    let seccomp = text.lines().find(|line| line.starts_with("Seccomp:")).unwrap();
    assert!(seccomp.ends_with('2'), "the sandbox filters: {seccomp}");
    // Another agent adopts it all the same.
    drop(driver);
    let driver = bed.driver().await;
    assert_eq!(state(&driver, id).await, VmState::Running);
    driver.stop_vm(&cx, id, Duration::from_secs(20)).await.map(drop).unwrap();
    assert_eq!(status(&driver, id).await.last_exit, Some(Exit::GuestShutdown));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_is_opened_where_no_socket_fits_or_without_qemu_says_so() {
    let bed = Bed::new();
    let mut config = bed.config();
    config.run_dir = bed.dir.path().join("x".repeat(100));
    let error = driver_qemu_kvm::QemuKvm::open(config).await.unwrap_err();
    assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidSpec, Some("run_dir")));
    let mut config = bed.config();
    config.qemu = "/nonexistent/qemu".into();
    let error = driver_qemu_kvm::QemuKvm::open(config).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.remedy().unwrap().contains("install"), "{error:?}");
    let driver = bed.driver().await;
    let info = driver.host_info(&within(5)).await.unwrap();
    assert!(info.backend_version.unwrap().starts_with("QEMU "));
    assert_eq!((info.driver.as_str(), info.hypervisor.as_str()), ("qemu-kvm", "qemu-kvm"));
}
