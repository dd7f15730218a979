//! The node behind the API: what each call does, without its wire.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use drivers_api::{Error, ErrorKind, HostId, ObjectRef, SecretResolver, Uuid, VmPower};
use reconciler::{
    Drivers, Reconciler,
    plan::Step,
    status::{Status, Unclaimed},
    store::WantedStore,
    wanted::{Key, Kind, ObjectName, Wanted, WantedSet},
};

use crate::{
    accept::{self, Accepted, Change, Deletion, Edit},
    config::Config,
    events::EventLog,
    fault::Faults,
    manifest::{self, Manifest},
    store::{self, Access, Op, Store, Trouble},
};

/// How long the host is asked for what nobody claims.
const UNCLAIMED: Duration = Duration::from_secs(5);

/// An object as it is wanted and as it is.
#[derive(Clone, Debug)]
pub struct Object {
    /// The document.
    pub wanted: Arc<Wanted>,
    /// The status; `None` until it was looked at first, and while the store is only read.
    pub status: Option<Status>,
}

/// A node: its wanted state, its reconciler and its drivers. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Node(Arc<Inner>);

/// What a node is made of.
pub(crate) struct Parts {
    pub(crate) config: Config,
    pub(crate) store: Arc<Store>,
    pub(crate) drivers: Drivers,
    pub(crate) secrets: Arc<dyn SecretResolver>,
}

struct Inner {
    id: HostId,
    config: Config,
    store: Arc<Store>,
    drivers: Drivers,
    secrets: Arc<dyn SecretResolver>,
    reconciler: Option<Reconciler>,
    events: EventLog,
    /// Held from the look at the wanted state to its change, so that two requests do not overwrite each other.
    edit: tokio::sync::Mutex<()>,
    /// Whether the host was seen to have nothing that nobody claims. Only a lost store makes such things.
    all_claimed: AtomicBool,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("id", &self.id)
            .field("drivers", &self.drivers)
            .finish_non_exhaustive()
    }
}

impl Node {
    pub(crate) fn new(id: HostId, parts: Parts, reconciler: Option<Reconciler>) -> Self {
        let Parts { config, store, drivers, secrets } = parts;
        let events = EventLog::new();
        if let Some(reconciler) = &reconciler {
            tokio::spawn(events.clone().follow(reconciler.clone()));
        }
        Self(Arc::new(Inner {
            id,
            config,
            store,
            drivers,
            secrets,
            reconciler,
            events,
            edit: tokio::sync::Mutex::new(()),
            all_claimed: AtomicBool::new(false),
        }))
    }

    /// The node's identity.
    #[must_use]
    pub fn id(&self) -> HostId {
        self.0.id
    }

