//! The hypervisor trait: virtual machines on a host.

use std::time::Duration;

use crate::{
    Backing, BackingKind, Change, Console, CpuCount, DeviceName, DisplayName, Error, EventStream,
    GuestAgent, HostInfo, HostPath, IfName, Mark, MemoryMib, Migrate, NicHandle, ProjectId, Resize,
    Result, Snapshots, VmId, VolumeId, WholeSpec,
};

/// How a VM boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum BootKind {
    /// A unified kernel image, started by UEFI firmware.
    Uki,
    /// A kernel and an optional initrd, loaded by the hypervisor.
    DirectLinux,
    /// An OCI artifact; what it holds decides: a UKI, or a kernel with its initrd.
    OciImage,
    /// Firmware boots from the VM's boot disk.
    Firmware,
}

/// The files that a boot reference resolved to on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", tag = "kind"))]
#[non_exhaustive]
pub enum BootFiles {
    /// A unified kernel image.
    Uki {
        /// Where it is.
        path: HostPath,
    },
    /// A kernel and an optional initrd.
    Kernel {
        /// The kernel.
        kernel: HostPath,
        /// The initial RAM disk.
        initrd: Option<HostPath>,
    },
}

/// How a VM boots: the kind, the reference as wanted, and what it resolved to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct BootSpec {
    /// The kind.
    pub kind: BootKind,
    /// A path or image reference, depending on the kind; `None` for firmware boot.
    pub reference: Option<String>,
    /// The kernel's command line, where it is not the artifact's own.
    pub cmdline: Option<String>,
    /// What the reference resolved to, filled in by the caller: required by every kind but firmware boot.
    pub files: Option<BootFiles>,
}

impl BootSpec {
    /// Firmware boot from the boot disk.
    #[must_use]
    pub const fn firmware() -> Self {
        Self { kind: BootKind::Firmware, reference: None, cmdline: None, files: None }
    }

    /// A boot from files of the host.
    #[must_use]
    pub const fn new(kind: BootKind, reference: String, files: Option<BootFiles>) -> Self {
        Self { kind, reference: Some(reference), cmdline: None, files }
    }

    /// Checks that kind, files and command line go together.
    ///
    /// # Errors
    /// `InvalidSpec` with the field.
    pub fn validate(&self) -> Result<()> {
        let wrong = |reason| Err(Error::invalid("boot.files", reason));
        match (self.kind, &self.files) {
            (BootKind::Firmware, None) => {}
            (BootKind::Firmware, Some(_)) => return wrong("firmware boot takes no files"),
            (_, None) => return wrong("the reference is not resolved to files of this host"),
            (BootKind::Uki, Some(BootFiles::Kernel { .. })) => {
                return wrong("a uki boot needs a unified kernel image");
            }
            (BootKind::DirectLinux, Some(BootFiles::Uki { .. })) => {
                return wrong("a direct_linux boot needs a kernel");
            }
            (BootKind::Uki | BootKind::OciImage, Some(BootFiles::Uki { .. }))
            | (BootKind::DirectLinux | BootKind::OciImage, Some(BootFiles::Kernel { .. })) => {}
        }
        match &self.cmdline {
            Some(_) if self.kind == BootKind::Firmware => {
                Err(Error::invalid("boot.cmdline", "firmware boot takes no kernel command line"))
            }
            // The kernel's own bound: COMMAND_LINE_SIZE of arch/x86/include/asm/setup.h, with the final NUL.
            Some(line) if line.len() > 2047 || line.chars().any(char::is_control) => {
                Err(Error::invalid(
                    "boot.cmdline",
                    "wanted at most 2047 bytes without control characters",
                ))
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// What a guest finds on its NoCloud seed (<https://docs.cloud-init.io/en/latest/reference/datasources/nocloud.html>).
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct CloudInit {
    /// The file `user-data`, byte for byte.
    pub user_data: String,
    /// The file `meta-data`.
    pub meta_data: String,
    /// The file `network-config`, where there is one.
    pub network_config: Option<String>,
}

impl CloudInit {
    /// A seed without network configuration.
    #[must_use]
    pub const fn new(user_data: String, meta_data: String) -> Self {
        Self { user_data, meta_data, network_config: None }
    }
}

/// A VM's static part as wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct VmSpec {
    /// The VM's identity.
    pub uuid: VmId,
    /// The project that owns it.
    pub project_uuid: Option<ProjectId>,
    /// What people call it.
    pub name: DisplayName,
    /// Virtual CPUs.
    pub cpu_count: CpuCount,
    /// Memory.
    pub memory_mib: MemoryMib,
    /// How it boots.
    pub boot: BootSpec,
    /// What it finds on its NoCloud seed; `None` for no seed.
    pub cloud_init: Option<CloudInit>,
}

impl VmSpec {
    /// A VM without a seed.
    #[must_use]
    pub const fn new(
        uuid: VmId,
        name: DisplayName,
        cpu_count: CpuCount,
        memory_mib: MemoryMib,
        boot: BootSpec,
    ) -> Self {
        Self { uuid, project_uuid: None, name, cpu_count, memory_mib, boot, cloud_init: None }
    }
}

/// The bus on which a guest sees a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum DiskBus {
    /// virtio-blk.
    Virtio,
    /// A virtio-scsi controller.
    Scsi,
    /// NVMe.
    Nvme,
}

/// One disk of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct DiskSpec {
    /// Its name within the VM.
    pub name: DeviceName,
    /// The volume.
    pub volume_uuid: VolumeId,
    /// What the hypervisor opens: the answer of the volume's `attach_volume`.
    pub backing: Backing,
    /// The bus.
    pub bus: DiskBus,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// Whether firmware boots from it: true for the root disk.
    pub boot: bool,
    /// The seed's transitional field, by which a hypervisor made the disk itself: refused unless zero, since volumes are
    /// made by the volume driver.
    pub size_gib: u64,
}

impl DiskSpec {
    /// A writable virtio disk that is not the boot disk.
    #[must_use]
    pub const fn new(name: DeviceName, volume_uuid: VolumeId, backing: Backing) -> Self {
        Self {
            name,
            volume_uuid,
            backing,
            bus: DiskBus::Virtio,
            read_only: false,
            boot: false,
            size_gib: 0,
        }
    }

