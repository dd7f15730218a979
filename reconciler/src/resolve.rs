//! From the names of the wanted state to the drivers' specs.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use drivers_api::{
    BootFiles, BootKind, BootSpec, CloudInit, DeviceName, DisplayName, Error, ErrorKind, HostPath,
    ImageFiles, ImageStatus, MacAddr, NetworkId, NetworkType, PortId, PortSpec, Uuid, VmId, VmSpec,
    VolumeId,
};

use crate::{
    plan::World,
    seen::Look,
    wanted::{
        Boot, ImageSpec, InstanceSpec, Key, Kind, NetworkSpec, Nic, ObjectName, VolumeSpec, Wanted,
        WantedSpec,
    },
};

/// Why something of an object cannot be done now.
#[derive(Clone, Debug)]
pub(crate) enum Hold {
    /// It waits for another object.
    Blocked(Key, String),
    /// It could not be seen.
    Unknown(Arc<Error>),
    /// An error that the object's own back-off deals with.
    Stuck(Arc<Error>),
}

impl From<Error> for Hold {
    fn from(error: Error) -> Self {
        Self::Stuck(Arc::new(error))
    }
}

/// The identity of the port of a NIC: the same for the same instance and name for ever (RFC 9562 section 5.5: version 5
/// over the instance's UUID as name space).
pub(crate) fn port_id(instance: Uuid, nic: &DeviceName) -> Option<PortId> {
    let space = uuid::Uuid::from_bytes(*instance.as_bytes());
    let derived = uuid::Uuid::new_v5(&space, nic.as_str().as_bytes());
    Uuid::from_bytes(*derived.as_bytes()).map(PortId::new)
}

/// The ports of NICs that an instance had and no longer has.
pub(crate) fn former_ports(object: &Wanted) -> impl Iterator<Item = PortId> {
    object.former_nics.iter().filter_map(|name| port_id(object.uuid, name))
}

/// Those of an instance's former ports, and of those that were made for it, that may be on the host, with the drivers that
/// may have them.
pub(crate) fn leftover_ports(
    world: &World<'_>,
    made: &BTreeSet<PortId>,
    object: &Wanted,
) -> Vec<(PortId, Arc<str>, Look<drivers_api::PortStatus>)> {
    let mut left = Vec::new();
    let all: BTreeSet<PortId> = former_ports(object).chain(made.iter().copied()).collect();
    for port in all {
        for (driver, _) in world.drivers.networks() {
            let look = world.seen.port(driver, &port);
            if look.there().is_some() || look.unknown().is_some() {
                left.push((port, driver.into(), look));
            }
        }
    }
    left
}

/// An object's name as the drivers take it.
pub(crate) fn display_name(name: &ObjectName) -> Result<DisplayName, Error> {
    name.as_str().parse().map_err(|error: drivers_api::ParseError| error.in_field("name"))
}

/// That no driver of a kind is there under the wanted id.
pub(crate) fn no_driver(kind: &str, id: Option<&str>) -> Error {
    let (object, reason) = id.map_or_else(
        || (kind.to_owned(), "no driver of this kind is configured".to_owned()),
        |id| (format!("{kind} \"{id}\""), "no driver of this id is configured".to_owned()),
    );
    Error::new(ErrorKind::Unsupported, "find driver", object, reason)
        .with_remedy("configure the driver, or name another in the object's spec")
}

/// The driver of an image.
pub(crate) fn image_driver<'a>(world: &World<'a>, spec: &ImageSpec) -> Result<&'a str, Error> {
    let id = spec.driver.as_deref();
    let found = world.drivers.find_image(id).map(|(id, _)| id);
    found.ok_or_else(|| no_driver("image driver", id))
}

/// The driver of a volume.
pub(crate) fn volume_driver<'a>(world: &World<'a>, spec: &VolumeSpec) -> Result<&'a str, Error> {
    let id = spec.driver.as_deref();
    let found = world.drivers.find_volume(id).map(|(id, _)| id);
    found.ok_or_else(|| no_driver("volume driver", id))
}

