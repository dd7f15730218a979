//! Which crate may reach which: a graph of dependencies, and the way from one crate to another.
//!
//! The rules are the tests of `tests/rules.rs`, which read the graph from `cargo metadata`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What a dependency is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Edge {
    /// For the crate itself or its build script.
    Build,
    /// For its tests only: nobody who depends on the crate gets it.
    Dev,
}

/// Dependencies between packages, by name.
#[derive(Clone, Debug, Default)]
pub struct Graph(BTreeMap<String, BTreeSet<(String, Edge)>>);

impl Graph {
    /// Adds a dependency.
    pub fn add(&mut self, from: &str, to: &str, edge: Edge) {
        self.0.entry(from.to_owned()).or_default().insert((to.to_owned(), edge));
    }

    /// The shortest way from a package to another one that `is_target` picks; `None` when there is none. With `dev` the
    /// dependencies of the package's own tests count too; those of other packages' tests never do.
    #[must_use]
    pub fn way(&self, from: &str, dev: bool, is_target: impl Fn(&str) -> bool) -> Option<String> {
        let mut reached_from: BTreeMap<&str, (&str, Edge)> = BTreeMap::new();
        let mut queue = VecDeque::from([from]);
        while let Some(package) = queue.pop_front() {
            for (next, edge) in self.0.get(package).into_iter().flatten() {
                let counts = *edge == Edge::Build || (dev && package == from);
                if !counts || next == from || reached_from.contains_key(next.as_str()) {
                    continue;
                }
                reached_from.insert(next, (package, *edge));
                if is_target(next) {
                    return Some(describe(from, next, &reached_from));
                }
                queue.push_back(next);
            }
        }
        None
    }
}

fn describe(from: &str, to: &str, reached_from: &BTreeMap<&str, (&str, Edge)>) -> String {
    let mut text = to.to_owned();
    let mut at = to;
    while let Some((before, edge)) = reached_from.get(at).filter(|_| at != from) {
        let arrow = if *edge == Edge::Dev { " -(dev)-> " } else { " -> " };
        text = format!("{before}{arrow}{text}");
        at = before;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph() -> Graph {
        let mut graph = Graph::default();
        graph.add("driver-a", "host", Edge::Build);
        graph.add("driver-a", "kit", Edge::Dev);
        graph.add("kit", "helper", Edge::Build);
        graph.add("helper", "driver-b", Edge::Build);
        graph.add("host", "driver-b", Edge::Dev);
        graph
    }

    #[test]
    fn a_forbidden_way_is_named_from_end_to_end() {
        let way = graph().way("driver-a", true, |name| name == "driver-b");
        assert_eq!(way.as_deref(), Some("driver-a -(dev)-> kit -> helper -> driver-b"));
    }

    #[test]
    fn the_tests_of_others_are_no_way() {
        assert_eq!(graph().way("driver-a", false, |name| name == "driver-b"), None);
        assert_eq!(graph().way("driver-a", false, |name| name == "kit"), None);
    }

    #[test]
    fn a_package_that_tests_itself_is_no_way_to_itself() {
        let mut graph = graph();
        graph.add("driver-a", "driver-a", Edge::Dev);
        assert_eq!(graph.way("driver-a", true, |name| name == "driver-a"), None);
    }
}
