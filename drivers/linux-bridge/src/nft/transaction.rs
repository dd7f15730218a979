//! From what is there to what is wanted, as one transaction.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{
    expr::goto,
    listing::{Content, Found, FoundChain},
    ruleset::{Chain, Family, Part, Touched, Wanted},
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

/// What names a chain.
type Key = (Family, String);

/// How many faults are named.
const MOST_FAULTS: usize = 8;

impl Transaction {
    /// The way from `found` to `wanted`, looked for in `only` where the rest is known to be the same. Empty when they are
    /// the same.
    ///
    /// The order within the transaction is what the kernel demands: a chain is made before something leads to it, and
    /// nothing leads to it any more when it is removed. A base chain cannot change its hook, so it is made anew.
    pub(super) fn between(
        table: &str,
        found: &Found,
        wanted: &Wanted,
        only: Option<&Touched>,
    ) -> Self {
        let mut this = Self::default();
        if wanted.families.is_empty() {
            for family in &found.families {
                this.parts.insert(Part::Base);
                this.fault(|| format!("table {family} {table} is still there"));
                let name = json!({ "family": family.as_str(), "name": table });
                this.command("delete", "table", name);
            }
            return this;
        }
        for family in wanted.families.difference(&found.families) {
            this.parts.insert(Part::Base);
            this.fault(|| format!("table {family} {table} is missing"));
            this.command("add", "table", json!({ "family": family.as_str(), "name": table }));
        }
        let (keys, taps): (BTreeSet<&Key>, BTreeSet<&str>) = match only {
            Some(touched) => {
                (touched.chains.iter().collect(), touched.taps.iter().map(String::as_str).collect())
            }
            None => {
                let there = found.maps.values().flat_map(|elements| elements.keys());
                let wished = wanted.maps.values().flat_map(|elements| elements.keys());
                (
                    found.chains.keys().chain(wanted.chains.keys()).collect(),
                    there.chain(wished).map(String::as_str).collect(),
                )
            }
        };
        this.remove_elements(table, found, wanted, &taps);
        this.make_chains(table, found, wanted, &keys);
        this.fill_chains(table, found, wanted, &keys);
        this.remove_chains(table, found, wanted, &keys);
        this.add_elements(table, found, wanted, &taps);
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

    fn remove_elements(
        &mut self,
        table: &str,
        found: &Found,
        wanted: &Wanted,
        taps: &BTreeSet<&str>,
    ) {
        for (map, wished) in &wanted.maps {
            let Some(there) = found.maps.get(*map) else { continue };
            for tap in taps {
                let Some(chain) = there.get(*tap) else { continue };
                match wished.get(*tap) {
                    Some(element) if element.chain == *chain => continue,
                    Some(element) => {
                        self.parts.insert(element.part);
                        self.fault(|| format!("map {map} leads {tap} elsewhere"));
                    }
                    None => self.fault(|| format!("map {map} has {tap}, which is no port")),
                }
                let element =
                    json!({ "family": "bridge", "table": table, "name": map, "elem": [tap] });
                self.command("delete", "element", element);
            }
        }
    }

    fn make_chains(&mut self, table: &str, found: &Found, wanted: &Wanted, keys: &BTreeSet<&Key>) {
        for chain in keys.iter().filter_map(|key| wanted.chains.get(*key)) {
            let what = || format!("chain {} {table} {}", chain.family, chain.name);
            match found.chains.get(&(chain.family, chain.name.clone())) {
                Some(there) if there.hook == chain.hook && !there.odd_policy => continue,
                Some(_) => {
                    self.fault(|| format!("{} is hooked in elsewhere", what()));
                    self.command("flush", "chain", named(table, chain));
                    self.command("delete", "chain", named(table, chain));
                }
                None => self.fault(|| format!("{} is missing", what())),
            }
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
        for map in wanted.maps.keys().filter(|map| !found.maps.contains_key(**map)) {
            self.parts.insert(Part::Base);
            self.fault(|| format!("map bridge {table} {map} is missing"));
            let object = json!({
                "family": "bridge", "table": table, "name": map, "type": "ifname", "map": "verdict"
            });
            self.command("add", "map", object);
        }
    }

    fn fill_chains(&mut self, table: &str, found: &Found, wanted: &Wanted, keys: &BTreeSet<&Key>) {
        for (key, chain) in keys.iter().filter_map(|key| wanted.chains.get_key_value(*key)) {
            let is_kept = |there: &&FoundChain| there.hook == chain.hook && !there.odd_policy;
            let there = found.chains.get(key).filter(is_kept);
            if there.is_some_and(|there| there.has_content_of(chain)) {
                continue;
            }
            if let Some(there) = there {
                if there.content != Content::Empty {
                    self.command("flush", "chain", named(table, chain));
                }
                self.fault(|| {
                    format!("chain {} {table} {} has other rules", chain.family, chain.name)
                });
            }
            self.parts.insert(chain.part);
            for (at, rule) in chain.rules.iter().enumerate() {
                let rule = json!({
                    "family": chain.family.as_str(), "table": table, "chain": chain.name,
                    "comment": chain.comment(at, rule.note), "expr": rule.expr,
                });
                self.command("add", "rule", rule);
            }
        }
    }

    /// Chains of ours that are wanted no more, and chains that somebody else put into our tables.
    fn remove_chains(
        &mut self,
        table: &str,
        found: &Found,
        wanted: &Wanted,
        keys: &BTreeSet<&Key>,
    ) {
        let is_gone =
            |key: &&&Key| found.chains.contains_key(**key) && !wanted.chains.contains_key(**key);
        let gone: Vec<&Key> = keys.iter().filter(is_gone).copied().collect();
        // What is left of a port that is gone harms nobody; any other chain may be hooked in.
        if gone.iter().any(|(_, name)| !name.starts_with(&format!("{table}t"))) {
            self.parts.insert(Part::Base);
        }
        // All are emptied first: one may lead to another.
        for verb in ["flush", "delete"] {
            for (family, name) in &gone {
                self.fault(|| format!("chain {family} {table} {name} is not wanted"));
                let chain = json!({ "family": family.as_str(), "table": table, "name": name });
                self.command(verb, "chain", chain);
            }
        }
    }

    fn add_elements(&mut self, table: &str, found: &Found, wanted: &Wanted, taps: &BTreeSet<&str>) {
        for (map, elements) in &wanted.maps {
            let there = found.maps.get(*map);
            for (tap, element) in taps.iter().filter_map(|tap| elements.get_key_value(*tap)) {
                if there.and_then(|there| there.get(tap)) == Some(&element.chain) {
                    continue;
                }
                self.parts.insert(element.part);
                self.fault(|| format!("map bridge {table} {map} lacks {tap}"));
                let element = json!({
                    "family": "bridge", "table": table, "name": map,
                    "elem": [[tap, goto(&element.chain)]]
                });
                self.command("add", "element", element);
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
