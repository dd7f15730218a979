//! The contract between bcd-node and the drivers that touch a host.
//!
//! Four traits: [`Hypervisor`] runs virtual machines, [`Network`] makes networks and ports, [`Volume`] makes and attaches
//! disks, [`Image`] keeps a cache of artifacts. A driver implements one of them; the reconciler calls it whenever what
//! is wanted and what is there may differ. This crate depends on the standard library alone, so that its promises can
//! stay the same for years.
//!
//! # What every method promises
//!
//! * **Idempotent.** `create`, `ensure`, `attach`, `start`, `pull` called again with the same spec change nothing and
//!   answer [`Change::Unchanged`] without a write to the host. `stop`, `detach`, `destroy`, `delete` of what is not there
//!   succeed: "already gone" is success, but only when its absence was *seen* — when the host cannot be asked, the answer
//!   is [`ErrorKind::Unavailable`].
//! * **Crash-safe.** The agent may be killed at any instant. A repeat of the call, or the matching delete, finds what was
//!   half made and finishes or clears it.
//! * **Owned.** Everything that a driver makes carries a mark ([`Mark`]) on the host, with the object's UUID, and the spec
//!   as applied where the host can keep it. What is not marked ours is never changed or removed: an object of the same
//!   name with another owner is [`ErrorKind::Conflict`].
//! * **Stateless for the caller.** A driver keeps no wanted state. With an empty memory, `list` finds all that is there.
//! * **Bounded.** A call ends soon after its deadline or cancellation ([`Context`]); it never blocks the executor and
//!   never panics. Every `await` may be the last one: a dropped future leaves the host repeatable.
//! * **Checked first.** A spec that cannot work is refused as [`ErrorKind::InvalidSpec`] with the field's path, before
//!   any effect.
//! * **Concurrent.** Calls for different objects run side by side. Calls for one object are serialised by the caller
//!   where it can, and a driver survives them where it cannot.
//!
//! # Writing a driver
//!
//! Depend on this crate and on `async-trait`, implement one trait, and run the conformance kit over it. The methods are
//! declared in the shape that `#[async_trait]` expands to:
//!
//! ```
//! use async_trait::async_trait;
//! use drivers_api::{Change, Context, HostInfo, Image, ImageRef, ImageStatus, Outcome, Result};
//!
//! struct Nothing(HostInfo);
//!
//! #[async_trait]
//! impl Image for Nothing {
//!     async fn host_info(&self, _cx: &Context) -> Result<HostInfo> {
//!         Ok(self.0.clone())
//!     }
//!     async fn pull(&self, _cx: &Context, reference: &ImageRef) -> Result<Outcome<ImageStatus>> {
//!         Err(drivers_api::Error::unsupported("pull", reference))
//!     }
//!     async fn local_path(&self, _cx: &Context, reference: &ImageRef) -> Result<drivers_api::HostPath> {
//!         Err(drivers_api::Error::not_found("find", reference))
//!     }
//!     async fn delete(&self, _cx: &Context, _reference: &ImageRef) -> Result<Change> {
//!         Ok(Change::Unchanged)
//!     }
//!     async fn in_cache(&self, _cx: &Context, _reference: &ImageRef) -> Result<bool> {
//!         Ok(false)
//!     }
//!     async fn list(&self, _cx: &Context) -> Result<Vec<ImageStatus>> {
//!         Ok(Vec::new())
//!     }
//!     async fn get(&self, _cx: &Context, _reference: &ImageRef) -> Result<Option<ImageStatus>> {
//!         Ok(None)
//!     }
//! }
//! ```
//!
//! # Compatibility
//!
//! Within a major version methods with defaults, fields and kinds may be added; specs are `#[non_exhaustive]` and made
//! with `new` of what is required. A breaking change is a new major version, and a registry can hold drivers of several.

#[macro_use]
mod macros;

mod abilities;
mod change;
mod context;
mod error;
mod events;
mod host;
mod image;
mod names;
mod net;
mod network;
mod quantity;
mod uuid;
mod vm;
mod volume;

pub use abilities::{
    CollectReport, Console, ConsoleStream, GuestAgent, GuestInfo, ImageCollect, Migrate, Resize,
    SnapshotInfo, Snapshots, WholeSpec,
};
pub use change::{Change, Outcome};
pub use context::{
    CancelFlag, Cancelled, Context, Progress, ProgressSink, SecretResolver, SecretValue,
};
pub use error::{Error, ErrorKind, NextStep, Result};
pub use events::{EventKind, EventStream, HostEvent, HostEvents, ObjectRef};
pub use host::{Architecture, HostInfo, Mark};
pub use image::{ArtifactKind, Image, ImageFiles, ImageStatus};
pub use names::{DeviceName, Digest, DisplayName, HostPath, ImageRef, ImageSource, SecretRef};
pub use net::{Endpoint, IfName, IpCidr, MacAddr, WireguardPublicKey};
pub use network::{
    Direction, MeshPeer, Network, NetworkSpec, NetworkStatus, NetworkType, NicHandle, PortSpec,
    PortStatus, Protocol, RulePeer, SecurityGroupSpec, SecurityRule,
};
pub use quantity::{CpuCount, MemoryMib, MtuBytes, PortNumber, SizeGib, VlanId};
pub use uuid::{
    HostId, NetworkId, ParseError, PortId, ProjectId, SecurityGroupId, Uuid, VmId, VolumeId,
};
pub use vm::{
    BootFiles, BootKind, BootSpec, CloudInit, DiskBus, DiskSpec, Exit, Hypervisor,
    HypervisorAbilities, InstanceSpec, VmPower, VmSpec, VmState, VmStatus,
};
pub use volume::{
    AttachRequest, AttachedVolume, Attachment, Backing, BackingKind, DetachRequest, DiskFormat,
    Volume, VolumeSource, VolumeSpec, VolumeStatus,
};

/// A boxed future, as `async-trait` makes it.
pub type BoxFuture<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + Send + 'a>>;

#[cfg(test)]
mod tests;
