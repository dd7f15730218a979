//! What becomes wanted when manifests are accepted or objects deleted. Pure: from a set and a request to the documents
//! that change.

use std::collections::BTreeMap;

use drivers_api::{Uuid, VmPower};
use reconciler::wanted::{Key, Wanted, WantedSet, WantedSpec};

use crate::{
    manifest::{Manifest, ManifestError},
    strict::Problem,
};

/// What a request did to the wanted state of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It was not wanted before.
    Created,
    /// Something else is wanted of it now.
    Changed,
    /// It is wanted already, just so.
    Unchanged,
}

impl Change {
    /// The word on the wire and for people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Changed => "changed",
            Self::Unchanged => "unchanged",
        }
    }
}

/// An accepted object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// The object.
    pub key: Key,
    /// Its identity.
    pub uuid: Uuid,
    /// Its generation from now on.
    pub generation: u64,
    /// What was done.
    pub change: Change,
}

impl Accepted {
    fn of(object: &Wanted, change: Change) -> Self {
        Self { key: object.key(), uuid: object.uuid, generation: object.generation, change }
    }
}

/// What a request leads to: the documents to put, and what to answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edit {
    /// The documents that change.
    pub puts: Vec<Wanted>,
    /// One answer for each object of the request.
    pub accepted: Vec<Accepted>,
}

/// The effect of manifests on a set. `adopt` has the identities of objects on the host that nobody claims: a manifest
/// without a uuid takes the one of its key.
///
/// # Errors
/// All manifests that cannot be accepted.
pub fn apply(
    set: &WantedSet,
    manifests: &[Manifest],
    adopt: &BTreeMap<Key, Uuid>,
) -> Result<Edit, Vec<ManifestError>> {
    let owners: BTreeMap<Uuid, Key> = set
        .iter()
        .flat_map(|object| std::iter::once(&**object).chain(object.successor.as_deref()))
        .map(|object| (object.uuid, object.key()))
        .collect();
    let (mut edit, mut errors) = (Edit::default(), Vec::new());
    for manifest in manifests {
        let key = manifest.key();
        let taken = manifest.uuid.and_then(|uuid| owners.get(&uuid)).filter(|owner| **owner != key);
        let one = match taken {
            Some(owner) => Err(Problem::new("uuid", format!("it is the identity of {owner}"))),
            None => apply_one(set.get(&key).map(|object| &**object), manifest, adopt.get(&key)),
        };
        match one {
            Ok((put, accepted)) => {
                edit.puts.extend(put);
                edit.accepted.push(accepted);
            }
            Err(problem) => errors.push(ManifestError {
                document: manifest.document,
                line: None,
                object: key.to_string(),
                problem,
            }),
        }
    }
    if errors.is_empty() { Ok(edit) } else { Err(errors) }
}

type One = Result<(Option<Wanted>, Accepted), Problem>;

fn apply_one(old: Option<&Wanted>, manifest: &Manifest, adopt: Option<&Uuid>) -> One {
    let Some(old) = old else {
        let uuid = manifest.uuid.or(adopt.copied()).map_or_else(random, Ok)?;
        let new = fresh(uuid, manifest);
        let accepted = Accepted::of(&new, Change::Created);
        return Ok((Some(new), accepted));
    };
    if !old.deleting {
        return Ok(match changed(old, manifest)? {
            Some(new) => {
                let accepted = Accepted::of(&new, Change::Changed);
                (Some(new), accepted)
            }
            None => (None, Accepted::of(old, Change::Unchanged)),
        });
    }
    // The name is being deleted: what is applied now takes its place when it is gone.
    if manifest.uuid == Some(old.uuid) {
        return Err(Problem::new("uuid", "the object of this identity is being deleted")
            .with_remedy("wait until it is gone, or leave the uuid out"));
    }
    let (successor, change) = match old.successor.as_deref() {
        None => (fresh(manifest.uuid.map_or_else(random, Ok)?, manifest), Change::Created),
        Some(waiting) => match changed(waiting, manifest)? {
            None => return Ok((None, Accepted::of(waiting, Change::Unchanged))),
            Some(new) => (new, Change::Changed),
        },
    };
    let tombstone = old.with_successor(successor);
    let waiting = tombstone.successor.as_deref().unwrap_or(&tombstone);
    let accepted = Accepted::of(waiting, change);
    Ok((Some(tombstone), accepted))
}

