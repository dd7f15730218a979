//! Instances: what they name, what their hypervisor can do, and the addresses that they ask for.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use drivers_api::{BootKind, Hypervisor, MacAddr, NetworkId};

use super::Check;
use crate::{
    resolve::{network_spec, port_id},
    wanted::{InstanceSpec, Key, Kind, Nic, ObjectName, Wanted, WantedSpec},
};

impl Check<'_> {
    pub(super) fn instance(&mut self, key: &Key, spec: &InstanceSpec) {
        let found =
            self.hypervisor(spec.driver.as_deref()).map(|(id, driver)| (id, Arc::clone(driver)));
        let Some((driver, hypervisor)) = found else {
            let there: Vec<&str> = self.drivers().hypervisors().map(|(id, _)| id).collect();
            self.no_driver(key, "hypervisor", spec.driver.as_deref(), &there);
            return;
        };
        self.boot(key, spec, driver, &*hypervisor);
        self.disks(key, spec, driver, &*hypervisor);
        self.nics(key, spec);
    }

    fn boot(&mut self, key: &Key, spec: &InstanceSpec, driver: &str, hypervisor: &dyn Hypervisor) {
        let boot = &spec.boot;
        if !hypervisor.abilities().boot_kinds.contains(&boot.kind) {
            let reason = format!("hypervisor {driver} cannot boot {:?}", boot.kind);
            self.refuse(key, "spec.boot.kind", reason);
        }
        if boot.kind == BootKind::Firmware && !spec.disks.iter().any(|disk| disk.boot) {
            self.refuse(key, "spec.disks", "firmware boot needs a disk with boot: true");
        }
        match (boot.kind, boot.r#ref.as_deref()) {
            (BootKind::Firmware, None) => {
                if boot.cmdline.is_some() {
                    let reason = "firmware boot takes no kernel command line";
                    self.refuse(key, "spec.boot.cmdline", reason);
                }
            }
            (BootKind::Firmware, Some(_)) => {
                self.refuse(key, "spec.boot.ref", "firmware boots from a disk, not from a file");
            }
            (_, None) => {
                self.refuse(key, "spec.boot.ref", "this kind of boot needs an Image or a path");
            }
            (BootKind::OciImage, Some(text)) if text.starts_with('/') => {
                self.refuse(key, "spec.boot.ref", "an oci_image boot needs an Image, not a path");
            }
            (_, Some(text)) if text.starts_with('/') => {
                if let Err(error) = text.parse::<drivers_api::HostPath>() {
                    self.refuse(key, "spec.boot.ref", error.to_string());
                }
            }
            (_, Some(text)) => match text.parse::<ObjectName>() {
                Ok(name) => self.reference(key, "spec.boot.ref", Kind::Image, &name),
                Err(error) => self.refuse(key, "spec.boot.ref", error.to_string()),
            },
        }
        // The bound of the driver contract for a kernel's command line.
        let line = boot.cmdline.as_deref().unwrap_or_default();
        if line.len() > 2047 || line.chars().any(char::is_control) {
            let reason = "wanted at most 2047 bytes without control characters";
            self.refuse(key, "spec.boot.cmdline", reason);
        }
    }

    fn disks(&mut self, key: &Key, spec: &InstanceSpec, driver: &str, hypervisor: &dyn Hypervisor) {
        let abilities = hypervisor.abilities();
        for (at, disk) in spec.disks.iter().enumerate() {
            let field = format!("spec.disks[{at}]");
            let mut earlier = spec.disks.iter().take(at);
            if earlier.clone().any(|other| other.name == disk.name) {
                self.refuse(key, format!("{field}.name"), "two disks have this name");
            }
            if earlier.clone().any(|other| other.volume == disk.volume) {
                self.refuse(key, format!("{field}.volume"), "two disks are of this volume");
            }
            if disk.boot && earlier.any(|other| other.boot) {
                self.refuse(key, format!("{field}.boot"), "two disks are marked as the boot disk");
            }
            if !abilities.buses.contains(&disk.bus) {
                let reason = format!("hypervisor {driver} has no {:?} bus", disk.bus);
                self.refuse(key, format!("{field}.bus"), reason);
            }
            let field = format!("{field}.volume");
            self.reference(key, &field, Kind::Volume, &disk.volume);
            let volume = Key::new(Kind::Volume, disk.volume.clone());
            let Some(WantedSpec::Volume(volume)) = self.proposed.live(&volume).map(|v| &v.spec)
            else {
                continue;
            };
            if let Some((id, backend)) = self.drivers().find_volume(volume.driver.as_deref())
                && !backend.backings().iter().any(|kind| abilities.backings.contains(kind))
            {
                let reason = format!("hypervisor {driver} opens nothing that driver {id} gives");
                self.refuse(key, field, reason);
            }
        }
    }

    fn nics(&mut self, key: &Key, spec: &InstanceSpec) {
        for (at, nic) in spec.nics.iter().enumerate() {
            let field = format!("spec.nics[{at}]");
            if spec.nics.iter().take(at).any(|other| other.name == nic.name) {
                self.refuse(key, format!("{field}.name"), "two NICs have this name");
            }
            self.reference(key, &format!("{field}.network"), Kind::Network, &nic.network);
            let network = Key::new(Kind::Network, nic.network.clone());
            let Some(object) = self.proposed.live(&network) else { continue };
            let WantedSpec::Network(wanted) = &object.spec else { continue };
            let Ok(network) = network_spec(object, wanted) else { continue };
            for (name, asked, range) in
                [("ip", nic.ip, network.cidr), ("ip6", nic.ip6, network.cidr6)]
            {
                let Some(address) = asked else { continue };
                let reason = match range {
                    Some(range) if !range.is_host_address(address) => {
                        format!("{address} is no host address of {range}")
                    }
                    Some(_) if network.gateways().any(|gateway| gateway == address) => {
                        format!("{address} is the network's gateway")
                    }
                    None if name == "ip6" => format!("Network {} has no cidr6", nic.network),
                    Some(_) | None => continue,
                };
                self.refuse(key, format!("{field}.{name}"), reason);
            }
        }
    }

    /// Addresses and MACs that two NICs of one network have, by their specs or on the host.
    pub(super) fn addresses(&mut self, differs: &BTreeSet<Key>) {
        let proposed = self.proposed;
        let mut macs: HashMap<(&ObjectName, MacAddr), Vec<(Key, usize)>> = HashMap::new();
        let mut ips: HashMap<_, Vec<(Key, usize, &'static str)>> = HashMap::new();
        for object in proposed.of_kind(Kind::Instance) {
            let Some(live) = object.live() else { continue };
            let WantedSpec::Instance(spec) = &live.spec else { continue };
            for (at, nic) in spec.nics.iter().enumerate() {
                if let Some(mac) = mac(live, nic) {
                    macs.entry((&nic.network, mac)).or_default().push((live.key(), at));
                }
                for (field, address) in asked(nic) {
                    ips.entry((&nic.network, address)).or_default().push((live.key(), at, field));
                }
                if differs.contains(&live.key()) {
                    self.held(live, at, nic);
                }
            }
        }
        let mut clashes = Vec::new();
        for ((network, mac), users) in macs.into_iter().filter(|(_, users)| users.len() > 1) {
            let Some((key, at)) = users.iter().find(|(key, _)| differs.contains(key)) else {
                continue;
            };
            let other = users.iter().find(|user| **user != (key.clone(), *at));
            let other = other.map_or_else(String::new, |(other, _)| other.to_string());
            let reason = format!("{other} has {mac} on Network {network}");
            clashes.push((key.clone(), format!("spec.nics[{at}].mac"), reason));
        }
        for ((network, address), users) in ips.into_iter().filter(|(_, users)| users.len() > 1) {
            let Some((key, at, field)) = users.iter().find(|(key, ..)| differs.contains(key))
            else {
                continue;
            };
            let other = users.iter().find(|(other, place, _)| (other, place) != (key, at));
            let other = other.map_or_else(String::new, |(other, ..)| other.to_string());
            let reason = format!("{other} asks for {address} on Network {network} too");
            clashes.push((key.clone(), format!("spec.nics[{at}].{field}"), reason));
        }
        clashes.sort();
        for (key, field, reason) in clashes {
            self.refuse(&key, field, reason);
        }
    }

    /// An address that another port has already.
    fn held(&mut self, object: &Wanted, at: usize, nic: &Nic) {
        let network = Key::new(Kind::Network, nic.network.clone());
        let Some(network) = self.proposed.live(&network) else { return };
        let network = NetworkId::new(network.uuid);
        let Some(port) = port_id(object.uuid, &nic.name) else { return };
        for (field, address) in asked(nic) {
            let shown = self.engine.seen().port_with(network, address);
            let holder = self.engine.allocator().holder(network, address).or(shown);
            let Some(holder) = holder.filter(|holder| *holder != port) else { continue };
            let owner = self.engine.known().index.port_owner(holder).cloned();
            // One that no longer has the NIC lets go of its address in time.
            let keeps = owner.as_ref().is_none_or(|owner| self.keeps(owner, holder));
            if keeps {
                let owner = owner.map_or_else(|| format!("port {holder}"), |key| key.to_string());
                let reason = format!("{owner} has {address}");
                self.refuse_with(
                    &object.key(),
                    format!("spec.nics[{at}].{field}"),
                    reason,
                    Some("ask for another address, or for none".to_owned()),
                );
            }
        }
    }

    fn keeps(&self, owner: &Key, port: drivers_api::PortId) -> bool {
        let Some(object) = self.proposed.live(owner) else { return false };
        let WantedSpec::Instance(spec) = &object.spec else { return false };
        spec.nics.iter().any(|nic| port_id(object.uuid, &nic.name) == Some(port))
    }
}

fn mac(object: &Wanted, nic: &Nic) -> Option<MacAddr> {
    nic.mac.or_else(|| port_id(object.uuid, &nic.name).map(MacAddr::derived))
}

fn asked(nic: &Nic) -> impl Iterator<Item = (&'static str, IpAddr)> {
    let v4 = nic.ip.map(|address| ("ip", address));
    v4.into_iter().chain(nic.ip6.map(|address| ("ip6", address)))
}
