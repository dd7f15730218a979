//! What a file of an artifact is: from its media type, else from the name that its publisher gave it. Pure.
//!
//! The table is `docs/images.md`. A format is claimed by the publisher and checked by us; no tool ever guesses one.

use drivers_api::DiskFormat;
use oci_client::manifest::{
    IMAGE_DOCKER_LAYER_GZIP_MEDIA_TYPE, IMAGE_DOCKER_LAYER_TAR_MEDIA_TYPE,
    IMAGE_LAYER_GZIP_MEDIA_TYPE, IMAGE_LAYER_MEDIA_TYPE,
};
use serde::{Deserialize, Serialize};

/// What our own media types begin with.
const OURS: &str = "application/vnd.bcd.";
/// A layer of a container image compressed by zstd (OCI image specification 1.1, "layer").
const LAYER_ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
/// Docker's name for the same.
const DOCKER_LAYER_ZSTD: &str = "application/vnd.docker.image.rootfs.diff.tar.zstd";

/// The part that a file plays in an image; also its name in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    Disk,
    Kernel,
    Initrd,
    Uki,
}

impl Role {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Kernel => "kernel",
            Self::Initrd => "initrd",
            Self::Uki => "uki",
        }
    }
}

/// How the bytes of a blob are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Packing {
    Plain,
    Gzip,
    Zstd,
}

impl Packing {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        }
    }
}

/// What the publisher says about a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Claim {
    pub(crate) role: Role,
    /// The format of a disk; `None` when nothing was said, and then our own parse of the header decides between a clean
    /// qcow2 image and plain bytes.
    pub(crate) format: Option<DiskFormat>,
}

impl Claim {
    const fn new(role: Role) -> Self {
        Self { role, format: None }
    }

    const fn disk(format: DiskFormat) -> Self {
        Self { role: Role::Disk, format: Some(format) }
    }
}

/// What a layer of a manifest is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerKind {
    /// One file.
    File(Claim, Packing),
    /// A tar archive of a container image's file system.
    Tar(Packing),
    /// Nothing that we know.
    Other,
    /// Compressed in a way that we do not unpack.
    Unsupported(&'static str),
}

/// Decides what a layer is.
pub(crate) fn layer_kind(media_type: &str, title: Option<&str>, unpack: bool) -> LayerKind {
    let (bare, packing) = split_media_type(media_type);
    if let Some(ours) = bare.strip_prefix(OURS) {
        let claim = match ours {
            "disk.qcow2.v1" => Claim::disk(DiskFormat::Qcow2),
            "disk.raw.v1" => Claim::disk(DiskFormat::Raw),
            "kernel.v1" => Claim::new(Role::Kernel),
            "initrd.v1" => Claim::new(Role::Initrd),
            "uki.v1" => Claim::new(Role::Uki),
            _ => return LayerKind::Other,
        };
        return LayerKind::File(claim, packing);
    }
    let tar = tar_packing(media_type);
    match (title.map(by_name), tar) {
        // What `oras push FILE` makes: a plain file under the media type of a tar layer, named by its title.
        (Some(Named::File(claim, named)), Some(Packing::Plain)) if !unpack => {
            LayerKind::File(claim, named)
        }
        (_, Some(packing)) => LayerKind::Tar(packing),
        (Some(Named::File(claim, named)), None) => {
            let packing = if named == Packing::Plain { packing } else { named };
            LayerKind::File(claim, packing)
        }
        (Some(Named::Unsupported(what)), None) => LayerKind::Unsupported(what),
        (Some(Named::Other) | None, None) => LayerKind::Other,
    }
}

fn tar_packing(media_type: &str) -> Option<Packing> {
    match media_type {
        IMAGE_LAYER_MEDIA_TYPE | IMAGE_DOCKER_LAYER_TAR_MEDIA_TYPE => Some(Packing::Plain),
        IMAGE_LAYER_GZIP_MEDIA_TYPE | IMAGE_DOCKER_LAYER_GZIP_MEDIA_TYPE => Some(Packing::Gzip),
        LAYER_ZSTD | DOCKER_LAYER_ZSTD => Some(Packing::Zstd),
        _ => None,
    }
}

fn split_media_type(media_type: &str) -> (&str, Packing) {
    if let Some(bare) = media_type.strip_suffix("+gzip") {
        (bare, Packing::Gzip)
    } else if let Some(bare) = media_type.strip_suffix("+zstd") {
        (bare, Packing::Zstd)
    } else {
        (media_type, Packing::Plain)
    }
}

/// What a file's name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    File(Claim, Packing),
    Unsupported(&'static str),
    Other,
}

