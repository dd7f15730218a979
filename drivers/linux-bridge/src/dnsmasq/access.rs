//! As which user dnsmasq runs, and how it may read its files.
//!
//! dnsmasq starts as root, binds its ports, and becomes its user with the network capabilities alone. Its files are then
//! readable for that user's group, and the run directory lets pass who knows the names in it. Where a parent of the run
//! directory lets nobody pass, dnsmasq stays root.

use std::{
    fs::{self, Permissions},
    io::Write,
    os::unix::fs::{MetadataExt, PermissionsExt, fchown},
    path::Path,
};

use host::files::{self, FileError};

/// A user of the host.
#[derive(Clone, Debug)]
pub(super) struct User {
    pub(super) name: String,
    pub(super) group: String,
    uid: u32,
    gid: u32,
}

/// The user, if there is one of this name and it can reach the run directory. Makes the run directory passable. Blocks.
pub(super) fn usable_user(name: &str, run_dir: &Path) -> Result<Option<User>, FileError> {
    let passwd = files::read_bounded(Path::new("/etc/passwd"), 16 << 20)?.unwrap_or_default();
    let group = files::read_bounded(Path::new("/etc/group"), 16 << 20)?.unwrap_or_default();
    let (passwd, group) = (String::from_utf8_lossy(&passwd), String::from_utf8_lossy(&group));
    let Some(user) = find(&passwd, &group, name) else {
        tracing::info!(name, "there is no such user: dnsmasq will run as root");
        return Ok(None);
    };
    if run_dir.parent().is_some_and(|parent| !can_pass(parent, &user)) {
        tracing::info!(name, run_dir = %run_dir.display(), "the user cannot pass the parents of the run directory: dnsmasq will run as root");
        return Ok(None);
    }
    set_mode(run_dir, 0o711)?;
    Ok(Some(user))
}

/// The user of a name in passwd(5), with the name of its group in group(5): dnsmasq takes another group if it is told none.
fn find(passwd: &str, groups: &str, name: &str) -> Option<User> {
    let group_of = |gid: u32| {
        groups.lines().find_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            (fields.nth(1)?.parse() == Ok(gid)).then(|| name.to_owned())
        })
    };
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next() != Some(name) {
            return None;
        }
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        let group = group_of(gid)?;
        (uid != 0).then(|| User { name: name.to_owned(), group, uid, gid })
    })
}

fn can_pass(dir: &Path, user: &User) -> bool {
    dir.ancestors().all(|dir| {
        fs::metadata(dir).is_ok_and(|found| {
            let bit = if found.uid() == user.uid {
                0o100
            } else if found.gid() == user.gid {
                0o010
            } else {
                0o001
            };
            found.mode() & bit != 0
        })
    })
}

fn set_mode(path: &Path, mode: u32) -> Result<(), FileError> {
    fs::set_permissions(path, Permissions::from_mode(mode))
        .map_err(FileError::of("set the mode of", path))
}

/// Makes a directory that the user may read, or root alone where there is none. Blocks.
pub(super) fn dir_for(path: &Path, user: Option<&User>) -> Result<(), FileError> {
    match fs::create_dir(path) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && path.is_dir() => {}
        Err(error) => return Err(FileError::of("make directory", path)(error)),
    }
    match user {
        Some(user) => {
            std::os::unix::fs::lchown(path, Some(0), Some(user.gid))
                .map_err(FileError::of("give to the group", path))?;
            set_mode(path, 0o750)
        }
        None => set_mode(path, 0o700),
    }
}

/// Replaces a file that the user may read. Not synced: what is here is made anew from the records. Blocks.
pub(super) fn write_for(path: &Path, bytes: &[u8], user: Option<&User>) -> Result<(), FileError> {
    let temporary = files::temporary_beside(path);
    let write = || -> Result<(), FileError> {
        let mut file = files::create_new(&temporary)?;
        let fail = || FileError::of("write", &temporary);
        file.write_all(bytes).map_err(fail())?;
        if let Some(user) = user {
            fchown(&file, Some(0), Some(user.gid)).map_err(fail())?;
            file.set_permissions(Permissions::from_mode(0o640)).map_err(fail())?;
        }
        fs::rename(&temporary, path).map_err(FileError::of("rename onto", path))
    };
    let written = write();
    if written.is_err() {
        // Best effort: the name is ours alone and the directory is removed with the network.
        drop(fs::remove_file(&temporary));
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_its_whole_name_and_root_is_none() {
        let passwd = "root:x:0:0::/root:/bin/sh\ndnsmasq:x:999:65534:d:/var:/usr/sbin/nologin\n";
        let groups = "root:x:0:\nnogroup:x:65534:\n";
        let user = find(passwd, groups, "dnsmasq").unwrap();
        assert_eq!((user.uid, user.gid, user.group.as_str()), (999, 65534, "nogroup"));
        assert!(find(passwd, "root:x:0:\n", "dnsmasq").is_none(), "its group has no name");
        for name in ["dns", "root", "", "nobody"] {
            assert!(find(passwd, groups, name).is_none(), "{name}");
        }
    }
}
