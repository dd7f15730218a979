//! Lets the users of VMMs reach the files of their volume, and nobody else.
//!
//! A volume's directory is 0700 and its disk 0600. For each attachment with a user of its own the directory gets an access
//! control entry that lets this user pass (`x`), the disk is given to the one writer or gets an entry to read (`r`) for
//! each reader, and the base, whose bytes several users read, is readable for all who reach it: those who may pass the
//! directory. On a filesystem without access control lists the directory can be passed by all (0711) instead, and the disk
//! still belongs to its writer alone.
//!
//! The list's binary form is `struct posix_acl_xattr_header` and `_entry` of Linux's
//! `include/uapi/linux/posix_acl_xattr.h`, little endian.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::unix::fs::{MetadataExt, PermissionsExt, fchown},
    path::Path,
};

use host::files::FileError;
use rustix::{fs::XattrFlags, io::Errno};

use crate::error::VolumeError;

const ACL: &str = "system.posix_acl_access";
/// `POSIX_ACL_XATTR_VERSION`.
const ACL_VERSION: u32 = 2;
/// `ACL_USER_OBJ`, `ACL_USER`, `ACL_GROUP_OBJ`, `ACL_MASK`, `ACL_OTHER`.
const TAGS: [u16; 5] = [0x01, 0x02, 0x04, 0x10, 0x20];
/// `ACL_UNDEFINED_ID`.
const NO_ID: u32 = u32::MAX;
const READ: u16 = 4;
const PASS: u16 = 1;

/// Which users open a volume, beside the agent's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Users {
    pub(crate) writer: Option<u32>,
    pub(crate) readers: BTreeSet<u32>,
}

impl Users {
    fn all(&self) -> BTreeSet<u32> {
        self.writer.into_iter().chain(self.readers.iter().copied()).collect()
    }
}

/// Brings the access to a volume's files to `users`; answers whether anything was changed.
pub(crate) fn apply(
    dir: &Path,
    disk: &File,
    base: Option<&File>,
    users: &Users,
) -> Result<bool, VolumeError> {
    let me = rustix::process::geteuid().as_raw();
    let fail = |operation| FileError::of(operation, dir);
    let dir_file = File::open(dir).map_err(fail("open"))?;
    let mut changed = match set_acl(&dir_file, 0o700, PASS, &users.all()) {
        Ok(changed) => changed,
        Err(Errno::OPNOTSUPP) => set_mode(&dir_file, 0o711).map_err(fail("set mode of"))?,
        Err(error) => return Err(fail("set access of")(error.into()).into()),
    };
    let owner = users.writer.unwrap_or(me);
    if disk.metadata().map_err(fail("look at the disk in"))?.uid() != owner {
        fchown(disk, Some(owner), None).map_err(fail("give the disk away in"))?;
        changed = true;
    }
    changed |= match set_acl(disk, 0o600, READ, &users.readers) {
        Ok(changed) => changed,
        Err(Errno::OPNOTSUPP) => return Err(VolumeError::NoAcl),
        Err(error) => return Err(fail("set access of the disk in")(error.into()).into()),
    };
    if let Some(base) = base.filter(|_| !users.all().is_empty()) {
        let mode = base.metadata().map_err(fail("look at the base in"))?.mode() & 0o777;
        changed |= set_mode(base, mode | 0o444).map_err(fail("set mode of the base in"))?;
    }
    Ok(changed)
}

fn set_mode(file: &File, mode: u32) -> std::io::Result<bool> {
    if file.metadata()?.mode() & 0o777 == mode {
        return Ok(false);
    }
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    Ok(true)
}

/// Gives `permission` to `users`, and `mode` to the rest; an empty set needs no list and no filesystem that has them.
fn set_acl(file: &File, mode: u32, permission: u16, users: &BTreeSet<u32>) -> Result<bool, Errno> {
    let mut now = vec![0; 4 + 8 * 256];
    let found = match rustix::fs::fgetxattr(file, ACL, now.as_mut_slice()) {
        Ok(length) => {
            now.truncate(length);
            Some(now)
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP) => None,
        Err(error) => return Err(error),
    };
    let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    if users.is_empty() {
        let removed = found.is_some();
        if removed {
            rustix::fs::fremovexattr(file, ACL)?;
        }
        // While there is a list, the group's bits of the mode are its mask, and they stay when it goes.
        return Ok(set_mode(file, mode).map_err(errno)? || removed);
    }
    let wanted = acl(mode, permission, users);
    if found.as_ref() == Some(&wanted) {
        return Ok(false);
    }
    rustix::fs::fsetxattr(file, ACL, &wanted, XattrFlags::empty())?;
    Ok(true)
}

fn acl(mode: u32, permission: u16, users: &BTreeSet<u32>) -> Vec<u8> {
    let [owner, user, group, mask, other] = TAGS;
    let owner_bits = u16::try_from((mode >> 6) & 7).unwrap_or_default();
    let mut entries = vec![(owner, owner_bits, NO_ID)];
    entries.extend(users.iter().map(|uid| (user, permission, *uid)));
    entries.extend([(group, 0, NO_ID), (mask, permission, NO_ID), (other, 0, NO_ID)]);
    let mut bytes = ACL_VERSION.to_le_bytes().to_vec();
    for (tag, bits, id) in entries {
        bytes.extend_from_slice(&tag.to_le_bytes());
        bytes.extend_from_slice(&bits.to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    bytes
}
