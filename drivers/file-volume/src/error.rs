//! Why a volume could not be made, changed, attached or removed, and what that means to the caller.

use std::path::PathBuf;

use drivers_api::{DiskFormat, Error, ErrorKind, HostId, VmId};
use host::{files::FileError, qcow2::Qcow2Error, run::RunError};

/// A failure of this driver, before it is put into the contract's terms.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// A file or directory of the pool could not be used.
    #[error("a file operation failed")]
    File(#[from] FileError),
    /// The image file of a volume has a header that we did not write, or that a VMM must not open.
    #[error("the header of {} is refused", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: Qcow2Error,
    },
    /// The source image cannot be taken.
    #[error("the source image is refused: {reason}")]
    Source {
        /// Why, where no header is the reason.
        reason: &'static str,
        /// What is wrong with its header.
        #[source]
        source: Option<Qcow2Error>,
    },
    /// The source image is not there.
    #[error("the source image {} is not there", path.display())]
    NoSource {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The wanted size is less than what the source image needs.
    #[error("the source image has {needs} bytes and the volume only {wanted}")]
    TooSmall {
        /// The wanted size.
        wanted: u64,
        /// The image's size.
        needs: u64,
    },
    /// The wanted size is less than the size.
    #[error("the volume has {is} bytes and cannot shrink to {wanted}: volumes are grow-only")]
    Shrink {
        /// The wanted size.
        wanted: u64,
        /// The size as it is.
        is: u64,
    },
    /// The wanted format is not the format.
    #[error("the volume's format is {} and cannot become {}", is.as_str(), wanted.as_str())]
    Format {
        /// The wanted format.
        wanted: DiskFormat,
        /// The format as it is.
        is: DiskFormat,
    },
    /// The format is none of ours.
    #[error("the format is unknown to this driver")]
    UnknownFormat,
    /// Something without our mark is in the volume's place.
    #[error("{} has no mark of ours", path.display())]
    Foreign {
        /// What is there.
        path: PathBuf,
    },
    /// Another node's agent made it.
    #[error("{} was made by the agent of node {node}", path.display())]
    OtherNode {
        /// What is there.
        path: PathBuf,
        /// Whose it is.
        node: HostId,
    },
    /// The sidecar, or a record beside it, cannot be understood.
    #[error("{} cannot be understood: {reason}", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A part of a volume is gone.
    #[error("{} is gone", path.display())]
    Lost {
        /// Which file.
        path: PathBuf,
    },
    /// A file that we did not make is among a volume's files.
    #[error("{} is not ours, and would be removed with the volume", path.display())]
    Stranger {
        /// Which file.
        path: PathBuf,
    },
    /// VMs have the volume.
    #[error("it is attached to {}", list(vms))]
    Attached {
        /// Which.
        vms: Vec<VmId>,
    },
    /// A process has the volume's file open although no VM is recorded.
    #[error("a process holds the lock of {}", path.display())]
    InUse {
        /// Which file.
        path: PathBuf,
    },
    /// Another process changes the same object now.
    #[error("another process works on it")]
    Busy,
    /// The filesystem cannot express what is needed.
    #[error(
        "the filesystem of the pool has no access control lists, so several users cannot read one volume"
    )]
    NoAcl,
    /// The directory is in use for something else.
    #[error("{} is no volume pool: it holds other files and no pool.json", path.display())]
    NoPool {
        /// The directory.
        path: PathBuf,
    },
    /// The pool's directory is another one than at the start.
    #[error("{} is another directory than when the driver started", path.display())]
    PoolReplaced {
        /// The pool.
        path: PathBuf,
    },
    /// The volume is not there.
    #[error("no such volume")]
    Absent,
    /// The request names another host.
    #[error("the volume is a file of host {node}")]
    OtherHost {
        /// The driver's host.
        node: HostId,
    },
    /// The hypervisor cannot open a file.
    #[error("the hypervisor cannot open files, and this driver has nothing else")]
    NoBacking,
    /// `qemu-img` failed.
    #[error("qemu-img failed")]
    Tool(#[from] RunError),
    /// A path that QEMU cannot be given.
    #[error("the path {} is not valid UTF-8", path.display())]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// The caller's context ended, or a test's fault point acted.
    #[error(transparent)]
    Contract(#[from] Error),
}

fn list(vms: &[VmId]) -> String {
    vms.iter().map(|vm| format!("vm {vm}")).collect::<Vec<_>>().join(", ")
}

impl VolumeError {
    /// As an error of the contract.
    #[expect(clippy::wildcard_enum_match_arm, reason = "most errors are put together alike")]
    pub(crate) fn into_error(
        self,
        operation: &'static str,
        object: impl std::fmt::Display,
    ) -> Error {
        match self {
            Self::File(error) => {
                let full = error.source.kind() == std::io::ErrorKind::StorageFull;
                let error = error.into_error(operation, object);
                if full { error.with_remedy("free space on the pool's filesystem") } else { error }
            }
            Self::Tool(error) => tool_error(error, operation, object),
            // Deadline, cancellation and faults keep their own words and get the object's name.
            Self::Contract(error) => error.during(operation, object),
            other => {
                let mut error = Error::new(other.kind(), operation, object, &other);
                if let Some(field) = other.field() {
                    error = error.with_field(field);
                }
                if let Some(remedy) = other.remedy() {
                    error = error.with_remedy(remedy);
                }
                match other.into_cause() {
                    Some(cause) => error.with_source(cause),
                    None => error,
                }
            }
        }
    }

    const fn kind(&self) -> ErrorKind {
        match self {
            Self::Source { .. }
            | Self::TooSmall { .. }
            | Self::Shrink { .. }
            | Self::Format { .. }
            | Self::UnknownFormat
            | Self::OtherHost { .. } => ErrorKind::InvalidSpec,
            Self::Header { .. }
            | Self::Foreign { .. }
            | Self::OtherNode { .. }
            | Self::Unreadable { .. }
            | Self::Lost { .. }
            | Self::Stranger { .. }
            | Self::NoPool { .. }
            | Self::Attached { .. }
            | Self::InUse { .. } => ErrorKind::Conflict,
            Self::NoSource { .. } | Self::Absent => ErrorKind::NotFound,
            Self::NoAcl | Self::NoBacking => ErrorKind::Unsupported,
            Self::Busy | Self::PoolReplaced { .. } | Self::File(_) | Self::Tool(_) => {
                ErrorKind::Unavailable
            }
            Self::Path { .. } | Self::Contract(_) => ErrorKind::Internal,
        }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "most errors have none")]
    const fn field(&self) -> Option<&'static str> {
        match self {
            Self::Source { .. } | Self::NoSource { .. } => Some("source.path"),
            Self::TooSmall { .. } | Self::Shrink { .. } => Some("size_gib"),
            Self::Format { .. } | Self::UnknownFormat => Some("format"),
            Self::OtherHost { .. } => Some("host_uuid"),
            Self::NoBacking => Some("accepts"),
            _ => None,
        }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "most errors have none")]
    const fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::Header { .. } => {
                Some("nothing was opened; restore the file from a backup or destroy the volume")
            }
            Self::Source { .. } => Some("use an image that is one clean, self-contained file"),
            Self::NoSource { .. } => Some("pull the image first"),
            Self::NoPool { .. } => Some("configure an empty directory"),
            Self::Foreign { .. } | Self::Stranger { .. } => Some("move it out of the pool"),
            Self::OtherNode { .. } => {
                Some("give each node a pool of its own, or move the volume away")
            }
            Self::Unreadable { .. } => Some("restore it from a backup, or move it out of the pool"),
            Self::PoolReplaced { .. } => {
                Some("mount the pool's filesystem again, or restart the agent on the new one")
            }
            Self::Lost { .. } => Some("restore the file from a backup or destroy the volume"),
            Self::Attached { .. } => Some("detach it first"),
            Self::InUse { .. } => Some("end the process that has it open"),
            Self::NoAcl => Some("mount the filesystem with ACLs, or attach to one VM at a time"),
            _ => None,
        }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "most errors have none")]
    fn into_cause(self) -> Option<Qcow2Error> {
        match self {
            Self::Header { source, .. } => Some(source),
            Self::Source { source, .. } => source,
            _ => None,
        }
    }
}

/// A failed `qemu-img`: without space it is `Exhausted`, which its exit code does not tell.
fn tool_error(error: RunError, operation: &'static str, object: impl std::fmt::Display) -> Error {
    // The runner fixes the locale, so strerror(ENOSPC) has this text.
    let full = matches!(&error, RunError::Failed { stderr, .. } if stderr.contains("No space left on device"));
    if full {
        return Error::new(ErrorKind::Exhausted, operation, object, "no space left for the disk")
            .with_remedy("free space on the pool's filesystem")
            .with_source(error);
    }
    error.into_error(operation, object)
}
