//! The host's forwarding switches, which nat networks need.
//!
//! What a switch was is written down before it is changed, and put back when the last network that needs it goes, unless
//! somebody set it to something else meanwhile.

use std::{
    io,
    path::{Path, PathBuf},
};

use host::files;
use serde::{Deserialize, Serialize};

/// A switch that cannot be set.
#[derive(Debug, thiserror::Error)]
#[error("the kernel setting {name} cannot be set to {value}")]
pub(crate) struct SysctlError {
    pub(crate) name: String,
    pub(crate) value: String,
    #[source]
    pub(crate) source: io::Error,
}

/// A switch with the value that is wanted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Wanted {
    /// Its path under `/proc/sys`.
    name: String,
    value: String,
}

/// A switch that we changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Changed {
    name: String,
    was: String,
    set: String,
}

fn path(name: &str) -> PathBuf {
    Path::new("/proc/sys").join(name)
}

fn read(name: &str) -> io::Result<String> {
    Ok(std::fs::read_to_string(path(name))?.trim().to_owned())
}

fn write(name: &str, value: &str) -> Result<(), SysctlError> {
    std::fs::write(path(name), value).map_err(|source| SysctlError {
        name: name.replace('/', "."),
        value: value.to_owned(),
        source,
    })
}

/// The switches that are not as nat networks need them. Blocks.
///
/// With IPv6 forwarding on, a link with `accept_ra` 1 ignores router advertisements, so a host that gets its default route
/// from them would lose it: those links are set to 2 first (`Documentation/networking/ip-sysctl.rst`).
pub(crate) fn missing(v4: bool, v6: bool) -> io::Result<Vec<Wanted>> {
    let mut wanted = Vec::new();
    let want = |name: &str, value: &str| Wanted { name: name.to_owned(), value: value.to_owned() };
    if v4 && read("net/ipv4/ip_forward")? != "1" {
        wanted.push(want("net/ipv4/ip_forward", "1"));
    }
    if v6 && read("net/ipv6/conf/all/forwarding")? != "1" {
        for entry in std::fs::read_dir("/proc/sys/net/ipv6/conf")? {
            let link = entry?.file_name().to_string_lossy().into_owned();
            let name = format!("net/ipv6/conf/{link}/accept_ra");
            // A link that is gone meanwhile needs nothing.
            if link != "all" && link != "lo" && read(&name).is_ok_and(|value| value == "1") {
                wanted.push(want(&name, "2"));
            }
        }
        wanted.push(want("net/ipv6/conf/all/forwarding", "1"));
    }
    Ok(wanted)
}

impl Wanted {
    /// For people.
    pub(crate) fn describe(&self) -> String {
        format!("{} is not {}", self.name.replace('/', "."), self.value)
    }
}

/// Sets switches, after writing down in `notes` what they were. Blocks.
pub(crate) fn set(notes: &Path, wanted: &[Wanted]) -> Result<(), SysctlError> {
    let mut changed = load(notes);
    for switch in wanted {
        let was = read(&switch.name).map_err(fail(switch))?;
        if !changed.iter().any(|known| known.name == switch.name) {
            changed.push(Changed { name: switch.name.clone(), was, set: switch.value.clone() });
        }
    }
    save(notes, &changed)?;
    for switch in wanted {
        write(&switch.name, &switch.value)?;
    }
    Ok(())
}

/// Puts switches back. Those whose value somebody else changed since are left alone. Blocks.
pub(crate) fn restore(notes: &Path) -> Result<bool, SysctlError> {
    let changed = load(notes);
    for switch in changed.iter().rev() {
        // A link whose switch we set may be gone, with its switch.
        if read(&switch.name).is_ok_and(|value| value == switch.set) {
            write(&switch.name, &switch.was)?;
        }
    }
    files::remove_file(notes).map_err(|error| SysctlError {
        name: notes.display().to_string(),
        value: "nothing".to_owned(),
        source: error.source,
    })
}

/// Whether there is something to put back. Blocks.
pub(crate) fn has_notes(notes: &Path) -> bool {
    notes.exists()
}

/// Notes that are not readable are none: what the switches were is then not known, and they stay.
fn load(notes: &Path) -> Vec<Changed> {
    let bytes = match files::read_bounded(notes, 1 << 20) {
        Ok(bytes) => bytes.unwrap_or_default(),
        Err(error) => {
            tracing::warn!(%error, "the former kernel settings are not known and will stay as they are");
            Vec::new()
        }
    };
    serde_json::from_slice(&bytes).unwrap_or_default()
}

fn save(notes: &Path, changed: &[Changed]) -> Result<(), SysctlError> {
    let fail = |source| SysctlError {
        name: notes.display().to_string(),
        value: "the former values".to_owned(),
        source,
    };
    let bytes =
        serde_json::to_vec_pretty(changed).map_err(|error| fail(io::Error::other(error)))?;
    files::write_atomic(notes, &bytes).map_err(|error| fail(error.source))
}

fn fail(switch: &Wanted) -> impl FnOnce(io::Error) -> SysctlError + '_ {
    move |source| SysctlError {
        name: switch.name.replace('/', "."),
        value: switch.value.clone(),
        source,
    }
}

/// Sets a switch of one of our own links, where the kernel has it. Blocks.
pub(crate) fn set_own(name: &str, value: &str) -> Result<(), SysctlError> {
    match write(name, value) {
        Err(error) if error.source.kind() == io::ErrorKind::NotFound => Ok(()),
        answer => answer,
    }
}

/// Whether every bridge of the host passes its frames to the inet hooks. Blocks.
pub(crate) fn bridges_call_iptables() -> bool {
    ["net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"]
        .iter()
        .all(|name| read(name).is_ok_and(|value| value == "1"))
}
