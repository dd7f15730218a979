//! The driver behind the contract's traits.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use drivers_api::{
    BackingKind, BootKind, Change, Console, ConsoleStream, Context, CpuCount, DiskSpec, Error,
    ErrorKind, EventStream, HostInfo, Hypervisor, HypervisorAbilities, IfName, InstanceSpec,
    MemoryMib, NicHandle, Resize, Result, VmId, VmSpec, VmStatus, VolumeId, WholeSpec,
};
use host::{
    bound::{blocking, bounded},
    files,
    run::Run,
};

use crate::{
    DRIVER,
    apply::{self, create, delete, disks, nics, power, whole},
    config::QemuConfig,
    console::{self, log::SerialLog},
    driver::{Held, Inner},
    error::{label, no_such_vm},
    observe::{self, Foreign},
    paths::{DEL_PREFIX, NEW_PREFIX, SOCKET_PATH_MAX, SOCKET_SUFFIX, VmPaths},
    record::{self, Ownership},
    scope, vmm,
};

/// How long an ended call waits for the thread that still works for it: on files, so milliseconds as a rule.
const AT_REST: Duration = Duration::from_secs(2);

/// The driver. Dropping it ends no VM.
#[derive(Clone, Debug)]
pub struct QemuKvm {
    inner: Arc<Inner>,
}

impl QemuKvm {
    /// Opens the driver: makes its directories, clears what interrupted calls left, and takes hold of every VMM that runs.
    ///
    /// # Errors
    /// `InvalidSpec` for a configuration that cannot work, `Unavailable` without QEMU, `Denied` or `Exhausted` when the
    /// directories cannot be made.
    pub async fn open(config: QemuConfig) -> Result<Self> {
        if config.run_dir.as_os_str().len() + SOCKET_SUFFIX > SOCKET_PATH_MAX {
            let most = SOCKET_PATH_MAX - SOCKET_SUFFIX;
            let reason = format!("wanted at most {most} bytes: a socket's path has a limit");
            return Err(Error::invalid("run_dir", reason));
        }
        for (field, dir) in [("state_dir", &config.state_dir), ("run_dir", &config.run_dir)] {
            if !dir.is_absolute() || dir.to_str().is_none() {
                return Err(Error::invalid(field, "wanted an absolute path in UTF-8"));
            }
        }
        scope::check(&config)?;
        let version = version(&config).await?;
        let inner = Inner::new(config, version);
        let opening = Arc::clone(&inner);
        blocking("open", move || prepare(&opening)).await?;
        // Takes hold of what runs, so that the end of a VMM is an event from now on.
        observe::list(&inner, &Context::new()).await?;
        Ok(Self { inner })
    }

    async fn op<T, F>(
        &self,
        cx: &Context,
        operation: &'static str,
        vm: VmId,
        work: impl FnOnce(crate::driver::Op) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let op = self.inner.op(cx, operation, vm).await?;
        // Every await below may be the last one, so the context ends the work wherever it is.
        let answer = bounded(cx, operation, label(vm), work(op)).await;
        if let Err(error) = &answer
            && matches!(error.kind(), ErrorKind::Cancelled | ErrorKind::Deadline)
        {
            // A thread may still be at its last file. Whoever looks after this answer must see what it made: a deletion
            // that saw nothing here would otherwise leave the VM's directory behind.
            self.inner.at_rest(vm, AT_REST).await;
        }
        answer
    }
}

/// `QEMU emulator version 7.2.22 (…)` as `QEMU 7.2.22`.
async fn version(config: &QemuConfig) -> Result<String> {
    let object = config.qemu.display();
    let run = Run::new(&config.qemu).arg("--version").limit(Duration::from_secs(10));
    let output = run.success(&Context::new()).await.map_err(|error| {
        error.into_error("ask for the version of", &object).with_remedy("install qemu-system-x86")
    })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let number = text.split_whitespace().skip_while(|word| *word != "version").nth(1);
    let number = number.unwrap_or_default();
    let major = number.split('.').next().and_then(|major| major.parse::<u32>().ok());
    // `-netdev` takes JSON from 7.2 on.
    if major.is_none_or(|major| major < 7) {
        let reason = format!("it is QEMU \"{number}\", and 7.2 is the least that works");
        return Err(Error::new(ErrorKind::Unavailable, "use", object, reason)
            .with_remedy("install a newer QEMU"));
    }
    Ok(format!("QEMU {number}"))
}

fn prepare(inner: &Inner) -> Result<()> {
    let config = &inner.config;
    for dir in [&config.state_dir, &config.run_dir] {
        files::private_dir(dir).map_err(|error| error.into_error("open", DRIVER))?;
    }
    sweep(inner)
}

