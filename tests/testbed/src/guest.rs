//! A guest of 8 KiB for QEMU: boots in a tenth of a second, speaks on its serial port, obeys its power button and lets go of
//! devices. The source, with its modes, is `guest/tiny.s`; it is built here with `as` and `ld`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::netns::tool;

const SOURCE: &str = include_str!("../guest/tiny.s");
const SCRIPT: &str = include_str!("../guest/tiny.ld");

/// Builds the guest's kernel, `tiny.elf`, in `dir` and answers its path.
///
/// Its command line chooses what it does: `mode=i` idles and obeys, `mode=n` ignores the power button, `mode=e` never lets
/// go of a device, `mode=p` powers off at once, `mode=r` resets at once, `mode=s` spins; `tick` writes a line a second.
///
/// # Errors
/// When the sources cannot be written.
///
/// # Panics
/// When `as` or `ld` (the package binutils) is missing or fails.
pub fn tiny(dir: &Path) -> io::Result<PathBuf> {
    fs::write(dir.join("tiny.s"), SOURCE)?;
    fs::write(dir.join("tiny.ld"), SCRIPT)?;
    let path = |name: &str| dir.join(name).to_string_lossy().into_owned();
    let (source, object, elf) = (path("tiny.s"), path("tiny.o"), path("tiny.elf"));
    tool(&["as", "--64", "-o", &object, &source]);
    tool(&[
        "ld",
        "-m",
        "elf_x86_64",
        "-nostdlib",
        "--no-warn-rwx-segments",
        "-T",
        &path("tiny.ld"),
        "-o",
        &elf,
        &object,
    ]);
    Ok(elf.into())
}

/// The QEMU processes that have a file below `dir` open. A test asks for its own directory, so they are its own.
#[must_use]
pub fn vmms_below(dir: &Path) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids =
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| is_vmm_below(*pid, dir)).collect()
}

fn is_vmm_below(pid: u32, dir: &Path) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let program = line.split(|byte| *byte == 0).next().unwrap_or_default();
    if !program.windows(11).any(|part| part == b"qemu-system") {
        return false;
    }
    let Ok(fds) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    fds.flatten().any(|fd| fs::read_link(fd.path()).is_ok_and(|file| file.starts_with(dir)))
}

/// Kills the QEMU processes that have a file below `dir` open; answers how many there were.
pub fn end_vmms_below(dir: &Path) -> usize {
    let mut count = 0;
    for pid in vmms_below(dir) {
        let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { continue };
        // Looked at again with the descriptor open: the number may be another process's by now.
        if let Ok(fd) = pidfd_open(raw, PidfdFlags::empty())
            && is_vmm_below(pid, dir)
            && pidfd_send_signal(&fd, Signal::KILL).is_ok()
        {
            count += 1;
        }
    }
    count
}
