//! Volume driver: qcow2 and raw files in a directory of the host, the pool.
//!
//! # How a volume stands on the host
//!
//! A volume is a directory of the pool, named by its UUID, with the disk, a record (`volume.json`: our mark and the spec
//! as applied) and one symbolic link per attachment. It is made in a directory beside and published by one rename, and
//! unpublished by one rename before it is taken apart, so at each instant it is whole, in the making, in the removing or
//! absent. A directory without a record is not ours and is not touched; one of another node's agent neither.
//!
//! # Copies of images
//!
//! A qcow2 volume from an image is an overlay. The image's file is a hard link in the volume's directory, else a file that
//! shares its blocks, else a link to a copy that the volumes of this pool share: it is there as long as the volume,
//! whatever the image cache does, and the kernel counts its users. The overlay names it by a relative name that only we
//! write, with its format. A raw volume is a copy: by shared blocks, else of what is no hole, else by `qemu-img convert`
//! from qcow2. Since a hard link has one mode for all its names, the cached file becomes readable (0444) when a VMM of
//! another user is to open it; what keeps others away is the mode of the directories.
//!
//! # Growing what a VMM has open
//!
//! The rule by which a size comes to a disk:
//!
//! 1. `ensure_volume` records the wanted size.
//! 2. A raw file is made longer at once; that is safe under a VMM, which looks at the length when it is told to.
//! 3. A qcow2 file is grown at once if the kernel's locks on it show that no VMM has it open, attached or not.
//!    `attach_volume`, which comes before a VM's start, does the same for a growth that is due.
//! 4. If a VMM has it open, the file is left alone, and the VMM has to grow it. The status then shows
//!    `size_bytes` below the size of its spec, with a message. A repeat of `ensure_volume` is unchanged.
//!
//! So for each VM that a volume is attached to and that runs, the caller calls `Resize::resize_disk` with the size of the
//! spec after each `ensure_volume`, whatever that answered: a VMM that knows the size answers unchanged; one that has a
//! raw file open looks at the new length; one that has a qcow2 file open grows it. Each crash between the steps is mended
//! by the next pass, and a VM that stopped before it was told is mended by rule 3. This needs a VMM that takes the usual
//! locks on its images (QEMU's `locking=auto`, Cloud Hypervisor always).
//!
//! # Headers
//!
//! Each qcow2 header is parsed (`host::qcow2`) before a tool or VMM opens the file: the source's, which must be one clean,
//! self-contained image, and at each attach and growth the volume's own, which may name our base and nothing else.
//!
//! # Users
//!
//! See [`AttachRequest::owner_uid`]: the disk is given to the writer, and readers and directories get access control
//! entries. All parents of the pool must be passable (`x`) for the VMMs' users.
//!
//! # Locks
//!
//! Calls for one volume take turns, within the process and among processes, by a lock that the kernel releases when its
//! holder ends. Another process that works on the volume at this moment makes a call `Unavailable`.

mod access;
mod apply;
mod attachments;
mod bases;
mod copy;
mod error;
mod image;
mod layout;
mod locks;
mod observe;
mod plan;
mod pool;
mod sidecar;
mod source;

use std::{future::Future, path::PathBuf, sync::Arc};

use async_trait::async_trait;
use drivers_api::{
    AttachRequest, AttachedVolume, BackingKind, Change, Context, DetachRequest, HostId, HostInfo,
    Outcome, Result, Volume, VolumeId, VolumeSpec, VolumeStatus,
};
use host::bound;

pub use error::VolumeError;
use pool::{Pool, with};

/// The driver's id.
pub const DRIVER: &str = "file-volume";

/// The points at which a test ends the process or injects an error (`host::fault`).
pub const FAULT_POINTS: &[&str] = &[
    "file.create.directory-made",
    "file.create.recorded",
    "file.base.copied",
    "file.base.published",
    "file.create.base-linked",
    "file.create.converted",
    "file.create.disk-made",
    "file.create.published",
    "file.ensure.recorded",
    "file.ensure.table-cleared",
    "file.ensure.grown",
    "file.attach.recorded",
    "file.attach.opened",
    "file.detach.closed",
    "file.detach.removed",
    "file.destroy.unpublished",
    "file.destroy.removed",
];

