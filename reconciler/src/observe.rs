//! Looks at the host: which parts an object has there, and what they are now.

use std::{collections::BTreeSet, sync::Arc};

use drivers_api::{Error, ErrorKind, ImageRef, NetworkId, PortId, VmId, VolumeId};

use crate::{
    call::{Call, Caller, Label},
    plan::{Action, World},
    resolve::{image_driver, leftover_ports, network_driver, port_id, volume_driver},
    seen::{DriverId, Listing, Look},
    wanted::{ImageSpec, InstanceSpec, Key, Kind, Wanted, WantedSpec},
};

/// One thing to look at.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Vm(DriverId, VmId),
    Network(DriverId, NetworkId),
    Port(DriverId, PortId),
    Volume(DriverId, VolumeId),
    Image(DriverId, ImageRef),
}

/// The parts that a pass for an object looks at. What has no driver is left out: the plan says so.
pub(crate) fn parts(world: &World<'_>, object: &Wanted) -> BTreeSet<Part> {
    let mut parts = BTreeSet::new();
    match &object.spec {
        WantedSpec::Image(spec) => {
            if let Ok(driver) = image_driver(world, spec) {
                parts.insert(Part::Image(driver.into(), spec.r#ref.clone()));
            }
        }
        WantedSpec::Volume(spec) => {
            let id = VolumeId::new(object.uuid);
            if let Ok(driver) = volume_driver(world, spec) {
                parts.insert(Part::Volume(driver.into(), id));
                let seen = world.seen.volume(driver, &id);
                let vms = seen.there().map(|volume| volume.attachments.iter().map(|a| a.vm_uuid));
                for vm in vms.into_iter().flatten() {
                    stranger(world, vm, &mut parts);
                }
            }
        }
        WantedSpec::Network(spec) => {
            let id = NetworkId::new(object.uuid);
            if let Ok(driver) = network_driver(world, spec) {
                parts.insert(Part::Network(driver.into(), id));
                if object.deleting {
                    for (port, vm) in world.seen.ports_on(id) {
                        parts.insert(Part::Port(driver.into(), *port));
                        stranger(world, *vm, &mut parts);
                    }
                }
            }
        }
        WantedSpec::Instance(spec) => instance(world, object, spec, &mut parts),
    }
    parts
}

/// Whether the last look at a part showed how it is.
pub(crate) fn is_shown(world: &World<'_>, part: &Part) -> bool {
    match part {
        Part::Vm(driver, id) => world.seen.vm(driver, id).unknown().is_none(),
        Part::Network(driver, id) => world.seen.network(driver, id).unknown().is_none(),
        Part::Port(driver, id) => world.seen.port(driver, id).unknown().is_none(),
        Part::Volume(driver, id) => world.seen.volume(driver, id).unknown().is_none(),
        Part::Image(driver, id) => world.seen.image(driver, id).unknown().is_none(),
    }
}

/// A VM that nobody wants, which may be gone: every hypervisor is asked.
fn stranger(world: &World<'_>, vm: VmId, parts: &mut BTreeSet<Part>) {
    if world.index.owner(vm.uuid()).is_none() {
        parts.extend(world.drivers.hypervisors().map(|(id, _)| Part::Vm(id.into(), vm)));
    }
}

fn instance(world: &World<'_>, object: &Wanted, spec: &InstanceSpec, parts: &mut BTreeSet<Part>) {
    let vm = VmId::new(object.uuid);
    if let Some((driver, _)) = world.drivers.find_hypervisor(spec.driver.as_deref()) {
        parts.insert(Part::Vm(driver.into(), vm));
    }
    for (driver, volume) in disks(world, spec) {
        parts.insert(Part::Volume(driver.into(), volume));
    }
    for (driver, port) in nics(world, object, spec) {
        parts.insert(Part::Port(driver.into(), port));
    }
    for (port, driver) in world.seen.ports_of(vm) {
        parts.insert(Part::Port(Arc::clone(driver), *port));
    }
    for (port, driver, _) in leftover_ports(world, &BTreeSet::new(), object) {
        parts.insert(Part::Port(driver, port));
    }
    for (volume, driver) in world.seen.volumes_of(vm) {
        parts.insert(Part::Volume(Arc::clone(driver), *volume));
    }
    if let Some((driver, spec)) = boot_image(world, spec)
        && !object.deleting
    {
        parts.insert(Part::Image(driver.into(), spec.r#ref.clone()));
    }
}

fn disks<'a>(
    world: &World<'a>,
    spec: &'a InstanceSpec,
) -> impl Iterator<Item = (&'a str, VolumeId)> {
    let world_ = *world;
    spec.disks.iter().filter_map(move |disk| {
        let object = world_.wanted.get(&Key::new(Kind::Volume, disk.volume.clone()))?;
        let WantedSpec::Volume(volume) = &object.spec else { return None };
        Some((volume_driver(&world_, volume).ok()?, VolumeId::new(object.uuid)))
    })
}

fn nics<'a>(
    world: &World<'a>,
    object: &'a Wanted,
    spec: &'a InstanceSpec,
) -> impl Iterator<Item = (&'a str, PortId)> {
    let world_ = *world;
    spec.nics.iter().filter_map(move |nic| {
        let network = world_.wanted.get(&Key::new(Kind::Network, nic.network.clone()))?;
        let WantedSpec::Network(network) = &network.spec else { return None };
        Some((network_driver(&world_, network).ok()?, port_id(object.uuid, &nic.name)?))
    })
}

fn boot_image<'a>(world: &World<'a>, spec: &InstanceSpec) -> Option<(&'a str, &'a ImageSpec)> {
    let object = world.wanted.get(&Key::new(Kind::Image, spec.boot.image()?))?;
    let WantedSpec::Image(image) = &object.spec else { return None };
    Some((image_driver(world, image).ok()?, image))
}

/// The lists that must have been seen once before an object is worked on: those from which leftovers and taken addresses
/// are known.
pub(crate) fn listings(world: &World<'_>, object: &Wanted) -> BTreeSet<(Listing, DriverId)> {
    let WantedSpec::Instance(spec) = &object.spec else { return BTreeSet::new() };
    let volumes = disks(world, spec).map(|(driver, _)| (Listing::Volumes, driver.into()));
    let ports = nics(world, object, spec).map(|(driver, _)| (Listing::Ports, driver.into()));
    volumes.chain(ports).collect()
}

/// The lists that show an object's parts.
pub(crate) fn shown_by(world: &World<'_>, object: &Wanted) -> BTreeSet<(Listing, DriverId)> {
    let lists = parts(world, object).into_iter().map(|part| match part {
        Part::Vm(driver, _) => (Listing::Vms, driver),
        Part::Network(driver, _) => (Listing::Networks, driver),
        Part::Port(driver, _) => (Listing::Ports, driver),
        Part::Volume(driver, _) => (Listing::Volumes, driver),
        Part::Image(driver, _) => (Listing::Images, driver),
    });
    lists.collect()
}

/// Asks a driver for one thing; the answer goes to what was seen.
macro_rules! look {
    ($caller:ident, $driver:ident, $id:ident, $find:ident, $get:ident, $put:ident, $what:literal, $pass:expr) => {{
        let engine = &$caller.engine;
        let Some((_, handle)) = engine.drivers.$find(Some(&$driver)) else { return };
        let handle = Arc::clone(handle);
        let began = engine.stamp();
        let object = format!(concat!($what, " {}"), $id);
        let label = Label { action: Action::Observe, driver: Arc::clone(&$driver), object };
        let asked = $id.clone();
        let call: Call<_> =
            Box::new(move |cx| Box::pin(async move { handle.$get(&cx, $pass(&asked)).await }));
        let limit = engine.settings.deadlines.observe;
        let answer = $caller.call(label, limit, call).await;
        engine.seen().$put(&$driver, $id, Look::of(answer), began);
    }};
}

/// Looks at one part.
async fn look(caller: &Caller, part: Part) {
    fn by_value<T: Copy>(id: &T) -> T {
        *id
    }
    fn by_reference<T>(id: &T) -> &T {
        id
    }
    match part {
        Part::Vm(driver, id) => {
            look!(caller, driver, id, find_hypervisor, get, put_vm, "vm", by_value);
        }
        Part::Network(driver, id) => {
            look!(caller, driver, id, find_network, get, put_network, "network", by_value);
        }
        Part::Port(driver, id) => {
            look!(caller, driver, id, find_network, get_port, put_port, "port", by_value);
        }
        Part::Volume(driver, id) => {
            look!(caller, driver, id, find_volume, get, put_volume, "volume", by_value);
        }
        Part::Image(driver, id) => {
            look!(caller, driver, id, find_image, get, put_image, "image", by_reference);
        }
    }
}

/// Looks at all parts, side by side.
pub(crate) async fn look_at(caller: &Caller, parts: BTreeSet<Part>) {
    futures_util::future::join_all(parts.into_iter().map(|part| look(caller, part))).await;
}

/// Asks a driver for one of its lists.
pub(crate) async fn list(
    caller: &Caller,
    listing: Listing,
    driver: &DriverId,
) -> Option<Arc<Error>> {
    macro_rules! list {
        ($find:ident, $list:ident, $put:ident, $what:literal) => {{
            let engine = &caller.engine;
            let (_, handle) = engine.drivers.$find(Some(driver))?;
            let handle = Arc::clone(handle);
            let began = engine.stamp();
            let object = format!(concat!($what, " of driver {}"), driver);
            let label = Label { action: Action::Observe, driver: Arc::clone(driver), object };
            let call: Call<_> =
                Box::new(move |cx| Box::pin(async move { handle.$list(&cx).await }));
            let limit = engine.settings.deadlines.observe;
            let answer = caller.call(label, limit, call).await.map_err(Arc::new);
            let failure = answer.as_ref().err().map(Arc::clone);
            engine.seen().$put(driver, answer, began);
            failure
        }};
    }
    match listing {
        Listing::Vms => list!(find_hypervisor, list, put_vms, "VMs"),
        Listing::Networks => list!(find_network, list, put_networks, "networks"),
        Listing::Ports => list!(find_network, list_ports, put_ports, "ports"),
        Listing::Volumes => list!(find_volume, list, put_volumes, "volumes"),
        Listing::Images => list!(find_image, list, put_images, "images"),
    }
}

/// That a list has not come back yet.
pub(crate) fn still_out(listing: Listing, driver: &str) -> Arc<Error> {
    let reason = "an earlier call has not returned";
    let object = format!("{listing:?} of driver {driver}");
    Arc::new(Error::new(ErrorKind::Unavailable, "list", object, reason))
}
