//! Every spec and every result goes through JSON and comes back the same, in a form that protobuf can carry: numbers
//! within 64 bits, maps with string keys, no borrowed handles.

#![expect(clippy::unwrap_used, reason = "the helpers of a test")]

use std::{collections::BTreeSet, fmt::Debug};

use drivers_api::{
    Architecture, ArtifactKind, AttachRequest, AttachedVolume, Attachment, Backing, BackingKind,
    BootFiles, BootKind, BootSpec, Change, CloudInit, CollectReport, CpuCount, DetachRequest,
    Digest, Direction, DiskBus, DiskFormat, DiskSpec, ErrorKind, EventKind, Exit, GuestInfo,
    HostEvent, HostId, HostInfo, HypervisorAbilities, ImageFiles, ImageRef, ImageStatus,
    InstanceSpec, MacAddr, Mark, MemoryMib, MeshPeer, MtuBytes, NetworkSpec, NetworkStatus,
    NetworkType, NicHandle, ObjectRef, Outcome, PortNumber, PortSpec, PortStatus, Progress,
    Protocol, RulePeer, SecurityGroupSpec, SecurityRule, SizeGib, SnapshotInfo, VlanId, VmPower,
    VmSpec, VmState, VmStatus, VolumeSource, VolumeSpec, VolumeStatus,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

const ID: &str = "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b";
const OTHER: &str = "0d9e8f7a-6b5c-4d3e-8f2a-1b0c9d8e7f6a";
const KEY: &str = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";

fn p<T: std::str::FromStr<Err: Debug>>(text: &str) -> T {
    text.parse().unwrap()
}

/// Through a string and through a tree, and back.
fn there_and_back<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T) -> Value {
    let text = serde_json::to_string(value).unwrap();
    assert_eq!(&serde_json::from_str::<T>(&text).unwrap(), value, "through {text}");
    let tree = serde_json::to_value(value).unwrap();
    assert_eq!(&serde_json::from_value::<T>(tree.clone()).unwrap(), value, "through {tree}");
    // A second trip writes the same bytes: what is stored does not flap.
    let again: T = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::to_string(&again).unwrap(), text);
    tree
}

/// Each of some values; their JSON forms must differ.
fn each<T: Serialize + DeserializeOwned + PartialEq + Debug>(values: &[T]) {
    let forms: BTreeSet<String> =
        values.iter().map(|value| there_and_back(value).to_string()).collect();
    assert_eq!(forms.len(), values.len(), "two values have one form: {values:?}");
}

fn boot() -> BootSpec {
    let files = BootFiles::Kernel { kernel: p("/boot/vmlinuz"), initrd: Some(p("/boot/initrd")) };
    let mut boot = BootSpec::new(BootKind::OciImage, "reg.test/k:1".to_owned(), Some(files));
    boot.cmdline = Some("console=ttyS0 \"quoted\" ü".to_owned());
    boot
}

fn vm() -> VmSpec {
    let (cpus, memory) = (CpuCount::new(3).unwrap(), MemoryMib::new(MemoryMib::MAX).unwrap());
    let mut vm = VmSpec::new(p(ID), p("a</name>\u{202e}"), cpus, memory, boot());
    vm.project_uuid = Some(p(OTHER));
    let mut seed = CloudInit::new("#cloud-config\n\t\"x\"\n".to_owned(), "{}".to_owned());
    seed.network_config = Some("version: 2".to_owned());
    vm.cloud_init = Some(seed);
    vm
}

fn rbd() -> Backing {
    Backing::Rbd {
        pool: "pool".to_owned(),
        image: ID.to_owned(),
        monitors: vec!["192.0.2.1:6789".to_owned(), "[2001:db8::1]:6789".to_owned()],
        user: "node".to_owned(),
        secret: p("secret://ceph/node"),
    }
}

fn disk() -> DiskSpec {
    let mut disk = DiskSpec::new(p("root"), p(OTHER), rbd());
    (disk.bus, disk.read_only, disk.boot) = (DiskBus::Nvme, true, true);
    disk
}

