//! A process in a systemd scope of its own: a cgroup that the service manager keeps apart from the agent's unit.
//!
//! What ends, limits or kills the unit of the agent (`systemctl stop` and `kill`, an upgrade, its `MemoryMax`) does not
//! reach a process in a scope. The process is started by us and then handed over: `StartTransientUnit` of
//! `org.freedesktop.systemd1(5)`, by a client of exactly that call. Why so: `docs/decisions/0007-vm-scope.md`.

mod bus;
mod wire;

use std::{io, path::Path, time::Duration};

use bus::Manager;
use wire::Writer;

/// How long the manager may take, where the caller allows more.
const LIMIT: Duration = Duration::from_secs(20);
/// The error of a unit name that is in use.
const EXISTS: &str = "org.freedesktop.systemd1.UnitExists";

/// Why a process is not in its scope.
#[derive(Debug, thiserror::Error)]
pub enum ScopeError {
    /// The service manager cannot be spoken to.
    #[error("the service manager does not answer")]
    Manager(#[source] io::Error),
    /// It did not answer in time.
    #[error("the service manager gave no answer within {} s", LIMIT.as_secs())]
    Slow,
    /// It refused.
    #[error("the service manager refused {unit}: {name}: {text}")]
    Refused {
        /// The scope.
        unit: String,
        /// The D-Bus error's name.
        name: String,
        /// Its text.
        text: String,
    },
    /// The job that makes the scope did not succeed, mostly since the process has ended.
    #[error("the job that makes {unit} ended as \"{result}\"")]
    Job {
        /// The scope.
        unit: String,
        /// The job's result (`JobRemoved` in org.freedesktop.systemd1(5)).
        result: String,
    },
}

/// What a scope is to be.
#[derive(Clone, Debug)]
pub struct Scope {
    /// The unit's name, `….scope`.
    pub unit: String,
    /// The slice that it belongs to, `….slice`.
    pub slice: String,
    /// For people.
    pub description: String,
}

/// Whether systemd is the service manager (`sd_booted(3)`).
#[must_use]
pub fn systemd_runs() -> bool {
    std::fs::symlink_metadata("/run/systemd/system").is_ok_and(|found| found.is_dir())
}

/// The systemd unit that a process belongs to: the last part of its cgroup. `None` where it has none, or is gone.
#[must_use]
pub fn unit_of(pid: u32) -> Option<String> {
    let text = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("cgroup"));
    unit_in(&text.ok()?)
}

/// From the text of `/proc/PID/cgroup` (cgroups(7)): the unified hierarchy, or systemd's own in the older layout.
fn unit_in(text: &str) -> Option<String> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let (_, path) = lines.find(|(controllers, path)| {
        *controllers == "name=systemd" || controllers.is_empty() && *path != "/"
    })?;
    path.rsplit('/').next().filter(|unit| !unit.is_empty()).map(str::to_owned)
}

impl Scope {
    /// Sees to it that the process is in the scope. Answers whether it had to be moved.
    ///
    /// The process must be held by the caller (a child that is not reaped, or one whose descriptor is open), since the
    /// manager is told its number.
    ///
    /// # Errors
    /// When it is not in the scope afterwards.
    pub async fn hold(&self, pid: u32) -> Result<bool, ScopeError> {
        if unit_of(pid).as_ref() == Some(&self.unit) {
            return Ok(false);
        }
        tokio::time::timeout(LIMIT, self.make(pid)).await.map_err(|_| ScopeError::Slow)??;
        Ok(true)
    }

    async fn make(&self, pid: u32) -> Result<(), ScopeError> {
        let mut manager = Manager::connect().await.map_err(ScopeError::Manager)?;
        let own = unit_of(std::process::id()).filter(|unit| unit.ends_with(".service"));
        let mut waited = false;
        let job = loop {
            let body = ("ssa(sv)a(sa(sv))", self.arguments(pid, own.as_deref()));
            let answer = manager.ask("StartTransientUnit", body).await;
            match answer.map_err(ScopeError::Manager)? {
                Ok(job) => break job,
                Err((name, _)) if name == EXISTS && !waited => {
                    // That of the process before, which has just ended: the manager is about to see that it is empty.
                    waited = true;
                    let gone = |texts: &[String]| (texts.first()? == &self.unit).then_some(());
                    manager.signal("UnitRemoved", gone).await.map_err(ScopeError::Manager)?;
                }
                Err((name, text)) => {
                    return Err(ScopeError::Refused { unit: self.unit.clone(), name, text });
                }
            }
        };
        let result = |texts: &[String]| match texts {
            [path, _unit, result] if *path == job => Some(result.clone()),
            _ => None,
        };
        let result = manager.signal("JobRemoved", result).await.map_err(ScopeError::Manager)?;
        if result == "done" && unit_of(pid).as_ref() == Some(&self.unit) {
            return Ok(());
        }
        Err(ScopeError::Job { unit: self.unit.clone(), result })
    }

    /// `StartTransientUnit(name, mode, properties, auxiliary units)`.
    fn arguments(&self, pid: u32, own: Option<&str>) -> Vec<u8> {
        fn text(out: &mut Writer, name: &str, value: &str) {
            out.align(8);
            out.text(name);
            out.signature("s");
            out.text(value);
        }
        let mut out = Writer::default();
        out.text(&self.unit);
        out.text("fail");
        out.array(8, |out| {
            text(out, "Description", &self.description);
            text(out, "Slice", &self.slice);
            // A scope that failed (its process was killed) must not keep its name from the next one.
            text(out, "CollectMode", "inactive-or-failed");
            out.align(8);
            out.text("PIDs");
            out.signature("au");
            out.array(4, |out| out.number(pid));
            if let Some(own) = own {
                // When the host shuts down, the agent ends before its processes do, and so starts none of them again.
                out.align(8);
                out.text("Before");
                out.signature("as");
                out.array(4, |out| out.text(own));
            }
        });
        out.array(8, |_| {});
        out.into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_is_the_last_part_of_the_cgroup_in_either_layout() {
        let unified = "0::/bcd.slice/bcd-vms.slice/bcd-vm-1.scope\n";
        assert_eq!(unit_in(unified).as_deref(), Some("bcd-vm-1.scope"));
        let older = "12:pids:/user.slice\n1:name=systemd:/system.slice/a.service\n0::/\n";
        assert_eq!(unit_in(older).as_deref(), Some("a.service"));
        for none in ["0::/\n", "", "garbage", "3:cpu:/x\n"] {
            assert_eq!(unit_in(none), None, "{none}");
        }
    }
}
