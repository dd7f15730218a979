//! The image trait: a cache of artifacts on the host.

use crate::{
    Change, Digest, DiskFormat, HostInfo, HostPath, ImageCollect, ImageRef, Outcome, Result,
};

/// What an artifact holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum ArtifactKind {
    /// A disk image.
    Disk,
    /// A kernel, with or without an initrd.
    Kernel,
    /// A unified kernel image.
    Uki,
}

/// The files of a cached artifact. Immutable once published; never opened with a probed format.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", tag = "kind"))]
#[non_exhaustive]
pub enum ImageFiles {
    /// A disk image.
    Disk {
        /// Where it is.
        path: HostPath,
        /// Its format: what the driver found by its own parse of the header, qcow2 only if the header is clean.
        format: DiskFormat,
        /// The size that a guest sees, in bytes.
        virtual_size: u64,
    },
    /// A kernel, with or without an initrd.
    Kernel {
        /// The kernel.
        kernel: HostPath,
        /// The initial RAM disk.
        initrd: Option<HostPath>,
        /// The command line that the artifact suggests.
        cmdline: Option<String>,
    },
    /// A unified kernel image: one PE file for UEFI firmware.
    Uki {
        /// Where it is.
        path: HostPath,
    },
}

impl ImageFiles {
    /// What the artifact holds.
    #[must_use]
    pub const fn kind(&self) -> ArtifactKind {
        match self {
            Self::Disk { .. } => ArtifactKind::Disk,
            Self::Kernel { .. } => ArtifactKind::Kernel,
            Self::Uki { .. } => ArtifactKind::Uki,
        }
    }

    /// The file that [`Image::local_path`] answers: the disk, the kernel or the UKI.
    #[must_use]
    pub const fn main_path(&self) -> &HostPath {
        match self {
            Self::Disk { path, .. } | Self::Uki { path } => path,
            Self::Kernel { kernel, .. } => kernel,
        }
    }
}

/// A cached image.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ImageStatus {
    /// The reference under which it was pulled.
    pub reference: ImageRef,
    /// What it resolved to: the manifest's digest, or the file's.
    pub digest: Digest,
    /// Its files.
    pub files: ImageFiles,
    /// The space that it takes on the host, in bytes.
    pub size_bytes: u64,
}

impl ImageStatus {
    /// A cached image.
    #[must_use]
    pub const fn new(
        reference: ImageRef,
        digest: Digest,
        files: ImageFiles,
        size_bytes: u64,
    ) -> Self {
        Self { reference, digest, files, size_bytes }
    }
}

driver_trait! {
    /// Caches OCI artifacts and files (cloud images, UKIs, kernel and initrd pairs) on a host, so that a VM's disk is
    /// cloned from a local copy.
    ///
    /// One driver instance per host and cache. Several references may name one content, which is stored once.
    ///
    /// # Guarantees
    /// Content is checked against its digest while it streams, before it is published; an entry is published whole or
    /// not at all. Concurrent pulls of one content are one download; each caller keeps its own deadline, and the download
    /// ends when no caller is left.
    pub trait Image {
        sync {
            /// Collection of what is no longer used, if the driver can.
            fn collect(&self) -> Option<&dyn ImageCollect> {
                None
            }
        }

        /// Where the cache is.
        ///
        /// # Errors
        /// `Unavailable` when the host cannot be asked.
        async fn host_info(&self, cx: &Context, []) -> Result<HostInfo>;

        /// Brings the artifact into the cache and answers its files. Already there: unchanged, without a request to the
        /// registry when the reference has a digest; a tag is resolved anew.
        ///
        /// # Errors
        /// `InvalidSpec` for a malformed or hostile artifact, `NotFound` when the registry does not have it, `Denied`
        /// by the registry, `Exhausted` beyond the size limit or disk space, `Unavailable`, `Deadline`, `Cancelled`.
        async fn pull(&self, cx: &Context, [], reference: &ImageRef) -> Result<Outcome<ImageStatus>>;

        /// The absolute path of the cached artifact's main file.
        ///
        /// # Errors
        /// `NotFound` when it is not in the cache: pull first.
        async fn local_path(&self, cx: &Context, [], reference: &ImageRef) -> Result<HostPath>;

        /// Removes the reference from the cache, and its content when no other reference names it. Not there: unchanged.
        ///
        /// # Errors
        /// `Unavailable` while a clone reads it; anything but "not found".
        async fn delete(&self, cx: &Context, [], reference: &ImageRef) -> Result<Change>;

        /// The cheap existence check. Asks the host only, never a registry.
        ///
        /// # Errors
        /// `Unavailable` when the cache cannot be read.
        async fn in_cache(&self, cx: &Context, [], reference: &ImageRef) -> Result<bool>;

        /// Everything in the cache.
        ///
        /// # Errors
        /// `Unavailable` when the cache cannot be read; never a part of the list.
        async fn list(&self, cx: &Context, []) -> Result<Vec<ImageStatus>>;

        /// One entry; `None` when it was seen not to be there.
        ///
        /// # Errors
        /// As `list`.
        async fn get(&self, cx: &Context, [], reference: &ImageRef) -> Result<Option<ImageStatus>>;
    }
}
