//! The host that a driver works on, and the mark on what it made there.

use crate::{HostId, Uuid};

/// A host's processor architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Architecture {
    /// 64-bit x86.
    Amd64,
    /// 64-bit Arm.
    Arm64,
    /// 64-bit RISC-V.
    Riscv64,
    /// 64-bit LoongArch.
    Loongarch64,
}

impl Architecture {
    /// The architecture that this program was built for; `None` where this contract has no name for it.
    #[must_use]
    pub const fn here() -> Option<Self> {
        if cfg!(target_arch = "x86_64") {
            Some(Self::Amd64)
        } else if cfg!(target_arch = "aarch64") {
            Some(Self::Arm64)
        } else if cfg!(target_arch = "riscv64") {
            Some(Self::Riscv64)
        } else if cfg!(target_arch = "loongarch64") {
            Some(Self::Loongarch64)
        } else {
            None
        }
    }

    /// The name that OCI and Go use: `amd64`, `arm64`, ….
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
            Self::Riscv64 => "riscv64",
            Self::Loongarch64 => "loongarch64",
        }
    }
}

/// Identifies a compute node, so that schedulers and audit logs can confirm where a side effect landed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct HostInfo {
    /// The host's identity; `None` for a driver of a cluster-wide backend.
    pub uuid: Option<HostId>,
    /// The host's name, or `<backend>-cluster` for a cluster-wide backend.
    pub hostname: String,
    /// The availability zone's label, such as `us-east-1a`; empty where none is configured.
    pub az: String,
    /// The hypervisor: `qemu-kvm`, `cloud-hypervisor`; empty for drivers of other traits.
    pub hypervisor: String,
    /// The architecture of the host's processors.
    pub architecture: Option<Architecture>,
    /// The driver's id, such as `linux-bridge`.
    pub driver: String,
    /// The version of the tool or library that the driver works through, where it has one: `QEMU 7.2.22`.
    pub backend_version: Option<String>,
}

impl HostInfo {
    /// The information of a driver on a host of this program's architecture.
    pub fn new(
        uuid: Option<HostId>,
        hostname: impl Into<String>,
        driver: impl Into<String>,
    ) -> Self {
        Self {
            uuid,
            hostname: hostname.into(),
            az: String::new(),
            hypervisor: String::new(),
            architecture: Architecture::here(),
            driver: driver.into(),
            backend_version: None,
        }
    }
}

/// What says that an object on the host was made by an agent: found in the run directory of a VM, the alias of a link, a
/// comment of a rule, a sidecar beside a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Mark {
    /// The node whose agent made it. An object of another node's agent is not ours to change.
    pub node: HostId,
    /// The object's own UUID.
    pub object: Uuid,
}

impl Mark {
    /// The mark of `object` made by the agent of `node`.
    #[must_use]
    pub const fn new(node: HostId, object: Uuid) -> Self {
        Self { node, object }
    }
}
