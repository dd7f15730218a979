//! The pure part: from what is wanted and what is there to the steps that close the difference.
//!
//! One object at a time. An Image, a Volume and a Network plan for themselves; an Instance plans for itself, its ports and
//! its attachments. A plan holds all steps that can be foreseen, in the order in which they are executed, and a verdict:
//! where the object stands once they are. After its steps an object is looked at and planned anew, until the plan is empty.

mod delete;
mod devices;
mod disks;
mod image;
mod instance;
mod network;
mod nics;
#[cfg(test)]
mod tests;
mod volume;

use devices::Devices;
pub(crate) use instance::{describe, ended_by_itself};

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use drivers_api::{
    AttachRequest, Backing, DetachRequest, DeviceName, DiskBus, DiskSpec, Error, ErrorKind, IfName,
    ImageRef, NetworkId, NicHandle, PortId, PortSpec, VmId, VmPower, VmSpec, VolumeId,
};
use serde::{Deserialize, Serialize};

use crate::{
    drivers::Drivers,
    index::Index,
    resolve::Hold,
    seen::{DriverId, Seen},
    settings::Settings,
    store::Done,
    wanted::{Key, Wanted, WantedSet, WantedSpec},
};

/// What a step does to the host. Executed steps are planned steps: the executor runs nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Action {
    /// Look at the host; never planned, named where a look failed.
    Observe,
    /// Pull an image.
    Pull,
    /// Remove an image from the cache.
    RemoveImage,
    /// Make or grow a volume.
    EnsureVolume,
    /// Remove a volume.
    DestroyVolume,
    /// Give a volume to an instance.
    AttachVolume,
    /// Take a volume from an instance.
    DetachVolume,
    /// Make or mend a network.
    EnsureNetwork,
    /// Remove a network.
    DestroyNetwork,
    /// Make or mend a port.
    AttachPort,
    /// Remove a port.
    DetachPort,
    /// Make a VM, or change it, with its devices and power.
    EnsureVm,
    /// Make a VM without devices.
    CreateVm,
    /// Plug a disk into a VM.
    AttachDisk,
    /// Unplug a disk from a VM.
    DetachDisk,
    /// Tell a running VM that a disk has grown.
    ResizeDisk,
    /// Plug a NIC into a VM.
    AttachNic,
    /// Unplug a NIC from a VM.
    DetachNic,
    /// Start a VM.
    StartVm,
    /// Stop a VM.
    StopVm,
    /// Restart a VM's guest.
    RebootVm,
    /// Remove a VM.
    DeleteVm,
}

/// One step: what is done, with which driver, to what.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Step {
    /// The wanted object for whose sake it is done.
    pub object: Key,
    /// What is done.
    pub action: Action,
    /// The driver's id.
    pub driver: String,
    /// To what, as people name it: `disk root (volume web-root)`.
    pub target: String,
    /// Why: `missing`, `differs: cpus 1 -> 2`, `wanted deleted`, `drifted: tap is gone`.
    pub reason: String,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { object, action, driver, target, reason } = self;
        write!(f, "{object}: {action:?} {target} [{driver}]: {reason}")
    }
}

/// What a plan is made from.
#[derive(Clone, Copy)]
pub(crate) struct World<'a> {
    pub(crate) wanted: &'a WantedSet,
    pub(crate) index: &'a Index,
    pub(crate) seen: &'a Seen,
    pub(crate) drivers: &'a Drivers,
    pub(crate) settings: &'a Settings,
    /// Whether the host side of an object is as wanted.
    pub(crate) ready: &'a dyn Fn(&Key) -> bool,
    /// An object whose running pass may be using this one.
    pub(crate) in_use: &'a dyn Fn(&Key) -> Option<Key>,
    /// Plan as if all other objects of the set were as wanted already: to show what would be done.
    pub(crate) assume: bool,
}

/// What is remembered about an instance between its passes. Lost with the agent, and made anew from the host.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    /// The addresses of the ports.
    pub(crate) addresses: Result<BTreeMap<PortId, Vec<IpAddr>>, Arc<Error>>,
    /// The size of each disk as the running VM was last told.
    pub(crate) told: BTreeMap<VolumeId, u64>,
    /// How long a VM that ended by itself waits for its restart.
    pub(crate) hold_start: Option<Duration>,
    /// Somebody asked for a start in this agent's life.
    pub(crate) asked: bool,
    /// Ports that were made for it in this agent's life, wanted or not.
    pub(crate) ports: BTreeSet<PortId>,
    /// Whether the host has room for the VM.
    pub(crate) room: Result<(), Arc<Error>>,
}

impl Memory {
    /// Nothing is remembered.
    pub(crate) const fn empty() -> Self {
        Self {
            addresses: Ok(BTreeMap::new()),
            told: BTreeMap::new(),
            hold_start: None,
            asked: false,
            ports: BTreeSet::new(),
            room: Ok(()),
        }
    }
}

