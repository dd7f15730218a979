//! From what is there to what is wanted, as one transaction.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{
    expr::goto,
    listing::{Content, Found},
    ruleset::{Chain, Family, Part, Wanted},
};

/// The commands of one commit, and whom they concern.
#[derive(Debug, Default)]
pub(super) struct Transaction {
    commands: Vec<Value>,
    /// Whose rules are not as wanted.
    pub(super) parts: BTreeSet<Part>,
    /// What is wrong, for people; a few of it.
    pub(super) faults: Vec<String>,
}

/// How many faults are named.
const MOST_FAULTS: usize = 8;

impl Transaction {
    /// The way from `found` to `wanted`. Empty when they are the same.
    ///
    /// The order within the transaction is what the kernel demands: a chain is made before something leads to it, and
    /// nothing leads to it any more when it is removed. A base chain cannot change its hook, so it is made anew.
    pub(super) fn between(table: &str, found: &Found, wanted: &Wanted) -> Self {
        let mut this = Self::default();
        if wanted.families.is_empty() {
            for family in &found.families {
                this.parts.insert(Part::Base);
                this.fault(|| format!("table {family} {table} is still there"));
                this.command(
                    "delete",
                    "table",
                    json!({ "family": family.as_str(), "name": table }),
                );
            }
            return this;
        }
        for family in wanted.families.difference(&found.families) {
            this.parts.insert(Part::Base);
            this.fault(|| format!("table {family} {table} is missing"));
            this.command("add", "table", json!({ "family": family.as_str(), "name": table }));
        }
        this.remove_elements(table, found, wanted);
        this.make_chains(table, found, wanted);
        this.fill_chains(table, found, wanted);
        this.remove_chains(table, found, wanted);
        this.add_elements(table, found, wanted);
        this
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// The document that `nft -j -f -` reads.
    pub(super) fn document(&self) -> String {
        json!({ "nftables": self.commands }).to_string()
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "the macro borrows what it puts in; callers have nothing else to do with it"
    )]
    fn command(&mut self, verb: &str, kind: &str, object: Value) {
        self.commands.push(json!({ verb: { kind: object } }));
    }

    fn fault(&mut self, text: impl FnOnce() -> String) {
        if self.faults.len() < MOST_FAULTS {
            self.faults.push(text());
        }
    }

    fn remove_elements(&mut self, table: &str, found: &Found, wanted: &Wanted) {
        for (map, elements) in &found.maps {
            let Some(wished) = wanted.maps.get(map.as_str()) else { continue };
            for (tap, chain) in elements {
                match wished.get(tap) {
                    Some(element) if element.chain == *chain => continue,
                    Some(element) => {
                        self.parts.insert(element.part);
                        self.fault(|| format!("map {map} leads {tap} elsewhere"));
                    }
                    None => {
                        self.fault(|| format!("map {map} has {tap}, which is no port"));
                    }
                }
                self.command(
                    "delete",
                    "element",
                    json!({
                        "family": "bridge", "table": table, "name": map, "elem": [tap]
                    }),
                );
            }
        }
    }

    fn make_chains(&mut self, table: &str, found: &Found, wanted: &Wanted) {
        for (key, chain) in &wanted.chains {
            let is_new = match found.chains.get(key) {
                Some(there) if there.hook == chain.hook && !there.odd_policy => false,
                Some(_) => {
                    self.fault(|| {
                        format!(
                            "chain {} {table} {} is hooked in elsewhere",
                            chain.family, chain.name
                        )
                    });
                    self.command("flush", "chain", named(table, chain));
                    self.command("delete", "chain", named(table, chain));
                    true
                }
                None => {
                    self.fault(|| {
                        format!("chain {} {table} {} is missing", chain.family, chain.name)
                    });
                    true
                }
            };
            if is_new {
                self.parts.insert(chain.part);
                let mut object = named(table, chain);
                if let (Some(hook), Some(fields)) = (&chain.hook, object.as_object_mut()) {
                    fields.insert("type".to_owned(), hook.kind.clone().into());
                    fields.insert("hook".to_owned(), hook.hook.clone().into());
                    fields.insert("prio".to_owned(), hook.prio.into());
                    fields.insert("policy".to_owned(), "accept".into());
                }
                self.command("add", "chain", object);
            }
        }
        for map in wanted.maps.keys().filter(|map| !found.maps.contains_key(**map)) {
            self.parts.insert(Part::Base);
            self.fault(|| format!("map bridge {table} {map} is missing"));
            self.command("add", "map", json!({
                "family": "bridge", "table": table, "name": map, "type": "ifname", "map": "verdict"
            }));
        }
    }

    fn fill_chains(&mut self, table: &str, found: &Found, wanted: &Wanted) {
        for (key, chain) in &wanted.chains {
            let there =
                found.chains.get(key).filter(|there| there.hook == chain.hook && !there.odd_policy);
            if there.is_some_and(|there| there.has_content_of(chain)) {
                continue;
            }
            if let Some(there) = there
                && there.content != Content::Empty
            {
                self.command("flush", "chain", named(table, chain));
            }
            if there.is_some() {
                self.fault(|| {
                    format!("chain {} {table} {} has other rules", chain.family, chain.name)
                });
            }
            self.parts.insert(chain.part);
            for (at, rule) in chain.rules.iter().enumerate() {
                self.command(
                    "add",
                    "rule",
                    json!({
                        "family": chain.family.as_str(), "table": table, "chain": chain.name,
                        "comment": chain.comment(at, rule.note), "expr": rule.expr,
                    }),
                );
            }
        }
    }

    /// Chains of ours that are wanted no more, and chains that somebody else put into our tables.
    fn remove_chains(&mut self, table: &str, found: &Found, wanted: &Wanted) {
        let gone: Vec<_> =
            found.chains.keys().filter(|key| !wanted.chains.contains_key(*key)).collect();
        // What is left of a port that is gone harms nobody; any other chain may be hooked in.
        if gone.iter().any(|(_, name)| !name.starts_with(&format!("{table}t"))) {
            self.parts.insert(Part::Base);
        }
        // All are emptied first: one may lead to another.
        for verb in ["flush", "delete"] {
            for (family, name) in &gone {
                self.fault(|| format!("chain {family} {table} {name} is not wanted"));
                self.command(
                    verb,
                    "chain",
                    json!({ "family": family.as_str(), "table": table, "name": name }),
                );
            }
        }
    }

    fn add_elements(&mut self, table: &str, found: &Found, wanted: &Wanted) {
        for (map, elements) in &wanted.maps {
            let there = found.maps.get(*map);
            for (tap, element) in elements {
                if there.and_then(|there| there.get(tap)) == Some(&element.chain) {
                    continue;
                }
                self.parts.insert(element.part);
                self.fault(|| format!("map bridge {table} {map} lacks {tap}"));
                self.command("add", "element", json!({
                    "family": "bridge", "table": table, "name": map, "elem": [[tap, goto(&element.chain)]]
                }));
            }
        }
    }
}

fn named(table: &str, chain: &Chain) -> Value {
    json!({ "family": chain.family.as_str(), "table": table, "name": chain.name })
}

/// Whether a table that is there is ours: it has the chain with our mark, or nothing at all.
pub(super) fn is_ours(found: &Found, family: Family, mark: &str) -> bool {
    let mut chains = found.chains.keys().filter(|(of, _)| *of == family).peekable();
    chains.peek().is_none() || chains.any(|(_, name)| name == mark)
}
