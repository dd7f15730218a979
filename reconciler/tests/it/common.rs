//! A reconciler over a host in memory, and short ways to say what is wanted.

use std::{sync::Arc, time::Duration};

use conformance::reference::Host;
use drivers_api::{
    ArtifactKind, BootKind, DiskBus, NetworkId, PortId, Uuid, VmId, VmPower, VolumeId,
};
use reconciler::{
    Drivers, Reconciler, Settings,
    status::{Phase, Status},
    store::{MemoryStore, WantedStore},
    wanted::{
        Boot, Disk, ImageSpec, InstanceSpec, Key, Kind, NetworkSpec, Nic, ObjectName,
        RestartPolicy, VolumeSource, VolumeSpec, Wanted, WantedSpec,
    },
};

/// The UUID of a text: the same each time.
pub(crate) fn uuid(text: &str) -> Uuid {
    let bytes = *uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_OID, text.as_bytes()).as_bytes();
    Uuid::from_bytes(bytes).unwrap()
}

pub(crate) fn name(text: &str) -> ObjectName {
    text.parse().unwrap()
}

pub(crate) fn key(kind: Kind, text: &str) -> Key {
    Key::new(kind, name(text))
}

pub(crate) fn instance_key(text: &str) -> Key {
    key(Kind::Instance, text)
}

fn wanted(kind: Kind, text: &str, spec: WantedSpec) -> Wanted {
    Wanted::new(uuid(&format!("{kind}/{text}")), name(text), spec)
}

pub(crate) fn vm(text: &str) -> VmId {
    VmId::new(uuid(&format!("Instance/{text}")))
}

pub(crate) fn volume_id(text: &str) -> VolumeId {
    VolumeId::new(uuid(&format!("Volume/{text}")))
}

pub(crate) fn network_id(text: &str) -> NetworkId {
    NetworkId::new(uuid(&format!("Network/{text}")))
}

pub(crate) fn port(instance: &str, nic: &str) -> PortId {
    port_of(vm(instance), nic)
}

/// The port of a NIC, as RFC 9562 derives a UUID of version 5.
pub(crate) fn port_of(vm: VmId, nic: &str) -> PortId {
    let space = uuid::Uuid::from_bytes(*vm.uuid().as_bytes());
    let id = uuid::Uuid::new_v5(&space, nic.as_bytes());
    PortId::new(Uuid::from_bytes(*id.as_bytes()).unwrap())
}