    /// Checks what does not depend on the host.
    ///
    /// # Errors
    /// `InvalidSpec` for a non-zero `size_gib`.
    pub fn validate(&self) -> Result<()> {
        if self.size_gib == 0 {
            Ok(())
        } else {
            Err(Error::invalid(
                "size_gib",
                "a hypervisor makes no disks: make the volume with the volume driver",
            ))
        }
    }
}

/// Whether a VM is wanted to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum VmPower {
    /// It runs.
    Running,
    /// It exists and does not run.
    Stopped,
}

/// A whole instance as wanted: what [`WholeSpec::ensure_vm`] takes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct InstanceSpec {
    /// The static part.
    pub vm: VmSpec,
    /// The disks, in the order in which the guest sees them.
    pub disks: Vec<DiskSpec>,
    /// The NICs, in the order in which the guest sees them.
    pub nics: Vec<NicHandle>,
    /// Whether it runs.
    pub power: VmPower,
}

impl InstanceSpec {
    /// A running instance.
    #[must_use]
    pub const fn new(vm: VmSpec, disks: Vec<DiskSpec>, nics: Vec<NicHandle>) -> Self {
        Self { vm, disks, nics, power: VmPower::Running }
    }

    /// Checks what does not depend on the host: boot, disks, unique names and volumes, one boot disk at most, and one
    /// where firmware boots.
    ///
    /// # Errors
    /// `InvalidSpec` with the field.
    pub fn validate(&self) -> Result<()> {
        self.vm.boot.validate()?;
        for (at, disk) in self.disks.iter().enumerate() {
            disk.validate().map_err(|error| error.with_field(format!("disks[{at}].size_gib")))?;
            let earlier = self.disks.iter().take(at);
            if earlier.clone().any(|other| other.name == disk.name) {
                return Err(Error::invalid(
                    format!("disks[{at}].name"),
                    "two disks have this name",
                ));
            }
            if earlier.clone().any(|other| other.volume_uuid == disk.volume_uuid) {
                return Err(Error::invalid(
                    format!("disks[{at}].volume"),
                    "two disks are of this volume",
                ));
            }
            if disk.boot && earlier.clone().any(|other| other.boot) {
                return Err(Error::invalid(
                    format!("disks[{at}].boot"),
                    "two disks are marked as the boot disk",
                ));
            }
        }
        for (at, nic) in self.nics.iter().enumerate() {
            let earlier = self.nics.iter().take(at);
            if earlier.clone().any(|other| {
                other.name == nic.name || other.device == nic.device || other.mac == nic.mac
            }) {
                return Err(Error::invalid(
                    format!("nics[{at}]"),
                    "two NICs share a name, a device or a MAC address",
                ));
            }
        }
        if self.vm.boot.kind == BootKind::Firmware && !self.disks.iter().any(|disk| disk.boot) {
            return Err(Error::invalid("disks", "firmware boot needs a disk with boot: true"));
        }
        Ok(())
    }
}