fn nic() -> NicHandle {
    let mut nic = NicHandle::new(p("eth0"), p(ID), p("tap0"), MacAddr::derived(p(ID)));
    nic.mtu_bytes = Some(MtuBytes::new(9000).unwrap());
    nic
}

fn mark() -> Mark {
    Mark::new(p(OTHER), p(ID))
}

fn network() -> NetworkSpec {
    let mut network = NetworkSpec::new(p(ID), p("net"), NetworkType::Mesh);
    network.project_uuid = Some(p(OTHER));
    network.cidr = Some(p("10.77.0.0/24"));
    network.cidr6 = Some(p("fd77::/64"));
    network.gateway = Some(p("10.77.0.1"));
    network.gateway6 = Some(p("fd77::1"));
    network.dns_servers = vec![p("192.0.2.53"), p("2001:db8::53")];
    network.uplink = Some(p("br-uplink.7"));
    network.vlan = Some(VlanId::new(4094).unwrap());
    network.mtu_bytes = Some(MtuBytes::new(1280).unwrap());
    network.mesh_listen_port = Some(PortNumber::new(51_820).unwrap());
    network.mesh_endpoint = Some(p("[2001:db8::7]:51820"));
    let mut peer = MeshPeer::new(p(KEY), vec![p("10.78.0.0/24")]);
    peer.endpoint = Some(p("peer.test:51820"));
    peer.persistent_keepalive_s = Some(25);
    network.mesh_peers = vec![peer];
    network
}

fn port() -> PortSpec {
    let mut port = PortSpec::new(p(ID), p(OTHER), p(ID), p("eth0"), MacAddr::derived(p(ID)));
    port.project_uuid = Some(p(OTHER));
    port.addresses = vec![p("10.77.0.9"), p("fd77::9")];
    port.hostname = Some("web-1".to_owned());
    port.wireguard_pub_key = Some(p(KEY));
    port.mesh_endpoint = Some(p("192.0.2.7:1"));
    port.effective_security_groups = Some(vec![p(ID), p(OTHER)]);
    port.owner_uid = Some(u32::MAX);
    port
}

fn volume() -> VolumeSpec {
    let size = SizeGib::new(SizeGib::MAX).unwrap();
    let mut volume = VolumeSpec::new(p(ID), p("--help"), size, DiskFormat::Qcow2);
    volume.project_uuid = Some(p(OTHER));
    let image: ImageRef = p("reg.test:5000/a/b:1");
    volume.source = Some(VolumeSource::new(image, Some(p("/images/a")), DiskFormat::Raw));
    volume
}

#[test]
fn vm_specs_and_statuses_survive() {
    each(&[vm(), bare_vm()]);
    each(&[BootKind::Uki, BootKind::DirectLinux, BootKind::OciImage, BootKind::Firmware]);
    each(&[boot(), BootSpec::firmware()]);
    there_and_back(&BootFiles::Uki { path: p("/boot/uki.efi") });
    each(&[disk(), DiskSpec::new(p("d"), p(ID), file())]);
    each(&[DiskBus::Virtio, DiskBus::Scsi, DiskBus::Nvme]);
    let mut instance = InstanceSpec::new(vm(), vec![disk()], vec![nic()]);
    there_and_back(&instance);
    instance.power = VmPower::Stopped;
    there_and_back(&instance);
    let mut status = VmStatus::new(p(ID), mark(), Some(vm()), VmState::Running);
    status.disks = vec![disk()];
    status.nics = vec![nic()];
    status.pid = Some(u32::MAX);
    status.accel = Some("kvm".to_owned());
    status.detaching = vec![p("root"), p("eth0")];
    status.restart_needed = true;
    status.message = Some("line\nline".to_owned());
    let exits =
        [Exit::GuestShutdown, Exit::Requested, Exit::Code(-1), Exit::Signal(9), Exit::Unseen];
    for exit in exits {
        status.last_exit = Some(exit);
        there_and_back(&status);
    }
    each(&[
        VmState::Stopped,
        VmState::Starting,
        VmState::Running,
        VmState::Paused,
        VmState::Stopping,
        VmState::Unknown,
    ]);
    there_and_back(&VmStatus::new(p(ID), mark(), None, VmState::Unknown));
    let mut abilities = HypervisorAbilities::new(
        vec![BootKind::Uki],
        vec![BackingKind::Rbd, BackingKind::File, BackingKind::BlockDevice],
        vec![DiskBus::Scsi],
    );
    abilities.hot_disks = true;
    there_and_back(&abilities);
    there_and_back(&SnapshotInfo::new("s".to_owned(), true, u64::MAX));
    there_and_back(&GuestInfo::new("h".to_owned(), vec![p("fd77::9")], "Debian".to_owned()));
}

