//! What a driver tells without being asked.

use crate::{BoxFuture, NetworkId, PortId, VmId, VolumeId};

/// Which object an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", tag = "kind", content = "id"))]
#[non_exhaustive]
pub enum ObjectRef {
    /// A virtual machine.
    Vm(VmId),
    /// A network.
    Network(NetworkId),
    /// A port.
    Port(PortId),
    /// A volume.
    Volume(VolumeId),
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum EventKind {
    /// The object, or a part of it, came to be.
    Appeared,
    /// The object's state changed; ask for it.
    Changed,
    /// The object, or a part of it, is gone.
    Gone,
    /// Events may have been lost: list everything again. `HostEvent::object` is `None`.
    Resync,
}

/// One event. A hint to look, never a state: who gets it asks the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct HostEvent {
    /// What it is about; `None` concerns everything of the driver.
    pub object: Option<ObjectRef>,
    /// What happened.
    pub kind: EventKind,
    /// What a person reads: `"qemu exited with signal 9"`.
    pub message: String,
}

impl HostEvent {
    /// An event about an object.
    pub fn new(object: ObjectRef, kind: EventKind, message: impl Into<String>) -> Self {
        Self { object: Some(object), kind, message: message.into() }
    }

    /// Events may have been lost.
    pub fn resync(message: impl Into<String>) -> Self {
        Self { object: None, kind: EventKind::Resync, message: message.into() }
    }
}

/// A subscription to a driver's events.
pub trait HostEvents: Send {
    /// The next event, or `None` when the driver is gone for good. Cancel-safe: a dropped future loses no event.
    ///
    /// A subscriber that falls behind gets one [`EventKind::Resync`] in place of what it missed; the driver never blocks
    /// on it.
    fn next(&mut self) -> BoxFuture<'_, Option<HostEvent>>;
}

/// A subscription, boxed.
pub type EventStream = Box<dyn HostEvents>;
