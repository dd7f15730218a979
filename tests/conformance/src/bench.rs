//! What a driver's author gives the kit: how to open the driver, and what to try on it.
//!
//! The numbers `n` that the kit passes are below 1,000. The same number gets the same answer during a run, and different
//! numbers get objects that can be side by side.

use std::sync::Arc;

use async_trait::async_trait;
use drivers_api::{
    DiskSpec, HostId, Hypervisor, Image, ImageRef, Network, NetworkSpec, NicHandle, PortSpec,
    Result, VmId, VmSpec, Volume, VolumeSource, VolumeSpec,
};

use crate::Census;

/// Whether the bench did what the kit asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plant {
    /// It is done.
    Done,
    /// It cannot be done on this back-end; the case is reported as not tried, with this reason.
    NotTried(String),
}

impl Plant {
    /// It cannot be done, for this reason.
    pub fn not_tried(reason: impl Into<String>) -> Self {
        Self::NotTried(reason.into())
    }

    pub(crate) fn not_offered(what: &str) -> Self {
        Self::NotTried(format!("the bench does not offer {what}"))
    }
}

/// A hypervisor driver on its back-end.
#[async_trait]
pub trait HypervisorBench: Send + Sync {
    /// The node whose mark the driver sets.
    fn node(&self) -> HostId;

    /// A new instance of the driver with an empty memory, over the back-end that all instances of this bench share: what
    /// a restart of the agent makes.
    async fn open(&self) -> Result<Arc<dyn Hypervisor>>;

    /// The `n`th VM: one that the driver can create, and start with [`HypervisorBench::boot_disk`] attached. Small, quick
    /// to boot, and deaf or obedient to a shutdown request as the bench likes.
    async fn vm(&self, n: u32) -> VmSpec;

    /// The disk from which the `n`th VM boots; `None` when it boots without one.
    async fn boot_disk(&self, _n: u32) -> Option<DiskSpec> {
        None
    }

    /// A disk to attach and detach, its backing made by the bench, its name and volume of its own; `None` when the driver
    /// takes none.
    async fn disk(&self, n: u32) -> Option<DiskSpec>;

    /// A NIC to attach and detach, its host device made by the bench; `None` when the driver takes none.
    async fn nic(&self, n: u32) -> Option<NicHandle>;

    /// Whether the guest lets go of a device that is removed while it runs. If not, the kit detaches from stopped VMs
    /// only.
    fn guest_lets_go(&self) -> bool {
        true
    }

    /// Puts an object of this identity on the back-end that does not carry the driver's mark.
    async fn plant_foreign(&self, _vm: &VmSpec) -> Plant {
        Plant::not_offered("a foreign VM")
    }

    /// All of the planted object that the driver could have touched, as text: the kit compares it before and after.
    async fn fingerprint_foreign(&self, _vm: &VmSpec) -> String {
        String::new()
    }

    /// Takes the planted object away.
    async fn remove_foreign(&self, _vm: &VmSpec) {}

    /// The half-made states that [`HypervisorBench::plant_half_made`] can make, by name: `spec-only`, `empty-directory`.
    fn half_made(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Puts the VM on the back-end as a create that was killed would leave it.
    async fn plant_half_made(&self, _vm: &VmSpec, _state: &str) -> Plant {
        Plant::not_offered("a half-made VM")
    }

    /// Kills the VMM of a running VM from outside.
    async fn kill_vmm(&self, _vm: VmId) -> Plant {
        Plant::not_offered("the kill of a VMM")
    }

    /// Has the VMM of a running VM stop answering, without an end: SIGSTOP. Undone by [`HypervisorBench::wake_vmm`].
    async fn silence_vmm(&self, _vm: VmId) -> Plant {
        Plant::not_offered("a VMM that does not answer")
    }

    /// Undoes [`HypervisorBench::silence_vmm`], where the VMM is still there.
    async fn wake_vmm(&self, _vm: VmId) {}

    /// Makes the host unreachable for the driver: no daemon, no run directory. Undone by [`HypervisorBench::mend`].
    async fn break_backend(&self) -> Plant {
        Plant::not_offered("a broken back-end")
    }

    /// Undoes [`HypervisorBench::break_backend`].
    async fn mend(&self) {}

    /// What is on the back-end: processes, files, sockets. The disks and NICs that the bench itself made are left out, or
    /// are made before the first census.
    async fn census(&self) -> Census;
}

/// A network driver on its back-end.
#[async_trait]
pub trait NetworkBench: Send + Sync {
    /// The node whose mark the driver sets.
    fn node(&self) -> HostId;

    /// As [`HypervisorBench::open`].
    async fn open(&self) -> Result<Arc<dyn Network>>;

    /// The `n`th network. Ranges of different numbers are disjoint.
    async fn network(&self, n: u32) -> NetworkSpec;

    /// The `n`th port on a network: its own identity, VM, MAC and address. Ports of different numbers on one network can
    /// be side by side.
    async fn port(&self, network: &NetworkSpec, n: u32) -> PortSpec;

    /// Puts something without the driver's mark where the network's device would be.
    async fn plant_foreign_network(&self, _network: &NetworkSpec) -> Plant {
        Plant::not_offered("a foreign network")
    }

    /// Puts something without the driver's mark where the port's device would be.
    async fn plant_foreign_port(&self, _port: &PortSpec) -> Plant {
        Plant::not_offered("a foreign port")
    }

