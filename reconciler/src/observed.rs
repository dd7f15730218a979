//! What a status shows of the host.

use drivers_api::{Exit, NetworkId, VmId, VmState, VolumeId};
use serde_json::{Map, Value, json};

use crate::{
    plan::{World, describe},
    resolve::{image_driver, network_driver, port_id, volume_driver},
    wanted::{InstanceSpec, Wanted, WantedSpec},
};

/// The host side of an object, under keys that are stable per kind.
pub(crate) fn observed(world: &World<'_>, object: &Wanted, restarts: u32) -> Map<String, Value> {
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| drop(map.insert(key.to_owned(), value));
    match &object.spec {
        WantedSpec::Image(spec) => {
            let look =
                image_driver(world, spec).map(|driver| world.seen.image(driver, &spec.r#ref));
            if let Some(status) = look.as_ref().ok().and_then(|look| look.there()) {
                put("digest", json!(status.digest));
                put("size_bytes", json!(status.size_bytes));
                put("kind", json!(status.files.kind()));
                put("path", json!(status.files.main_path()));
            }
        }
        WantedSpec::Volume(spec) => {
            let id = VolumeId::new(object.uuid);
            let look = volume_driver(world, spec).map(|driver| world.seen.volume(driver, &id));
            if let Some(status) = look.as_ref().ok().and_then(|look| look.there()) {
                put("size_bytes", json!(status.size_bytes));
                put("allocated_bytes", json!(status.allocated_bytes));
                let name = |vm: VmId| {
                    let owner = world.index.owner(vm.uuid());
                    owner.map_or_else(|| vm.to_string(), |key| key.name.to_string())
                };
                let all = status.attachments.iter().map(|one| name(one.vm_uuid));
                put("attached_to", json!(all.collect::<Vec<_>>()));
            }
        }
        WantedSpec::Network(spec) => {
            let id = NetworkId::new(object.uuid);
            let look = network_driver(world, spec).map(|driver| world.seen.network(driver, &id));
            if let Some(status) = look.as_ref().ok().and_then(|look| look.there()) {
                put("device", json!(status.device));
                put("healthy", json!(status.healthy));
                if let Some(key) = &status.public_key {
                    put("public_key", json!(key));
                }
            }
        }
        WantedSpec::Instance(spec) => instance(world, object, spec, restarts, &mut put),
    }
    map
}

fn instance(
    world: &World<'_>,
    object: &Wanted,
    spec: &InstanceSpec,
    restarts: u32,
    put: &mut dyn FnMut(&str, Value),
) {
    let Some((driver, _)) = world.drivers.find_hypervisor(spec.driver.as_deref()) else { return };
    let look = world.seen.vm(driver, &VmId::new(object.uuid));
    if let Some(status) = look.there() {
        put("state", json!(status.state));
        put("pid", json!(status.pid));
        put("accel", json!(status.accel));
        put("last_exit", status.last_exit.map_or(Value::Null, |exit| json!(exit_text(exit))));
        if !status.detaching.is_empty() {
            put("detaching", json!(status.detaching));
        }
    } else if look.unknown().is_some() {
        put("state", json!(VmState::Unknown));
    }
    put("restarts", json!(restarts));
    let ports = spec.nics.iter().filter_map(|nic| port_id(object.uuid, &nic.name));
    let places = ports.filter_map(|port| world.seen.place_of(port));
    let addresses: Vec<_> = places.flat_map(|(.., addresses)| addresses.iter()).collect();
    put("addresses", json!(addresses));
}

fn exit_text(exit: Exit) -> String {
    describe(exit)
}
