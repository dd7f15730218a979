//! Named points at which tests kill the process or inject an error.
//!
//! A driver names a point after each effect that a crash could leave behind: `fault::point("qemu.create.spec-written")?`.
//! Without the feature `fault-points` the call is a constant `Ok`. With it, the environment variable `BCD_FAULT` says what
//! happens: `NAME=kill` ends the process by SIGKILL when the point is reached, `NAME=error` makes it fail once with
//! [`ErrorKind::Internal`](drivers_api::ErrorKind::Internal), `NAME@N=…` acts at the Nth time. `BCD_FAULT_TRACE` names a
//! file to which each reached point is appended, so that a matrix of all points can be run.

#[cfg(not(feature = "fault-points"))]
use drivers_api::Result;

/// Passes a point.
///
/// # Errors
/// Never in a release build.
#[cfg(not(feature = "fault-points"))]
#[inline(always)]
pub const fn point(_name: &'static str) -> Result<()> {
    Ok(())
}

#[cfg(feature = "fault-points")]
pub use armed::{arm, disarm, point};

#[cfg(feature = "fault-points")]
mod armed {
    use std::{
        io::Write,
        sync::{Mutex, OnceLock, PoisonError},
    };

    use drivers_api::{Error, ErrorKind, Result};

    struct Plan {
        name: String,
        action: String,
        /// How many times the point is still passed before it acts; `None` once it has acted.
        left: Option<u64>,
    }

    fn plan() -> &'static Mutex<Option<Plan>> {
        static PLAN: OnceLock<Mutex<Option<Plan>>> = OnceLock::new();
        PLAN.get_or_init(|| {
            Mutex::new(std::env::var("BCD_FAULT").ok().and_then(|text| parse(&text)))
        })
    }

    fn parse(text: &str) -> Option<Plan> {
        let (name, action) = text.split_once('=')?;
        let (name, nth) =
            name.split_once('@').map_or((name, 1), |(name, nth)| (name, nth.parse().unwrap_or(1)));
        Some(Plan { name: name.to_owned(), action: action.to_owned(), left: Some(nth) })
    }

    /// Arms a point in this process, as `BCD_FAULT` does from outside.
    pub fn arm(text: &str) {
        *plan().lock().unwrap_or_else(PoisonError::into_inner) = parse(text);
    }

    /// Takes back what is armed.
    pub fn disarm() {
        *plan().lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Passes a point.
    ///
    /// # Errors
    /// When the point is armed with `error`.
    pub fn point(name: &'static str) -> Result<()> {
        trace(name);
        let action = {
            let mut plan = plan().lock().unwrap_or_else(PoisonError::into_inner);
            let Some(plan) = plan.as_mut().filter(|plan| plan.name == name) else { return Ok(()) };
            match plan.left.as_mut() {
                None => return Ok(()),
                Some(1) => {
                    plan.left = None;
                    plan.action.clone()
                }
                Some(left) => {
                    *left -= 1;
                    return Ok(());
                }
            }
        };
        match action.as_str() {
            "kill" => kill_now(),
            _ => Err(Error::new(ErrorKind::Internal, "pass", name, "an armed fault point")),
        }
    }

    fn trace(name: &str) {
        if let Some(path) = std::env::var_os("BCD_FAULT_TRACE") {
            let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
            if let Ok(mut file) = file {
                drop(writeln!(file, "{name}"));
            }
        }
    }

    fn kill_now() -> ! {
        if let Err(error) =
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
        {
            tracing::error!(%error, "a fault point could not kill the process");
        }
        std::process::abort()
    }
}
