//! What was seen of the host, with how fresh it is. Pure: who looks is [`crate::observe`].

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use drivers_api::{
    Error, ErrorKind, HostId, ImageRef, ImageStatus, NetworkId, NetworkStatus, PortId, PortStatus,
    VmId, VmStatus, VolumeId, VolumeStatus,
};

/// Orders looks at the host: taken when a call begins, so that an answer never replaces that of a call that began later.
pub(crate) type Stamp = u64;

/// What a look at one object showed.
#[derive(Debug)]
pub(crate) enum Look<T> {
    /// It was seen not to be there.
    Absent,
    /// It is there.
    There(Arc<T>),
    /// Something of that identity is there, and it is not ours.
    Foreign(Arc<Error>),
    /// It could not be seen.
    Unknown(Arc<Error>),
}

impl<T> Clone for Look<T> {
    fn clone(&self) -> Self {
        match self {
            Self::Absent => Self::Absent,
            Self::There(value) => Self::There(Arc::clone(value)),
            Self::Foreign(error) => Self::Foreign(Arc::clone(error)),
            Self::Unknown(error) => Self::Unknown(Arc::clone(error)),
        }
    }
}

impl<T> Look<T> {
    /// The answer of a `get`.
    pub(crate) fn of(answer: drivers_api::Result<Option<T>>) -> Self {
        match answer {
            Ok(Some(value)) => Self::There(Arc::new(value)),
            Ok(None) => Self::Absent,
            Err(error) if error.kind() == ErrorKind::Conflict => Self::Foreign(Arc::new(error)),
            Err(error) => Self::Unknown(Arc::new(error)),
        }
    }

    pub(crate) const fn there(&self) -> Option<&Arc<T>> {
        match self {
            Self::There(value) => Some(value),
            Self::Absent | Self::Foreign(_) | Self::Unknown(_) => None,
        }
    }

    pub(crate) const fn unknown(&self) -> Option<&Arc<Error>> {
        match self {
            Self::Unknown(error) => Some(error),
            Self::Absent | Self::There(_) | Self::Foreign(_) => None,
        }
    }

    const fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

/// The objects of one driver.
#[derive(Debug)]
pub(crate) struct Table<K, V> {
    items: BTreeMap<K, (Look<V>, Stamp)>,
    /// When the last complete list was begun.
    listed: Option<Stamp>,
    /// Why the last list failed.
    failure: Option<Arc<Error>>,
}

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Self { items: BTreeMap::new(), listed: None, failure: None }
    }
}

impl<K: Ord + Clone, V: PartialEq> Table<K, V> {
    fn look(&self, id: &K, driver: &str) -> Look<V> {
        match self.items.get(id) {
            Some((look, _)) => look.clone(),
            None if self.listed.is_some() => Look::Absent,
            None => Look::Unknown(self.failure.clone().unwrap_or_else(|| not_listed(driver))),
        }
    }

    /// Takes in one look; answers whether it showed something new.
    fn put(&mut self, id: K, look: Look<V>, began: Stamp) -> bool {
        match (self.items.get_mut(&id), &look) {
            (Some((_, stamp)), _) if *stamp > began => return false,
            (Some((Look::There(old), stamp)), Look::There(new)) if old == new => {
                *stamp = began;
                return false;
            }
            (Some((Look::Absent, stamp)), Look::Absent) => {
                *stamp = began;
                return false;
            }
            (_, _) => {}
        }
        self.items.insert(id, (look, began));
        true
    }

    /// The identities that a list begun at `began` did not show though it should have.
    fn missing(&self, shown: &BTreeSet<K>, began: Stamp) -> Vec<K> {
        let stale = self.items.iter().filter(|(id, (look, stamp))| {
            *stamp <= began && !look.is_absent() && !shown.contains(id)
        });
        stale.map(|(id, _)| id.clone()).collect()
    }

    fn there(&self) -> impl Iterator<Item = &Arc<V>> {
        self.items.values().filter_map(|(look, _)| look.there())
    }
}

fn not_listed(driver: &str) -> Arc<Error> {
    let error = Error::new(ErrorKind::Unavailable, "list the objects of", driver, "no answer yet");
    Arc::new(error)
}

/// What kind of list a driver was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Listing {
    Vms,
    Networks,
    Ports,
    Volumes,
    Images,
}

/// A driver's id, shared.
pub(crate) type DriverId = Arc<str>;