    /// All of what was planted that the driver could have touched, as text.
    async fn fingerprint_foreign(&self) -> String {
        String::new()
    }

    /// Takes away what was planted.
    async fn remove_foreign(&self) {}

    /// The parts of a network that a person can remove by hand, by name: `bridge`, `rules`, `dhcp`.
    fn network_parts(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Removes one part of a network behind the driver's back. Half-made networks are made in the same way.
    async fn remove_network_part(&self, _network: &NetworkSpec, _part: &str) -> Plant {
        Plant::not_offered("a network that lost a part")
    }

    /// The parts of a port that a person can remove by hand, by name: `tap`, `rules`.
    fn port_parts(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Removes one part of a port behind the driver's back. Half-made ports are made in the same way.
    async fn remove_port_part(&self, _port: &PortSpec, _part: &str) -> Plant {
        Plant::not_offered("a port that lost a part")
    }

    /// Makes the host unreachable for the driver. Undone by [`NetworkBench::mend`].
    async fn break_backend(&self) -> Plant {
        Plant::not_offered("a broken back-end")
    }

    /// Undoes [`NetworkBench::break_backend`].
    async fn mend(&self) {}

    /// What is on the back-end: links, addresses, routes, rules, processes, files.
    async fn census(&self) -> Census;
}

/// A volume driver on its back-end.
#[async_trait]
pub trait VolumeBench: Send + Sync {
    /// The node whose mark the driver sets, and the host on which volumes are attached.
    fn node(&self) -> HostId;

    /// As [`HypervisorBench::open`].
    async fn open(&self) -> Result<Arc<dyn Volume>>;

    /// The `n`th volume, empty, of the least size that is quick to make.
    async fn volume(&self, n: u32) -> VolumeSpec;

    /// An image of which volumes are made as copies; `None` when the driver makes none.
    async fn source(&self) -> Option<VolumeSource> {
        None
    }

    /// Puts something without the driver's mark where the volume would be.
    async fn plant_foreign(&self, _volume: &VolumeSpec) -> Plant {
        Plant::not_offered("a foreign volume")
    }

    /// All of the planted object that the driver could have touched, as text.
    async fn fingerprint_foreign(&self, _volume: &VolumeSpec) -> String {
        String::new()
    }

    /// Takes the planted object away.
    async fn remove_foreign(&self, _volume: &VolumeSpec) {}

    /// The half-made states that [`VolumeBench::plant_half_made`] can make, by name.
    fn half_made(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Puts the volume on the back-end as a make that was killed would leave it.
    async fn plant_half_made(&self, _volume: &VolumeSpec, _state: &str) -> Plant {
        Plant::not_offered("a half-made volume")
    }

    /// Leaves the back-end no room for volumes larger than those that are there. Undone by [`VolumeBench::mend`].
    async fn fill_backend(&self) -> Plant {
        Plant::not_offered("a full back-end")
    }

    /// Makes the back-end unreachable for the driver. Undone by [`VolumeBench::mend`].
    async fn break_backend(&self) -> Plant {
        Plant::not_offered("a broken back-end")
    }

    /// Undoes [`VolumeBench::break_backend`] and [`VolumeBench::fill_backend`].
    async fn mend(&self) {}

    /// What is on the back-end: files, images, locks, maps.
    async fn census(&self) -> Census;
}

/// An image driver on its back-end, with a source of images that the bench runs.
#[async_trait]
pub trait ImageBench: Send + Sync {
    /// As [`HypervisorBench::open`].
    async fn open(&self) -> Result<Arc<dyn Image>>;

    /// The `n`th image: small, with content of its own. The source has it.
    async fn image(&self, n: u32) -> ImageRef;

    /// Another reference to the content of [`ImageBench::image`] of the same number; `None` when there is none.
    async fn alias(&self, _n: u32) -> Option<ImageRef> {
        None
    }

    /// A well-formed reference that the source does not have.
    async fn absent(&self) -> ImageRef;

    /// How many times the source has sent the content of the `n`th image; `None` when nobody counts.
    async fn downloads(&self, _n: u32) -> Option<u64> {
        None
    }

    /// The half-made states that [`ImageBench::plant_half_made`] can make, by name.
    fn half_made(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Puts the image into the cache as a pull that was killed would leave it.
    async fn plant_half_made(&self, _reference: &ImageRef, _state: &str) -> Plant {
        Plant::not_offered("a half-made image")
    }

    /// Takes the source away. Undone by [`ImageBench::mend`].
    async fn break_source(&self) -> Plant {
        Plant::not_offered("a source that is down")
    }

    /// Makes the cache unreadable for the driver. Undone by [`ImageBench::mend`].
    async fn break_backend(&self) -> Plant {
        Plant::not_offered("a broken back-end")
    }

    /// Undoes [`ImageBench::break_source`] and [`ImageBench::break_backend`].
    async fn mend(&self) {}

    /// What is in the cache's directory.
    async fn census(&self) -> Census;
}

/// A bench of any kind, for who picks the driver at run time.
#[expect(missing_debug_implementations, reason = "a bench need not be printable")]
#[non_exhaustive]
pub enum AnyBench {
    /// A hypervisor driver's.
    Hypervisor(Box<dyn HypervisorBench>),
    /// A network driver's.
    Network(Box<dyn NetworkBench>),
    /// A volume driver's.
    Volume(Box<dyn VolumeBench>),
    /// An image driver's.
    Image(Box<dyn ImageBench>),
}
