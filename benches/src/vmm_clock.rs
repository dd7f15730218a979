//! When a VMM was really executed: the bench stands in for the QEMU binary, notes the time, and becomes QEMU.

use std::{
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};

/// The name under which the bench is started as the VMM.
const NAME: &str = "timed-qemu";
/// The real one.
pub(crate) const QEMU: &str = "/usr/bin/qemu-system-x86_64";

/// Makes `DIR/timed-qemu`; each start of it as a VMM adds a line to `DIR/execs`.
pub(crate) fn install(dir: &Path) -> std::io::Result<PathBuf> {
    let path = dir.join(NAME);
    std::fs::copy(std::env::current_exe()?, &path)?;
    Ok(path)
}

/// The clock that the notes are in.
pub(crate) fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or_default())
}

/// The times of the starts so far.
pub(crate) fn execs(dir: &Path) -> Vec<Duration> {
    let text = std::fs::read_to_string(dir.join("execs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).map(Duration::from_nanos).collect()
}

/// In the role of the VMM: notes the time and executes QEMU; answers only when that failed. `None` in another role.
#[expect(clippy::disallowed_methods, reason = "becomes another program, starts none")]
pub(crate) fn run_if_vmm() -> Option<ExitCode> {
    let me = PathBuf::from(std::env::args_os().next()?);
    if me.file_name()? != NAME {
        return None;
    }
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    if args.iter().any(|arg| arg == "-blockdev" || arg == "-smp") {
        let at = now().as_nanos();
        let notes =
            std::fs::OpenOptions::new().append(true).create(true).open(me.with_file_name("execs"));
        if let Ok(mut notes) = notes
            && writeln!(notes, "{at}").is_err()
        {
            return Some(ExitCode::FAILURE);
        }
    }
    let error = std::process::Command::new(QEMU).args(args).exec();
    crate::figures::say(&format!("cannot execute {QEMU}: {error}"));
    Some(ExitCode::FAILURE)
}
