//! Finds a process again without trusting a pid.
//!
//! A pid is reused, so a pid alone names nothing. An [`Identity`] is the pid, the process's start time and the boot it
//! was started in; a [`PidFd`] is a descriptor that stays with the one process it was opened for. A signal is sent through
//! the descriptor only, after the identity was checked with the descriptor open.

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    str::FromStr,
    time::Duration,
};

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};

/// What identifies a process for as long as the host runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pid: i32,
    /// Clock ticks since boot (`/proc/PID/stat`, field 22 of proc(5)).
    start_ticks: u64,
    /// `/proc/sys/kernel/random/boot_id` of the boot in which it started.
    boot_id: String,
}

impl Identity {
    /// The identity of a process that runs now; `None` when there is none of that pid (a zombie counts as none).
    #[must_use]
    pub fn of(pid: u32) -> Option<Self> {
        let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0)?;
        Some(Self { pid, start_ticks: start_ticks(pid)?, boot_id: boot_id()? })
    }

    /// The pid, for people; never to be signalled.
    #[must_use]
    pub const fn pid(&self) -> u32 {
        self.pid.unsigned_abs()
    }

    /// Opens the process if it is still the same one; `None` when it is gone.
    ///
    /// # Errors
    /// When the kernel refuses the descriptor for another reason.
    pub fn open(&self) -> io::Result<Option<PidFd>> {
        if boot_id().as_ref() != Some(&self.boot_id) {
            return Ok(None);
        }
        let Some(pid) = Pid::from_raw(self.pid) else { return Ok(None) };
        let fd = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Ok(fd) => fd,
            Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // Checked with the descriptor open: what it names can no longer change.
        if start_ticks(self.pid) == Some(self.start_ticks) { Ok(Some(PidFd(fd))) } else { Ok(None) }
    }
}

/// `BOOT_ID PID START_TICKS`, the form in which a run directory keeps it.
impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.boot_id, self.pid, self.start_ticks)
    }
}

/// Why a text is no identity.
#[derive(Debug, thiserror::Error)]
#[error("a process identity is BOOT_ID PID START_TICKS")]
pub struct ParseIdentityError;

impl FromStr for Identity {
    type Err = ParseIdentityError;

    fn from_str(text: &str) -> Result<Self, ParseIdentityError> {
        let mut parts = text.trim_end_matches('\n').split(' ');
        let (Some(boot_id), Some(pid), Some(start), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(ParseIdentityError);
        };
        let pid = pid.parse().ok().filter(|pid| *pid > 1).ok_or(ParseIdentityError)?;
        let start_ticks = start.parse().map_err(|_| ParseIdentityError)?;
        if boot_id.len() != 36 {
            return Err(ParseIdentityError);
        }
        Ok(Self { pid, start_ticks, boot_id: boot_id.to_owned() })
    }
}

/// The kernel's identifier of this boot.
#[must_use]
pub fn boot_id() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned())
}

/// The start time of a process that runs; `None` for an absent one and for a zombie.
fn start_ticks(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command may hold spaces and parentheses: the fields begin after the last one.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ');
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    // `state` is field 3, `starttime` field 22.
    fields.nth(18)?.parse().ok()
}

/// A descriptor of one process.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With this exit code. Only a child's is known.
    Code(i32),
    /// By this signal. Only a child's is known.
    Signal(i32),
    /// It is gone; it was no child of ours.
    Unseen,
}

impl PidFd {
    /// Sends a signal to the process. Gone already: nothing.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.0, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until the process has ended, and reaps it when it is a child of ours. Cancel-safe.
    ///
    /// # Errors
    /// When the descriptor cannot be waited on.
    pub async fn ended(&self) -> io::Result<Ended> {
        // A pidfd is readable once the process has ended, zombie or not (pidfd_open(2)).
        crate::readiness::readable(self.0.as_fd()).await?;
        Ok(self.reap())
    }

    /// Whether the process has ended, without waiting.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let mut polled = [rustix::event::PollFd::new(&self.0, rustix::event::PollFlags::IN)];
        matches!(rustix::event::poll(&mut polled, Some(&rustix::event::Timespec::default())), Ok(1))
    }

    /// As [`PidFd::ended`], at most `limit`; `None` when it still runs then.
    ///
    /// # Errors
    /// When the descriptor cannot be waited on.
    pub async fn ended_within(&self, limit: Duration) -> io::Result<Option<Ended>> {
        match tokio::time::timeout(limit, self.ended()).await {
            Ok(ended) => ended.map(Some),
            Err(_) => Ok(None),
        }
    }

    fn reap(&self) -> Ended {
        match waitid(WaitId::PidFd(self.0.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Ended::Code(code),
                (None, Some(signal)) => Ended::Signal(signal),
                (None, None) => Ended::Unseen,
            },
            // ECHILD: no child of ours, or somebody else reaped it.
            Ok(None) | Err(_) => Ended::Unseen,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_survives_its_text_and_names_this_process() {
        let me = Identity::of(std::process::id()).unwrap();
        let again: Identity = me.to_string().parse().unwrap();
        assert_eq!(me, again);
        assert!(again.open().unwrap().is_some_and(|fd| !fd.has_ended()));
    }

    #[test]
    fn another_start_time_or_boot_is_another_process() {
        let me = Identity::of(std::process::id()).unwrap();
        let other = Identity { start_ticks: me.start_ticks + 1, ..me.clone() };
        assert!(other.open().unwrap().is_none());
        let before = Identity { boot_id: "00000000-0000-0000-0000-000000000000".to_owned(), ..me };
        assert!(before.open().unwrap().is_none());
    }

    #[test]
    fn text_that_is_no_identity_is_refused() {
        let boot = boot_id().unwrap();
        for text in [
            "",
            "abc",
            "-1",
            "0",
            &format!("{boot} 1 5"),
            &format!("{boot} 0 5"),
            &format!("{boot} -1 5"),
            "x 5 5",
        ] {
            assert!(text.parse::<Identity>().is_err(), "{text:?}");
        }
    }
}