/// Everything that was seen, by driver.
#[derive(Debug)]
pub(crate) struct Seen {
    host: HostId,
    vms: BTreeMap<DriverId, Table<VmId, VmStatus>>,
    networks: BTreeMap<DriverId, Table<NetworkId, NetworkStatus>>,
    ports: BTreeMap<DriverId, Table<PortId, PortStatus>>,
    volumes: BTreeMap<DriverId, Table<VolumeId, VolumeStatus>>,
    images: BTreeMap<DriverId, Table<ImageRef, ImageStatus>>,
    /// Ports by the VM in their spec.
    ports_of: HashMap<VmId, BTreeMap<PortId, DriverId>>,
    /// Ports by the network in their spec.
    ports_on: HashMap<NetworkId, BTreeMap<PortId, VmId>>,
    port_places: HashMap<PortId, (VmId, NetworkId, Vec<IpAddr>)>,
    /// The addresses that ports have on the host.
    addresses: HashMap<NetworkId, BTreeMap<IpAddr, PortId>>,
    /// Volumes that a VM has open on this host.
    volumes_of: HashMap<VmId, BTreeMap<VolumeId, DriverId>>,
    volume_places: HashMap<VolumeId, Vec<VmId>>,
}

macro_rules! kind {
    ($field:ident, $look:ident, $put:ident, $put_list:ident, $id:ty, $value:ty, $key:expr) => {
        pub(crate) fn $look(&self, driver: &str, id: &$id) -> Look<$value> {
            match self.$field.get(driver) {
                Some(table) => table.look(id, driver),
                None => Look::Unknown(not_listed(driver)),
            }
        }

        pub(crate) fn $put_list(
            &mut self,
            driver: &DriverId,
            answer: Result<Vec<$value>, Arc<Error>>,
            began: Stamp,
        ) {
            let values = match answer {
                Ok(values) => values,
                Err(error) => {
                    self.$field.entry(Arc::clone(driver)).or_default().failure = Some(error);
                    return;
                }
            };
            let key: fn(&$value) -> $id = $key;
            let shown: BTreeSet<$id> = values.iter().map(key).collect();
            for value in values {
                self.$put(driver, key(&value), Look::There(Arc::new(value)), began);
            }
            let table = self.$field.entry(Arc::clone(driver)).or_default();
            table.listed = Some(began);
            table.failure = None;
            for id in table.missing(&shown, began) {
                self.$put(driver, id, Look::Absent, began);
            }
        }
    };
}

macro_rules! all {
    ($field:ident, $all:ident, $value:ty) => {
        /// Everything of the kind that was seen to be there, with its driver.
        pub(crate) fn $all(&self) -> impl Iterator<Item = (&DriverId, &Arc<$value>)> {
            self.$field
                .iter()
                .flat_map(|(driver, table)| table.there().map(move |value| (driver, value)))
        }
    };
}

impl Seen {
    pub(crate) fn new(host: HostId) -> Self {
        Self {
            host,
            vms: BTreeMap::new(),
            networks: BTreeMap::new(),
            ports: BTreeMap::new(),
            volumes: BTreeMap::new(),
            images: BTreeMap::new(),
            ports_of: HashMap::new(),
            ports_on: HashMap::new(),
            volumes_of: HashMap::new(),
            port_places: HashMap::new(),
            addresses: HashMap::new(),
            volume_places: HashMap::new(),
        }
    }

    kind!(vms, vm, put_vm, put_vms, VmId, VmStatus, |value| value.uuid);
    kind!(networks, network, put_network, put_networks, NetworkId, NetworkStatus, |value| value
        .uuid);
    kind!(ports, port, put_port, put_ports, PortId, PortStatus, |value| value.uuid);
    kind!(volumes, volume, put_volume, put_volumes, VolumeId, VolumeStatus, |value| { value.uuid });
    kind!(images, image, put_image, put_images, ImageRef, ImageStatus, |value| {
        value.reference.clone()
    });
    all!(vms, all_vms, VmStatus);
    all!(networks, all_networks, NetworkStatus);
    all!(ports, all_ports, PortStatus);
    all!(volumes, all_volumes, VolumeStatus);

    pub(crate) fn put_vm(
        &mut self,
        driver: &DriverId,
        id: VmId,
        look: Look<VmStatus>,
        began: Stamp,
    ) {
        self.vms.entry(Arc::clone(driver)).or_default().put(id, look, began);
    }

    pub(crate) fn put_network(
        &mut self,
        driver: &DriverId,
        id: NetworkId,
        look: Look<NetworkStatus>,
        began: Stamp,
    ) {
        self.networks.entry(Arc::clone(driver)).or_default().put(id, look, began);
    }

    pub(crate) fn put_image(
        &mut self,
        driver: &DriverId,
        id: ImageRef,
        look: Look<ImageStatus>,
        began: Stamp,
    ) {
        self.images.entry(Arc::clone(driver)).or_default().put(id, look, began);
    }

