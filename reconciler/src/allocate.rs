//! Addresses of ports. One allocator, behind one lock: what it gave to a port nobody else gets.
//!
//! Nothing of it needs to be kept: an address is what the NIC asks for, else what the host shows for its port, else the
//! lowest free one. A port keeps what it was given until it is seen to be gone.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

use drivers_api::{Error, ErrorKind, IpCidr, NetworkId, NetworkSpec, NetworkType, PortId};

use crate::{
    index::Index,
    seen::Seen,
    wanted::{Key, Nic},
};

/// The addresses that ports were given.
#[derive(Debug, Default)]
pub(crate) struct Allocator {
    held: HashMap<PortId, (NetworkId, Vec<IpAddr>)>,
    taken: HashMap<NetworkId, BTreeMap<IpAddr, PortId>>,
    /// The lowest place of a range that may be free.
    hints: HashMap<(NetworkId, IpCidr), u128>,
}

/// Where an allocator looks beside its own memory.
#[derive(Clone, Copy)]
pub(crate) struct Sources<'a> {
    pub(crate) index: &'a Index,
    pub(crate) seen: &'a Seen,
    pub(crate) network: &'a NetworkSpec,
    pub(crate) key: &'a Key,
}

impl Allocator {
    /// The addresses of a port, the same each time.
    pub(crate) fn assign(
        &mut self,
        from: Sources<'_>,
        port: PortId,
        nic: &Nic,
    ) -> Result<Vec<IpAddr>, Error> {
        let network = from.network.uuid;
        if self.held.get(&port).is_some_and(|(held, _)| *held != network) {
            self.release(port);
        }
        let mut addresses = Vec::new();
        for (range, asked) in [(from.network.cidr, nic.ip), (from.network.cidr6, nic.ip6)] {
            addresses.extend(self.one(from, port, range, asked)?);
        }
        if self.held.get(&port).is_none_or(|(_, held)| *held != addresses) {
            self.release(port);
            for address in &addresses {
                self.taken.entry(network).or_default().insert(*address, port);
            }
            self.held.insert(port, (network, addresses.clone()));
        }
        Ok(addresses)
    }

    fn one(
        &mut self,
        from: Sources<'_>,
        port: PortId,
        range: Option<IpCidr>,
        asked: Option<IpAddr>,
    ) -> Result<Option<IpAddr>, Error> {
        if let Some(address) = asked {
            return match self.other(from, address, port) {
                None => Ok(Some(address)),
                Some(other) => Err(conflict(address, other, from.key)),
            };
        }
        let Some(range) = range else { return Ok(None) };
        if let Some(address) = self.known(from, port, range) {
            return Ok(Some(address));
        }
        if from.network.network_type == NetworkType::Bridged {
            // Others give out addresses there.
            return Ok(None);
        }
        self.lowest_free(from, port, range).map(Some)
    }

    /// What the port was given, or has on the host.
    fn known(&self, from: Sources<'_>, port: PortId, range: IpCidr) -> Option<IpAddr> {
        let network = from.network.uuid;
        let held = self.held.get(&port).map(|(_, held)| held.as_slice()).unwrap_or_default();
        let place = from.seen.place_of(port).filter(|(_, on, _)| *on == network);
        let shown = place.map(|(.., shown)| shown).unwrap_or_default();
        let mut all = held.iter().chain(shown).copied();
        all.find(|address| {
            range.is_host_address(*address)
                && from.network.gateways().all(|gateway| gateway != *address)
                && self.taken_by(network, *address).is_none_or(|holder| holder == port)
        })
    }

    fn taken_by(&self, network: NetworkId, address: IpAddr) -> Option<PortId> {
        self.taken.get(&network)?.get(&address).copied()
    }

    /// Another port that has, was given or asks for the address.
    fn other(&self, from: Sources<'_>, address: IpAddr, port: PortId) -> Option<PortId> {
        let network = from.network.uuid;
        self.taken_by(network, address)
            .filter(|other| *other != port)
            .or_else(|| from.seen.port_with(network, address).filter(|other| *other != port))
            .or_else(|| from.index.asks(from.key, address, port))
    }

    fn lowest_free(
        &mut self,
        from: Sources<'_>,
        port: PortId,
        range: IpCidr,
    ) -> Result<IpAddr, Error> {
        let place = (from.network.uuid, range);
        let hint = self.hints.get(&place).copied().unwrap_or(1).max(1);
        for start in [hint, 1] {
            let mut at = start;
            while let Some(address) = range.nth(at) {
                let usable = range.is_host_address(address)
                    && from.network.gateways().all(|gateway| gateway != address);
                if usable && self.other(from, address, port).is_none() {
                    self.hints.insert(place, at + 1);
                    return Ok(address);
                }
                at += 1;
            }
        }
        let reason = format!("every address of {range} is taken");
        Err(Error::new(ErrorKind::Exhausted, "find an address in", from.key, reason)
            .with_remedy("give the network a wider range, or remove instances"))
    }

    /// Takes a port's addresses back.
    pub(crate) fn release(&mut self, port: PortId) {
        let Some((network, addresses)) = self.held.remove(&port) else { return };
        let taken = self.taken.entry(network).or_default();
        for address in addresses {
            taken.remove(&address);
            for ((of, range), hint) in &mut self.hints {
                if *of == network
                    && let Some(at) = position(*range, address)
                {
                    *hint = (*hint).min(at);
                }
            }
        }
        if taken.is_empty() {
            self.taken.remove(&network);
        }
    }

    /// The port that was given an address of a network.
    pub(crate) fn holder(&self, network: NetworkId, address: IpAddr) -> Option<PortId> {
        self.taken_by(network, address)
    }

    /// What a port was given or has, without giving it anything: for a plan that is only shown.
    pub(crate) fn peek(&self, from: Sources<'_>, port: PortId, nic: &Nic) -> Vec<IpAddr> {
        let pairs = [(from.network.cidr, nic.ip), (from.network.cidr6, nic.ip6)];
        let all = pairs
            .into_iter()
            .filter_map(|(range, asked)| asked.or_else(|| self.known(from, port, range?)));
        all.collect()
    }
}

/// The place of an address in a range.
fn position(range: IpCidr, address: IpAddr) -> Option<u128> {
    let bits = |address: IpAddr| match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    };
    range.contains(address).then(|| bits(address).saturating_sub(bits(range.address())))
}

fn conflict(address: IpAddr, other: PortId, network: &Key) -> Error {
    let reason = format!("port {other} has the address {address}");
    Error::new(ErrorKind::Conflict, "take an address of", network, reason)
        .with_remedy("ask for another address, or for none")
}
