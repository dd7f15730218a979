//! What is there: a volume's directory with its record, disk, base and attachments.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use drivers_api::{DiskFormat, HostId, Mark, VolumeId, VolumeStatus};
use host::{
    files::{self, FileError},
    qcow2::{self, Qcow2Info},
};

use crate::{
    attachments::{self, Record},
    error::VolumeError,
    layout::{Layout, VolumeEntry, base_name, disk_name, volume_entry},
    sidecar::Sidecar,
};

/// What is there of one identity.
#[derive(Debug)]
pub(crate) struct Observed {
    pub(crate) live: Option<Live>,
    /// A volume in the making.
    pub(crate) staged: bool,
}

/// A published volume.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) dir: PathBuf,
    pub(crate) sidecar: Sidecar,
    pub(crate) disk: Option<File>,
    pub(crate) base: Option<File>,
    pub(crate) size: u64,
    pub(crate) allocated: u64,
    pub(crate) records: Vec<Record>,
    /// Why no VMM may open it: a file is gone, a header is not ours.
    problem: Option<VolumeError>,
    /// An attachment that cannot be understood.
    bad_record: Option<VolumeError>,
    pub(crate) stranger: Option<PathBuf>,
    pub(crate) temporary: Vec<PathBuf>,
}

/// Looks at one identity. Nothing is changed.
///
/// # Errors
/// When what is there has no mark, or cannot be read.
pub(crate) fn observe(layout: &Layout, id: VolumeId) -> Result<Observed, VolumeError> {
    Ok(Observed { live: live(&layout.volume(id), id)?, staged: is_there(&layout.staging(id))? })
}

fn is_there(path: &Path) -> Result<bool, VolumeError> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(FileError::of("look at", path)(error).into()),
    }
}

/// Looks at a published volume; `None` when it was seen not to be there.
pub(crate) fn live(dir: &Path, id: VolumeId) -> Result<Option<Live>, VolumeError> {
    if !is_there(dir)? {
        return Ok(None);
    }
    let foreign = || VolumeError::Foreign { path: dir.to_owned() };
    if !fs::symlink_metadata(dir).map_err(FileError::of("look at", dir))?.is_dir() {
        return Err(foreign());
    }
    let Some(sidecar) = Sidecar::read(dir)? else {
        // Unpublished between the two looks, or never ours.
        return if is_there(dir)? { Err(foreign()) } else { Ok(None) };
    };
    // A directory copied under another name is not the volume of that name.
    if sidecar.volume != id {
        return Err(foreign());
    }
    let mut live = Live {
        dir: dir.to_owned(),
        sidecar,
        disk: None,
        base: None,
        size: 0,
        allocated: 0,
        records: Vec::new(),
        problem: None,
        bad_record: None,
        stranger: None,
        temporary: Vec::new(),
    };
    live.read_entries()?;
    if let Err(problem) = live.read_files() {
        live.problem = Some(problem);
    }
    Ok(Some(live))
}

impl Live {
    /// Refuses a volume of another node's agent.
    pub(crate) fn check_node(&self, node: HostId) -> Result<(), VolumeError> {
        if self.sidecar.node == node {
            return Ok(());
        }
        Err(VolumeError::OtherNode { path: self.dir.clone(), node: self.sidecar.node })
    }

    /// Refuses a volume that no VMM and no tool may open.
    pub(crate) fn usable(mut self) -> Result<Self, VolumeError> {
        match self.problem.take() {
            None => Ok(self),
            Some(problem) => Err(problem),
        }
    }

    /// Refuses a volume with an attachment that cannot be understood.
    pub(crate) fn attachments_known(mut self) -> Result<Self, VolumeError> {
        match self.bad_record.take() {
            None => Ok(self),
            Some(problem) => Err(problem),
        }
    }

    /// The path of the disk.
    pub(crate) fn disk_path(&self) -> Result<PathBuf, VolumeError> {
        Ok(self.dir.join(disk_name(self.sidecar.spec.format)?))
    }

    fn read_entries(&mut self) -> Result<(), VolumeError> {
        let fail = || FileError::of("read directory", &self.dir);
        let entries = fs::read_dir(&self.dir).map_err(fail())?;
        for entry in entries {
            let name = entry.map_err(fail())?.file_name();
            match volume_entry(&name) {
                VolumeEntry::Part => {}
                VolumeEntry::Temporary => self.temporary.push(self.dir.join(name)),
                VolumeEntry::Stranger => self.stranger = Some(self.dir.join(name)),
                VolumeEntry::Attachment(vm) => match attachments::read(&self.dir, vm) {
                    Ok(record) => self.records.push(record),
                    Err(error) => self.bad_record = Some(error),
                },
            }
        }
        self.records.sort_by_key(|record| record.attachment.vm_uuid);
        Ok(())
    }