fn bare_vm() -> VmSpec {
    let (cpus, memory) = (CpuCount::new(1).unwrap(), MemoryMib::new(1).unwrap());
    VmSpec::new(p(ID), p("n"), cpus, memory, BootSpec::firmware())
}

fn file() -> Backing {
    Backing::File { path: p("/v/d.qcow2,readonly=off"), format: DiskFormat::Qcow2 }
}

#[test]
fn network_specs_and_statuses_survive() {
    each(&[network(), NetworkSpec::new(p(ID), p("n"), NetworkType::Isolated)]);
    let types = [NetworkType::Nat, NetworkType::Bridged, NetworkType::Isolated, NetworkType::Mesh];
    each(&types);
    let mut none = port();
    none.effective_security_groups = None;
    let mut empty = port();
    empty.effective_security_groups = Some(Vec::new());
    // "No answer" and "no groups" are two things, and stay two.
    each(&[port(), none, empty]);
    there_and_back(&nic());
    let mut status = NetworkStatus::new(p(ID), mark(), Some(network()));
    status.healthy = false;
    status.device = Some(p("bcn0"));
    status.public_key = Some(p(KEY));
    status.messages = vec!["x".to_owned()];
    there_and_back(&status);
    let mut status = PortStatus::new(p(ID), mark(), Some(port()), Some(nic()));
    status.healthy = false;
    there_and_back(&status);
    let mut group = SecurityGroupSpec::new(p(ID), p("web"));
    group.project_uuid = Some(p(OTHER));
    group.members = vec![p("10.77.0.9"), p("fd77::9")];
    let protocols = [
        Protocol::Any,
        Protocol::Tcp { from_port: 0, to_port: u16::MAX },
        Protocol::Udp { from_port: 53, to_port: 53 },
        Protocol::Icmp { icmp_type: None },
        Protocol::Icmp { icmp_type: Some(8) },
        Protocol::Icmp6 { icmp_type: Some(128) },
    ];
    each(&protocols);
    let peers = [RulePeer::Any, RulePeer::Cidr(p("fd77::/64")), RulePeer::Group(p(OTHER))];
    each(&peers);
    for (protocol, peer) in protocols.into_iter().zip(peers.into_iter().cycle()) {
        for direction in [Direction::Ingress, Direction::Egress] {
            group.rules.push(SecurityRule::new(direction, protocol, peer.clone()));
        }
    }
    there_and_back(&group);
}

#[test]
fn volume_specs_and_statuses_survive() {
    let size = SizeGib::new(1).unwrap();
    each(&[volume(), VolumeSpec::new(p(ID), p("v"), size, DiskFormat::Raw)]);
    each(&[DiskFormat::Raw, DiskFormat::Qcow2]);
    each(&[BackingKind::File, BackingKind::BlockDevice, BackingKind::Rbd]);
    each(&[file(), Backing::BlockDevice { path: p("/dev/rbd0") }, rbd()]);
    there_and_back(&AttachedVolume::new(rbd(), true));
    let mut request = AttachRequest::new(p(ID), p(OTHER), p(ID), vec![BackingKind::Rbd]);
    request.read_only = true;
    request.owner_uid = Some(64_055);
    there_and_back(&request);
    there_and_back(&DetachRequest::new(p(ID), p(OTHER), p(ID)));
    let mut status = VolumeStatus::new(p(ID), mark(), Some(volume()), u64::MAX, 0);
    status.complete = false;
    status.attachments = vec![Attachment::new(p(OTHER), p(ID), true)];
    status.message = Some("m".to_owned());
    there_and_back(&status);
}

