//! A terminal whose keys come as they are typed, and that is restored whatever happens.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

/// Raw mode. Dropping it restores what was before.
pub(crate) struct RawMode {
    terminal: OwnedFd,
    before: Termios,
}

impl RawMode {
    pub(crate) fn enter(terminal: BorrowedFd<'_>) -> io::Result<Self> {
        let before = tcgetattr(terminal)?;
        let this = Self { terminal: terminal.try_clone_to_owned()?, before };
        let mut raw = this.before.clone();
        raw.make_raw();
        tcsetattr(terminal, OptionalActions::Now, &raw)?;
        Ok(this)
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        if let Err(error) = tcsetattr(&self.terminal, OptionalActions::Drain, &self.before) {
            super::output::complain(&format!("the terminal is not restored ({error}): type reset"));
        }
    }
}
