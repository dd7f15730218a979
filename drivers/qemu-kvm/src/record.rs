//! What is kept about a VM on the host, and how it is read back.

use std::path::{Path, PathBuf};

use drivers_api::{DiskSpec, Error, ErrorKind, Exit, HostId, Mark, NicHandle, VmId, VmSpec};
use host::files::{self, FileError};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::paths::VmPaths;

/// The version of the files' form. A file of a higher one was written by a newer agent and is left alone.
const SCHEMA: u32 = 1;
/// No file of ours is larger than this: 16 MiB, for a seed's user data.
const MAX_BYTES: u64 = 16 << 20;

/// Why a file of ours could not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    /// It cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// Its content is not what we write.
    #[error("{} is damaged", path.display())]
    Damaged {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    /// A newer agent wrote it.
    #[error("{} has schema {found}, this version knows {SCHEMA}", path.display())]
    Newer { path: PathBuf, found: u32 },
}

impl RecordError {
    pub(crate) fn into_error(self, operation: &'static str, vm: VmId) -> Error {
        let object = crate::error::label(vm);
        match self {
            Self::File(error) => error.into_error(operation, object),
            Self::Damaged { .. } => {
                let reason = self.to_string();
                Error::new(ErrorKind::Unavailable, operation, object, reason)
                    .with_remedy("create the VM again with its spec, or delete it")
                    .with_source(self)
            }
            Self::Newer { .. } => {
                let reason = self.to_string();
                Error::new(ErrorKind::Unavailable, operation, object, reason)
                    .with_remedy("run the newer version of the agent")
            }
        }
    }
}

#[derive(Deserialize)]
struct Schema {
    schema: u32,
}

#[derive(Serialize)]
struct Versioned<'a, T> {
    schema: u32,
    #[serde(flatten)]
    value: &'a T,
}

/// Reads a file of ours; `None` when it is not there.
fn load<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, RecordError> {
    let Some(bytes) = files::read_bounded(path, MAX_BYTES)? else { return Ok(None) };
    let damaged = |source| RecordError::Damaged { path: path.to_owned(), source };
    let schema: Schema = serde_json::from_slice(&bytes).map_err(damaged)?;
    if schema.schema > SCHEMA {
        return Err(RecordError::Newer { path: path.to_owned(), found: schema.schema });
    }
    serde_json::from_slice(&bytes).map(Some).map_err(damaged)
}

/// Writes a file of ours, whole or not at all.
fn store<T: Serialize>(path: &Path, value: &T) -> Result<(), RecordError> {
    let bytes = serde_json::to_vec_pretty(&Versioned { schema: SCHEMA, value })
        .map_err(|source| RecordError::Damaged { path: path.to_owned(), source })?;
    Ok(files::write_atomic(path, &bytes)?)
}

/// Who made the VM.
#[derive(Serialize, Deserialize)]
struct MarkFile {
    node: HostId,
    vm: VmId,
}

/// Whose directory it is.
#[derive(Debug)]
pub(crate) enum Ownership {
    /// There is no such directory.
    Absent,
    /// It has our mark.
    Ours,
    /// It has no mark, another's, or one that cannot be read: why.
    Foreign(String),
}

/// Looks whose the VM's directory is.
pub(crate) fn ownership(paths: &VmPaths, node: HostId) -> Result<Ownership, RecordError> {
    match std::fs::symlink_metadata(&paths.dir) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Ok(Ownership::Foreign("it is no directory".to_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            // Absent was seen only where the directory that would hold it is there.
            let state = paths.state();
            std::fs::metadata(state).map_err(FileError::of("look into", state))?;
            return Ok(Ownership::Absent);
        }
        Err(error) => return Err(FileError::of("look at", &paths.dir)(error).into()),
    }
    match load::<MarkFile>(&paths.mark()) {
        Ok(Some(mark)) if mark.node == node && mark.vm == paths.id => Ok(Ownership::Ours),
        Ok(Some(mark)) => Ok(Ownership::Foreign(format!(
            "it carries the mark of vm {} by node {}",
            mark.vm, mark.node
        ))),
        Ok(None) => Ok(Ownership::Foreign("it carries no mark".to_owned())),
        Err(RecordError::File(error)) => Err(error.into()),
        Err(error) => Ok(Ownership::Foreign(error.to_string())),
    }
}

