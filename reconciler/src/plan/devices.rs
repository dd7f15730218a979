//! What disks and NICs of an instance have in common.

use std::sync::Arc;

use drivers_api::{DeviceName, Error, ErrorKind, VmId, VmStatus};

use super::{Drafter, Memory, Planned, World};
use crate::{
    resolve::Hold,
    wanted::{InstanceSpec, Wanted},
};

/// What may be done to the devices of the VM now.
#[derive(Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "four facts that do not depend on each other")]
pub(super) struct Plug {
    /// The VM is there.
    pub(super) exists: bool,
    /// It runs, and goes on running through this plan.
    pub(super) running: bool,
    /// The devices of the kind may come and go while it runs.
    pub(super) hot: bool,
    /// The whole spec is applied when it is started.
    pub(super) whole: bool,
}

impl Plug {
    /// Whether a device can be taken from, or given to, the VM now.
    pub(super) const fn possible(self) -> bool {
        !self.running || self.hot
    }

    /// Whether it is done by a step of its own; else the whole spec does it.
    pub(super) const fn stepwise(self) -> bool {
        self.exists && self.possible() && (self.hot || !self.whole)
    }
}

/// The steps of one kind of device, by when they are due.
pub(super) struct Devices<T> {
    /// Takes away what is not wanted.
    pub(super) remove: Vec<Planned>,
    /// Makes the host's side ready.
    pub(super) wire: Vec<Planned>,
    /// Gives it to the VM.
    pub(super) plug: Vec<Planned>,
    /// What the VM is to have.
    pub(super) all: Vec<T>,
    /// Why some of it cannot be done.
    pub(super) holds: Vec<Hold>,
    /// What only a restart applies.
    pub(super) restart: Vec<String>,
    /// Whether the VM's list differs from what is wanted.
    pub(super) differs: bool,
}

impl<T> Devices<T> {
    pub(super) const fn new() -> Self {
        Self {
            remove: Vec::new(),
            wire: Vec::new(),
            plug: Vec::new(),
            all: Vec::new(),
            holds: Vec::new(),
            restart: Vec::new(),
            differs: false,
        }
    }
}

/// What plans for devices are made from.
#[derive(Clone, Copy)]
pub(super) struct Scene<'a> {
    pub(super) world: &'a World<'a>,
    pub(super) memory: &'a Memory,
    pub(super) object: &'a Wanted,
    pub(super) spec: &'a InstanceSpec,
    pub(super) driver: &'a str,
    pub(super) vm: VmId,
    pub(super) status: Option<&'a VmStatus>,
}

impl Scene<'_> {
    pub(super) fn draft(&self) -> Drafter {
        Drafter { key: self.object.key() }
    }

    pub(super) fn is_detaching(&self, name: &DeviceName) -> bool {
        self.status.is_some_and(|status| status.detaching.contains(name))
    }
}

/// An error of a VM that is there and does not answer.
pub(super) fn silent(status: &VmStatus) -> Arc<Error> {
    let reason = status.message.as_deref().unwrap_or("its VMM does not answer");
    let object = format!("vm {}", status.uuid);
    let error = Error::new(ErrorKind::Unavailable, "look at", object, reason)
        .with_remedy("nothing is started or stopped beside it; delete the instance to end it");
    Arc::new(error)
}
