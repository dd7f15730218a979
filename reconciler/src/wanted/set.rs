//! All wanted objects at one moment.

use std::{cmp::Ordering, collections::BTreeMap, sync::Arc};

use drivers_api::Uuid;

use super::{Key, Kind, ObjectName, Wanted};

/// Everything that is wanted at one moment. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WantedSet {
    objects: Arc<BTreeMap<Key, Arc<Wanted>>>,
}

impl WantedSet {
    /// The set of these objects. Of two with one key the later wins.
    pub fn new(objects: impl IntoIterator<Item = Wanted>) -> Self {
        let objects = objects.into_iter().map(|object| (object.key(), Arc::new(object))).collect();
        Self { objects: Arc::new(objects) }
    }

    /// The set with `object` put in or replaced.
    #[must_use]
    pub fn with(&self, object: Wanted) -> Self {
        let mut objects = (*self.objects).clone();
        objects.insert(object.key(), Arc::new(object));
        Self { objects: Arc::new(objects) }
    }

    /// The set with all of `objects` put in or replaced; one copy of the set for any number of them.
    #[must_use]
    pub fn with_all(&self, objects: impl IntoIterator<Item = Wanted>) -> Self {
        let mut all = (*self.objects).clone();
        all.extend(objects.into_iter().map(|object| (object.key(), Arc::new(object))));
        Self { objects: Arc::new(all) }
    }

    /// What remains wanted under a name: see [`Wanted::live`].
    #[must_use]
    pub fn live(&self, key: &Key) -> Option<&Wanted> {
        self.get(key)?.live()
    }

    /// The keys of which the two sets hold different documents.
    #[must_use]
    pub fn diff(&self, other: &Self) -> Vec<Key> {
        if Arc::ptr_eq(&self.objects, &other.objects) {
            return Vec::new();
        }
        let mut keys = Vec::new();
        let (mut left, mut right) =
            (self.objects.iter().peekable(), other.objects.iter().peekable());
        loop {
            let order = match (left.peek(), right.peek()) {
                (None, None) => return keys,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some((a, _)), Some((b, _))) => a.cmp(b),
            };
            let one = if order.is_le() { left.next() } else { None };
            let two = if order.is_ge() { right.next() } else { None };
            let same = match (one, two) {
                (Some((_, a)), Some((_, b))) => Arc::ptr_eq(a, b) || a == b,
                (_, _) => false,
            };
            if let Some((key, _)) = one.or(two).filter(|_| !same) {
                keys.push(key.clone());
            }
        }
    }

    /// The set without an object.
    #[must_use]
    pub fn without(&self, key: &Key) -> Self {
        let mut objects = (*self.objects).clone();
        objects.remove(key);
        Self { objects: Arc::new(objects) }
    }

    /// The set once the tombstone of `uuid` is dropped: without it, or with its successor in its place. The same set where
    /// the document is no tombstone of that identity.
    #[must_use]
    pub fn forget(&self, key: &Key, uuid: Uuid) -> Self {
        match self.get(key) {
            Some(object) if object.deleting && object.uuid == uuid => match &object.successor {
                Some(successor) => self.with((**successor).clone()),
                None => self.without(key),
            },
            Some(_) | None => self.clone(),
        }
    }

    /// One object, being deleted or not.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<&Arc<Wanted>> {
        self.objects.get(key)
    }

    /// All objects, by kind and name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Wanted>> {
        self.objects.values()
    }

    /// All objects of a kind, by name.
    pub fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &Arc<Wanted>> {
        // The empty text sorts before every name.
        let first = Key::new(kind, ObjectName("".into()));
        self.objects
            .range(first..)
            .map_while(move |(key, object)| (key.kind == kind).then_some(object))
    }

    /// How many objects there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether nothing is wanted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }
}