/// The object with what the manifest says; `None` when it says so already. A label alone is no new generation: it has no
/// effect on the host.
fn changed(old: &Wanted, manifest: &Manifest) -> Result<Option<Wanted>, Problem> {
    if manifest.uuid.is_some_and(|uuid| uuid != old.uuid) {
        let reason = format!("the object has the identity {}, which never changes", old.uuid);
        return Err(
            Problem::new("uuid", reason).with_remedy("leave it out, or delete the object first")
        );
    }
    let next = old.next(fresh(old.uuid, manifest));
    Ok(Some(next).filter(|next| next != old))
}

/// An instance with its power asked for: the next generation where it changes, and a start where an instance that is
/// wanted to run already may stand still by its restart policy. Other objects stay as they are.
#[must_use]
pub fn power(old: &Wanted, power: VmPower) -> Wanted {
    let mut asked = old.clone();
    let WantedSpec::Instance(spec) = &mut asked.spec else { return asked };
    if spec.power != power {
        spec.power = power;
        return old.next(asked);
    }
    if power == VmPower::Running {
        asked.starts += 1;
    }
    asked
}

fn fresh(uuid: Uuid, manifest: &Manifest) -> Wanted {
    let mut new = Wanted::new(uuid, manifest.name.clone(), manifest.spec.clone());
    new.project = manifest.project;
    new.labels.clone_from(&manifest.labels);
    new
}

fn random() -> Result<Uuid, Problem> {
    Uuid::from_bytes(*uuid::Uuid::new_v4().as_bytes())
        .ok_or_else(|| Problem::new("uuid", "no random identity could be made"))
}

/// What became of an object that was asked to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deletion {
    /// It is being deleted.
    Deleting(Uuid),
    /// It is not there: nothing to do.
    NotFound,
}

