//! What the cache keeps about an image and about a reference.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use drivers_api::{
    ArtifactKind, Digest, DiskFormat, HostId, HostPath, ImageFiles, ImageRef, ImageStatus,
};
use host::files::{self, FileError};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::MAX_RECORD_BYTES;
use crate::{
    error::{ImageError, Result},
    fetch::blob::hex,
    media::Role,
    plan::kind_of,
};

/// The record's file in an image's directory.
pub(crate) const ENTRY: &str = "entry.json";

/// One file of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileRecord {
    pub(crate) role: Role,
    /// Of the file as it lies there, unpacked.
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    /// Nanoseconds since 1970. A write moves it.
    pub(crate) mtime: i128,
    #[serde(default)]
    pub(crate) format: Option<DiskFormat>,
    #[serde(default)]
    pub(crate) virtual_size: Option<u64>,
}

/// An image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EntryRecord {
    /// The node whose agent made it.
    pub(crate) node: HostId,
    pub(crate) driver: String,
    pub(crate) files: Vec<FileRecord>,
    #[serde(default)]
    pub(crate) cmdline: Option<String>,
    pub(crate) size_bytes: u64,
}

/// A reference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RefRecord {
    pub(crate) reference: ImageRef,
    /// What the reference resolved to: the digest of the manifest or index, or of the file.
    pub(crate) digest: Digest,
    /// The key of its content.
    pub(crate) content: String,
}

/// An image in the cache whose files look as they were published.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) dir: PathBuf,
    pub(crate) record: EntryRecord,
    files: ImageFiles,
}

/// The name of a reference's file.
pub(crate) fn ref_file(reference: &ImageRef) -> String {
    let hash = hex(&Sha256::digest(reference.as_str().as_bytes()));
    format!("{}.json", hash.trim_start_matches("sha256:"))
}

impl RefRecord {
    /// Parses a record; one that cannot be understood is reported and counts as absent.
    pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Option<Self> {
        match serde_json::from_slice::<Self>(bytes) {
            Ok(record) if is_key(&record.content) => Some(record),
            Ok(_) => {
                tracing::warn!(path = %path.display(), "a reference names no content");
                None
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a reference cannot be understood");
                None
            }
        }
    }

    pub(crate) fn to_json(&self) -> Result<Vec<u8>> {
        to_json(self)
    }
}

/// A key is one component of a path.
fn is_key(key: &str) -> bool {
    !key.is_empty()
        && key
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

impl EntryRecord {
    pub(crate) fn to_json(&self) -> Result<Vec<u8>> {
        to_json(self)
    }
}

fn to_json(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec_pretty(value).map_err(|error| ImageError::Internal(error.to_string()))
}

/// Reads an image's record and looks at its files; `None` when it is not there or was changed since.
pub(crate) fn read_entry(dir: &Path, key: &str) -> Result<Option<Entry>> {
    let Some(bytes) = files::read_bounded(&dir.join(ENTRY), MAX_RECORD_BYTES)? else {
        return Ok(None);
    };
    let damaged = |why: &str| {
        tracing::warn!(path = %dir.display(), why, "an image in the cache is damaged");
        Ok(None)
    };
    let Ok(record) = serde_json::from_slice::<EntryRecord>(&bytes) else {
        return damaged("its record cannot be understood");
    };
    for file in &record.files {
        let path = dir.join(file.role.as_str());
        let found = match fs::symlink_metadata(&path) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return damaged("a file is gone");
            }
            Err(error) => return Err(FileError::of("look at", &path)(error).into()),
        };
        if !found.is_file() || found.len() != file.size || mtime(&found) != file.mtime {
            return damaged("a file was changed");
        }
    }
    match image_files(dir, &record) {
        Ok(files) => Ok(Some(Entry { key: key.to_owned(), dir: dir.to_owned(), record, files })),
        Err(_) => damaged("its record makes no sense"),
    }
}

/// The time of a file's last change of content.
pub(crate) fn mtime(found: &fs::Metadata) -> i128 {
    i128::from(found.mtime()) * 1_000_000_000 + i128::from(found.mtime_nsec())
}

fn image_files(dir: &Path, record: &EntryRecord) -> Result<ImageFiles> {
    let of = |role: Role| record.files.iter().find(|file| file.role == role);
    let missing = || ImageError::Internal("a record lacks a file".to_owned());
    let path = |role: Role| -> Result<HostPath> {
        of(role).ok_or_else(missing)?;
        let path = dir.join(role.as_str());
        let text = path.to_str().and_then(|text| text.parse().ok());
        text.ok_or_else(|| ImageError::Internal("the cache's path is no host path".to_owned()))
    };
    Ok(match kind_of(record.files.iter().map(|file| file.role))? {
        ArtifactKind::Disk => {
            let file = of(Role::Disk).ok_or_else(missing)?;
            ImageFiles::Disk {
                path: path(Role::Disk)?,
                format: file.format.ok_or_else(missing)?,
                virtual_size: file.virtual_size.ok_or_else(missing)?,
            }
        }
        ArtifactKind::Kernel => ImageFiles::Kernel {
            kernel: path(Role::Kernel)?,
            initrd: of(Role::Initrd).map(|_| path(Role::Initrd)).transpose()?,
            cmdline: record.cmdline.clone(),
        },
        ArtifactKind::Uki => ImageFiles::Uki { path: path(Role::Uki)? },
        _ => return Err(ImageError::Internal("an unknown kind of image".to_owned())),
    })
}

impl Entry {
    pub(crate) fn status(&self, reference: &ImageRef, digest: &Digest) -> ImageStatus {
        ImageStatus::new(
            reference.clone(),
            digest.clone(),
            self.files.clone(),
            self.record.size_bytes,
        )
    }

    /// The files with their paths.
    pub(crate) fn paths(&self) -> impl Iterator<Item = (&FileRecord, PathBuf)> {
        self.record.files.iter().map(|file| (file, self.dir.join(file.role.as_str())))
    }
}