/// Removes what interrupted calls left: directories in the making or on their way out, run directories without a VM.
/// Blocking, before any call.
fn sweep(inner: &Inner) -> Result<()> {
    let config = &inner.config;
    let names = |dir: &std::path::Path| -> Result<Vec<String>> {
        let entries = std::fs::read_dir(dir)
            .map_err(|error| files::FileError::of("read", dir)(error).into_error("open", DRIVER))?;
        Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
    };
    for name in names(&config.state_dir)? {
        let rest = [NEW_PREFIX, DEL_PREFIX].iter().find_map(|prefix| name.strip_prefix(prefix));
        let Some(id) = rest.and_then(|rest| rest.get(..36)).and_then(|id| id.parse().ok()) else {
            continue;
        };
        unless_locked(config, id, || {
            delete::sweep_where(&config.state_dir, |found| found == name).map(drop)
        });
    }
    for name in names(&config.state_dir)? {
        let Ok(id) = name.parse::<VmId>() else { continue };
        let paths = VmPaths::new(&config.state_dir, &config.run_dir, id);
        // What carries no mark of ours is left alone.
        if matches!(record::ownership(&paths, config.node), Ok(Ownership::Ours)) {
            unless_locked(config, id, || {
                let swept = files::sweep_temporaries(&paths.dir)
                    .and_then(|()| files::sweep_temporaries(&paths.run));
                swept.map_err(|error| error.into_error("open", label(id)))
            });
        }
    }
    for name in names(&config.run_dir)? {
        let Ok(id) = name.trim_end_matches(".lock").parse::<VmId>() else { continue };
        let paths = VmPaths::new(&config.state_dir, &config.run_dir, id);
        let absent = matches!(record::ownership(&paths, config.node), Ok(Ownership::Absent));
        unless_locked(config, id, || match inner.hold(&inner.vm(id), "open")? {
            // `requested` alone: an end that was asked for and seen, and a crash before the rest was cleared.
            Held::Nothing if absent || paths.identity().exists() || paths.requested().exists() => {
                vmm::clear_ended(&paths)
            }
            Held::Nothing => Ok(()),
            Held::BeingStarted | Held::Live(_) | Held::Ending(_) => Ok(()),
        });
    }
    Ok(())
}

/// Does work on a VM on which no other agent works. What fails is logged: one broken VM must not keep the driver from
/// opening.
fn unless_locked(config: &QemuConfig, id: VmId, work: impl FnOnce() -> Result<()>) {
    let paths = VmPaths::new(&config.state_dir, &config.run_dir, id);
    let Ok(lock) = host::lock::FileLock::try_exclusive(&paths.gate) else { return };
    if let Err(error) = work() {
        tracing::warn!(vm = %id, error = error.chain(), "what an interrupted call left stays");
    }
    drop(files::remove_file(&paths.gate));
    drop(lock);
}

#[async_trait]
impl Hypervisor for QemuKvm {
    fn abilities(&self) -> HypervisorAbilities {
        let mut abilities = HypervisorAbilities::new(
            vec![BootKind::DirectLinux, BootKind::Uki, BootKind::OciImage, BootKind::Firmware],
            vec![BackingKind::File, BackingKind::BlockDevice],
            crate::devices::BUSES.to_vec(),
        );
        abilities.hot_disks = true;
        abilities.hot_nics = true;
        abilities
    }

    fn vmm_uid(&self, vm: VmId) -> Option<u32> {
        self.inner.config.uids.map(|uids| uids.uid_of(vm))
    }

    fn events(&self) -> Option<EventStream> {
        Some(self.inner.hub.subscribe())
    }

    fn whole_spec(&self) -> Option<&dyn WholeSpec> {
        Some(self)
    }

    fn console(&self) -> Option<&dyn Console> {
        Some(self)
    }

    fn resize(&self) -> Option<&dyn Resize> {
        Some(self)
    }

    async fn host_info(&self, cx: &Context) -> Result<HostInfo> {
        host::bound::check(cx, "describe", "host")?;
        let config = &self.inner.config;
        let mut info = HostInfo::new(Some(config.node), config.hostname.as_str(), DRIVER);
        info.az.clone_from(&config.az);
        info.hypervisor = DRIVER.to_owned();
        info.backend_version = Some(self.inner.version.clone());
        Ok(info)
    }

    async fn create_vm(&self, cx: &Context, spec: &VmSpec) -> Result<Change> {
        create::check_spec(spec)?;
        self.op(cx, "create", spec.uuid, |op| async move { create::create(&op, cx, spec).await })
            .await
    }

    async fn start_vm(&self, cx: &Context, vm: VmId) -> Result<Change> {
        self.op(cx, "start", vm, |op| async move { power::start(&op, cx).await }).await
    }

    async fn stop_vm(&self, cx: &Context, vm: VmId, grace: Duration) -> Result<Change> {
        self.op(cx, "stop", vm, |op| async move { power::stop(&op, cx, grace).await }).await
    }

    async fn reboot_vm(&self, cx: &Context, vm: VmId, grace: Duration) -> Result<Change> {
        self.op(cx, "reboot", vm, |op| async move { power::reboot(&op, cx, grace).await }).await
    }

