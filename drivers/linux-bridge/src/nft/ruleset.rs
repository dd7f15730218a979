//! The whole ruleset as wanted, from the records alone.
//!
//! Two tables of our own. `bridge`: per tap an anti-spoof chain (prerouting, before everything), an egress and an ingress
//! chain, found through verdict maps; a tap that is in no map is dropped both ways. `inet`: what crosses the host.
//!
//! A chain's rules carry the chain's content hash, their place and their number in their comment, so that a listing shows
//! a rule that was removed, added, moved or is of another version without comparing expressions (nft prints them in another
//! form than it takes them).

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use drivers_api::{NetworkId, NetworkType, PortId};
use serde_json::{Value, json};

use super::{base, detect::Mode, port};
use crate::{
    names::Names,
    records::{NetworkRecord, PortRecord, Records},
};

/// The bit of the packet mark that says "belongs to a known connection" between `br_netfilter` and the bridge hooks.
pub(super) const ESTABLISHED: u32 = 0x8000_0000;
/// The bit that says "belongs to no possible connection".
pub(super) const INVALID: u32 = 0x4000_0000;

/// The verdict maps by tap: anti-spoof, egress, ingress.
pub(super) const MAPS: [&str; 3] = ["spoof", "egress", "ingress"];

/// Which of our two tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Family {
    Bridge,
    Inet,
}

impl Family {
    pub(super) const ALL: [Self; 2] = [Self::Bridge, Self::Inet];

    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Bridge => "bridge",
            Self::Inet => "inet",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// To whom a chain belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Part {
    /// All networks.
    Base,
    Port(PortId),
}

/// Where a base chain is hooked in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hook {
    pub(super) kind: String,
    pub(super) hook: String,
    pub(super) prio: i64,
}

/// One rule: a note for people, and its statements.
#[derive(Clone, Debug)]
pub(super) struct Rule {
    pub(super) note: &'static str,
    pub(super) expr: Vec<Value>,
}

/// A chain as wanted.
#[derive(Debug)]
pub(super) struct Chain {
    pub(super) family: Family,
    pub(super) name: String,
    pub(super) hook: Option<Hook>,
    pub(super) rules: Vec<Rule>,
    pub(super) digest: String,
    pub(super) part: Part,
}

impl Chain {
    pub(super) fn new(
        part: Part,
        family: Family,
        name: impl Into<String>,
        rules: Vec<Rule>,
    ) -> Self {
        let digest = digest(&rules);
        Self { family, name: name.into(), hook: None, rules, digest, part }
    }

    pub(super) fn hooked(mut self, kind: &str, hook: &str, prio: i64) -> Self {
        self.hook = Some(Hook { kind: kind.to_owned(), hook: hook.to_owned(), prio });
        self
    }

    /// The comment of the rule at this place.
    pub(super) fn comment(&self, at: usize, note: &str) -> String {
        format!("{note} {}.{at}/{}", self.digest, self.rules.len())
    }
}

pub(super) fn rule(note: &'static str, expr: impl IntoIterator<Item = Value>) -> Rule {
    Rule { note, expr: expr.into_iter().collect() }
}

/// FNV-1a, 64 bit, over the rules as they are sent: tells versions apart, and is no protection against forgery (who can
/// write our rules is root).
fn digest(rules: &[Rule]) -> String {
    let text: Vec<Value> = rules.iter().map(|rule| json!([rule.note, rule.expr])).collect();
    format!("{:016x}", crate::fnv1a(Value::Array(text).to_string().as_bytes()))
}

/// What a tap's element of a verdict map says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Element {
    pub(super) chain: String,
    pub(super) part: Part,
}

/// Everything that should be there.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    pub(super) families: BTreeSet<Family>,
    pub(super) chains: BTreeMap<(Family, String), Arc<Chain>>,
    /// Per verdict map its elements by tap.
    pub(super) maps: BTreeMap<&'static str, BTreeMap<String, Element>>,
}

/// The chains of one port, kept from one build to the next while its records stay the same.
#[derive(Debug)]
struct Kept {
    port: Arc<PortRecord>,
    network: Arc<NetworkRecord>,
    zone: u16,
    tap: String,
    chains: Vec<Arc<Chain>>,
}

/// What changed in the wanted ruleset since it was last written.
#[derive(Debug, Default)]
pub(super) struct Touched {
    pub(super) chains: BTreeSet<(Family, String)>,
    pub(super) taps: BTreeSet<String>,
}

/// What of the records is not to have rules: it is being removed.
#[derive(Debug, Default)]
pub(crate) struct Leaving {
    pub(crate) networks: BTreeSet<NetworkId>,
    pub(super) ports: BTreeSet<PortId>,
}

/// Keeps the wanted ruleset up with the records: what did not change costs a comparison of pointers.
#[derive(Debug)]
pub(super) struct Builder {
    names: Names,
    /// The networks of which the base chains are.
    networks: Vec<Arc<NetworkRecord>>,
    zones: BTreeMap<String, u16>,
    kept: BTreeMap<PortId, Kept>,
    pub(super) wanted: Wanted,
    pub(super) touched: Touched,
}