pub(crate) fn image(text: &str) -> Wanted {
    let reference = format!("registry.test/{text}:1").parse().unwrap();
    wanted(Kind::Image, text, WantedSpec::Image(ImageSpec { r#ref: reference, driver: None }))
}

pub(crate) fn volume(text: &str, size_gib: u64) -> Wanted {
    let spec = VolumeSpec {
        driver: None,
        size_gib: drivers_api::SizeGib::new(size_gib).unwrap(),
        format: drivers_api::DiskFormat::Qcow2,
        source: None,
    };
    wanted(Kind::Volume, text, WantedSpec::Volume(spec))
}

pub(crate) fn volume_of(text: &str, size_gib: u64, image: &str) -> Wanted {
    let mut object = volume(text, size_gib);
    if let WantedSpec::Volume(spec) = &mut object.spec {
        spec.source = Some(VolumeSource { image: name(image) });
    }
    object
}

pub(crate) fn network(text: &str, cidr: &str) -> Wanted {
    let spec = NetworkSpec {
        driver: None,
        r#type: drivers_api::NetworkType::Nat,
        cidr: Some(cidr.parse().unwrap()),
        cidr6: None,
        gateway: None,
        gateway6: None,
        dns_servers: Vec::new(),
        uplink: None,
        vlan: None,
        mtu: None,
        mesh_listen_port: None,
        mesh_endpoint: None,
        mesh_peers: Vec::new(),
    };
    wanted(Kind::Network, text, WantedSpec::Network(spec))
}

/// An instance that boots `kernel`, with a disk of each volume and a NIC on each network.
pub(crate) fn instance(text: &str, volumes: &[&str], networks: &[&str]) -> Wanted {
    let disks = volumes.iter().enumerate().map(|(at, volume)| Disk {
        name: format!("disk{at}").parse().unwrap(),
        volume: name(volume),
        bus: DiskBus::Virtio,
        boot: false,
        read_only: false,
    });
    let nics = networks.iter().enumerate().map(|(at, network)| Nic {
        name: format!("eth{at}").parse().unwrap(),
        network: name(network),
        mac: None,
        ip: None,
        ip6: None,
    });
    let spec = InstanceSpec {
        driver: None,
        cpus: drivers_api::CpuCount::new(1).unwrap(),
        memory_mib: drivers_api::MemoryMib::new(128).unwrap(),
        boot: Boot { kind: BootKind::DirectLinux, r#ref: Some("kernel".to_owned()), cmdline: None },
        disks: disks.collect(),
        nics: nics.collect(),
        user_data: None,
        power: VmPower::Running,
        restart_policy: RestartPolicy::Always,
        start_order: 0,
        stop_grace_seconds: 5,
    };
    wanted(Kind::Instance, text, WantedSpec::Instance(spec))
}

/// Changes the instance part of an object.
pub(crate) fn with(mut object: Wanted, change: impl FnOnce(&mut InstanceSpec)) -> Wanted {
    if let WantedSpec::Instance(spec) = &mut object.spec {
        change(spec);
    }
    object
}

/// A host, a store, and a reconciler between them.
pub(crate) struct Node {
    pub(crate) host: Host,
    pub(crate) store: Arc<MemoryStore>,
    pub(crate) settings: Settings,
    pub(crate) whole: bool,
}

impl Node {
    pub(crate) fn new() -> Self {
        let host = Host::new();
        for (name, kind) in [("kernel", ArtifactKind::Kernel), ("disk", ArtifactKind::Disk)] {
            host.publish_image(&format!("registry.test/{name}:1").parse().unwrap(), kind);
        }
        let settings = Settings::new(host.node());
        Self { host, store: Arc::default(), settings, whole: true }
    }

    /// With the objects of `hello`: kernel, disk image, network, volume, instance.
    pub(crate) fn hello() -> Self {
        let node = Self::new();
        for object in [
            image("kernel"),
            image("disk"),
            network("net", "10.1.0.0/24"),
            volume_of("root", 2, "disk"),
            instance("web", &["root"], &["net"]),
        ] {
            node.store.apply(object);
        }
        node
    }

    pub(crate) fn drivers(&self) -> Drivers {
        let hypervisor = self.host.hypervisor();
        let hypervisor = if self.whole { hypervisor } else { hypervisor.without_whole_spec() };
        Drivers::new()
            .hypervisor("reference", hypervisor)
            .network("reference", self.host.network())
            .volume("reference", self.host.volume())
            .image("reference", self.host.image())
    }

    pub(crate) fn start(&self) -> Reconciler {
        Reconciler::start(
            Arc::<MemoryStore>::clone(&self.store),
            self.drivers(),
            self.settings.clone(),
        )
    }

    /// Changes the instance `text` in the store.
    pub(crate) fn change(&self, text: &str, change: impl FnOnce(&mut InstanceSpec)) {
        let object = self.store.snapshot().get(&instance_key(text)).unwrap().clone();
        self.store.apply(with((*object).clone(), change));
    }
}

/// Waits until a condition holds, on tokio's clock.
pub(crate) async fn until(what: &str, seconds: u64, condition: impl Fn() -> bool) {
    let limit = tokio::time::Instant::now() + Duration::from_secs(seconds);
    while !condition() {
        assert!(tokio::time::Instant::now() < limit, "not within {seconds} s: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until everything in the store is as wanted.
pub(crate) async fn converged(node: &Node, reconciler: &Reconciler) {
    let limit = tokio::time::Instant::now() + Duration::from_secs(300);
    loop {
        let open: Vec<String> = node
            .store
            .snapshot()
            .iter()
            .filter(|object| {
                let status = reconciler.status(&object.key());
                object.deleting || !status.is_some_and(|status| is_reached(object, &status))
            })
            .map(|object| format!("{:?}", reconciler.status(&object.key())))
            .collect();
        if open.is_empty() {
            return;
        }
        assert!(tokio::time::Instant::now() < limit, "not converged: {open:#?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) fn is_reached(object: &Wanted, status: &Status) -> bool {
    status.uuid == object.uuid
        && status.observed_generation == object.generation
        && matches!(status.phase, Phase::Ready | Phase::RestartNeeded)
}

/// Lets everything that is on its way come to rest.
pub(crate) async fn settle() {
    tokio::time::sleep(Duration::from_secs(3)).await;
}
