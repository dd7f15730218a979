//! A VMM's place in the host's tree of cgroups: a scope of its own, where systemd runs.

use drivers_api::{Error, ErrorKind, Result, VmId};
use host::scope::{self, Scope, ScopeError};

use crate::{config::QemuConfig, error::label};

/// Whether a text is the name of a slice that systemd takes (`systemd.unit(5)`, `systemd.slice(5)`).
#[must_use]
pub fn is_slice(name: &str) -> bool {
    let Some(stem) = name.strip_suffix(".slice") else { return false };
    // A hyphen separates levels: none may be empty. 255 bytes is the most of any unit's name.
    let level = |part: &str| {
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    name.len() <= 255 && stem.split('-').all(level)
}

/// Says once where VMMs will be; refuses a name that cannot work.
pub(crate) fn check(config: &QemuConfig) -> Result<()> {
    let Some(slice) = &config.slice else { return Ok(()) };
    if !is_slice(slice) {
        return Err(Error::invalid("slice", "wanted the name of a systemd slice: \"vms.slice\""));
    }
    if scope::systemd_runs() {
        tracing::info!(%slice, "each VM runs in a systemd scope of its own");
    } else {
        tracing::info!(
            "no systemd: VMs outlive the agent as sessions of their own, without a cgroup each"
        );
    }
    Ok(())
}

/// Sees to it that a VMM is in its scope.
pub(crate) async fn confine(config: &QemuConfig, vm: VmId, pid: u32) -> Result<()> {
    let Some(slice) = config.slice.clone().filter(|_| scope::systemd_runs()) else { return Ok(()) };
    let unit = format!("bcd-vm-{vm}.scope");
    let scope = Scope { unit, slice, description: format!("virtual machine {vm}") };
    match scope.hold(pid).await {
        Ok(moved) => {
            if moved {
                tracing::debug!(%vm, pid, unit = scope.unit, "the VMM is in its scope");
            }
            Ok(())
        }
        Err(error) => Err(failed(vm, error)),
    }
}

fn failed(vm: VmId, error: ScopeError) -> Error {
    let remedy = match error {
        ScopeError::Manager(_) | ScopeError::Slow => "see: systemctl status; journalctl -b -u dbus",
        ScopeError::Refused { .. } | ScopeError::Job { .. } => "see: journalctl -b _PID=1",
    };
    let reason = "its VMM gets no systemd scope, and so is not let run";
    Error::new(ErrorKind::Unavailable, "start", label(vm), reason)
        .with_remedy(remedy)
        .with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_systemd_takes_are_slices() {
        for good in ["a.slice", "bcd-vms.slice", "a_1-b.slice"] {
            assert!(is_slice(good), "{good}");
        }
        let long = format!("{}.slice", "a".repeat(250));
        for bad in [
            "",
            ".slice",
            "-.slice",
            "a-.slice",
            "a--b.slice",
            "a/b.slice",
            "a.scope",
            "a b.slice",
            &long,
        ] {
            assert!(!is_slice(bad), "{bad}");
        }
    }

    #[tokio::test]
    async fn without_a_slice_nobody_is_asked_for_a_scope() {
        let vm: VmId = "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b".parse().unwrap();
        let node = "7d2f8f0e-6f0d-4a53-9d7c-0a7b8c1d2e3f".parse().unwrap();
        let before = scope::unit_of(std::process::id());
        confine(&QemuConfig::new(node, "h", "/s", "/r"), vm, std::process::id()).await.unwrap();
        assert_eq!(scope::unit_of(std::process::id()), before);
    }
}
