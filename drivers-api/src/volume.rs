//! The volume trait: disks on a storage backend.

use crate::{
    Change, DisplayName, EventStream, HostId, HostInfo, HostPath, ImageRef, Mark, Outcome,
    ProjectId, Result, SecretRef, SizeGib, VmId, VolumeId,
};

/// The format of a disk's bytes. Always given, never probed: a guest can write any header into its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum DiskFormat {
    /// The bytes are the disk.
    Raw,
    /// QEMU's copy-on-write format, version 2 or 3.
    Qcow2,
}

impl DiskFormat {
    /// The name that QEMU and manifests use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// What a volume starts with.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct VolumeSource {
    /// The image that the volume is a copy of.
    pub image: ImageRef,
    /// The image's file in the host's cache, resolved by the caller; a driver with images of its own may ignore it.
    pub path: Option<HostPath>,
    /// The format of that file.
    pub format: DiskFormat,
}

impl VolumeSource {
    /// A copy of a cached disk image.
    #[must_use]
    pub const fn new(image: ImageRef, path: Option<HostPath>, format: DiskFormat) -> Self {
        Self { image, path, format }
    }
}

/// A volume as wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct VolumeSpec {
    /// The volume's identity.
    pub uuid: VolumeId,
    /// The project that owns it.
    pub project_uuid: Option<ProjectId>,
    /// What people call it.
    pub name: DisplayName,
    /// Its size. Grow-only.
    pub size_gib: SizeGib,
    /// Its format on the backend.
    pub format: DiskFormat,
    /// What it starts with; empty when absent. Looked at only when the volume is made.
    pub source: Option<VolumeSource>,
}

impl VolumeSpec {
    /// An empty volume.
    #[must_use]
    pub const fn new(
        uuid: VolumeId,
        name: DisplayName,
        size_gib: SizeGib,
        format: DiskFormat,
    ) -> Self {
        Self { uuid, project_uuid: None, name, size_gib, format, source: None }
    }
}

/// What kind of thing a hypervisor opens for a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum BackingKind {
    /// A file.
    File,
    /// A block device of the host.
    BlockDevice,
    /// A RADOS block device image, opened by the hypervisor's own client.
    Rbd,
}

/// What a hypervisor opens for a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", tag = "kind"))]
#[non_exhaustive]
pub enum Backing {
    /// A file with its format.
    File {
        /// Where it is.
        path: HostPath,
        /// How its bytes are to be read.
        format: DiskFormat,
    },
    /// A block device of the host, read as raw bytes.
    BlockDevice {
        /// The device node.
        path: HostPath,
    },
    /// A RADOS block device image.
    Rbd {
        /// The pool.
        pool: String,
        /// The image.
        image: String,
        /// The monitors, each `ADDRESS:PORT`.
        monitors: Vec<String>,
        /// The Ceph user, without `client.`.
        user: String,
        /// Where its key is.
        secret: SecretRef,
    },
}

impl Backing {
    /// What kind it is.
    #[must_use]
    pub const fn kind(&self) -> BackingKind {
        match self {
            Self::File { .. } => BackingKind::File,
            Self::BlockDevice { .. } => BackingKind::BlockDevice,
            Self::Rbd { .. } => BackingKind::Rbd,
        }
    }

    /// The path or URI as one text, for people and logs: it holds no secret.
    #[must_use]
    pub fn path_or_uri(&self) -> String {
        match self {
            Self::File { path, .. } | Self::BlockDevice { path } => path.to_string(),
            Self::Rbd { pool, image, .. } => format!("rbd://{pool}/{image}"),
        }
    }
}

/// What `attach_volume` answers: what the hypervisor opens, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct AttachedVolume {
    /// What the hypervisor opens.
    pub backing: Backing,
    /// Whether it may only read.
    pub read_only: bool,
}

impl AttachedVolume {
    /// A backing and its access mode.
    #[must_use]
    pub const fn new(backing: Backing, read_only: bool) -> Self {
        Self { backing, read_only }
    }
}

/// Who wants a volume on which host, and what it can open.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct AttachRequest {
    /// The volume.
    pub volume_uuid: VolumeId,
    /// The host on which it is to be opened.
    pub host_uuid: HostId,
    /// The VM that will open it: the owner of the exclusive attachment.
    pub vm_uuid: VmId,
    /// Whether the VM only reads. Any number of readers may share a volume that nobody writes.
    pub read_only: bool,
    /// The kinds that the hypervisor can open, best first.
    pub accepts: Vec<BackingKind>,
    /// The uid under which the hypervisor opens it, where that is not the agent's own.
    pub owner_uid: Option<u32>,
}

impl AttachRequest {
    /// A request for exclusive, writable access.
    #[must_use]
    pub const fn new(
        volume_uuid: VolumeId,
        host_uuid: HostId,
        vm_uuid: VmId,
        accepts: Vec<BackingKind>,
    ) -> Self {
        Self { volume_uuid, host_uuid, vm_uuid, read_only: false, accepts, owner_uid: None }
    }
}

