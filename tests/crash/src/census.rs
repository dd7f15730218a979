//! What is on a node at a moment: links, rules, processes, files. Two runs that should end alike are compared by it.
//!
//! Everything that differs between two runs of the same story is taken out or named alike: the node's directory, the
//! registry's port, descriptor numbers, handles and counters. What is left is compared line by line.

use std::{collections::BTreeSet, os::unix::fs::MetadataExt, path::Path};

use serde_json::Value;
use testbed::netns::{Netns, tool};

use crate::failure::{During, Result};

/// The lines of a node. A line that stands twice has its number at the end, so that a double is a difference.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Census(BTreeSet<String>);

/// What a census leaves out beside the stable things.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    /// Everything: what two nodes in the same state have in common.
    Whole,
    /// Nothing but what a deletion must take away: directories that are empty stay.
    Left,
}

impl Census {
    /// Takes the census of the calling thread's namespace and of the node below `dir`.
    pub(crate) fn take(dir: &Path, registry: &str, detail: Detail) -> Result<Self> {
        let mut census = Self::default();
        census.links()?;
        census.rules()?;
        census.processes(dir, registry)?;
        census.settings();
        for below in ["state", "run", "volumes", "images"] {
            census.files(dir, &dir.join(below), detail)?;
        }
        Ok(census)
    }

    fn add(&mut self, line: &str) {
        let mut number = 2;
        let mut unique = line.to_owned();
        while !self.0.insert(unique) {
            unique = format!("{line} ({number})");
            number += 1;
        }
    }

    /// What is here and not in `wanted` (`+`), and what is missing (`-`).
    pub(crate) fn against(&self, wanted: &Self) -> Vec<String> {
        let more = self.0.difference(&wanted.0).map(|line| format!("+ {line}"));
        let less = wanted.0.difference(&self.0).map(|line| format!("- {line}"));
        more.chain(less).collect()
    }

    fn links(&mut self) -> Result<()> {
        let text = tool(&["ip", "-j", "-d", "address", "show"]);
        let links: Vec<Value> = serde_json::from_str(&text).during("read the links")?;
        for link in links {
            let text = |path: &str| {
                link.pointer(path).map_or_else(|| "-".to_owned(), |value| value.to_string())
            };
            let up = text("/flags").contains("\"UP\"");
            let mut addresses: Vec<String> = link
                .get("addr_info")
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
                .map(|one| format!("{}/{}", field(one, "local"), field(one, "prefixlen")))
                .collect();
            addresses.sort();
            self.add(&format!(
                "link {} kind {} master {} alias {} names {} mtu {} up {up} addresses {}",
                text("/ifname"),
                text("/linkinfo/info_kind"),
                text("/master"),
                text("/ifalias"),
                text("/altnames"),
                text("/mtu"),
                addresses.join(",")
            ));
        }
        Ok(())
    }

    fn rules(&mut self) -> Result<()> {
        let text = tool(&["nft", "-j", "list", "ruleset"]);
        let mut ruleset: Value = serde_json::from_str(&text).during("read the rules")?;
        stable(&mut ruleset);
        for object in ruleset.get("nftables").and_then(Value::as_array).into_iter().flatten() {
            if object.get("metainfo").is_none() {
                self.add(&format!("rule {object}"));
            }
        }
        Ok(())
    }

    fn processes(&mut self, dir: &Path, registry: &str) -> Result<()> {
        let ours = Netns::current().and_then(|ns| ns.pids()).during("list processes")?;
        for pid in ours {
            let proc = Path::new("/proc").join(pid.to_string());
            // Gone meanwhile: then there is no line.
            let Ok(comm) = std::fs::read_to_string(proc.join("comm")) else { continue };
            if matches!(comm.trim(), "docker-registry" | "setpriv" | "bcd-crash") {
                continue;
            }
            let line = std::fs::read(proc.join("cmdline")).unwrap_or_default();
            let words: Vec<String> = line
                .split(|byte| *byte == 0)
                .map(|word| named_alike(&String::from_utf8_lossy(word), dir, registry))
                .collect();
            self.add(&format!("process {} {}", comm.trim(), words.join(" ").trim_end()));
        }
        Ok(())
    }

    fn settings(&mut self) {
        for name in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            // `/proc/sys/net` is the calling thread's.
            let value = std::fs::read_to_string(Path::new("/proc/sys/net").join(name));
            self.add(&format!("setting {name} {}", value.unwrap_or_default().trim()));
        }
    }

    fn files(&mut self, root: &Path, at: &Path, detail: Detail) -> Result<bool> {
        let Ok(entries) = std::fs::read_dir(at) else { return Ok(false) };
        let mut any = false;
        for entry in entries {
            let path = entry.during("read a directory")?.path();
            let mut below = path.strip_prefix(root).unwrap_or(&path).display().to_string();
            if is_cached(&below, detail) {
                continue;
            }
            if below.starts_with("images/refs/") {
                // Named by a hash of the reference, which has the registry's port.
                let extension = path.extension().unwrap_or_default().display();
                below = format!("images/refs/REFERENCE.{extension}");
            }
            if below.starts_with("volumes/bases/") {
                // Named by inode and times of the image.
                "volumes/bases/BASE".clone_into(&mut below);
            }
            // Gone meanwhile: then there is no line.
            let Ok(found) = std::fs::symlink_metadata(&path) else { continue };
            if is_the_agents_own(&below) {
                continue;
            }
            let inner = found.is_dir() && self.files(root, &path, detail)?;
            if found.is_dir() && !inner && detail == Detail::Left {
                continue;
            }
            any = true;
            if !found.is_dir() || detail == Detail::Whole {
                self.add(&format!("file {below} {:o} {}", found.mode(), found.uid()));
            }
        }
        Ok(any)
    }
}

/// The store, and the files of locks, which stay for ever: a removed lock is no lock.
fn is_the_agents_own(below: &str) -> bool {
    below.starts_with("state/wanted.db") || below.ends_with("lock") || below.ends_with(".lock")
}

/// What the cache of images may keep: unfinished downloads and writes in either case, and whole images that nothing names
/// any more. The agent's collector removes them, by size and time.
fn is_cached(below: &str, detail: Detail) -> bool {
    match detail {
        Detail::Whole => {
            below.starts_with("images/partial") || below.starts_with("images/refs/.tmp-")
        }
        Detail::Left => below.starts_with("images/"),
    }
}

fn field(value: &Value, name: &str) -> String {
    match value.get(name) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => "-".to_owned(),
    }
}

/// Without what changes by traffic or by history, and sets in one order.
fn stable(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|key, _| {
                !matches!(key.as_str(), "packets" | "bytes" | "handle" | "expires")
            });
            map.values_mut().for_each(stable);
            if let Some(Value::Array(elements)) = map.get_mut("elem") {
                elements.sort_by_key(Value::to_string);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(stable),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn named_alike(word: &str, dir: &Path, registry: &str) -> String {
    let word = word.replace(&dir.display().to_string(), "DIR").replace(registry, "REGISTRY");
    // `fd=12`: the number is whatever was free.
    let mut parts = word.split("fd=");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        text.push_str("fd=N");
        text.push_str(part.trim_start_matches(|letter: char| letter.is_ascii_digit()));
    }
    text
}