    pub(crate) fn put_port(
        &mut self,
        driver: &DriverId,
        id: PortId,
        look: Look<PortStatus>,
        began: Stamp,
    ) {
        // What could not be seen stays in the indexes as it was seen last.
        let indexed = look.unknown().is_none();
        let new = look.there().and_then(|port| port.spec.as_ref());
        let new = new.map(|spec| (spec.vm_uuid, spec.network_uuid, spec.addresses.clone()));
        let table = self.ports.entry(Arc::clone(driver)).or_default();
        if !table.put(id, look, began) || !indexed {
            return;
        }
        if let Some((vm, network, addresses)) = self.port_places.remove(&id) {
            remove_from(&mut self.ports_of, &vm, &id);
            remove_from(&mut self.ports_on, &network, &id);
            for address in addresses {
                if self.port_with(network, address) == Some(id) {
                    remove_from(&mut self.addresses, &network, &address);
                }
            }
        }
        if let Some((vm, network, addresses)) = new {
            self.ports_of.entry(vm).or_default().insert(id, Arc::clone(driver));
            self.ports_on.entry(network).or_default().insert(id, vm);
            for address in &addresses {
                self.addresses.entry(network).or_default().insert(*address, id);
            }
            self.port_places.insert(id, (vm, network, addresses));
        }
    }

    pub(crate) fn put_volume(
        &mut self,
        driver: &DriverId,
        id: VolumeId,
        look: Look<VolumeStatus>,
        began: Stamp,
    ) {
        let indexed = look.unknown().is_none();
        let all = look.there().map(|volume| volume.attachments.as_slice()).unwrap_or_default();
        let here = all.iter().filter(|one| one.host_uuid == self.host);
        let new: Vec<VmId> = here.map(|one| one.vm_uuid).collect();
        let table = self.volumes.entry(Arc::clone(driver)).or_default();
        if !table.put(id, look, began) || !indexed {
            return;
        }
        for vm in self.volume_places.remove(&id).unwrap_or_default() {
            remove_from(&mut self.volumes_of, &vm, &id);
        }
        for vm in &new {
            self.volumes_of.entry(*vm).or_default().insert(id, Arc::clone(driver));
        }
        if !new.is_empty() {
            self.volume_places.insert(id, new);
        }
    }

    /// The port that has an address of a network on the host.
    pub(crate) fn port_with(&self, network: NetworkId, address: IpAddr) -> Option<PortId> {
        self.addresses.get(&network)?.get(&address).copied()
    }

    /// The VM, the network and the addresses of a port.
    pub(crate) fn place_of(&self, port: PortId) -> Option<(VmId, NetworkId, &[IpAddr])> {
        let (vm, network, addresses) = self.port_places.get(&port)?;
        Some((*vm, *network, addresses))
    }

    /// The ports of a VM, with their drivers.
    pub(crate) fn ports_of(&self, vm: VmId) -> impl Iterator<Item = (&PortId, &DriverId)> {
        self.ports_of.get(&vm).into_iter().flatten()
    }

    /// The ports on a network, with their VMs.
    pub(crate) fn ports_on(&self, network: NetworkId) -> impl Iterator<Item = (&PortId, &VmId)> {
        self.ports_on.get(&network).into_iter().flatten()
    }

    /// The volumes that a VM has open on this host, with their drivers.
    pub(crate) fn volumes_of(&self, vm: VmId) -> impl Iterator<Item = (&VolumeId, &DriverId)> {
        self.volumes_of.get(&vm).into_iter().flatten()
    }

    /// Whether a VM was seen not to be there by every hypervisor of these.
    pub(crate) fn vm_is_gone<'a>(
        &self,
        vm: VmId,
        mut hypervisors: impl Iterator<Item = &'a str>,
    ) -> bool {
        hypervisors.all(|driver| self.vm(driver, &vm).is_absent())
    }

    /// Why a driver's last list failed, if it did.
    pub(crate) fn list_failure(&self, listing: Listing, driver: &str) -> Option<Arc<Error>> {
        match listing {
            Listing::Vms => self.vms.get(driver)?.failure.clone(),
            Listing::Networks => self.networks.get(driver)?.failure.clone(),
            Listing::Ports => self.ports.get(driver)?.failure.clone(),
            Listing::Volumes => self.volumes.get(driver)?.failure.clone(),
            Listing::Images => self.images.get(driver)?.failure.clone(),
        }
    }

    /// Why a driver's list is not known: never listed.
    pub(crate) fn unlisted(&self, listing: Listing, driver: &str) -> Option<Arc<Error>> {
        fn of<K, V>(tables: &BTreeMap<DriverId, Table<K, V>>, driver: &str) -> Option<Arc<Error>> {
            match tables.get(driver) {
                Some(table) if table.listed.is_some() => None,
                Some(table) => Some(table.failure.clone().unwrap_or_else(|| not_listed(driver))),
                None => Some(not_listed(driver)),
            }
        }
        match listing {
            Listing::Vms => of(&self.vms, driver),
            Listing::Networks => of(&self.networks, driver),
            Listing::Ports => of(&self.ports, driver),
            Listing::Volumes => of(&self.volumes, driver),
            Listing::Images => of(&self.images, driver),
        }
    }
}

fn remove_from<A, B, C>(index: &mut HashMap<A, BTreeMap<B, C>>, at: &A, id: &B)
where
    A: std::hash::Hash + Eq,
    B: Ord,
{
    if let Some(inner) = index.get_mut(at) {
        inner.remove(id);
        if inner.is_empty() {
            index.remove(at);
        }
    }
}