/// Which attachment ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct DetachRequest {
    /// The volume.
    pub volume_uuid: VolumeId,
    /// The host on which it is open.
    pub host_uuid: HostId,
    /// The VM whose attachment ends. Another VM's attachment is left alone.
    pub vm_uuid: VmId,
}

impl DetachRequest {
    /// The attachment of `vm_uuid` on `host_uuid`.
    #[must_use]
    pub const fn new(volume_uuid: VolumeId, host_uuid: HostId, vm_uuid: VmId) -> Self {
        Self { volume_uuid, host_uuid, vm_uuid }
    }
}

/// Who has a volume open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Attachment {
    /// On which host.
    pub host_uuid: HostId,
    /// For which VM.
    pub vm_uuid: VmId,
    /// Whether only for reading.
    pub read_only: bool,
}

impl Attachment {
    /// An attachment.
    #[must_use]
    pub const fn new(host_uuid: HostId, vm_uuid: VmId, read_only: bool) -> Self {
        Self { host_uuid, vm_uuid, read_only }
    }
}

/// A volume as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct VolumeStatus {
    /// The volume's identity.
    pub uuid: VolumeId,
    /// Who made it.
    pub mark: Mark,
    /// The spec as applied; `None` when the backend could not keep it or it is unreadable.
    pub spec: Option<VolumeSpec>,
    /// Whether it is complete. A half-made volume is finished by `ensure_volume` or cleared by `destroy_volume`.
    pub complete: bool,
    /// The size that a guest sees, in bytes.
    pub size_bytes: u64,
    /// The space that it takes on the backend, in bytes.
    pub allocated_bytes: u64,
    /// Who has it open.
    pub attachments: Vec<Attachment>,
    /// What a person should know: why it is incomplete, what cannot be read.
    pub message: Option<String>,
}

impl VolumeStatus {
    /// A complete volume without attachments.
    #[must_use]
    pub const fn new(
        uuid: VolumeId,
        mark: Mark,
        spec: Option<VolumeSpec>,
        size_bytes: u64,
        allocated_bytes: u64,
    ) -> Self {
        Self {
            uuid,
            mark,
            spec,
            complete: true,
            size_bytes,
            allocated_bytes,
            attachments: Vec::new(),
            message: None,
        }
    }
}

driver_trait! {
    /// Materialises volumes on a storage backend: files, RBD images, SAN LUNs.
    ///
    /// One driver instance per backend. [`Volume::local`] is the hint for a scheduler: a volume in a file of host A can
    /// only be attached on A; a Ceph volume anywhere.
    pub trait Volume {
        sync {
            /// The backend's name: `file`, `ceph`.
            fn name(&self) -> &str;

            /// Whether volumes are bound to the driver's host (true) or can be opened from any host (false).
            fn local(&self) -> bool;

            /// Which kinds of backing `attach_volume` can answer; a plan refuses a VM whose hypervisor opens none.
            fn backings(&self) -> &[BackingKind];

            /// A subscription to the backend's events, if it has any.
            fn events(&self) -> Option<EventStream> {
                None
            }
        }

        /// Where the driver works. A cluster-wide driver answers `uuid: None` and `<backend>-cluster`.
        ///
        /// # Errors
        /// `Unavailable` when the host cannot be asked.
        async fn host_info(&self, cx: &Context, []) -> Result<HostInfo>;

        /// Makes the volume, or grows it. The same spec again: unchanged. A failed growth leaves the old size valid.
        ///
        /// # Errors
        /// `InvalidSpec` for a smaller size ("grow-only") or another format, `Conflict` when the name is taken by what is
        /// not ours, `Exhausted` without space, `NotFound` when the source is not there.
        async fn ensure_volume(&self, cx: &Context, [], spec: &VolumeSpec) -> Result<Change>;

        /// Removes the volume, half-made ones included. Not there: unchanged.
        ///
        /// # Errors
        /// `Conflict` naming who has it open, and nothing is forced; `Conflict` when it is not ours.
        async fn destroy_volume(&self, cx: &Context, [volume: VolumeId]) -> Result<Change>;

        /// Prepares the volume for a VM on a host: maps it, locks it. Again by the same VM: unchanged, the same answer.
        ///
        /// # Errors
        /// `NotFound` without such a volume, `Conflict` naming the VM that has it, `Unsupported` when the hypervisor opens
        /// none of the backings.
        async fn attach_volume(&self, cx: &Context, [], request: &AttachRequest) -> Result<Outcome<AttachedVolume>>;

        /// Releases a VM's attachment. Does not delete the volume. No such attachment or volume: unchanged.
        ///
        /// # Errors
        /// Anything but "not found".
        async fn detach_volume(&self, cx: &Context, [], request: &DetachRequest) -> Result<Change>;

        /// All volumes with an agent's mark, half-made ones included.
        ///
        /// # Errors
        /// `Unavailable` when the backend cannot be read; never a part of the list.
        async fn list(&self, cx: &Context, []) -> Result<Vec<VolumeStatus>>;

        /// One volume; `None` when it was seen not to be there.
        ///
        /// # Errors
        /// As `list`; `Conflict` when something of that identity is there without our mark.
        async fn get(&self, cx: &Context, [volume: VolumeId]) -> Result<Option<VolumeStatus>>;
    }
}