/// What a step's call needs. What only an earlier step of the same plan answers is `None` here.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Pull(ImageRef),
    RemoveImage(ImageRef),
    EnsureVolume(drivers_api::VolumeSpec),
    DestroyVolume(VolumeId),
    AttachVolume(AttachRequest),
    DetachVolume(DetachRequest),
    EnsureNetwork(drivers_api::NetworkSpec),
    DestroyNetwork(NetworkId),
    AttachPort(PortSpec),
    DetachPort(PortId),
    EnsureVm {
        vm: VmSpec,
        disks: Vec<DiskPlan>,
        nics: Vec<NicPlan>,
        power: VmPower,
        starts: bool,
    },
    CreateVm(VmSpec),
    AttachDisk(VmId, DiskPlan),
    DetachDisk(VmId, VolumeId),
    ResizeDisk(VmId, VolumeId, u64),
    AttachNic(VmId, NicPlan),
    DetachNic(VmId, IfName),
    /// With the sizes of its disks, which it sees at its start.
    StartVm(VmId, Vec<(VolumeId, u64)>),
    StopVm(VmId, Duration),
    RebootVm(VmId, Duration),
    DeleteVm(VmId),
}

/// A disk of a VM to be.
#[derive(Clone, Debug)]
pub(crate) struct DiskPlan {
    pub(crate) name: DeviceName,
    pub(crate) volume: VolumeId,
    pub(crate) bus: DiskBus,
    pub(crate) read_only: bool,
    pub(crate) boot: bool,
    /// The size that the VM will see, where that is settled.
    pub(crate) bytes: Option<u64>,
    /// The backend shows less than that: it waits for the VM to be told.
    pub(crate) growth_due: bool,
    /// `None`: as the volume's attach step answers.
    pub(crate) backing: Option<Backing>,
}

impl DiskPlan {
    /// The disk, once it is known what to open.
    pub(crate) fn spec(&self, backing: Backing) -> DiskSpec {
        let mut disk = DiskSpec::new(self.name.clone(), self.volume, backing);
        disk.bus = self.bus;
        disk.read_only = self.read_only;
        disk.boot = self.boot;
        disk
    }
}

/// A NIC of a VM to be.
#[derive(Clone, Debug)]
pub(crate) struct NicPlan {
    pub(crate) port: PortId,
    /// `None`: as the port's attach step answers.
    pub(crate) handle: Option<NicHandle>,
}

/// Steps that fail together: after a failed one, those that need its group are not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Group {
    Own,
    Power,
    Disks,
    Nics,
    Vm,
}

/// A step with its call.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) step: Step,
    pub(crate) driver: DriverId,
    pub(crate) op: Op,
    pub(crate) group: Group,
    pub(crate) needs: &'static [Group],
}

/// Where an object stands when a plan's steps are done.
#[derive(Clone, Debug)]
pub(crate) enum Verdict {
    /// As wanted; what a person may want to know beside it.
    Satisfied(Option<String>),
    /// As wanted but for what only a restart of the VM applies.
    RestartNeeded(String),
    /// It waits for another object, or for something that nobody tells.
    Blocked { by: Option<Key>, why: String },
    /// It is tried again after this time.
    Waiting { after: Duration, why: String },
    /// It could not be seen.
    Unknown(Arc<Error>),
    /// It cannot go on by itself as things are.
    Stuck(Arc<Error>),
    /// It was seen to be gone.
    Clear,
}

/// What is to be done for one object.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) steps: Vec<Planned>,
    pub(crate) verdict: Verdict,
    /// Which requests are done once the steps are.
    pub(crate) done: Option<Done>,
}

impl Plan {
    pub(crate) const fn new(steps: Vec<Planned>, verdict: Verdict) -> Self {
        Self { steps, verdict, done: None }
    }

    const fn only(verdict: Verdict) -> Self {
        Self::new(Vec::new(), verdict)
    }

    const fn satisfied() -> Self {
        Self::only(Verdict::Satisfied(None))
    }
}

impl From<Hold> for Verdict {
    fn from(hold: Hold) -> Self {
        match hold {
            Hold::Blocked(by, why) => Self::Blocked { by: Some(by), why },
            Hold::Unknown(error) => Self::Unknown(error),
            Hold::Stuck(error) => Self::Stuck(error),
        }
    }
}

impl From<Hold> for Plan {
    fn from(hold: Hold) -> Self {
        Self::only(hold.into())
    }
}

/// Makes the steps of one object.
struct Drafter {
    key: Key,
}

impl Drafter {
    fn step(
        &self,
        driver: &str,
        (action, op): (Action, Op),
        target: impl Into<String>,
        reason: impl Into<String>,
    ) -> Planned {
        let step = Step {
            object: self.key.clone(),
            action,
            driver: driver.to_owned(),
            target: target.into(),
            reason: reason.into(),
        };
        Planned { step, driver: driver.into(), op, group: Group::Own, needs: &[] }
    }
}

impl Planned {
    const fn in_group(mut self, group: Group, needs: &'static [Group]) -> Self {
        self.group = group;
        self.needs = needs;
        self
    }
}

/// The plan of one object.
pub(crate) fn plan(world: &World<'_>, memory: &Memory, object: &Wanted) -> Plan {
    if object.deleting {
        return delete::plan(world, memory, object);
    }
    match &object.spec {
        WantedSpec::Image(spec) => image::plan(world, object, spec),
        WantedSpec::Volume(spec) => volume::plan(world, object, spec),
        WantedSpec::Network(spec) => network::plan(world, object, spec),
        WantedSpec::Instance(spec) => instance::plan(world, memory, object, spec),
    }
}

/// An object of that identity that another node's agent made.
fn of_another_node(object: &Key, mark: drivers_api::Mark) -> Hold {
    let reason = format!("it was made by the agent of host {}", mark.node);
    let error = Error::new(ErrorKind::Conflict, "adopt", object, reason)
        .with_remedy("remove it on that host, or give this agent the host's old identity");
    Hold::Stuck(Arc::new(error))
}
