//! Refuses what cannot work before anything happens. Nothing is asked of the host.
//!
//! Only documents that differ from the present state are refused, so that a fault that is there already keeps nobody from
//! changing something else. What two documents have in conflict is refused at the one that differs.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use drivers_api::{Error, Hypervisor, Uuid, VmPower};

use crate::{
    admit::{Load, shortage},
    drivers::Drivers,
    engine::Engine,
    resolve::{display_name, network_spec, no_driver},
    status::Refusal,
    wanted::{ImageSpec, Key, Kind, NetworkSpec, VolumeSpec, Wanted, WantedSet, WantedSpec},
};

mod instance;

/// What is checked against what.
pub(crate) struct Check<'a> {
    engine: &'a Engine,
    proposed: &'a WantedSet,
    refusals: Vec<Refusal>,
}

/// Everything that keeps a set from being accepted, by kind and name.
pub(crate) fn check(engine: &Engine, proposed: &WantedSet) -> Vec<Refusal> {
    let present = engine.store.snapshot();
    let mut check = Check { engine, proposed, refusals: Vec::new() };
    let differs: BTreeSet<Key> = present
        .diff(proposed)
        .into_iter()
        .filter(|key| {
            let (old, new) = (present.live(key), proposed.live(key));
            new.is_some()
                && old.map(|old| (&old.spec, old.uuid)) != new.map(|new| (&new.spec, new.uuid))
        })
        .collect();
    for key in &differs {
        let Some(object) = proposed.live(key) else { continue };
        check.object(key, object);
        let old = present.get(key).filter(|old| old.uuid == object.uuid);
        if let Some(old) = old {
            check.change(key, old, object);
        }
    }
    check.identities(&differs);
    check.sharing(&differs);
    check.addresses(&differs);
    check.capacity(&present, &differs);
    check.refusals
}