#[test]
fn image_results_survive() {
    let digest: Digest = p(&format!("sha256:{}", "0123456789abcdef".repeat(4)));
    let files = [
        ImageFiles::Disk { path: p("/i/d"), format: DiskFormat::Raw, virtual_size: u64::MAX },
        ImageFiles::Kernel {
            kernel: p("/i/k"),
            initrd: Some(p("/i/r")),
            cmdline: Some("quiet".to_owned()),
        },
        ImageFiles::Kernel { kernel: p("/i/k"), initrd: None, cmdline: None },
        ImageFiles::Uki { path: p("/i/u") },
    ];
    each(&files);
    each(&[ArtifactKind::Disk, ArtifactKind::Kernel, ArtifactKind::Uki]);
    for files in files {
        let reference: ImageRef = p(&format!("oci://reg.test/a@{digest}"));
        let status = ImageStatus::new(reference, digest.clone(), files, 7);
        there_and_back(&Outcome::new(Change::Created, status));
    }
    there_and_back(&CollectReport::new(vec![p("localhost/a:1")], u64::MAX));
}

#[test]
fn hosts_events_changes_and_kinds_survive() {
    let mut info = HostInfo::new(Some(p(ID)), "host-1", "reference");
    info.az = "az-1a".to_owned();
    info.hypervisor = "qemu-kvm".to_owned();
    info.backend_version = Some("QEMU 7.2.22".to_owned());
    there_and_back(&info);
    info.uuid = None::<HostId>;
    info.architecture = Some(Architecture::Riscv64);
    there_and_back(&info);
    each(&[Change::Unchanged, Change::Changed, Change::Created]);
    let objects = [
        ObjectRef::Vm(p(ID)),
        ObjectRef::Network(p(ID)),
        ObjectRef::Port(p(ID)),
        ObjectRef::Volume(p(ID)),
    ];
    each(&objects);
    for object in objects {
        for kind in [EventKind::Appeared, EventKind::Changed, EventKind::Gone] {
            there_and_back(&HostEvent::new(object, kind, "m"));
        }
    }
    there_and_back(&HostEvent::resync("m"));
    there_and_back(&Progress::new("download", "m").with_amount(u64::MAX, Some(u64::MAX)));
    each(&ErrorKind::ALL);
    for kind in ErrorKind::ALL {
        assert_eq!(serde_json::to_value(kind).unwrap(), Value::from(kind.code()));
    }
}

#[test]
fn a_value_that_no_parser_takes_comes_through_no_json_either() {
    let mut tree = serde_json::to_value(vm()).unwrap();
    for (field, wrong) in [
        ("uuid", Value::from("../../etc")),
        ("uuid", Value::from("00000000-0000-0000-0000-000000000000")),
        ("name", Value::from("a\u{0}b")),
        ("cpu_count", Value::from(0)),
        ("cpu_count", Value::from(-1)),
        ("memory_mib", Value::from(u64::MAX)),
        ("memory_mib", Value::from("64")),
    ] {
        let kept = std::mem::replace(&mut tree[field], wrong.clone());
        assert!(serde_json::from_value::<VmSpec>(tree.clone()).is_err(), "{field}: {wrong}");
        tree[field] = kept;
    }
    serde_json::from_value::<VmSpec>(tree).unwrap();
    assert!(serde_json::from_str::<PortNumber>("0").is_err());
    assert!(serde_json::from_str::<VlanId>("4095").is_err());
    // JSON's escapes reach the parsers as plain text.
    let escaped = "\"10.77.0.0\\u002f24\"";
    assert_eq!(serde_json::from_str::<drivers_api::IpCidr>(escaped).unwrap(), p("10.77.0.0/24"));
}

#[test]
fn an_optional_field_that_an_older_writer_left_out_is_absent() {
    let mut tree = serde_json::to_value(vm()).unwrap();
    let fields = tree.as_object_mut().unwrap();
    fields.remove("project_uuid");
    fields.remove("cloud_init");
    let read: VmSpec = serde_json::from_value(tree).unwrap();
    assert_eq!((read.project_uuid, read.cloud_init), (None, None));
}