    fn read_files(&mut self) -> Result<(), VolumeError> {
        let path = self.disk_path()?;
        let disk = open_part(&path, false)?;
        let meta = disk.metadata().map_err(FileError::of("look at", &path))?;
        self.size = meta.len();
        // `st_blocks` counts 512 bytes whatever the filesystem's block size (stat(3type)).
        self.allocated = meta.blocks() * 512;
        let disk = self.disk.insert(disk);
        if self.sidecar.spec.format == DiskFormat::Qcow2 {
            let info = check_header(disk, &path, self.sidecar.base)?;
            self.size = info.virtual_size;
        }
        self.read_base()
    }

    fn read_base(&mut self) -> Result<(), VolumeError> {
        let Some(format) = self.sidecar.base else { return Ok(()) };
        let path = self.dir.join(base_name(format)?);
        let base = self.base.insert(open_part(&path, false)?);
        if format == DiskFormat::Qcow2 {
            qcow2::inspect(base)
                .and_then(|info| info.check_standalone())
                .map_err(|source| VolumeError::Header { path, source })?;
        }
        Ok(())
    }

    /// As the contract shows it.
    pub(crate) fn status(&self) -> VolumeStatus {
        let mark = Mark::new(self.sidecar.node, self.sidecar.volume.uuid());
        let spec = self.sidecar.spec.clone();
        let wanted = spec.size_gib.bytes();
        let mut status =
            VolumeStatus::new(self.sidecar.volume, mark, Some(spec), self.size, self.allocated);
        status.complete = self.problem.is_none();
        status.attachments = self.records.iter().map(|record| record.attachment).collect();
        let growing = || {
            (self.size < wanted).then(|| {
                format!(
                    "has {} bytes and is to have {wanted}: the VM that has it open must grow it",
                    self.size
                )
            })
        };
        status.message =
            self.problem.as_ref().or(self.bad_record.as_ref()).map(full).or_else(growing);
        status
    }
}

/// Reads the header of a volume's qcow2 disk, which may name the base that is ours and no other file.
pub(crate) fn check_header(
    disk: &File,
    path: &Path,
    base: Option<DiskFormat>,
) -> Result<Qcow2Info, VolumeError> {
    let refuse = |source| VolumeError::Header { path: path.to_owned(), source };
    let info = qcow2::inspect(disk).map_err(refuse)?;
    match base {
        None if info.backing.is_some() => {
            return Err(refuse(qcow2::Qcow2Error::Refused("a backing file")));
        }
        None => info.check_contained().map_err(refuse)?,
        Some(format) => info.check_overlay(base_name(format)?, format.as_str()).map_err(refuse)?,
    }
    Ok(info)
}

/// The status of a volume whose record cannot be read: it is there, and that is all we know.
pub(crate) fn unreadable_status(node: HostId, id: VolumeId, why: &VolumeError) -> VolumeStatus {
    let mut status = VolumeStatus::new(id, Mark::new(node, id.uuid()), None, 0, 0);
    status.complete = false;
    status.message = Some(full(why));
    status
}

/// The status of a volume that is half-made.
pub(crate) fn staged_status(layout: &Layout, node: HostId, id: VolumeId) -> VolumeStatus {
    // The record is written first, but may be missing or cut off after a crash.
    let spec = Sidecar::read(&layout.staging(id)).ok().flatten().map(|sidecar| sidecar.spec);
    let mut status = VolumeStatus::new(id, Mark::new(node, id.uuid()), spec, 0, 0);
    status.complete = false;
    status.message = Some("half-made: its creation has not ended".to_owned());
    status
}

/// An error and its cause as one text.
fn full(error: &VolumeError) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// Opens a file of a volume that must be there, be a regular file and be no link.
pub(crate) fn open_part(path: &Path, write: bool) -> Result<File, VolumeError> {
    match open_regular(path, write) {
        Ok(file) => Ok(file),
        Err(error) if error.source.kind() == io::ErrorKind::NotFound => {
            Err(VolumeError::Lost { path: path.to_owned() })
        }
        Err(error) => Err(error.into()),
    }
}

/// Opens a regular file, without following a link in its place and without waiting for a peer of a FIFO.
pub(crate) fn open_regular(path: &Path, write: bool) -> Result<File, files::FileError> {
    let fail = || FileError::of("open", path);
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(i32::try_from(flags.bits()).unwrap_or_default())
        .open(path)
        .map_err(fail())?;
    if file.metadata().map_err(fail())?.is_file() {
        return Ok(file);
    }
    Err(fail()(io::Error::new(io::ErrorKind::InvalidInput, "no regular file")))
}