    async fn delete_vm(&self, cx: &Context, vm: VmId) -> Result<Change> {
        self.op(cx, "delete", vm, |op| async move { delete::delete(&op, cx).await }).await
    }

    async fn attach_disk(&self, cx: &Context, vm: VmId, disk: &DiskSpec) -> Result<Change> {
        crate::devices::check_disk(disk)?;
        self.op(cx, "attach disk to", vm, |op| async move { disks::attach(&op, cx, disk).await })
            .await
    }

    async fn detach_disk(&self, cx: &Context, vm: VmId, volume: VolumeId) -> Result<Change> {
        self.op(
            cx,
            "detach disk from",
            vm,
            |op| async move { disks::detach(&op, cx, volume).await },
        )
        .await
    }

    async fn attach_nic(&self, cx: &Context, vm: VmId, nic: &NicHandle) -> Result<Change> {
        self.op(cx, "attach NIC to", vm, |op| async move { nics::attach(&op, cx, nic).await }).await
    }

    async fn detach_nic(&self, cx: &Context, vm: VmId, device: &IfName) -> Result<Change> {
        self.op(cx, "detach NIC from", vm, |op| async move { nics::detach(&op, cx, device).await })
            .await
    }

    async fn list(&self, cx: &Context) -> Result<Vec<VmStatus>> {
        observe::list(&self.inner, cx).await
    }

    async fn get(&self, cx: &Context, vm: VmId) -> Result<Option<VmStatus>> {
        let work = observe::status(&self.inner, cx, vm, Foreign::Refuse);
        bounded(cx, "look at", label(vm), work).await
    }
}

#[async_trait]
impl WholeSpec for QemuKvm {
    async fn ensure_vm(&self, cx: &Context, spec: &InstanceSpec) -> Result<Change> {
        spec.validate()?;
        self.op(cx, "ensure", spec.vm.uuid, |op| async move { whole::ensure(&op, cx, spec).await })
            .await
    }
}

impl QemuKvm {
    /// Whether there is such a VM of ours.
    async fn need(&self, vm: VmId, operation: &'static str) -> Result<VmPaths> {
        let inner = Arc::clone(&self.inner);
        blocking(operation, move || {
            let paths = VmPaths::new(&inner.config.state_dir, &inner.config.run_dir, vm);
            let found = record::ownership(&paths, inner.config.node)
                .map_err(|error| error.into_error(operation, vm))?;
            match found {
                Ownership::Ours => Ok(paths),
                Ownership::Absent => Err(no_such_vm(operation, vm)),
                Ownership::Foreign(why) => {
                    Err(crate::error::foreign(operation, vm, &paths.dir, &why))
                }
            }
        })
        .await
    }
}

#[async_trait]
impl Console for QemuKvm {
    async fn open_console(
        &self,
        cx: &Context,
        vm: VmId,
        history: usize,
    ) -> Result<Box<dyn ConsoleStream>> {
        const DOING: &str = "open console of";
        let work = async {
            self.need(vm, DOING).await?;
            let inner = Arc::clone(&self.inner);
            let held = blocking(DOING, move || inner.hold(&inner.vm(vm), DOING)).await?;
            match held {
                Held::Live(live) => live.console.open(history).await,
                Held::Nothing | Held::Ending(_) | Held::BeingStarted => {
                    let reason = "the VM does not run";
                    Err(Error::new(ErrorKind::Unavailable, DOING, label(vm), reason)
                        .with_remedy("start the VM, or read its console log"))
                }
            }
        };
        bounded(cx, DOING, label(vm), work).await
    }

    async fn console_log(&self, cx: &Context, vm: VmId, bytes: usize) -> Result<Vec<u8>> {
        const DOING: &str = "read console log of";
        let work = async {
            let paths = self.need(vm, DOING).await?;
            let limit = self.inner.config.serial_log_bytes;
            console::read_tail(vm, SerialLog::new(paths.serial_log(), limit), bytes).await
        };
        bounded(cx, DOING, label(vm), work).await
    }
}

#[async_trait]
impl Resize for QemuKvm {
    async fn resize_disk(
        &self,
        cx: &Context,
        vm: VmId,
        volume: VolumeId,
        bytes: u64,
    ) -> Result<Change> {
        self.op(cx, "resize disk of", vm, |op| async move {
            apply::resize::disk(&op, volume, bytes).await
        })
        .await
    }

    async fn resize_cpus(&self, _cx: &Context, _vm: VmId, _cpus: CpuCount) -> Result<Change> {
        Err(Error::unsupported("resize CPUs", DRIVER).with_remedy("change the spec and restart"))
    }

    async fn resize_memory(&self, _cx: &Context, _vm: VmId, _memory: MemoryMib) -> Result<Change> {
        Err(Error::unsupported("resize memory", DRIVER).with_remedy("change the spec and restart"))
    }
}
