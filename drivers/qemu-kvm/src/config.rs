//! What a driver instance is told about its host.

use std::path::PathBuf;

use drivers_api::{HostId, VmId};

/// How guest code is to be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AccelChoice {
    /// KVM where a short probe guest runs at real speed, else TCG where that is allowed.
    Auto,
    /// KVM, without a probe.
    Kvm,
    /// TCG: emulation. Asking for it allows it.
    Tcg,
}

/// The uids under which VMMs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UidRange {
    /// The first uid.
    pub base: u32,
    /// How many there are, at least one. The uid follows from the VM's UUID alone, so that no list of them can be lost; two of
    /// N VMs share one with a probability of about N²/2/count.
    pub count: u32,
}

impl UidRange {
    /// The uid of a VM: always the same one (FNV-1a of the UUID, reduced to the range).
    #[must_use]
    pub fn uid_of(self, vm: VmId) -> u32 {
        let hash = vm.uuid().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let offset = hash % u64::from(self.count.max(1));
        self.base.saturating_add(u32::try_from(offset).unwrap_or(0))
    }
}

/// The configuration of the driver.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct QemuConfig {
    /// The node: the owner in every mark.
    pub node: HostId,
    /// The host's name.
    pub hostname: String,
    /// The availability zone's label; empty for none.
    pub az: String,
    /// Where each VM has its persistent directory. Made (0700) when it is not there.
    pub state_dir: PathBuf,
    /// Where sockets and process identities are: volatile, empty after a boot of the host. At most 50 bytes long, since a
    /// socket's path has at most 107 (unix(7)).
    pub run_dir: PathBuf,
    /// The QEMU binary.
    pub qemu: PathBuf,
    /// The UEFI firmware's code.
    pub firmware_code: PathBuf,
    /// The template of the UEFI firmware's variables, copied for each VM.
    pub firmware_vars: PathBuf,
    /// How guest code is to be run.
    pub accel: AccelChoice,
    /// Whether `Auto` may fall back to TCG.
    pub allow_tcg: bool,
    /// The uids of VMMs; `None` runs them as the agent's own user.
    pub uids: Option<UidRange>,
    /// The systemd slice in which each VMM has a scope of its own, where systemd runs; `None` leaves VMMs in the agent's own
    /// cgroup.
    pub slice: Option<String>,
    /// How much of a VM's serial output is kept on disk, in bytes.
    pub serial_log_bytes: u64,
    /// PCI Express ports left free at start for disks and NICs that come later.
    pub spare_ports: u16,
}

impl QemuConfig {
    /// The paths of Debian and Ubuntu, `accel = auto` without TCG.
    #[must_use]
    pub fn new(
        node: HostId,
        hostname: impl Into<String>,
        state_dir: impl Into<PathBuf>,
        run_dir: impl Into<PathBuf>,
    ) -> Self {
        Self {
            node,
            hostname: hostname.into(),
            az: String::new(),
            state_dir: state_dir.into(),
            run_dir: run_dir.into(),
            qemu: "/usr/bin/qemu-system-x86_64".into(),
            firmware_code: "/usr/share/OVMF/OVMF_CODE_4M.fd".into(),
            firmware_vars: "/usr/share/OVMF/OVMF_VARS_4M.fd".into(),
            accel: AccelChoice::Auto,
            allow_tcg: false,
            uids: None,
            slice: None,
            serial_log_bytes: 1 << 20,
            spare_ports: 8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_has_one_uid_within_the_range() {
        let range = UidRange { base: 2_000_000, count: 1000 };
        let vm: VmId = "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b".parse().unwrap();
        let other: VmId = "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6c".parse().unwrap();
        assert_eq!(range.uid_of(vm), range.uid_of(vm));
        assert_ne!(range.uid_of(vm), range.uid_of(other));
        assert!((2_000_000..2_001_000).contains(&range.uid_of(vm)));
    }
}