/// The effect of a deletion on a set.
#[must_use]
pub fn delete(set: &WantedSet, keys: &[Key]) -> (Vec<Wanted>, Vec<(Key, Deletion)>) {
    let (mut puts, mut answers) = (Vec::new(), Vec::new());
    for key in keys {
        let Some(object) = set.get(key) else {
            answers.push((key.clone(), Deletion::NotFound));
            continue;
        };
        let gone = object.deleted();
        if gone != **object {
            puts.push(gone);
        }
        answers.push((key.clone(), Deletion::Deleting(object.uuid)));
    }
    (puts, answers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::parse;

    fn manifests(size: u64, more: &str) -> Vec<Manifest> {
        parse(&format!(
            "api_version: bcd/v1\nkind: Volume\nname: a\nspec: {{size_gib: {size}}}\n{more}"
        ))
        .unwrap()
    }

    fn set(edit: &Edit, set: &WantedSet) -> WantedSet {
        set.with_all(edit.puts.clone())
    }

    fn none() -> BTreeMap<Key, Uuid> {
        BTreeMap::new()
    }

    #[test]
    fn a_generation_counts_real_changes_only_and_the_identity_stays() {
        let start = WantedSet::default();
        let first = apply(&start, &manifests(1, ""), &none()).unwrap();
        assert_eq!(first.accepted[0].change, Change::Created);
        let one = set(&first, &start);
        let again = apply(&one, &manifests(1, ""), &none()).unwrap();
        assert_eq!((again.accepted[0].change, again.puts.len()), (Change::Unchanged, 0));
        let labelled = apply(&one, &manifests(1, "labels: {x: y}"), &none()).unwrap();
        assert_eq!(
            (labelled.accepted[0].change, labelled.accepted[0].generation),
            (Change::Changed, 1)
        );
        let grown = apply(&one, &manifests(2, ""), &none()).unwrap();
        assert_eq!((grown.accepted[0].change, grown.accepted[0].generation), (Change::Changed, 2));
        assert_eq!(grown.accepted[0].uuid, first.accepted[0].uuid);
    }

    #[test]
    fn an_identity_never_changes_and_has_one_owner() {
        let uuid = "uuid: 3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b";
        let one = set(
            &apply(&WantedSet::default(), &manifests(1, ""), &none()).unwrap(),
            &WantedSet::default(),
        );
        let error = apply(&one, &manifests(1, uuid), &none()).unwrap_err()[0].to_string();
        assert!(error.contains("Volume a: uuid: the object has the identity"), "{error}");
        let own = set(
            &apply(&WantedSet::default(), &manifests(1, uuid), &none()).unwrap(),
            &WantedSet::default(),
        );
        let mut other = manifests(1, &uuid.to_uppercase().replace("UUID", "uuid"));
        other[0].name = "b".parse().unwrap();
        let error = apply(&own, &other, &none()).unwrap_err()[0].to_string();
        assert!(error.contains("Volume b: uuid: it is the identity of Volume a"), "{error}");
    }

    #[test]
    fn what_is_applied_while_its_name_is_deleted_waits_as_the_successor() {
        let one = set(
            &apply(&WantedSet::default(), &manifests(1, ""), &none()).unwrap(),
            &WantedSet::default(),
        );
        let key = manifests(1, "")[0].key();
        let old = one.get(&key).unwrap().uuid;
        let (puts, answers) = delete(&one, std::slice::from_ref(&key));
        assert_eq!(answers[0].1, Deletion::Deleting(old));
        let deleting = one.with_all(puts);
        let (again, _) = delete(&deleting, std::slice::from_ref(&key));
        assert!(again.is_empty(), "a second deletion writes nothing");

        let next = apply(&deleting, &manifests(1, ""), &none()).unwrap();
        let both = set(&next, &deleting);
        let document = both.get(&key).unwrap();
        assert!(document.deleting && document.uuid == old);
        let successor = document.successor.as_deref().unwrap();
        assert_eq!(successor.uuid, next.accepted[0].uuid);
        assert_ne!(successor.uuid, old);
        assert_eq!(
            apply(&both, &manifests(1, ""), &none()).unwrap().accepted[0].change,
            Change::Unchanged
        );
        let (puts, _) = delete(&both, std::slice::from_ref(&key));
        assert!(puts[0].successor.is_none(), "deleting again takes the successor back");
        let same = apply(&deleting, &manifests(1, &format!("uuid: {old}")), &none()).unwrap_err();
        assert!(same[0].to_string().contains("is being deleted"), "{}", same[0]);
    }

    #[test]
    fn what_is_unclaimed_on_the_host_is_adopted_by_its_name() {
        let found: Uuid = "0d9e8f7a-6b5c-4d3e-8f2a-1b0c9d8e7f6a".parse().unwrap();
        let adopt = BTreeMap::from([(manifests(1, "")[0].key(), found)]);
        let edit = apply(&WantedSet::default(), &manifests(1, ""), &adopt).unwrap();
        assert_eq!(edit.accepted[0].uuid, found);
    }

    #[test]
    fn a_deletion_of_what_is_not_there_is_no_error() {
        let key = manifests(1, "")[0].key();
        let (puts, answers) = delete(&WantedSet::default(), std::slice::from_ref(&key));
        assert!(puts.is_empty());
        assert_eq!(answers, [(key, Deletion::NotFound)]);
    }

    fn instance(power: &str, nics: &str) -> Vec<Manifest> {
        parse(&format!(
            "api_version: bcd/v1\nkind: Instance\nname: a\nspec:\n  cpus: 1\n  memory_mib: 64\n  \
             boot: {{kind: oci_image, ref: g}}\n  power: {power}\n  nics: [{nics}]\n"
        ))
        .unwrap()
    }

    #[test]
    fn an_instance_remembers_nics_that_went_and_a_power_that_goes_to_running_asks_for_a_start() {
        let (lan, wan) = ("{name: lan, network: n}", "{name: wan, network: n}");
        let step = |at: &WantedSet, power: &str, nics: &str| {
            set(&apply(at, &instance(power, nics), &none()).unwrap(), at)
        };
        let of = |at: &WantedSet| (**at.get(&instance("running", "")[0].key()).unwrap()).clone();
        let both = step(&WantedSet::default(), "running", &format!("{lan}, {wan}"));
        let one = step(&both, "stopped", lan);
        let former: Vec<_> = of(&one).former_nics.iter().map(ToString::to_string).collect();
        assert_eq!((former, of(&one).starts, of(&one).generation), (vec!["wan".to_owned()], 0, 2));
        let back = step(&one, "running", wan);
        let former: Vec<_> = of(&back).former_nics.iter().map(ToString::to_string).collect();
        assert_eq!(
            (former, of(&back).starts, of(&back).generation),
            (vec!["lan".to_owned()], 1, 3)
        );
        assert_eq!(step(&back, "running", wan), back, "the same again changes nothing");
    }

    #[test]
    fn a_start_is_asked_for_whether_the_instance_is_wanted_to_run_or_not() {
        let at = WantedSet::default();
        let at = set(&apply(&at, &instance("running", "")[..], &none()).unwrap(), &at);
        let runs = (**at.iter().next().unwrap()).clone();
        let stopped = power(&runs, VmPower::Stopped);
        assert_eq!((stopped.generation, stopped.starts), (2, 0));
        assert_eq!(power(&stopped, VmPower::Stopped), stopped);
        let started = power(&stopped, VmPower::Running);
        assert_eq!((started.generation, started.starts), (3, 1));
        let again = power(&started, VmPower::Running);
        assert_eq!((again.generation, again.starts), (3, 2));
    }
}