impl<'a> Check<'a> {
    fn drivers(&self) -> &'a Drivers {
        &self.engine.drivers
    }

    fn refuse(&mut self, key: &Key, field: impl Into<String>, reason: impl Into<String>) {
        self.refuse_with(key, field, reason, None);
    }

    fn refuse_with(
        &mut self,
        key: &Key,
        field: impl Into<String>,
        reason: impl Into<String>,
        hint: Option<String>,
    ) {
        let (field, reason) = (field.into(), reason.into());
        self.refusals.push(Refusal { key: key.clone(), field, reason, hint });
    }

    /// An error of a spec's own check, at its field.
    fn refuse_error(&mut self, key: &Key, error: &Error) {
        let field = error.field().unwrap_or("spec");
        let field =
            if field.starts_with("spec") { field.to_owned() } else { format!("spec.{field}") };
        let hint = error.remedy().map(str::to_owned);
        self.refuse_with(key, field, error.reason(), hint);
    }

    fn object(&mut self, key: &Key, object: &Wanted) {
        if let Err(error) = display_name(&object.name) {
            self.refuse_error(key, &error);
        }
        match &object.spec {
            WantedSpec::Image(spec) => self.image(key, spec),
            WantedSpec::Volume(spec) => self.volume(key, spec),
            WantedSpec::Network(spec) => self.network(key, object, spec),
            WantedSpec::Instance(spec) => self.instance(key, spec),
        }
    }

    /// That a driver is not there, with those that are.
    fn no_driver(&mut self, key: &Key, kind: &str, id: Option<&str>, there: &[&str]) {
        let error = no_driver(kind, id);
        let hint = if there.is_empty() {
            error.remedy().map(str::to_owned)
        } else {
            Some(format!("there is {}", there.join(", ")))
        };
        self.refuse_with(
            key,
            "spec.driver",
            format!("{}: {}", error.object(), error.reason()),
            hint,
        );
    }

    /// A name that a spec has must lead to something that stays.
    fn reference(&mut self, key: &Key, field: &str, kind: Kind, name: &crate::wanted::ObjectName) {
        let named = Key::new(kind, name.clone());
        if self.proposed.live(&named).is_some() {
            return;
        }
        if self.proposed.get(&named).is_some() {
            self.refuse_with(
                key,
                field,
                format!("{named} is being deleted"),
                Some(format!("apply {named} again, or name another")),
            );
            return;
        }
        let hint = nearest(self.proposed, &named).map(|near| format!("did you mean \"{near}\"?"));
        let hint = hint.or_else(|| Some(format!("apply {named} with it, or before it")));
        self.refuse_with(key, field, format!("there is no {named}"), hint);
    }

    fn image(&mut self, key: &Key, spec: &ImageSpec) {
        let drivers = self.drivers();
        if drivers.find_image(spec.driver.as_deref()).is_none() {
            let there: Vec<&str> = drivers.images().map(|(id, _)| id).collect();
            self.no_driver(key, "image driver", spec.driver.as_deref(), &there);
        }
    }

    fn volume(&mut self, key: &Key, spec: &VolumeSpec) {
        let drivers = self.drivers();
        if drivers.find_volume(spec.driver.as_deref()).is_none() {
            let there: Vec<&str> = drivers.volumes().map(|(id, _)| id).collect();
            self.no_driver(key, "volume driver", spec.driver.as_deref(), &there);
        }
        if let Some(source) = &spec.source {
            self.reference(key, "spec.source.image", Kind::Image, &source.image);
        }
    }

    fn network(&mut self, key: &Key, object: &Wanted, spec: &NetworkSpec) {
        let drivers = self.drivers();
        let there: Vec<&str> = drivers.networks().map(|(id, _)| id).collect();
        match drivers.network_for(spec.driver.as_deref(), spec.r#type) {
            Some((_, driver)) if driver.types().contains(&spec.r#type) => {}
            Some((id, _)) => {
                let reason = format!("driver {id} serves no {:?} networks", spec.r#type);
                self.refuse(key, "spec.type", reason);
            }
            None if spec.driver.is_none() && !there.is_empty() => {
                let reason = format!("no driver serves {:?} networks", spec.r#type);
                self.refuse(key, "spec.type", reason);
            }
            None => self.no_driver(key, "network driver", spec.driver.as_deref(), &there),
        }
        match network_spec(object, spec) {
            Ok(network) => {
                if let Err(error) = network.validate() {
                    self.refuse_error(key, &error);
                }
            }
            Err(error) => self.refuse_error(key, &error),
        }
    }

    /// What of an object that is there cannot be changed.
    fn change(&mut self, key: &Key, old: &Wanted, new: &Wanted) {
        const ANEW: &str = "delete the object and apply it again";
        let anew = || Some(ANEW.to_owned());
        let driver = |object: &Wanted| self.driver_of(object).map(str::to_owned);
        let (before, after) = (driver(old), driver(new));
        if before.is_some() && after.is_some() && before != after {
            self.refuse_with(key, "spec.driver", "an object stays with its driver", anew());
        }
        match (&old.spec, &new.spec) {
            (WantedSpec::Volume(old), WantedSpec::Volume(new)) => {
                if new.size_gib < old.size_gib {
                    let reason =
                        format!("{} -> {} GiB: volumes only grow", old.size_gib, new.size_gib);
                    self.refuse_with(key, "spec.size_gib", reason, anew());
                }
                if new.format != old.format {
                    self.refuse_with(key, "spec.format", "a volume keeps its format", anew());
                }
            }
            (WantedSpec::Network(old), WantedSpec::Network(new)) if old.r#type != new.r#type => {
                self.refuse_with(key, "spec.type", "a network keeps its type", anew());
            }
            (_, _) => {}
        }
    }

    fn driver_of(&self, object: &Wanted) -> Option<&'a str> {
        let drivers = self.drivers();
        match &object.spec {
            WantedSpec::Image(spec) => drivers.find_image(spec.driver.as_deref()).map(|(id, _)| id),
            WantedSpec::Volume(spec) => {
                drivers.find_volume(spec.driver.as_deref()).map(|(id, _)| id)
            }
            WantedSpec::Network(spec) => {
                drivers.network_for(spec.driver.as_deref(), spec.r#type).map(|(id, _)| id)
            }
            WantedSpec::Instance(spec) => {
                drivers.find_hypervisor(spec.driver.as_deref()).map(|(id, _)| id)
            }
        }
    }

    /// Two objects of one identity.
    fn identities(&mut self, differs: &BTreeSet<Key>) {
        let mut owners: HashMap<Uuid, Vec<Key>> = HashMap::new();
        for object in self.proposed.iter() {
            for document in std::iter::once(&**object).chain(object.successor.as_deref()) {
                owners.entry(document.uuid).or_default().push(document.key());
            }
        }
        for (uuid, keys) in owners.into_iter().filter(|(_, keys)| keys.len() > 1) {
            let Some(key) = keys.iter().find(|key| differs.contains(*key)) else { continue };
            let others = keys.iter().filter(|other| *other != key).map(ToString::to_string);
            let others: Vec<String> = others.collect();
            let owner = others.first().cloned().unwrap_or_else(|| format!("the old {key}"));
            self.refuse(key, "uuid", format!("{owner} has the identity {uuid}"));
        }
    }

    /// One volume written by two instances, or written by one and read by another.
    fn sharing(&mut self, differs: &BTreeSet<Key>) {
        let mut users: BTreeMap<&crate::wanted::ObjectName, Vec<(Key, usize, bool)>> =
            BTreeMap::new();
        let proposed = self.proposed;
        for object in proposed.of_kind(Kind::Instance) {
            let Some(live) = object.live() else { continue };
            let WantedSpec::Instance(spec) = &live.spec else { continue };
            for (at, disk) in spec.disks.iter().enumerate() {
                users.entry(&disk.volume).or_default().push((live.key(), at, disk.read_only));
            }
        }
        for (volume, users) in users {
            if users.iter().all(|(.., read_only)| *read_only) {
                continue;
            }
            for (key, at, read_only) in users.iter().filter(|(key, ..)| differs.contains(key)) {
                let other = users
                    .iter()
                    .find(|(other, _, other_reads)| other != key && !(*read_only && *other_reads));
                if let Some((other, ..)) = other {
                    let reason = format!("{other} has Volume {volume} too, and one of them writes");
                    let hint = "give each its own volume, or mark all disks of it read_only";
                    let field = format!("spec.disks[{at}].volume");
                    self.refuse_with(key, field, reason, Some(hint.to_owned()));
                }
            }
        }
    }

    /// More than the host has room for. Only who adds to it is refused.
    fn capacity(&mut self, present: &WantedSet, differs: &BTreeSet<Key>) {
        let capacity = self.engine.settings.capacity;
        let load = |set: &WantedSet, key: &Key| {
            let spec = match set.live(key).map(|object| &object.spec) {
                Some(WantedSpec::Instance(spec)) if spec.power == VmPower::Running => spec,
                Some(_) | None => return Load { cpus: 0, memory_mib: 0 },
            };
            Load::of(spec)
        };
        let mut taken = Load { cpus: 0, memory_mib: 0 };
        let mut more = Vec::new();
        for object in self.proposed.of_kind(Kind::Instance) {
            let key = object.key();
            let (old, new) = (load(present, &key), load(self.proposed, &key));
            let grows = new.cpus > old.cpus || new.memory_mib > old.memory_mib;
            if grows && differs.contains(&key) {
                more.push((key, new));
            } else {
                taken = plus(taken, new);
            }
        }
        for (key, load) in more {
            if let Some(reason) = shortage(&capacity, taken, load) {
                let hint = "stop another instance, give this one less, or raise the limit";
                self.refuse_with(&key, "spec", reason, Some(hint.to_owned()));
            } else {
                taken = plus(taken, load);
            }
        }
    }

    fn hypervisor(
        &self,
        id: Option<&str>,
    ) -> Option<(&'a str, &'a std::sync::Arc<dyn Hypervisor>)> {
        self.drivers().find_hypervisor(id)
    }
}

const fn plus(a: Load, b: Load) -> Load {
    Load {
        cpus: a.cpus.saturating_add(b.cpus),
        memory_mib: a.memory_mib.saturating_add(b.memory_mib),
    }
}

/// The name of that kind which is nearest in spelling: at most two letters differ.
fn nearest(set: &WantedSet, named: &Key) -> Option<String> {
    let all = set.of_kind(named.kind).filter(|object| object.live().is_some());
    let near =
        all.map(|object| (distance(object.name.as_str(), named.name.as_str()), &object.name));
    let (_, name) =
        near.filter(|(distance, _)| *distance <= 2).min_by_key(|(distance, _)| *distance)?;
    Some(name.to_string())
}

/// Levenshtein's distance.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.bytes().enumerate() {
        let mut diagonal = i;
        let mut before = i + 1;
        if let Some(first) = row.first_mut() {
            *first = before;
        }
        for (cell, right) in row.iter_mut().skip(1).zip(b.bytes()) {
            let changed = diagonal + usize::from(left != right);
            diagonal = *cell;
            *cell = changed.min(diagonal + 1).min(before + 1);
            before = *cell;
        }
    }
    row.last().copied().unwrap_or_default()
}