/// The driver of a network.
pub(crate) fn network_driver<'a>(world: &World<'a>, spec: &NetworkSpec) -> Result<&'a str, Error> {
    let id = spec.driver.as_deref();
    let found = world.drivers.network_for(id, spec.r#type).map(|(id, _)| id);
    found.ok_or_else(|| no_driver("network driver", id))
}

/// The network as its driver takes it: the gateway of a nat network is the first host address unless given.
pub(crate) fn network_spec(
    object: &Wanted,
    spec: &NetworkSpec,
) -> Result<drivers_api::NetworkSpec, Error> {
    let id = NetworkId::new(object.uuid);
    let name = display_name(&object.name)?;
    let mut network = drivers_api::NetworkSpec::new(id, name, spec.r#type);
    let nat = spec.r#type == NetworkType::Nat;
    let gateway = |given: Option<IpAddr>, range: Option<drivers_api::IpCidr>| {
        given.or_else(|| range.filter(|_| nat).and_then(|range| range.nth(1)))
    };
    network.project_uuid = object.project;
    network.cidr = spec.cidr;
    network.cidr6 = spec.cidr6;
    network.gateway = gateway(spec.gateway, spec.cidr);
    network.gateway6 = gateway(spec.gateway6, spec.cidr6);
    network.dns_servers.clone_from(&spec.dns_servers);
    network.uplink.clone_from(&spec.uplink);
    network.vlan = spec.vlan;
    network.mtu_bytes = spec.mtu;
    network.mesh_listen_port = spec.mesh_listen_port;
    network.mesh_endpoint.clone_from(&spec.mesh_endpoint);
    network.mesh_peers.clone_from(&spec.mesh_peers);
    Ok(network)
}

/// The cached image of a name.
fn image(world: &World<'_>, name: &ObjectName) -> Result<Arc<ImageStatus>, Hold> {
    let key = Key::new(Kind::Image, name.clone());
    let blocked = |why: &str| Hold::Blocked(key.clone(), format!("{key} {why}"));
    let Some(object) = world.wanted.get(&key) else { return Err(blocked("is not there")) };
    let WantedSpec::Image(spec) = &object.spec else { return Err(blocked("is not there")) };
    if object.deleting {
        return Err(blocked("is being deleted"));
    }
    match world.seen.image(image_driver(world, spec)?, &spec.r#ref) {
        Look::There(status) => Ok(status),
        Look::Absent => Err(blocked("is not pulled yet")),
        Look::Foreign(error) => Err(Hold::Stuck(error)),
        Look::Unknown(error) => Err(Hold::Unknown(error)),
    }
}

/// The volume as its driver takes it. The source is looked up only if `made` is false.
pub(crate) fn volume_spec(
    world: &World<'_>,
    object: &Wanted,
    spec: &VolumeSpec,
    made: bool,
) -> Result<drivers_api::VolumeSpec, Hold> {
    let id = VolumeId::new(object.uuid);
    let name = display_name(&object.name)?;
    let mut volume = drivers_api::VolumeSpec::new(id, name, spec.size_gib, spec.format);
    volume.project_uuid = object.project;
    let Some(source) = spec.source.as_ref().filter(|_| !made) else { return Ok(volume) };
    let status = image(world, &source.image)?;
    let ImageFiles::Disk { path, format, .. } = &status.files else {
        let reason = format!("Image {} holds no disk", source.image);
        return Err(Error::invalid("spec.source.image", reason).into());
    };
    let reference = status.reference.clone();
    let source = drivers_api::VolumeSource::new(reference, Some(path.clone()), *format);
    volume.source = Some(source);
    Ok(volume)
}

/// How an instance boots, its reference resolved.
fn boot_spec(world: &World<'_>, boot: &Boot) -> Result<BootSpec, Hold> {
    if boot.kind == BootKind::Firmware {
        return Ok(BootSpec::firmware());
    }
    let wrong = |reason: String| Hold::from(Error::invalid("spec.boot.ref", reason));
    let Some(reference) = boot.r#ref.as_deref() else {
        return Err(wrong("this kind of boot needs an Image or a path".to_owned()));
    };
    let mut resolved = if reference.starts_with('/') {
        let path: HostPath = reference.parse().map_err(|error| wrong(format!("{error}")))?;
        let files = if boot.kind == BootKind::Uki {
            BootFiles::Uki { path }
        } else {
            BootFiles::Kernel { kernel: path, initrd: None }
        };
        BootSpec::new(boot.kind, reference.to_owned(), Some(files))
    } else {
        let name: ObjectName = reference.parse().map_err(|error| wrong(format!("{error}")))?;
        let status = image(world, &name)?;
        let (files, cmdline) = match &status.files {
            ImageFiles::Kernel { kernel, initrd, cmdline } => {
                let (kernel, initrd) = (kernel.clone(), initrd.clone());
                (BootFiles::Kernel { kernel, initrd }, cmdline.clone())
            }
            ImageFiles::Uki { path } => (BootFiles::Uki { path: path.clone() }, None),
            ImageFiles::Disk { .. } | _ => {
                return Err(wrong(format!("Image {name} holds no kernel")));
            }
        };
        let mut spec = BootSpec::new(boot.kind, status.reference.to_string(), Some(files));
        spec.cmdline = cmdline;
        spec
    };
    if boot.cmdline.is_some() {
        resolved.cmdline.clone_from(&boot.cmdline);
    }
    Ok(resolved)
}