    /// The configuration that it runs with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// The wanted state on disk.
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        &self.0.store
    }

    /// The drivers.
    #[must_use]
    pub fn drivers(&self) -> &Drivers {
        &self.0.drivers
    }

    /// Where drivers have the values of secret references from.
    #[must_use]
    pub fn secrets(&self) -> &Arc<dyn SecretResolver> {
        &self.0.secrets
    }

    /// The latest events.
    #[must_use]
    pub fn events(&self) -> &EventLog {
        &self.0.events
    }

    /// The reconciler; `None` while the store is only read: then nothing on the host is changed.
    #[must_use]
    pub fn reconciler(&self) -> Option<&Reconciler> {
        self.0.reconciler.as_ref()
    }

    /// Why the store is only read.
    #[must_use]
    pub fn trouble(&self) -> Option<&Trouble> {
        match self.0.store.access() {
            Access::ReadWrite => None,
            Access::ReadOnly(trouble) => Some(trouble),
        }
    }

    fn working(&self) -> Result<&Reconciler, Faults> {
        match (&self.0.reconciler, self.trouble()) {
            (Some(reconciler), None) => Ok(reconciler),
            (_, Some(trouble)) => Err(store::read_only(trouble).into()),
            (None, None) => {
                Err(Error::new(ErrorKind::Unavailable, "change", "the node", "it is ending").into())
            }
        }
    }

    /// All objects, or those of a kind, by kind and name.
    #[must_use]
    pub fn list(&self, kind: Option<Kind>) -> Vec<Object> {
        let mut statuses: BTreeMap<Key, Status> = self
            .0
            .reconciler
            .iter()
            .flat_map(Reconciler::statuses)
            .map(|status| (status.key.clone(), status))
            .collect();
        let set = self.0.store.snapshot();
        set.iter()
            .filter(|object| kind.is_none_or(|kind| object.spec.kind() == kind))
            .map(|object| Object {
                status: statuses.remove(&object.key()),
                wanted: Arc::clone(object),
            })
            .collect()
    }

    /// One object.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<Object> {
        let wanted = Arc::clone(self.0.store.snapshot().get(key)?);
        let status = self.0.reconciler.as_ref().and_then(|reconciler| reconciler.status(key));
        Some(Object { wanted, status })
    }

    /// Accepts manifests: all documents, or none. Durable when it returns.
    ///
    /// # Errors
    /// Every problem of every document; or why the store was not written.
    pub async fn apply(&self, text: &str) -> Result<Vec<Accepted>, Faults> {
        self.working()?;
        let manifests = manifest::parse(text)?;
        let adopt = self.adoptable(&manifests).await?;
        let _edit = self.0.edit.lock().await;
        let set = self.0.store.snapshot();
        let edit = accept::apply(&set, &manifests, &adopt)?;
        self.check(&set.with_all(edit.puts.clone()), &manifests)?;
        self.commit(edit).await
    }

    /// The steps that [`Node::apply`] of these manifests would lead to, for their objects, and what it would accept.
    /// Changes nothing.
    ///
    /// # Errors
    /// As [`Node::apply`]; or a driver that cannot be asked.
    pub async fn plan(&self, text: &str) -> Result<(Vec<Step>, Vec<Accepted>), Faults> {
        let reconciler = self.working()?;
        let manifests = manifest::parse(text)?;
        let adopt = self.adoptable(&manifests).await?;
        let set = self.0.store.snapshot();
        let edit = accept::apply(&set, &manifests, &adopt)?;
        let proposed = set.with_all(edit.puts);
        self.check(&proposed, &manifests)?;
        let keys: Vec<Key> = manifests.iter().map(Manifest::key).collect();
        let mut steps = reconciler.plan(&proposed).await?;
        steps.retain(|step| keys.contains(&step.object));
        Ok((steps, edit.accepted))
    }

    /// The steps that are still to be done for one object as it is wanted now.
    ///
    /// # Errors
    /// When a driver cannot be asked.
    pub async fn pending(&self, key: &Key) -> Result<Vec<Step>, Faults> {
        let mut steps = self.working()?.plan(&self.0.store.snapshot()).await?;
        steps.retain(|step| step.object == *key);
        Ok(steps)
    }

    fn check(&self, proposed: &WantedSet, manifests: &[Manifest]) -> Result<(), Faults> {
        let refusals = self.working()?.check(proposed);
        if refusals.is_empty() {
            return Ok(());
        }
        let document = |key: &Key| {
            manifests.iter().find(|one| one.key() == *key).map_or(0, |manifest| manifest.document)
        };
        Err(Faults::of_refusals(refusals, document))
    }

    async fn commit(&self, edit: Edit) -> Result<Vec<Accepted>, Faults> {
        if !edit.puts.is_empty() {
            self.0.store.commit(vec![Op::Put(edit.puts)]).await?;
        }
        for accepted in edit.accepted.iter().filter(|one| one.change != Change::Unchanged) {
            let Accepted { key, uuid, generation, change } = accepted;
            let message = format!("{}: generation {generation} of {uuid}", change.as_str());
            self.0.events.add("accepted", Some(key.clone()), message);
        }
        Ok(edit.accepted)
    }

    /// Marks objects for deletion. Durable when it returns; the host is cleared afterwards.
    ///
    /// # Errors
    /// Why the store was not written.
    pub async fn delete(&self, keys: &[Key]) -> Result<Vec<(Key, Deletion)>, Faults> {
        self.working()?;
        let _edit = self.0.edit.lock().await;
        let (puts, answers) = accept::delete(&self.0.store.snapshot(), keys);
        let marked: Vec<_> = puts.iter().map(Wanted::key).collect();
        if !puts.is_empty() {
            self.0.store.commit(vec![Op::Put(puts)]).await?;
        }
        for key in marked {
            self.0.events.add("accepted", Some(key), "marked for deletion");
        }
        Ok(answers)
    }

    /// Starts or stops an instance.
    ///
    /// # Errors
    /// `NotFound`; what [`Reconciler::check`] refuses; why the store was not written.
    pub async fn set_power(&self, name: &ObjectName, power: VmPower) -> Result<Accepted, Faults> {
        self.edit_instance(name, |object| *object = accept::power(object, power)).await
    }

    /// Restarts an instance's guest.
    ///
    /// # Errors
    /// `NotFound`; why the store was not written.
    pub async fn reboot(&self, name: &ObjectName) -> Result<Accepted, Faults> {
        self.edit_instance(name, |object| object.reboots += 1).await
    }

    async fn edit_instance(
        &self,
        name: &ObjectName,
        change: impl FnOnce(&mut Wanted),
    ) -> Result<Accepted, Faults> {
        self.working()?;
        let _edit = self.0.edit.lock().await;
        let set = self.0.store.snapshot();
        let key = Key::new(Kind::Instance, name.clone());
        let Some(object) = set.get(&key).filter(|object| !object.deleting) else {
            return Err(not_found(&key).into());
        };
        let mut new = (**object).clone();
        change(&mut new);
        let changed = new != **object;
        let accepted = Accepted {
            key,
            uuid: new.uuid,
            generation: new.generation,
            change: if changed { Change::Changed } else { Change::Unchanged },
        };
        let puts = if changed { vec![new] } else { Vec::new() };
        self.check(&set.with_all(puts.clone()), &[])?;
        self.commit(Edit { puts, accepted: vec![accepted.clone()] }).await?;
        Ok(accepted)
    }

    /// What is on the host with this node's mark and claimed by nobody.
    ///
    /// # Errors
    /// When a driver cannot be asked in time.
    pub async fn unclaimed(&self) -> Result<Vec<Unclaimed>, Faults> {
        let asked = tokio::time::timeout(UNCLAIMED, self.working()?.unclaimed()).await;
        let found = asked.map_err(|_| {
            let reason = format!("a driver did not answer within {UNCLAIMED:?}");
            Error::new(ErrorKind::Deadline, "list", "what nobody claims", reason)
        })??;
        if found.is_empty() {
            self.0.all_claimed.store(true, Ordering::Relaxed);
        }
        Ok(found)
    }

    /// The identities that new objects without one take over from what is on the host.
    async fn adoptable(&self, manifests: &[Manifest]) -> Result<BTreeMap<Key, Uuid>, Faults> {
        let set = self.0.store.snapshot();
        let asks = manifests.iter().any(|one| one.uuid.is_none() && set.get(&one.key()).is_none());
        if !asks || self.0.all_claimed.load(Ordering::Relaxed) {
            return Ok(BTreeMap::new());
        }
        match self.unclaimed().await {
            Ok(found) => Ok(found.into_iter().filter_map(|one| identity(&one)).collect()),
            // A new store beside a silent driver: what is there could be made a second time under another identity.
            Err(faults) if self.0.store.is_fresh() => Err(faults),
            Err(faults) => {
                tracing::warn!(error = %faults, "the host was not asked for what nobody claims");
                Ok(BTreeMap::new())
            }
        }
    }
}

fn identity(unclaimed: &Unclaimed) -> Option<(Key, Uuid)> {
    let (kind, uuid) = match unclaimed.object {
        ObjectRef::Vm(id) => (Kind::Instance, id.uuid()),
        ObjectRef::Network(id) => (Kind::Network, id.uuid()),
        ObjectRef::Volume(id) => (Kind::Volume, id.uuid()),
        // A port is found by its instance and name.
        ObjectRef::Port(_) | _ => return None,
    };
    let name = unclaimed.name.as_deref()?.parse().ok()?;
    Some((Key::new(kind, name), uuid))
}

pub(crate) fn not_found(key: &Key) -> Error {
    Error::not_found("find", key).with_remedy("bcd-node get lists what is there")
}
