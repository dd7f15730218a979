//! A place for a driver on real QEMU: directories of its own, the tiny guest, and the end of every VMM with the test.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use driver_qemu_kvm::{AccelChoice, QemuConfig, QemuKvm};
use drivers_api::{
    Backing, BootFiles, BootKind, BootSpec, Change, Console, Context, CpuCount, DiskFormat,
    DiskSpec, Error, EventStream, Hypervisor, MemoryMib, VmId, VmSpec, VmState, VmStatus,
};
use tokio::time::{Instant, timeout};

pub(crate) const NODE: &str = "0d9e8f7a-6b5c-4d3e-8f2a-1b0c9d8e7f6a";

pub(crate) struct Bed {
    pub(crate) dir: Dir,
    pub(crate) kernel: PathBuf,
}

impl Drop for Bed {
    fn drop(&mut self) {
        if let Dir::Own(dir) = &self.dir {
            testbed::guest::end_vmms_below(dir.path());
        }
    }
}

/// A directory that goes with the bed, or one of another process's bed.
pub(crate) enum Dir {
    Own(tempfile::TempDir),
    Other(PathBuf),
}

impl Dir {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Own(dir) => dir.path(),
            Self::Other(path) => path,
        }
    }
}

impl Bed {
    /// The bed of another process, by its directory.
    pub(crate) fn at(dir: &Path) -> Self {
        Self { dir: Dir::Other(dir.to_owned()), kernel: dir.join("tiny.elf") }
    }

    pub(crate) fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("bcd-qemu-").tempdir().unwrap();
        let kernel = testbed::guest::tiny(dir.path()).unwrap();
        Self { dir: Dir::Own(dir), kernel }
    }

    pub(crate) fn config(&self) -> QemuConfig {
        let mut config = QemuConfig::new(
            NODE.parse().unwrap(),
            "test",
            self.dir.path().join("state"),
            self.dir.path().join("run"),
        );
        config.accel = AccelChoice::Tcg;
        config
    }

    pub(crate) async fn driver(&self) -> QemuKvm {
        QemuKvm::open(self.config()).await.unwrap()
    }

    pub(crate) fn state(&self, vm: VmId) -> PathBuf {
        self.dir.path().join("state").join(vm.to_string())
    }

    pub(crate) fn run(&self, vm: VmId) -> PathBuf {
        self.dir.path().join("run").join(vm.to_string())
    }

    pub(crate) fn spec(&self, vm: VmId, mode: &str) -> VmSpec {
        let kernel = self.kernel.to_str().unwrap().parse().unwrap();
        let files = BootFiles::Kernel { kernel, initrd: None };
        let mut boot = BootSpec::new(BootKind::DirectLinux, "tiny".to_owned(), Some(files));
        boot.cmdline = Some(format!("mode={mode}"));
        let (cpus, memory) = (CpuCount::new(1).unwrap(), MemoryMib::new(32).unwrap());
        VmSpec::new(vm, format!("test {mode}").parse().unwrap(), cpus, memory, boot)
    }

    pub(crate) fn disk(&self, number: u8) -> DiskSpec {
        let path = self.dir.path().join(format!("disk-{number}.raw"));
        if !path.exists() {
            std::fs::File::create(&path).unwrap().set_len(8 << 20).unwrap();
        }
        let path = path.to_str().unwrap().parse().unwrap();
        let backing = Backing::File { path, format: DiskFormat::Raw };
        DiskSpec::new(format!("d{number}").parse().unwrap(), volume(number), backing)
    }

    /// A VM that runs, and whose guest is ready.
    pub(crate) async fn running(&self, driver: &QemuKvm, vm: VmId, mode: &str) -> VmStatus {
        let cx = within(30);
        assert_eq!(driver.create_vm(&cx, &self.spec(vm, mode)).await.unwrap(), Change::Created);
        assert_eq!(driver.start_vm(&cx, vm).await.unwrap(), Change::Changed);
        wait_for_text(driver, vm, "IDLE").await;
        status(driver, vm).await
    }

    /// The VMMs of this bed.
    pub(crate) fn vmms(&self) -> Vec<u32> {
        testbed::guest::vmms_below(self.dir.path())
    }
}

pub(crate) fn vm(number: u8) -> VmId {
    format!("3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a{number:02x}").parse().unwrap()
}

pub(crate) fn volume(number: u8) -> drivers_api::VolumeId {
    format!("aaaaaaaa-9a4d-4e6f-8b7a-1c2d3e4f5a{number:02x}").parse().unwrap()
}

pub(crate) fn within(seconds: u64) -> Context {
    Context::new().with_deadline((Instant::now() + Duration::from_secs(seconds)).into_std())
}

pub(crate) async fn status(driver: &QemuKvm, vm: VmId) -> VmStatus {
    driver.get(&within(10), vm).await.unwrap().expect("the VM is there")
}

pub(crate) async fn state(driver: &QemuKvm, vm: VmId) -> VmState {
    status(driver, vm).await.state
}

/// Waits until the console has shown a text.
pub(crate) async fn wait_for_text(driver: &QemuKvm, vm: VmId, wanted: &str) {
    let mut console = driver.open_console(&within(10), vm, 1 << 16).await.unwrap();
    let mut text = String::new();
    let read = async {
        while !text.contains(wanted) {
            let bytes = console.read().await.unwrap();
            assert!(!bytes.is_empty(), "the console ended before {wanted:?}: {text}");
            text.push_str(&String::from_utf8_lossy(&bytes));
        }
    };
    timeout(Duration::from_secs(20), read).await.expect("the guest writes in time");
}

/// Waits for an event whose message contains a text; answers how long it took.
pub(crate) async fn wait_for_event(events: &mut EventStream, wanted: &str) -> Duration {
    let begun = Instant::now();
    let wait = async {
        loop {
            let event = events.next().await.expect("the driver is there");
            if event.message.contains(wanted) {
                return;
            }
        }
    };
    timeout(Duration::from_secs(10), wait).await.unwrap_or_else(|_| panic!("no event: {wanted}"));
    begun.elapsed()
}

pub(crate) fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

pub(crate) fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

pub(crate) fn kind<T: std::fmt::Debug>(answer: Result<T, Error>) -> drivers_api::ErrorKind {
    answer.unwrap_err().kind()
}
