//! What is wanted: the objects as an operator writes them, named and cross-referenced by name.
//!
//! The specs here are the `spec` part of a manifest, one to one, and the document that the store keeps. They hold names
//! where the driver specs hold identities; [`crate::plan`] resolves them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    str::FromStr,
    sync::Arc,
};

use drivers_api::{
    BootKind, CpuCount, DeviceName, DiskBus, DiskFormat, Endpoint, IfName, ImageRef, IpCidr,
    MacAddr, MemoryMib, MeshPeer, MtuBytes, NetworkType, PortNumber, ProjectId, SizeGib, Uuid,
    VlanId, VmPower,
};
use serde::{Deserialize, Serialize};

mod set;

pub use set::WantedSet;

/// The kind of a wanted object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Kind {
    /// An artifact in the host's cache.
    Image,
    /// A disk.
    Volume,
    /// A network.
    Network,
    /// A virtual machine with its disks and NICs.
    Instance,
}

impl Kind {
    /// All kinds, in the order in which they are made; they are removed in the reverse.
    pub const ALL: [Self; 4] = [Self::Image, Self::Volume, Self::Network, Self::Instance];

    /// The name in manifests and on the command line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Image => "Image",
            Self::Volume => "Volume",
            Self::Network => "Network",
            Self::Instance => "Instance",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A text that is no kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no kind: wanted Instance, Network, Volume or Image")]
pub struct ParseKindError(String);

impl FromStr for Kind {
    type Err = ParseKindError;

    /// Takes the manifest's spelling in any case, and the plural: `instances`.
    fn from_str(text: &str) -> Result<Self, ParseKindError> {
        let lower = text.to_ascii_lowercase();
        let singular = lower.strip_suffix('s').unwrap_or(&lower);
        Self::ALL
            .into_iter()
            .find(|kind| kind.as_str().to_ascii_lowercase() == singular)
            .ok_or_else(|| ParseKindError(text.chars().take(40).collect()))
    }
}

/// The name of a wanted object, unique within its kind: 1 to 63 of `a-z 0-9 -`, starting and ending with a letter or
/// digit (RFC 1123 label, so that it can be a guest's host name).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ObjectName(Arc<str>);

/// A text that is no object name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is no name: wanted 1 to 63 lower-case letters, digits and hyphens, starting and ending with a letter or digit"
)]
pub struct ParseNameError(String);

impl ObjectName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ObjectName {
    type Err = ParseNameError;

    fn from_str(text: &str) -> Result<Self, ParseNameError> {
        let edge = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        let good = !text.is_empty()
            && text.len() <= 63
            && text.starts_with(edge)
            && text.ends_with(edge)
            && text.chars().all(|c| edge(c) || c == '-');
        if good {
            Ok(Self(text.into()))
        } else {
            Err(ParseNameError(text.chars().flat_map(char::escape_debug).take(80).collect()))
        }
    }
}

impl TryFrom<String> for ObjectName {
    type Error = ParseNameError;
    fn try_from(text: String) -> Result<Self, ParseNameError> {
        text.parse()
    }
}