/// Decides by the last component of a name.
pub(crate) fn by_name(name: &str) -> Named {
    let name = name.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
    for (suffix, what) in [(".xz", "xz"), (".bz2", "bzip2"), (".zip", "zip"), (".tar", "tar")] {
        if name.ends_with(suffix) {
            return Named::Unsupported(what);
        }
    }
    let (bare, packing) = [(".gz", Packing::Gzip), (".zst", Packing::Zstd)]
        .into_iter()
        .find_map(|(suffix, packing)| Some((name.strip_suffix(suffix)?, packing)))
        .unwrap_or((&name, Packing::Plain));
    // An initrd is compressed for the kernel, which unpacks it itself.
    if ["initrd", "initramfs"].iter().any(|start| bare.starts_with(start)) {
        return Named::File(Claim::new(Role::Initrd), Packing::Plain);
    }
    let ends = |suffixes: &[&str]| suffixes.iter().any(|suffix| bare.ends_with(suffix));
    let claim = if ends(&[".qcow2"]) {
        Claim::disk(DiskFormat::Qcow2)
    } else if ends(&[".raw"]) {
        Claim::disk(DiskFormat::Raw)
    } else if ends(&[".img"]) {
        Claim::new(Role::Disk)
    } else if ends(&[".efi"]) {
        Claim::new(Role::Uki)
    } else if ["vmlinuz", "vmlinux", "bzimage", "kernel"].iter().any(|s| bare.starts_with(s)) {
        Claim::new(Role::Kernel)
    } else {
        return Named::Other;
    };
    Named::File(claim, packing)
}

/// What a single file of a URL or path is: by its name, else a disk.
pub(crate) fn single_file(name: &str) -> Result<(Claim, Packing), &'static str> {
    match by_name(name) {
        Named::File(claim, packing) => Ok((claim, packing)),
        Named::Unsupported(what) => Err(what),
        Named::Other => Ok((Claim::new(Role::Disk), Packing::Plain)),
    }
}

/// The format that the name of a containerDisk's file claims.
pub(crate) fn disk_claim(name: &str) -> Option<DiskFormat> {
    match by_name(name) {
        Named::File(claim, Packing::Plain) => claim.format,
        Named::File(..) | Named::Unsupported(_) | Named::Other => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_media_type_of_ours_decides_whatever_the_name_says() {
        let kind = layer_kind("application/vnd.bcd.disk.qcow2.v1+zstd", Some("x.raw"), false);
        assert_eq!(kind, LayerKind::File(Claim::disk(DiskFormat::Qcow2), Packing::Zstd));
        assert_eq!(layer_kind("application/vnd.bcd.future.v9", None, false), LayerKind::Other);
    }

    #[test]
    fn a_plain_tar_type_with_a_known_title_is_a_file_and_else_a_layer() {
        let tar = "application/vnd.oci.image.layer.v1.tar";
        let raw = Claim::disk(DiskFormat::Raw);
        assert_eq!(
            layer_kind(tar, Some("disk.raw.gz"), false),
            LayerKind::File(raw, Packing::Gzip)
        );
        assert_eq!(layer_kind(tar, None, false), LayerKind::Tar(Packing::Plain));
        assert_eq!(layer_kind(tar, Some("disk.raw"), true), LayerKind::Tar(Packing::Plain));
        let gzip = "application/vnd.oci.image.layer.v1.tar+gzip";
        assert_eq!(layer_kind(gzip, Some("a.raw"), false), LayerKind::Tar(Packing::Gzip));
    }

    #[test]
    fn names_say_what_people_mean() {
        let file = |role, format, packing| Named::File(Claim { role, format }, packing);
        for (name, wanted) in [
            ("noble-server-cloudimg-amd64.img", file(Role::Disk, None, Packing::Plain)),
            ("a/b/Debian.QCOW2", file(Role::Disk, Some(DiskFormat::Qcow2), Packing::Plain)),
            ("disk.raw.zst", file(Role::Disk, Some(DiskFormat::Raw), Packing::Zstd)),
            ("vmlinuz-6.1.0", file(Role::Kernel, None, Packing::Plain)),
            ("initrd.img-6.1.0", file(Role::Initrd, None, Packing::Plain)),
            ("initramfs.gz", file(Role::Initrd, None, Packing::Plain)),
            ("linux.efi", file(Role::Uki, None, Packing::Plain)),
            ("disk.raw.xz", Named::Unsupported("xz")),
            ("README.md", Named::Other),
        ] {
            assert_eq!(by_name(name), wanted, "{name}");
        }
    }
}