impl Builder {
    pub(super) fn new(names: Names) -> Self {
        Self {
            names,
            networks: Vec::new(),
            zones: BTreeMap::new(),
            kept: BTreeMap::new(),
            wanted: Wanted::default(),
            touched: Touched::default(),
        }
    }

    /// Takes these records over.
    pub(super) fn update(&mut self, mode: Mode, records: &Records, leaving: &Leaving) {
        let networks: Vec<Arc<NetworkRecord>> = records
            .good_networks()
            .filter(|network| !leaving.networks.contains(&network.spec.uuid))
            .cloned()
            .collect();
        let is_same = networks.len() == self.networks.len()
            && networks.iter().zip(&self.networks).all(|(new, old)| Arc::ptr_eq(new, old));
        if !is_same {
            self.networks = networks;
            self.rebase(mode);
        }
        let zone_of = |network: &NetworkRecord| {
            let device = base::device_of(&self.names, network);
            device.and_then(|device| self.zones.get(&device)).copied().unwrap_or_default()
        };
        let networks: BTreeMap<NetworkId, (Arc<NetworkRecord>, u16)> = self
            .networks
            .iter()
            .map(|network| (network.spec.uuid, (Arc::clone(network), zone_of(network))))
            .collect();
        let mut ports = BTreeMap::new();
        for port in records.good_ports().filter(|port| !leaving.ports.contains(&port.spec.uuid)) {
            if let Some(network) = networks.get(&port.spec.network_uuid) {
                ports.insert(port.spec.uuid, (port, network));
            }
        }
        let gone: Vec<PortId> =
            self.kept.keys().filter(|port| !ports.contains_key(port)).copied().collect();
        for port in gone {
            self.remove_port(port);
        }
        for (port, (network, zone)) in ports.values() {
            self.put_port(mode, port, network, *zone);
        }
    }

    /// Builds the base chains anew.
    fn rebase(&mut self, mode: Mode) {
        let old: Vec<_> = self
            .wanted
            .chains
            .iter()
            .filter(|(_, chain)| chain.part == Part::Base)
            .map(|(key, _)| key.clone())
            .collect();
        for key in old {
            self.wanted.chains.remove(&key);
            self.touched.chains.insert(key);
        }
        // Networks that share an uplink share the lowest of their zones.
        self.zones.clear();
        for network in &self.networks {
            if let Some(device) = base::device_of(&self.names, network) {
                let zone = self.zones.entry(device).or_insert(network.zone);
                *zone = network.zone.min(*zone);
            }
        }
        if self.networks.is_empty() {
            self.wanted = Wanted::default();
            self.kept.clear();
            return;
        }
        self.wanted.families.extend(Family::ALL);
        for map in MAPS {
            self.wanted.maps.entry(map).or_default();
        }
        for chain in base::chains(&self.names, mode, &self.networks, &self.zones) {
            let key = (chain.family, chain.name.clone());
            self.touched.chains.insert(key.clone());
            self.wanted.chains.insert(key, Arc::new(chain));
        }
    }

    fn remove_port(&mut self, port: PortId) {
        let Some(kept) = self.kept.remove(&port) else { return };
        for chain in kept.chains {
            let key = (chain.family, chain.name.clone());
            self.wanted.chains.remove(&key);
            self.touched.chains.insert(key);
        }
        for elements in self.wanted.maps.values_mut() {
            elements.remove(&kept.tap);
        }
        self.touched.taps.insert(kept.tap);
    }

    fn put_port(
        &mut self,
        mode: Mode,
        port: &Arc<PortRecord>,
        network: &Arc<NetworkRecord>,
        zone: u16,
    ) {
        let id = port.spec.uuid;
        let is_same = self.kept.get(&id).is_some_and(|kept| {
            Arc::ptr_eq(&kept.port, port)
                && Arc::ptr_eq(&kept.network, network)
                && kept.zone == zone
        });
        if is_same {
            return;
        }
        // The prefix was checked when the driver was opened, so the name can be made.
        let Ok(tap) = self.names.tap(id) else { return };
        self.remove_port(id);
        let tap = tap.as_str().to_owned();
        let chains: Vec<Arc<Chain>> = port::chains(&tap, mode, &port.spec, &network.spec, zone)
            .into_iter()
            .map(Arc::new)
            .collect();
        for chain in &chains {
            let key = (chain.family, chain.name.clone());
            self.touched.chains.insert(key.clone());
            self.wanted.chains.insert(key, Arc::clone(chain));
        }
        for map in MAPS {
            let element = Element { chain: port::chain_name(&tap, map), part: Part::Port(id) };
            self.wanted.maps.entry(map).or_default().insert(tap.clone(), element);
        }
        self.touched.taps.insert(tap.clone());
        let (port, network) = (Arc::clone(port), Arc::clone(network));
        self.kept.insert(id, Kept { port, network, zone, tap, chains });
    }
}

/// The chain whose name is our mark on a table. A flush of the table's rules leaves it.
pub(super) fn mark_chain(names: &Names) -> String {
    format!("bcd-node.{}", names.node)
}

/// Whether the host itself is on the network's link: such networks have a bridge of ours.
pub(crate) const fn has_own_bridge(network_type: NetworkType) -> bool {
    matches!(network_type, NetworkType::Nat | NetworkType::Isolated)
}