impl From<ObjectName> for String {
    fn from(name: ObjectName) -> Self {
        name.as_str().to_owned()
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The identity of a wanted object: how people name it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Key {
    /// The kind.
    pub kind: Kind,
    /// The name within the kind.
    pub name: ObjectName,
}

impl Key {
    /// A key.
    #[must_use]
    pub const fn new(kind: Kind, name: ObjectName) -> Self {
        Self { kind, name }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

/// One wanted object. Its document in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// The identity on the host. Chosen once, when the object is first accepted; never changed.
    pub uuid: Uuid,
    /// The name. A changed name is another object.
    pub name: ObjectName,
    /// The project that owns it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<ProjectId>,
    /// Labels, for people and selectors; no effect on the host.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Counts the accepted changes of this object, from 1.
    pub generation: u64,
    /// The tombstone: somebody asked for the deletion. Never taken back; the document goes when the host is clear.
    #[serde(default)]
    pub deleting: bool,
    /// Counts the requested reboots of an instance. Persisted, so that a request survives a crash.
    #[serde(default)]
    pub reboots: u64,
    /// How many of them are done: the reconciler has the store write it after the reboot
    /// ([`WantedStore::acknowledge`](crate::store::WantedStore::acknowledge)). A crash between the two repeats the reboot:
    /// a request is done at least once, and never lost.
    #[serde(default)]
    pub reboots_done: u64,
    /// Counts the requested starts of an instance whose restart policy left it stopped; raised by `start` where `power` is
    /// `running` already. An instance that runs is left alone.
    #[serde(default)]
    pub starts: u64,
    /// How many of them are done; as `reboots_done`.
    #[serde(default)]
    pub starts_done: u64,
    /// An instance's NICs of earlier generations that it no longer has. Their ports are looked for by the identity that is
    /// derived from the name: the host may not be able to say whose a half-made port is. [`Wanted::next`] keeps it.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub former_nics: BTreeSet<DeviceName>,
    /// On a tombstone only: the object that was applied under the same name while this one is being deleted. It has an
    /// identity of its own and a higher generation, and takes the place of the tombstone when
    /// [`WantedStore::forget`](crate::store::WantedStore::forget) drops that; until then nothing of it is made, so
    /// deleting it again only removes it here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub successor: Option<Box<Wanted>>,
    /// What is wanted.
    #[serde(flatten)]
    pub spec: WantedSpec,
}

impl Wanted {
    /// A new object of generation 1, without project and labels.
    #[must_use]
    pub const fn new(uuid: Uuid, name: ObjectName, spec: WantedSpec) -> Self {
        Self {
            uuid,
            name,
            project: None,
            labels: BTreeMap::new(),
            generation: 1,
            deleting: false,
            reboots: 0,
            reboots_done: 0,
            starts: 0,
            starts_done: 0,
            former_nics: BTreeSet::new(),
            successor: None,
            spec,
        }
    }

    /// The object's key.
    #[must_use]
    pub fn key(&self) -> Key {
        Key::new(self.spec.kind(), self.name.clone())
    }

    /// This object with what `applied` says of it: project, labels and spec. A changed spec is the next generation; a power
    /// that goes to running asks for a start; NICs that go are remembered.
    #[must_use]
    pub fn next(&self, applied: Self) -> Self {
        let mut next = Self {
            project: applied.project,
            labels: applied.labels,
            spec: applied.spec,
            generation: self.generation,
            ..self.clone()
        };
        if next.spec != self.spec || next.project != self.project {
            next.generation += 1;
        }
        if let (WantedSpec::Instance(old), WantedSpec::Instance(new)) = (&self.spec, &next.spec) {
            if old.power == VmPower::Stopped && new.power == VmPower::Running {
                next.starts += 1;
            }
            next.former_nics.extend(old.nics.iter().map(|nic| nic.name.clone()));
            for nic in &new.nics {
                next.former_nics.remove(&nic.name);
            }
        }
        next
    }

    /// What remains wanted under this name: the object itself, or a tombstone's successor.
    #[must_use]
    pub fn live(&self) -> Option<&Self> {
        if self.deleting { self.successor.as_deref() } else { Some(self) }
    }

    /// The tombstone of this object. A tombstone stays as it is, but for a successor, which goes: nothing was made of it.
    #[must_use]
    pub fn deleted(&self) -> Self {
        let generation = if self.deleting { self.generation } else { self.generation + 1 };
        Self { deleting: true, generation, successor: None, ..self.clone() }
    }

    /// This tombstone with an object that takes its place once it is gone.
    #[must_use]
    pub fn with_successor(&self, successor: Self) -> Self {
        let generation = successor.generation.max(self.generation + 1);
        Self { successor: Some(Box::new(Self { generation, ..successor })), ..self.clone() }
    }

    /// The objects that this one names, in the order of its spec, without repeats.
    #[must_use]
    pub fn references(&self) -> Vec<Key> {
        let mut keys = Vec::new();
        let mut add = |kind, name: &ObjectName| {
            let key = Key::new(kind, name.clone());
            if !keys.contains(&key) {
                keys.push(key);
            }
        };
        match &self.spec {
            WantedSpec::Image(_) | WantedSpec::Network(_) => {}
            WantedSpec::Volume(volume) => {
                if let Some(source) = &volume.source {
                    add(Kind::Image, &source.image);
                }
            }
            WantedSpec::Instance(instance) => {
                if let Some(image) = instance.boot.image() {
                    add(Kind::Image, &image);
                }
                for disk in &instance.disks {
                    add(Kind::Volume, &disk.volume);
                }
                for nic in &instance.nics {
                    add(Kind::Network, &nic.network);
                }
            }
        }
        keys
    }
}

/// What is wanted of an object, by kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "spec")]
#[non_exhaustive]
pub enum WantedSpec {
    /// An artifact in the host's cache.
    Image(ImageSpec),
    /// A disk.
    Volume(VolumeSpec),
    /// A network.
    Network(NetworkSpec),
    /// A virtual machine.
    Instance(InstanceSpec),
}

impl WantedSpec {
    /// The kind.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Image(_) => Kind::Image,
            Self::Volume(_) => Kind::Volume,
            Self::Network(_) => Kind::Network,
            Self::Instance(_) => Kind::Instance,
        }
    }
}

/// An artifact in the host's cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageSpec {
    /// What to pull.
    pub r#ref: ImageRef,
    /// The driver's id; the default image driver when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeSpec {
    /// The driver's id; the default volume driver when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// The size. Grow-only.
    pub size_gib: SizeGib,
    /// The format on the backend: `qcow2` unless given.
    #[serde(default = "default_format")]
    pub format: DiskFormat,
    /// What the volume starts with; empty when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<VolumeSource>,
}

