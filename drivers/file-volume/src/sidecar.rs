//! The record beside a disk: our mark and the spec as applied.

use std::path::Path;

use drivers_api::{DiskFormat, HostId, VolumeId, VolumeSpec};
use host::files;
use serde::{Deserialize, Serialize};

use crate::{error::VolumeError, layout::SIDECAR};

/// The version of the record that this program writes, and the newest that it reads.
const SCHEMA: u32 = 1;
/// A record is far below a page; more is not ours.
const LIMIT: u64 = 64 << 10;

/// What `volume.json` holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sidecar {
    schema: u32,
    /// The mark: who made it.
    pub(crate) node: HostId,
    /// The mark: what it is.
    pub(crate) volume: VolumeId,
    /// The spec as applied. A growth is recorded before it is done, so the size here may be ahead of the disk's.
    pub(crate) spec: VolumeSpec,
    /// The format of the file below a qcow2 disk, where there is one.
    pub(crate) base: Option<DiskFormat>,
}

/// What every version of the record has.
#[derive(Deserialize)]
struct Versioned {
    schema: u32,
}

impl Sidecar {
    pub(crate) fn new(node: HostId, spec: VolumeSpec, base: Option<DiskFormat>) -> Self {
        Self { schema: SCHEMA, node, volume: spec.uuid, spec, base }
    }

    /// Reads the record of a volume's directory; `None` when there is none.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>, VolumeError> {
        let path = dir.join(SIDECAR);
        let Some(bytes) = files::read_bounded(&path, LIMIT)? else { return Ok(None) };
        let unreadable = |reason: String| VolumeError::Unreadable { path: path.clone(), reason };
        let version: Versioned =
            serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))?;
        if version.schema > SCHEMA {
            return Err(unreadable(format!(
                "a newer version wrote it (schema {}, known up to {SCHEMA})",
                version.schema
            )));
        }
        serde_json::from_slice(&bytes).map(Some).map_err(|error| unreadable(error.to_string()))
    }

    /// The record as bytes.
    pub(crate) fn bytes(&self) -> Result<Vec<u8>, VolumeError> {
        serde_json::to_vec(self).map_err(|error| VolumeError::Unreadable {
            path: SIDECAR.into(),
            reason: error.to_string(),
        })
    }

    /// Replaces the record of a volume's directory; the old one or the new one is there after a crash.
    pub(crate) fn write(&self, dir: &Path) -> Result<(), VolumeError> {
        Ok(files::write_atomic(&dir.join(SIDECAR), &self.bytes()?)?)
    }
}