/// The VM's static part as its hypervisor takes it. While the boot image cannot be resolved, a VM that is there is compared
/// by what it was made with: the second part of the answer says why nothing may be started from it.
pub(crate) fn vm_spec(
    world: &World<'_>,
    object: &Wanted,
    spec: &InstanceSpec,
    applied: Option<&VmSpec>,
) -> Result<(VmSpec, Option<Hold>), Hold> {
    let (boot, hold) = match boot_spec(world, &spec.boot) {
        Ok(boot) => (boot, None),
        Err(hold @ (Hold::Blocked(..) | Hold::Unknown(_))) => {
            let same =
                applied.map(|applied| &applied.boot).filter(|boot| boot.kind == spec.boot.kind);
            match same {
                Some(boot) => (boot.clone(), Some(hold)),
                None if world.assume => {
                    let reference = spec.boot.r#ref.clone().unwrap_or_default();
                    (BootSpec::new(spec.boot.kind, reference, None), None)
                }
                None => return Err(hold),
            }
        }
        Err(hold) => return Err(hold),
    };
    let name = display_name(&object.name)?;
    let id = VmId::new(object.uuid);
    let mut vm = VmSpec::new(id, name, spec.cpus, spec.memory_mib, boot);
    vm.project_uuid = object.project;
    vm.cloud_init = spec.user_data.as_ref().map(|user_data| {
        let meta = format!("instance-id: {}\nlocal-hostname: {}\n", object.uuid, object.name);
        CloudInit::new(user_data.clone(), meta)
    });
    Ok((vm, hold))
}

/// The port of a NIC as its driver takes it.
pub(crate) fn port_spec(
    object: &Wanted,
    nic: &Nic,
    network: NetworkId,
    addresses: &[IpAddr],
    owner_uid: Option<u32>,
) -> Result<PortSpec, Error> {
    let id = port_id(object.uuid, &nic.name).ok_or_else(|| {
        Error::invalid("spec.nics", "no identity can be derived for the NIC's port")
    })?;
    let mac = nic.mac.unwrap_or_else(|| MacAddr::derived(id));
    let mut port = PortSpec::new(id, VmId::new(object.uuid), network, nic.name.clone(), mac);
    port.project_uuid = object.project;
    port.addresses = addresses.to_vec();
    port.hostname = Some(object.name.to_string());
    port.owner_uid = owner_uid;
    Ok(port)
}
