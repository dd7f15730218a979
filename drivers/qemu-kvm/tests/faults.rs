//! The driver killed at each of its fault points, and what the next one makes of it (case REC-01).

#[cfg(test)]
#[expect(dead_code, reason = "the other tests use the rest")]
#[path = "qemu/common.rs"]
mod common;

#[cfg(test)]
mod faults {
    use std::{path::Path, time::Duration};

    use driver_qemu_kvm::{FAULT_POINTS, QemuKvm};
    use drivers_api::{Change, Context, Hypervisor, NicHandle, Result, VmState};
    use host::run::Run;
    use testbed::netns::{in_netns, tool};

    use crate::common::*;

    const DIR: &str = "BCD_TEST_DIR";

    fn nic() -> NicHandle {
        NicHandle::new(
            "eth1".parse().unwrap(),
            "bbbbbbbb-9a4d-4e6f-8b7a-1c2d3e4f5a01".parse().unwrap(),
            "ftap1".parse().unwrap(),
            "02:00:00:00:00:01".parse().unwrap(),
        )
    }

    /// Every kind of change, up to a running VM with two disks and a NIC.
    async fn build(bed: &Bed, driver: &QemuKvm) -> Result<()> {
        let (cx, id) = (within(60), vm(1));
        driver.create_vm(&cx, &bed.spec(id, "i tick")).await.map(drop)?;
        driver.create_vm(&cx, &bed.spec(id, "i")).await.map(drop)?;
        let mut other_kernel = bed.spec(id, "i");
        let copy = bed.dir.path().join("copy.elf");
        std::fs::copy(&bed.kernel, &copy).unwrap();
        other_kernel.boot.files = Some(drivers_api::BootFiles::Kernel {
            kernel: copy.to_str().unwrap().parse().unwrap(),
            initrd: None,
        });
        driver.create_vm(&cx, &other_kernel).await.map(drop)?;
        driver.create_vm(&cx, &bed.spec(id, "i")).await.map(drop)?;
        driver.attach_disk(&cx, id, &bed.disk(1)).await.map(drop)?;
        driver.start_vm(&cx, id).await.map(drop)?;
        driver.attach_disk(&cx, id, &bed.disk(2)).await.map(drop)?;
        driver.attach_nic(&cx, id, &nic()).await.map(drop)
    }

    /// The way back.
    async fn clear(driver: &QemuKvm) -> Result<()> {
        let (cx, id) = (within(60), vm(1));
        driver.detach_disk(&cx, id, volume(2)).await.map(drop)?;
        driver.detach_nic(&cx, id, &nic().device).await.map(drop)?;
        driver.stop_vm(&cx, id, Duration::ZERO).await.map(drop)?;
        driver.delete_vm(&cx, id).await.map(drop)
    }

    /// What the child process does until it is killed.
    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "run by the kill matrix, in a process of its own that is killed"]
    async fn child() {
        let dir = std::env::var(DIR).expect("the kill matrix sets it");
        let bed = Bed::at(Path::new(&dir));
        let driver = bed.driver().await;
        build(&bed, &driver).await.unwrap();
        clear(&driver).await.unwrap();
        panic!("the point was never reached");
    }

    /// Runs the child until the point kills it; answers what it left.
    async fn killed_at(point: &str) -> Bed {
        let bed = Bed::new();
        let child = Run::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "faults::child", "--nocapture"])
            .env("BCD_FAULT", format!("{point}=kill"))
            .env(DIR, bed.dir.path())
            .limit(Duration::from_secs(60));
        let output = child.output(&Context::new()).await.unwrap();
        let killed = std::os::unix::process::ExitStatusExt::signal(&output.status) == Some(9);
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(killed, "{point}: {} {text}", output.status);
        bed
    }

    async fn check_repeat(point: &str) {
        let bed = killed_at(point).await;
        let before = bed.vmms();
        assert!(before.len() <= 1, "{point}: {before:?}");
        let driver = bed.driver().await;
        build(&bed, &driver).await.unwrap_or_else(|error| panic!("{point}: repeat: {error:?}"));
        let status = status(&driver, vm(1)).await;
        assert_eq!(status.state, VmState::Running, "{point}: {status:?}");
        assert_eq!((status.disks.len(), status.nics.len()), (2, 1), "{point}: {status:?}");
        assert_eq!(status.detaching, [], "{point}");
        let after = bed.vmms();
        assert_eq!(after.len(), 1, "{point}");
        if before.len() == 1 {
            assert_eq!(after, before, "{point}: the VM was not restarted");
        }
        clear(&driver).await.unwrap_or_else(|error| panic!("{point}: clear: {error:?}"));
        nothing_is_left(point, &bed, &driver).await;
    }

    async fn check_delete(point: &str) {
        let bed = killed_at(point).await;
        let driver = bed.driver().await;
        let deleted = driver.delete_vm(&within(30), vm(1)).await;
        assert!(deleted.is_ok(), "{point}: {deleted:?}");
        nothing_is_left(point, &bed, &driver).await;
    }

    async fn nothing_is_left(point: &str, bed: &Bed, driver: &QemuKvm) {
        let again = driver.delete_vm(&within(30), vm(1)).await.unwrap();
        assert_eq!(again, Change::Unchanged, "{point}");
        assert_eq!(driver.list(&within(10)).await.unwrap(), [], "{point}");
        assert_eq!(bed.vmms(), [0_u32; 0], "{point}");
        for name in ["state", "run"] {
            assert_eq!(entries(&bed.dir.path().join(name)), [""; 0], "{point}: {name}");
        }
    }

    #[test]
    fn a_repeat_after_a_kill_at_any_point_converges_without_a_second_vmm_or_a_restart() {
        in_netns(|| async {
            tool(&["ip", "tuntap", "add", "dev", "ftap1", "mode", "tap"]);
            for point in FAULT_POINTS {
                check_repeat(point).await;
            }
        });
    }

    #[test]
    fn a_delete_after_a_kill_at_any_point_leaves_nothing() {
        in_netns(|| async {
            tool(&["ip", "tuntap", "add", "dev", "ftap1", "mode", "tap"]);
            for point in FAULT_POINTS {
                check_delete(point).await;
            }
        });
    }
}
