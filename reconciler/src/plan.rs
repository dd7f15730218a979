//! The pure part: from what is wanted and what is there to the steps that close the difference.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::wanted::Key;

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