const fn default_format() -> DiskFormat {
    DiskFormat::Qcow2
}

/// What a volume starts with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeSource {
    /// The name of an `Image` that holds a disk.
    pub image: ObjectName,
}

/// A network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkSpec {
    /// The driver's id; the driver that serves the type when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// `nat`, `bridged`, `isolated` or `mesh`.
    pub r#type: NetworkType,
    /// The range of addresses, of either family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cidr: Option<IpCidr>,
    /// The IPv6 range beside a v4 `cidr`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cidr6: Option<IpCidr>,
    /// The host's address in `cidr`; the first host address of a nat network when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// The host's address in `cidr6`; the first host address of a nat network when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway6: Option<IpAddr>,
    /// The resolvers that guests are told.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dns_servers: Vec<IpAddr>,
    /// Bridged only: the existing bridge of the host's uplink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink: Option<IfName>,
    /// Bridged only: the VLAN tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<VlanId>,
    /// The MTU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<MtuBytes>,
    /// Mesh only: the UDP port on which this host listens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mesh_listen_port: Option<PortNumber>,
    /// Mesh only: where other hosts reach this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mesh_endpoint: Option<Endpoint>,
    /// Mesh only: the other hosts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mesh_peers: Vec<MeshPeer>,
}

/// A virtual machine with its disks and NICs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstanceSpec {
    /// The driver's id; the default hypervisor when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Virtual CPUs.
    pub cpus: CpuCount,
    /// Memory in MiB.
    pub memory_mib: MemoryMib,
    /// How it boots.
    pub boot: Boot,
    /// The disks, in the order in which the guest sees them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<Disk>,
    /// The NICs, in the order in which the guest sees them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<Nic>,
    /// `user-data` of a NoCloud seed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
    /// Whether it runs: `running` unless given.
    #[serde(default = "default_power")]
    pub power: VmPower,
    /// What happens when it ends by itself.
    #[serde(default)]
    pub restart_policy: RestartPolicy,
    /// After a host's reboot, instances start in this order; the lowest first.
    #[serde(default)]
    pub start_order: i32,
    /// How long a stop waits for the guest, in seconds: 30 unless given.
    #[serde(default = "default_grace")]
    pub stop_grace_seconds: u32,
}

const fn default_power() -> VmPower {
    VmPower::Running
}

const fn default_grace() -> u32 {
    30
}

/// What happens to an instance that is wanted to run and ended by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum RestartPolicy {
    /// It is started again, whatever ended it.
    #[default]
    Always,
    /// It is started again unless the guest shut itself down.
    OnFailure,
    /// It stays as it is, until somebody asks for a start.
    Never,
}

/// How an instance boots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Boot {
    /// `uki`, `direct_linux`, `oci_image` or `firmware`.
    pub kind: BootKind,
    /// The name of an `Image`, or an absolute path of the host. Absent for `firmware`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub r#ref: Option<String>,
    /// The kernel's command line; the artifact's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cmdline: Option<String>,
}

impl Boot {
    /// The `Image` that it names; `None` for firmware, a path of the host and what is no name.
    #[must_use]
    pub fn image(&self) -> Option<ObjectName> {
        self.r#ref.as_deref().filter(|text| !text.starts_with('/'))?.parse().ok()
    }
}

/// A disk of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Its name within the instance.
    pub name: DeviceName,
    /// The name of a `Volume`.
    pub volume: ObjectName,
    /// The bus: `virtio` unless given.
    #[serde(default = "default_bus")]
    pub bus: DiskBus,
    /// Whether firmware boots from it.
    #[serde(default)]
    pub boot: bool,
    /// Whether the guest may only read.
    #[serde(default)]
    pub read_only: bool,
}

const fn default_bus() -> DiskBus {
    DiskBus::Virtio
}

/// A NIC of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// Its name within the instance.
    pub name: DeviceName,
    /// The name of a `Network`.
    pub network: ObjectName,
    /// The MAC address; derived from instance and name when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddr>,
    /// The address in the network's `cidr`; the lowest free one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip: Option<IpAddr>,
    /// The address in the network's `cidr6`; the lowest free one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip6: Option<IpAddr>,
}