/// Where the driver works and for whom.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FileVolumeConfig {
    /// The node whose agent uses the driver: the mark on what it makes.
    pub node: HostId,
    /// The host's name.
    pub hostname: String,
    /// The pool's directory, made when it is not there: `/var/lib/bcd-node/volumes`.
    pub dir: PathBuf,
    /// `qemu-img`, by path or by a name in the fixed search path. Used for raw volumes from qcow2 images and for qcow2
    /// volumes that grow beyond 4 TiB; all else is done without it.
    pub qemu_img: PathBuf,
}

impl FileVolumeConfig {
    /// With `qemu-img` from the fixed search path.
    pub fn new(node: HostId, hostname: impl Into<String>, dir: impl Into<PathBuf>) -> Self {
        Self {
            node,
            hostname: hostname.into(),
            dir: dir.into(),
            qemu_img: PathBuf::from("qemu-img"),
        }
    }
}

/// The driver over one pool.
#[derive(Clone, Debug)]
pub struct FileVolume {
    pool: Arc<Pool>,
    hostname: String,
}

impl FileVolume {
    /// Makes or adopts the pool. Blocking, and short: called once at start.
    ///
    /// # Errors
    /// `Conflict` when the pool belongs to another node, `Unavailable` when it cannot be read or another process opens it
    /// at this moment, `Denied` and `Exhausted` as the filesystem says.
    pub fn open(config: FileVolumeConfig) -> Result<Self> {
        let FileVolumeConfig { node, hostname, dir, qemu_img } = config;
        let pool = Pool::open(&dir, node, qemu_img).map_err(|error| {
            error.into_error("open", format_args!("volume pool {}", dir.display()))
        })?;
        Ok(Self { pool: Arc::new(pool), hostname })
    }

    /// Ends the wait with the context, and puts errors into the contract's terms.
    async fn run<T>(
        &self,
        cx: &Context,
        operation: &'static str,
        volume: VolumeId,
        work: impl Future<Output = std::result::Result<T, VolumeError>>,
    ) -> Result<T> {
        let object = format!("volume {volume}");
        bound::bounded(cx, operation, &object, async {
            work.await.map_err(|error| error.into_error(operation, &object))
        })
        .await
    }
}

#[async_trait]
impl Volume for FileVolume {
    fn name(&self) -> &'static str {
        "file"
    }

    fn local(&self) -> bool {
        true
    }

    fn backings(&self) -> &[BackingKind] {
        &[BackingKind::File]
    }

    async fn host_info(&self, cx: &Context) -> Result<HostInfo> {
        bound::check(cx, "look at", "host")?;
        Ok(HostInfo::new(Some(self.pool.node), self.hostname.clone(), DRIVER))
    }

    async fn ensure_volume(&self, cx: &Context, spec: &VolumeSpec) -> Result<Change> {
        // Boxed: it holds a spec and a source, and would make every call's future as large.
        let work = Box::pin(apply::ensure(Arc::clone(&self.pool), cx.clone(), spec.clone()));
        self.run(cx, "ensure", spec.uuid, work).await
    }

    async fn destroy_volume(&self, cx: &Context, volume: VolumeId) -> Result<Change> {
        let work = apply::destroy(Arc::clone(&self.pool), volume);
        self.run(cx, "destroy", volume, work).await
    }

    async fn attach_volume(
        &self,
        cx: &Context,
        request: &AttachRequest,
    ) -> Result<Outcome<AttachedVolume>> {
        let work = apply::attach(Arc::clone(&self.pool), request.clone());
        self.run(cx, "attach", request.volume_uuid, work).await
    }

    async fn detach_volume(&self, cx: &Context, request: &DetachRequest) -> Result<Change> {
        let work = apply::detach(Arc::clone(&self.pool), *request);
        self.run(cx, "detach", request.volume_uuid, work).await
    }

    async fn list(&self, cx: &Context) -> Result<Vec<VolumeStatus>> {
        let object = format!("volumes in {}", self.pool.layout.pool().display());
        bound::bounded(cx, "list", &object, async {
            with(&self.pool, Pool::list).await.map_err(|error| error.into_error("list", &object))
        })
        .await
    }

    async fn get(&self, cx: &Context, volume: VolumeId) -> Result<Option<VolumeStatus>> {
        let work = with(&self.pool, move |pool| pool.get(volume));
        self.run(cx, "look at", volume, work).await
    }
}