/// What a VM does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum VmState {
    /// It exists and no VMM runs.
    Stopped,
    /// A VMM is there and the guest does not run yet.
    Starting,
    /// The guest runs.
    Running,
    /// The guest is halted by the VMM: by request, or because the host's disk is full.
    Paused,
    /// It was asked to stop and still runs.
    Stopping,
    /// A VMM is there that does not answer: never a reason to start another one.
    Unknown,
}

/// How a VM's last run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Exit {
    /// The guest powered itself off, or did so when asked.
    GuestShutdown,
    /// The driver ended it on request.
    Requested,
    /// The VMM ended with this exit code without being asked.
    Code(i32),
    /// A signal ended the VMM.
    Signal(i32),
    /// The VMM is gone and nobody saw how: the agent was down.
    Unseen,
}

/// A VM as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct VmStatus {
    /// The VM's identity.
    pub uuid: VmId,
    /// Who made it.
    pub mark: Mark,
    /// The static part as applied; `None` when it is half made or unreadable.
    pub spec: Option<VmSpec>,
    /// The disks that the VM has.
    pub disks: Vec<DiskSpec>,
    /// The NICs that the VM has.
    pub nics: Vec<NicHandle>,
    /// What it does.
    pub state: VmState,
    /// The VMM's process, while there is one.
    pub pid: Option<u32>,
    /// How its last run ended, where that is known and it does not run.
    pub last_exit: Option<Exit>,
    /// How guest code runs: `kvm`, `tcg`.
    pub accel: Option<String>,
    /// Disks and NICs whose removal the guest has not let go of yet, by name.
    pub detaching: Vec<DeviceName>,
    /// Whether the running VM differs from `spec` in what only a restart applies.
    pub restart_needed: bool,
    /// What a person should know: why the state is unknown, why it is paused.
    pub message: Option<String>,
}

impl VmStatus {
    /// A VM without devices.
    #[must_use]
    pub const fn new(uuid: VmId, mark: Mark, spec: Option<VmSpec>, state: VmState) -> Self {
        Self {
            uuid,
            mark,
            spec,
            disks: Vec::new(),
            nics: Vec::new(),
            state,
            pid: None,
            last_exit: None,
            accel: None,
            detaching: Vec::new(),
            restart_needed: false,
            message: None,
        }
    }
}

/// What a hypervisor can do, for a plan to refuse the rest before it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct HypervisorAbilities {
    /// The ways to boot.
    pub boot_kinds: Vec<BootKind>,
    /// The kinds of backing that a disk can have, best first.
    pub backings: Vec<BackingKind>,
    /// The buses that a disk can have.
    pub buses: Vec<DiskBus>,
    /// Whether disks come and go while the VM runs.
    pub hot_disks: bool,
    /// Whether NICs come and go while the VM runs.
    pub hot_nics: bool,
}

impl HypervisorAbilities {
    /// The abilities to boot and to open disks, without hot changes.
    #[must_use]
    pub const fn new(
        boot_kinds: Vec<BootKind>,
        backings: Vec<BackingKind>,
        buses: Vec<DiskBus>,
    ) -> Self {
        Self { boot_kinds, backings, buses, hot_disks: false, hot_nics: false }
    }
}

