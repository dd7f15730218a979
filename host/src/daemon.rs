//! Starts a process that outlives the agent.
//!
//! Such a process has its own session, its standard streams on files or `/dev/null`, no descriptor of the agent's but those
//! that it is given by number, and no parent-death signal.

use std::{
    ffi::OsString,
    fs::File,
    io,
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::Stdio,
};

use crate::process::{Identity, PidFd};

/// A process about to be started.
#[derive(Debug)]
pub struct Daemon {
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    fds: Vec<(OwnedFd, RawFd)>,
    user: Option<(u32, u32)>,
    log: Option<File>,
}

/// A started process: what to keep of it, and what to hold it by.
#[derive(Debug)]
pub struct Started {
    /// What identifies it in a run directory.
    pub identity: Identity,
    /// The descriptor that names it.
    pub pidfd: PidFd,
}

impl Daemon {
    /// The process `program` without arguments.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            fds: Vec::new(),
            user: None,
            log: None,
        }
    }

    /// With one more argument.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// With more arguments.
    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// With one more variable beside `PATH` and `LC_ALL`.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// With a descriptor under the next free number from 3 on; answers the number.
    pub fn pass(&mut self, fd: OwnedFd) -> RawFd {
        let number = 3 + RawFd::try_from(self.fds.len()).unwrap_or(RawFd::MAX - 3);
        self.fds.push((fd, number));
        number
    }

    /// As another user and group, without supplementary groups.
    #[must_use]
    pub fn user(mut self, uid: u32, gid: u32) -> Self {
        self.user = Some((uid, gid));
        self
    }

    /// With standard output and error on this file.
    #[must_use]
    pub fn log(mut self, file: File) -> Self {
        self.log = Some(file);
        self
    }

    /// Starts it. Returns after the exec.
    ///
    /// # Errors
    /// When it cannot be started; nothing runs then.
    #[expect(
        clippy::disallowed_methods,
        reason = "this is the place that starts what outlives the agent"
    )]
    pub fn start(mut self) -> io::Result<Started> {
        tracing::debug!(program = %self.program.display(), args = ?self.args, "start");
        let mut command = std::process::Command::new(&self.program);
        command
            .args(&self.args)
            .env_clear()
            .env("PATH", crate::run::FIXED_PATH)
            .env("LC_ALL", "C.UTF-8")
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .current_dir("/")
            .stdin(Stdio::null());
        match self.log.take() {
            Some(log) => command.stdout(log.try_clone()?).stderr(log),
            None => command.stdout(Stdio::null()).stderr(Stdio::null()),
        };
        if let Some((uid, gid)) = self.user {
            // The standard library drops the supplementary groups with the uid.
            command.uid(uid).gid(gid);
        }
        // Above every target number first, so that no dup2 in the child closes a source that is still needed.
        let high = 3 + RawFd::try_from(self.fds.len()).unwrap_or(RawFd::MAX - 3);
        let mut sources = Vec::with_capacity(self.fds.len());
        for (fd, number) in &self.fds {
            sources.push((rustix::io::fcntl_dupfd_cloexec(fd, high)?, *number));
        }
        let numbers = sources.iter().map(|(fd, number)| (fd.as_raw_fd(), *number)).collect();
        in_child::prepare(&mut command, numbers);
        let mut child = command.spawn()?;
        unprotect(child.id());
        let held = match Identity::of(child.id()) {
            Some(identity) => identity.open()?.map(|pidfd| Started { identity, pidfd }),
            None => None,
        };
        held.map_or_else(
            || Err(io::Error::other(format!("the process ended at once: {:?}", child.wait()?))),
            Ok,
        )
    }
}

/// A service manager may protect the agent from the killer of the memory-starved. What the agent starts is no more worth than
/// other processes, or the killer would take all others first.
fn unprotect(pid: u32) {
    let path = format!("/proc/{pid}/oom_score_adj");
    let protected = std::fs::read_to_string(&path).is_ok_and(|text| text.starts_with('-'));
    if protected && let Err(error) = std::fs::write(&path, "0") {
        tracing::warn!(pid, %error, "a started process keeps the agent's oom_score_adj");
    }
}

/// The only code that runs between fork and exec.
#[expect(
    unsafe_code,
    reason = "pre_exec is the only way to set a session and to place descriptors by number"
)]
mod in_child {
    use std::{io, os::fd::RawFd, os::unix::process::CommandExt, process::Command};

    /// Has the child start a session and take each descriptor under its number.
    pub(super) fn prepare(command: &mut Command, fds: Vec<(RawFd, RawFd)>) {
        let place = move || {
            // SAFETY: setsid takes no argument and is async-signal-safe (signal-safety(7)).
            if unsafe { libc::setsid() } == -1 {
                return Err(io::Error::last_os_error());
            }
            for (source, number) in &fds {
                // SAFETY: both are plain numbers; dup2 is async-signal-safe and clears close-on-exec on the copy.
                if unsafe { libc::dup2(*source, *number) } == -1 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: `place` runs in the forked child: it calls async-signal-safe functions only and allocates nothing
        // (`last_os_error` reads errno, and the vector was made before the fork).
        unsafe { command.pre_exec(place) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    #[tokio::test]
    async fn a_daemon_gets_its_descriptors_by_number_and_is_waited_for_by_descriptor() {
        let mut first = tempfile::tempfile().unwrap();
        let mut log = tempfile::tempfile().unwrap();
        first.write_all(b"from three").unwrap();
        first.rewind().unwrap();
        let mut daemon =
            Daemon::new("sh").arg("-c").arg("cat <&3; exit 7").log(log.try_clone().unwrap());
        assert_eq!(daemon.pass(first.into()), 3);
        let started = daemon.start().unwrap();
        assert_eq!(started.pidfd.ended().await.unwrap(), crate::process::Ended::Code(7));
        let mut text = String::new();
        log.rewind().unwrap();
        log.read_to_string(&mut text).unwrap();
        assert_eq!(text, "from three");
        assert!(started.identity.open().unwrap().is_none(), "a reaped process is gone");
    }

    #[test]
    fn a_program_that_is_not_there_starts_nothing() {
        assert!(Daemon::new("/nonexistent/program").start().is_err());
    }
}
