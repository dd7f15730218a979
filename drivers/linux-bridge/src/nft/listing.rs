//! What is in our tables, read from nft's listing as far as it is needed to see whether it is what we wrote.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::ruleset::{Chain, Family, Hook, Touched, Wanted};

/// A chain as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FoundChain {
    pub(super) hook: Option<Hook>,
    /// Whether a base chain's policy is another than ours, `accept`.
    pub(super) odd_policy: bool,
    pub(super) content: Content,
}

/// What the comments of a chain's rules say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Empty,
    /// All rules of this digest, in their order, and no others.
    Whole(String),
    /// Rules are missing, foreign, moved or doubled.
    Damaged,
}

impl Content {
    fn of(chain: &Chain) -> Self {
        if chain.rules.is_empty() { Self::Empty } else { Self::Whole(chain.digest.clone()) }
    }
}

/// Our tables as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) families: BTreeSet<Family>,
    pub(super) chains: BTreeMap<(Family, String), FoundChain>,
    /// Per map of the bridge table its elements: key and the chain of its verdict, empty for another verdict.
    pub(super) maps: BTreeMap<String, BTreeMap<String, String>>,
}

/// Collects the rules of one chain.
#[derive(Debug, Default)]
struct Rules {
    seen: usize,
    digest: Option<String>,
    of: usize,
    damaged: bool,
}

impl Rules {
    fn add(&mut self, comment: &str) {
        let parsed = comment.rsplit_once(' ').and_then(|(_, mark)| {
            let (digest, place) = mark.split_once('.')?;
            let (at, of) = place.split_once('/')?;
            Some((digest, at.parse::<usize>().ok()?, of.parse::<usize>().ok()?))
        });
        match parsed {
            Some((digest, at, of))
                if at == self.seen
                    && self
                        .digest
                        .as_deref()
                        .is_none_or(|known| known == digest && of == self.of) =>
            {
                self.digest = Some(digest.to_owned());
                self.of = of;
            }
            Some(_) | None => self.damaged = true,
        }
        self.seen += 1;
    }

    fn content(self) -> Content {
        match self.digest {
            None if self.seen == 0 => Content::Empty,
            Some(digest) if !self.damaged && self.seen == self.of => Content::Whole(digest),
            Some(_) | None => Content::Damaged,
        }
    }
}

impl Found {
    /// What a listing holds, added to what other listings held.
    pub(super) fn read(&mut self, family: Family, listing: &[Value]) {
        self.families.insert(family);
        let mut rules: BTreeMap<String, Rules> = BTreeMap::new();
        let text =
            |object: &Value, key: &str| object.get(key).and_then(Value::as_str).map(str::to_owned);
        for object in listing {
            if let Some(rule) = object.get("rule") {
                let chain = text(rule, "chain").unwrap_or_default();
                rules.entry(chain).or_default().add(&text(rule, "comment").unwrap_or_default());
            } else if let Some(map) = object.get("map") {
                let elements = map.get("elem").and_then(Value::as_array).map(Vec::as_slice);
                let elements = elements.unwrap_or_default().iter().filter_map(element).collect();
                self.maps.insert(text(map, "name").unwrap_or_default(), elements);
            }
        }
        for chain in listing.iter().filter_map(|object| object.get("chain")) {
            let name = text(chain, "name").unwrap_or_default();
            let hook = text(chain, "hook").map(|hook| Hook {
                kind: text(chain, "type").unwrap_or_default(),
                hook,
                prio: chain.get("prio").and_then(Value::as_i64).unwrap_or_default(),
            });
            let odd_policy = hook.is_some() && text(chain, "policy").as_deref() != Some("accept");
            let content = rules.remove(&name).unwrap_or_default().content();
            self.chains.insert((family, name), FoundChain { hook, odd_policy, content });
        }
    }

    /// Takes over what was written: everything wanted, or the touched part of it.
    pub(super) fn take_over(&mut self, wanted: &Wanted, only: Option<&Touched>) {
        let Some(touched) = only.filter(|_| !wanted.families.is_empty()) else {
            *self = Self::default();
            self.chains.extend(
                wanted.chains.iter().map(|(key, chain)| (key.clone(), FoundChain::of(chain))),
            );
            for (map, elements) in &wanted.maps {
                let elements = elements.iter().map(|(tap, to)| (tap.clone(), to.chain.clone()));
                self.maps.insert((*map).to_owned(), elements.collect());
            }
            self.families.clone_from(&wanted.families);
            return;
        };
        self.families.clone_from(&wanted.families);
        for key in &touched.chains {
            match wanted.chains.get(key) {
                Some(chain) => self.chains.insert(key.clone(), FoundChain::of(chain)),
                None => self.chains.remove(key),
            };
        }
        for (map, elements) in &wanted.maps {
            let there = self.maps.entry((*map).to_owned()).or_default();
            for tap in &touched.taps {
                match elements.get(tap) {
                    Some(element) => there.insert(tap.clone(), element.chain.clone()),
                    None => there.remove(tap),
                };
            }
        }
    }
}

impl FoundChain {
    fn of(chain: &Chain) -> Self {
        Self { hook: chain.hook.clone(), odd_policy: false, content: Content::of(chain) }
    }

    /// Whether the rules are those of the wanted chain.
    pub(super) fn has_content_of(&self, chain: &Chain) -> bool {
        self.content == Content::of(chain)
    }
}

/// An element of a verdict map: `["tap", {"goto": {"target": "chain"}}]`.
fn element(pair: &Value) -> Option<(String, String)> {
    let pair = pair.as_array()?;
    let key = pair.first()?.as_str()?.to_owned();
    let target = pair.get(1).and_then(|verdict| verdict.pointer("/goto/target"));
    Some((key, target.and_then(Value::as_str).unwrap_or_default().to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn content(comments: &[&str]) -> Content {
        let mut listing = vec![json!({ "chain": { "name": "c" } })];
        for comment in comments {
            listing.push(json!({ "rule": { "chain": "c", "comment": comment } }));
        }
        let mut found = Found::default();
        found.read(Family::Inet, &listing);
        found.chains.remove(&(Family::Inet, "c".to_owned())).unwrap().content
    }

    #[test]
    fn a_chain_is_whole_only_with_all_its_rules_in_order_and_no_other() {
        assert_eq!(content(&[]), Content::Empty);
        assert_eq!(content(&["a x.0/2", "b c x.1/2"]), Content::Whole("x".to_owned()));
        for damaged in [
            &["a x.0/2"][..],
            &["b x.1/2"],
            &["b x.1/2", "a x.0/2"],
            &["a x.0/2", "b x.1/2", "b x.1/2"],
            &["a x.0/2", "", "b x.1/2"],
            &["a x.0/2", "b y.1/2"],
            &["a x.0/2", "b x.1/3"],
            &["somebody's"],
        ] {
            assert_eq!(content(damaged), Content::Damaged, "{damaged:?}");
        }
    }
}