driver_trait! {
    /// Materialises VMs on one host. One driver instance per host and hypervisor.
    ///
    /// # Guarantees
    /// * A VM runs in at most one VMM, whatever was killed when. A VMM that does not answer is [`VmState::Unknown`], and
    ///   no second one is started beside it.
    /// * VMs outlive the agent: the end of the driver's process ends no VM, and a new instance adopts it.
    /// * A VM that does not answer delays calls for that VM only, never `list`.
    ///
    /// # Errors
    /// `InvalidSpec` and `Unsupported` mean that the call can never succeed as it is; `Deadline` and `Cancelled` that the
    /// caller's context ended; the rest is [`ErrorKind`](crate::ErrorKind)'s.
    pub trait Hypervisor {
        sync {
            /// What it can do.
            fn abilities(&self) -> HypervisorAbilities;

            /// The uid under which the VMM of a VM runs, where that is not the agent's own: the owner of its taps and
            /// disk files.
            fn vmm_uid(&self, vm: VmId) -> Option<u32> {
                let _ = vm;
                None
            }

            /// A subscription to starts, exits and device changes.
            fn events(&self) -> Option<EventStream> {
                None
            }

            /// Create, devices and power in one call. The reconciler prefers it where it is.
            fn whole_spec(&self) -> Option<&dyn WholeSpec> {
                None
            }

            /// The serial console.
            fn console(&self) -> Option<&dyn Console> {
                None
            }

            /// Disks, CPUs and memory changed while the VM runs.
            fn resize(&self) -> Option<&dyn Resize> {
                None
            }

            /// Snapshots.
            fn snapshots(&self) -> Option<&dyn Snapshots> {
                None
            }

            /// Live migration.
            fn migrate(&self) -> Option<&dyn Migrate> {
                None
            }

            /// The agent inside the guest.
            fn guest_agent(&self) -> Option<&dyn GuestAgent> {
                None
            }
        }

        /// Where the driver works.
        ///
        /// # Errors
        /// `Unavailable` when the host cannot be asked.
        async fn host_info(&self, cx: &Context, []) -> Result<HostInfo>;

        /// Makes the VM's static state. Disks and NICs come by attach. The same spec again: unchanged; a changed spec of
        /// a VM that runs is kept for its next start (`restart_needed`). A half-made VM is completed.
        ///
        /// # Errors
        /// `InvalidSpec`; `Conflict` when a VM of that identity is there without our mark; `Exhausted`.
        async fn create_vm(&self, cx: &Context, [], spec: &VmSpec) -> Result<Change>;

        /// Boots the VM; returns once the guest runs. Running already: unchanged.
        ///
        /// # Errors
        /// `NotFound` without such a VM, `Exhausted`, `Unavailable`, `UnknownOutcome` when a VMM is there that does not
        /// answer.
        async fn start_vm(&self, cx: &Context, [vm: VmId]) -> Result<Change>;

        /// Asks the guest to shut down, again and again until `grace` has passed, then ends the VMM. Returns when no VMM
        /// is left. Stopped already, or no such VM: unchanged.
        ///
        /// # Errors
        /// `UnknownOutcome` when the process cannot be ended (it hangs in the kernel), with its pid.
        async fn stop_vm(&self, cx: &Context, [vm: VmId, grace: Duration]) -> Result<Change>;

        /// Restarts the guest: asks it, and resets the VM after `grace`. A stopped VM is started.
        ///
        /// # Errors
        /// As `start_vm`.
        async fn reboot_vm(&self, cx: &Context, [vm: VmId, grace: Duration]) -> Result<Change>;

        /// Ends the VMM without grace and removes every host-local state of the VM, whatever of it is there. Not there:
        /// unchanged. Volumes and ports are not its business.
        ///
        /// # Errors
        /// `Conflict` when it is not ours; `UnknownOutcome` as for `stop_vm`.
        async fn delete_vm(&self, cx: &Context, [vm: VmId]) -> Result<Change>;

        /// Adds a disk: at once where the VM runs. Idempotent on VM and volume. The same volume with another backing,
        /// bus or access is a conflict: detach first.
        ///
        /// # Errors
        /// `NotFound` without such a VM; `InvalidSpec`, among others for a non-zero `size_gib`; `Conflict`; `Exhausted`
        /// without a free slot.
        async fn attach_disk(&self, cx: &Context, [vm: VmId], disk: &DiskSpec) -> Result<Change>;

        /// Removes a disk; waits for the guest to let go. No such disk or VM: unchanged.
        ///
        /// # Errors
        /// `Deadline` when the guest did not let go in time: the removal is still pending, the VM's status names it, and a
        /// repeat waits on.
        async fn detach_disk(&self, cx: &Context, [vm: VmId, volume: VolumeId]) -> Result<Change>;

        /// Adds a NIC: at once where the VM runs. Idempotent on VM and device.
        ///
        /// # Errors
        /// As `attach_disk`; `Conflict` when the device is in use.
        async fn attach_nic(&self, cx: &Context, [vm: VmId], nic: &NicHandle) -> Result<Change>;

        /// Removes a NIC; waits for the guest to let go. No such NIC or VM: unchanged.
        ///
        /// # Errors
        /// As `detach_disk`.
        async fn detach_nic(&self, cx: &Context, [vm: VmId], device: &IfName) -> Result<Change>;

        /// All VMs with an agent's mark, half-made ones included. A VMM that does not answer is in the list as
        /// [`VmState::Unknown`] and delays it by no more than a moment.
        ///
        /// # Errors
        /// `Unavailable` when the host cannot be asked; never a part of the list.
        async fn list(&self, cx: &Context, []) -> Result<Vec<VmStatus>>;

        /// One VM; `None` when it was seen not to be there.
        ///
        /// # Errors
        /// As `list`; `Conflict` when something of that identity is there without our mark.
        async fn get(&self, cx: &Context, [vm: VmId]) -> Result<Option<VmStatus>>;
    }
}