/// Writes the mark of a new directory.
pub(crate) fn write_mark(paths: &VmPaths, node: HostId) -> Result<(), RecordError> {
    store(&paths.mark(), &MarkFile { node, vm: paths.id })
}

/// The mark of our VM.
pub(crate) const fn mark(node: HostId, vm: VmId) -> Mark {
    Mark::new(node, vm.uuid())
}

/// A disk and the PCI Express port behind which the guest finds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskEntry {
    pub(crate) disk: DiskSpec,
    pub(crate) port: u16,
    /// Its removal was asked for and the guest has not let go.
    #[serde(default)]
    pub(crate) detaching: bool,
}

/// A NIC and the PCI Express port behind which the guest finds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NicEntry {
    pub(crate) nic: NicHandle,
    pub(crate) port: u16,
    /// Its removal was asked for and the guest has not let go.
    #[serde(default)]
    pub(crate) detaching: bool,
}

/// The disks and NICs of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Devices {
    pub(crate) disks: Vec<DiskEntry>,
    pub(crate) nics: Vec<NicEntry>,
}

impl Devices {
    /// The ports in use.
    pub(crate) fn ports(&self) -> impl Iterator<Item = u16> + '_ {
        self.disks.iter().map(|entry| entry.port).chain(self.nics.iter().map(|entry| entry.port))
    }

    /// The lowest port that neither these nor `other` devices use.
    pub(crate) fn free_port(&self, other: Option<&Self>) -> u16 {
        let taken = |port: u16| {
            self.ports().chain(other.into_iter().flat_map(Self::ports)).any(|used| used == port)
        };
        (0..u16::MAX).find(|port| !taken(*port)).unwrap_or(u16::MAX)
    }
}

/// The VM as its next start takes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VmRecord {
    pub(crate) spec: VmSpec,
    #[serde(flatten)]
    pub(crate) devices: Devices,
}

impl VmRecord {
    pub(crate) fn load(paths: &VmPaths) -> Result<Option<Self>, RecordError> {
        load(&paths.record())
    }

    pub(crate) fn store(&self, paths: &VmPaths) -> Result<(), RecordError> {
        store(&paths.record(), self)
    }
}

/// How guest code runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Accel {
    Kvm,
    Tcg,
}

impl Accel {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// What a VMM was started with, and the devices that it has since.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Running {
    pub(crate) spec: VmSpec,
    #[serde(flatten)]
    pub(crate) devices: Devices,
    /// How many PCI Express ports there are.
    pub(crate) ports: u16,
    pub(crate) accel: Accel,
    /// The number of the serial journal's descriptor in the VMM.
    pub(crate) journal_fd: i32,
}

impl Running {
    pub(crate) fn load(paths: &VmPaths) -> Result<Option<Self>, RecordError> {
        load(&paths.running())
    }

    pub(crate) fn store(&self, paths: &VmPaths) -> Result<(), RecordError> {
        store(&paths.running(), self)
    }
}

#[derive(Serialize, Deserialize)]
struct ExitFile {
    exit: Exit,
}

/// How the last run ended, if there was one.
pub(crate) fn load_exit(paths: &VmPaths) -> Result<Option<Exit>, RecordError> {
    Ok(load::<ExitFile>(&paths.exit())?.map(|file| file.exit))
}

/// Keeps how a run ended, where the VM is still there.
pub(crate) fn store_exit(paths: &VmPaths, exit: Exit) -> Result<(), RecordError> {
    if !paths.dir.is_dir() || load_exit(paths).ok().flatten() == Some(exit) {
        return Ok(());
    }
    store(&paths.exit(), &ExitFile { exit })
}
