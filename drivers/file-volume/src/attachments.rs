//! The records of who has a volume.
//!
//! A record is a symbolic link `vm-UUID` in the volume's directory; its target, which is no path, is the record:
//! `HOST rw|ro UID|-`. One system call makes it whole or not at all, and so removes it: a detach needs no space, so it
//! works on a full disk, where a rewrite of the sidecar would not.

use std::{
    ffi::OsStr,
    fs, io,
    os::unix::{ffi::OsStrExt, fs::symlink},
    path::{Path, PathBuf},
};

use drivers_api::{AttachRequest, Attachment, HostId, VmId};
use host::files::{self, FileError};

use crate::{access::Users, error::VolumeError, layout::ATTACHMENT};

/// Who has a volume, and as which user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) attachment: Attachment,
    pub(crate) uid: Option<u32>,
}

impl Record {
    pub(crate) const fn wanted(request: &AttachRequest) -> Self {
        Self {
            attachment: Attachment::new(request.host_uuid, request.vm_uuid, request.read_only),
            uid: request.owner_uid,
        }
    }

    fn target(&self) -> String {
        let mode = if self.attachment.read_only { "ro" } else { "rw" };
        let uid = self.uid.map_or_else(|| "-".to_owned(), |uid| uid.to_string());
        format!("{} {mode} {uid}", self.attachment.host_uuid)
    }

    fn parse(vm: VmId, target: &OsStr) -> Option<Self> {
        let text = std::str::from_utf8(target.as_bytes()).ok()?;
        let mut parts = text.split(' ');
        let (host, mode, uid) = (parts.next()?, parts.next()?, parts.next()?);
        let host: HostId = host.parse().ok()?;
        let read_only = match mode {
            "ro" => true,
            "rw" => false,
            _ => return None,
        };
        let uid = if uid == "-" { None } else { Some(uid.parse().ok()?) };
        let whole = parts.next().is_none();
        whole.then_some(Self { attachment: Attachment::new(host, vm, read_only), uid })
    }
}

fn path(dir: &Path, vm: VmId) -> PathBuf {
    dir.join(format!("{ATTACHMENT}{vm}"))
}

/// Reads the record of `vm`. What cannot be understood is an error: an attachment that we overlook may cost data.
pub(crate) fn read(dir: &Path, vm: VmId) -> Result<Record, VolumeError> {
    let path = path(dir, vm);
    let unreadable =
        |reason: &str| VolumeError::Unreadable { path: path.clone(), reason: reason.to_owned() };
    match fs::read_link(&path) {
        Ok(target) => Record::parse(vm, target.as_os_str())
            .ok_or_else(|| unreadable("it is no attachment record")),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            Err(unreadable("it is no symbolic link"))
        }
        Err(error) => Err(FileError::of("read", &path)(error).into()),
    }
}

/// Writes a record, in place of an earlier one of the same VM. Durable when it returns.
pub(crate) fn write(dir: &Path, record: &Record) -> Result<(), VolumeError> {
    let path = path(dir, record.attachment.vm_uuid);
    let temporary = files::temporary_beside(&path);
    let written = symlink(record.target(), &temporary)
        .map_err(FileError::of("record in", &path))
        .and_then(|()| fs::rename(&temporary, &path).map_err(FileError::of("rename onto", &path)))
        .and_then(|()| files::sync_parent(&path));
    if written.is_err() {
        // Best effort: `list` and `open` remove what stays.
        drop(fs::remove_file(&temporary));
    }
    Ok(written?)
}

/// Removes the record of `vm`. Durable when it returns; needs no space.
pub(crate) fn remove(dir: &Path, vm: VmId) -> Result<(), VolumeError> {
    let path = path(dir, vm);
    files::remove_file(&path)?;
    Ok(files::sync_parent(&path)?)
}

/// The users that open a volume with these attachments.
pub(crate) fn users(records: &[Record]) -> Users {
    let me = rustix::process::geteuid().as_raw();
    let mut users = Users::default();
    for record in records {
        match record.uid.filter(|uid| *uid != me) {
            Some(uid) if record.attachment.read_only => drop(users.readers.insert(uid)),
            Some(uid) => users.writer = Some(uid),
            None => {}
        }
    }
    users
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(read_only: bool, uid: Option<u32>) -> Record {
        let host = "0d9e8f7a-6b5c-4d3e-8f2a-1b0c9d8e7f6a".parse().unwrap();
        let vm = "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b".parse().unwrap();
        Record { attachment: Attachment::new(host, vm, read_only), uid }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        for wanted in [record(false, None), record(true, Some(4_294_967_294))] {
            write(dir.path(), &wanted).unwrap();
            assert_eq!(read(dir.path(), wanted.attachment.vm_uuid).unwrap(), wanted);
            assert!(wanted.target().len() < 60, "ext4 keeps it in the inode, without a block");
        }
        remove(dir.path(), record(true, None).attachment.vm_uuid).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_record_that_is_not_ours_is_an_error_and_not_absent() {
        let dir = tempfile::tempdir().unwrap();
        let vm = record(true, None).attachment.vm_uuid;
        for target in ["/etc/shadow", "x rw -", "0d9e8f7a-6b5c-4d3e-8f2a-1b0c9d8e7f6a rw - more"] {
            symlink(target, path(dir.path(), vm)).unwrap();
            assert!(read(dir.path(), vm).is_err(), "{target}");
            fs::remove_file(path(dir.path(), vm)).unwrap();
        }
        fs::write(path(dir.path(), vm), "").unwrap();
        assert!(read(dir.path(), vm).is_err());
    }
}
