//! Who names whom, and which object has which identity: kept with the wanted state, so that nothing searches it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use drivers_api::{PortId, Uuid};

use crate::{
    resolve::{former_ports, port_id},
    wanted::{Key, Kind, Wanted, WantedSet, WantedSpec},
};

/// Look-ups over a wanted set.
#[derive(Debug, Default)]
pub(crate) struct Index {
    users: HashMap<Key, BTreeSet<Key>>,
    owners: HashMap<Uuid, Key>,
    ports: HashMap<PortId, Key>,
    /// The addresses that NICs ask for, by network.
    asked: HashMap<Key, BTreeMap<IpAddr, BTreeSet<PortId>>>,
}

impl Index {
    /// Of a whole set.
    pub(crate) fn of(set: &WantedSet) -> Self {
        let mut index = Self::default();
        for object in set.iter() {
            index.change(&object.key(), None, Some(object));
        }
        index
    }

    /// Follows the change of one document.
    pub(crate) fn change(&mut self, key: &Key, old: Option<&Wanted>, new: Option<&Wanted>) {
        for object in old.into_iter().flat_map(documents) {
            for named in object.references() {
                if let Some(users) = self.users.get_mut(&named) {
                    users.remove(key);
                    if users.is_empty() {
                        self.users.remove(&named);
                    }
                }
            }
            if self.owners.get(&object.uuid) == Some(key) {
                self.owners.remove(&object.uuid);
            }
            for port in former_ports(object) {
                self.ports.remove(&port);
            }
            for (port, network, addresses) in ports(object) {
                self.ports.remove(&port);
                let Some(asked) = self.asked.get_mut(&network) else { continue };
                for address in addresses {
                    let ports = asked.entry(address).or_default();
                    ports.remove(&port);
                    if ports.is_empty() {
                        asked.remove(&address);
                    }
                }
            }
        }
        for object in new.into_iter().flat_map(documents) {
            for named in object.references() {
                self.users.entry(named).or_default().insert(key.clone());
            }
            self.owners.insert(object.uuid, key.clone());
            for port in former_ports(object) {
                self.ports.insert(port, key.clone());
            }
            for (port, network, addresses) in ports(object) {
                self.ports.insert(port, key.clone());
                for address in addresses {
                    let asked = self.asked.entry(network.clone()).or_default();
                    asked.entry(address).or_default().insert(port);
                }
            }
        }
    }

    /// A port other than `port` whose NIC asks for an address of a network.
    pub(crate) fn asks(&self, network: &Key, address: IpAddr, port: PortId) -> Option<PortId> {
        let ports = self.asked.get(network)?.get(&address)?;
        ports.iter().copied().find(|other| *other != port)
    }

    /// The objects that name `key`, by key.
    pub(crate) fn users(&self, key: &Key) -> impl Iterator<Item = &Key> {
        self.users.get(key).into_iter().flatten()
    }

    /// The object of an identity.
    pub(crate) fn owner(&self, uuid: Uuid) -> Option<&Key> {
        self.owners.get(&uuid)
    }

    /// The instance of a port.
    pub(crate) fn port_owner(&self, port: PortId) -> Option<&Key> {
        self.ports.get(&port)
    }
}

/// A document, and its successor's.
fn documents(object: &Wanted) -> impl Iterator<Item = &Wanted> {
    std::iter::once(object).chain(object.successor.as_deref())
}

/// The ports of an instance with their networks and the addresses that they ask for.
fn ports(object: &Wanted) -> Vec<(PortId, Key, Vec<IpAddr>)> {
    let WantedSpec::Instance(spec) = &object.spec else { return Vec::new() };
    let nics = spec.nics.iter().filter_map(|nic| {
        let network = Key::new(Kind::Network, nic.network.clone());
        let addresses = nic.ip.into_iter().chain(nic.ip6).collect();
        Some((port_id(object.uuid, &nic.name)?, network, addresses))
    });
    nics.collect()
}
