//! What is there, counted: before and after a run the same, or something leaked.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
};

/// A count of things by class and name: `links` / `tap0`, `files` / `/var/lib/x`, `fds` / `socket`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census(BTreeMap<(String, String), usize>);

impl Census {
    /// Nothing at all.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// With one more thing of a class.
    #[must_use]
    pub fn with(mut self, class: &str, name: impl fmt::Display) -> Self {
        self.add(class, name);
        self
    }

    /// Adds one thing of a class.
    pub fn add(&mut self, class: &str, name: impl fmt::Display) {
        *self.0.entry((class.to_owned(), name.to_string())).or_default() += 1;
    }

    /// Adds many things of a class.
    pub fn extend(&mut self, class: &str, names: impl IntoIterator<Item = impl fmt::Display>) {
        for name in names {
            self.add(class, name);
        }
    }

    /// Adds every file, link and directory under a directory, with the sizes of files. A directory that is not there is
    /// empty.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn add_tree(&mut self, class: &str, root: &std::path::Path) -> io::Result<()> {
        let entries = match std::fs::read_dir(root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = entry?;
            let path = entry.path();
            if entry.file_type()?.is_dir() {
                self.add(class, format_args!("{}/", path.display()));
                self.add_tree(class, &path)?;
            } else {
                self.add(class, path.display());
            }
        }
        Ok(())
    }

    /// Adds the descriptors (class `fds`) and child processes (class `children`) of this process. Descriptors without a
    /// path are counted by their kind.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn add_process(&mut self) -> io::Result<()> {
        for entry in std::fs::read_dir("/proc/self/fd")? {
            // Descriptors come and go while they are listed, that of the listing itself among them.
            let Ok(target) = std::fs::read_link(entry?.path()) else { continue };
            let target = target.to_string_lossy().into_owned();
            if target.ends_with("/fd") && target.starts_with("/proc/") {
                continue;
            }
            let kind = target.split_once(":[").map_or(target.as_str(), |(kind, _)| kind);
            self.add("fds", kind);
        }
        let me = rustix::process::getpid().as_raw_nonzero().get().to_string();
        for entry in std::fs::read_dir("/proc")? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name.bytes().all(|byte| byte.is_ascii_digit())
                && let Ok(stat) = std::fs::read_to_string(format!("/proc/{name}/stat"))
                && let Some((command, state)) = child_of(&stat, &me)
            {
                self.add("children", format_args!("{command} ({state})"));
            }
        }
        Ok(())
    }

    /// With all that another census counted.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        for (key, count) in other.0 {
            *self.0.entry(key).or_default() += count;
        }
        self
    }

    /// How many things of a class there are.
    #[must_use]
    pub fn count(&self, class: &str) -> usize {
        self.0.iter().filter(|((of, _), _)| of == class).map(|(_, count)| count).sum()
    }

    /// What differs, a line each: `+` for what `after` has more than `self`, `-` for what it has less. Empty when they
    /// are the same.
    #[must_use]
    pub fn diff(&self, after: &Self) -> Vec<String> {
        let keys: BTreeSet<_> = self.0.keys().chain(after.0.keys()).collect();
        let of = |census: &Self, key| census.0.get(key).copied().unwrap_or_default();
        keys.into_iter()
            .filter_map(|key| {
                let (before, after) = (of(self, key), of(after, key));
                let (class, name) = key;
                match after.cmp(&before) {
                    std::cmp::Ordering::Equal => None,
                    std::cmp::Ordering::Greater => {
                        Some(format!("+ {class}: {name} ({before} before, {after} after)"))
                    }
                    std::cmp::Ordering::Less => {
                        Some(format!("- {class}: {name} ({before} before, {after} after)"))
                    }
                }
            })
            .collect()
    }
}

/// Command and state of a process whose parent is `parent`; the form of `/proc/PID/stat` is in `proc_pid_stat(5)`.
fn child_of<'a>(stat: &'a str, parent: &str) -> Option<(&'a str, &'a str)> {
    // The command may hold spaces and brackets: it ends at the last bracket.
    let (head, tail) = stat.rsplit_once(')')?;
    let (_, command) = head.split_once('(')?;
    let mut fields = tail.split_ascii_whitespace();
    let state = fields.next()?;
    (fields.next()? == parent).then_some((command, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diff_names_what_leaked_and_what_is_gone() {
        let before = Census::new().with("links", "a").with("links", "b");
        let after = Census::new().with("links", "b").with("links", "b").with("rules", "r");
        assert_eq!(
            before.diff(&after),
            [
                "- links: a (1 before, 0 after)",
                "+ links: b (1 before, 2 after)",
                "+ rules: r (0 before, 1 after)"
            ]
        );
        assert!(before.diff(&before.clone()).is_empty());
    }

    #[test]
    fn a_leaked_descriptor_is_in_the_census_of_the_process() {
        let census = || {
            let mut census = Census::new();
            census.add_process().unwrap();
            census
        };
        let before = census();
        let held = std::fs::File::open("/proc/self/exe").unwrap();
        let grown = before.diff(&census());
        assert!(grown.iter().any(|line| line.starts_with("+ fds: ")), "{grown:?}");
        drop(held);
    }

    #[test]
    fn a_child_is_known_by_its_parent_even_with_brackets_in_its_name() {
        assert_eq!(child_of("12 (a) b) S 7 0", "7"), Some(("a) b", "S")));
        assert_eq!(child_of("12 (a) S 70 0", "7"), None);
    }
}
