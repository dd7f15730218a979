//! The benches of the reference drivers: the kit checked on drivers that keep the contract.

use std::{net::IpAddr, sync::Arc};

use async_trait::async_trait;
use drivers_api::{
    ArtifactKind, Backing, BootFiles, BootKind, BootSpec, CpuCount, DiskFormat, DiskSpec, HostId,
    Hypervisor, Image, ImageRef, IpCidr, MacAddr, MemoryMib, Network, NetworkId, NetworkSpec,
    NetworkType, NicHandle, PortId, PortSpec, Result, SizeGib, Uuid, VmId, VmSpec, Volume,
    VolumeId, VolumeSource, VolumeSpec,
};

use super::Host;
use crate::{Census, HypervisorBench, ImageBench, NetworkBench, Plant, VolumeBench};

/// The bench of all four reference drivers.
#[derive(Clone, Debug)]
pub struct ReferenceBench {
    host: Host,
    has_whole_spec: bool,
    network_type: NetworkType,
}

impl ReferenceBench {
    /// A bench over a host; the registry of the host gets the images that the kit pulls.
    #[must_use]
    pub fn new(host: Host) -> Self {
        for n in 0..1000 {
            let content = format!("content {n}");
            if n % 10 < 4 {
                host.publish_content(&image_ref("image", n), ArtifactKind::Disk, &content);
                host.publish_content(&image_ref("alias", n), ArtifactKind::Disk, &content);
            }
        }
        Self { host, has_whole_spec: true, network_type: NetworkType::Nat }
    }

    /// The same without [`drivers_api::WholeSpec`].
    #[must_use]
    pub const fn without_whole_spec(mut self) -> Self {
        self.has_whole_spec = false;
        self
    }

    /// The same with networks that are meshes.
    #[must_use]
    pub const fn with_meshes(mut self) -> Self {
        self.network_type = NetworkType::Mesh;
        self
    }

    /// The host.
    #[must_use]
    pub const fn host(&self) -> &Host {
        &self.host
    }

    /// What the kit leaves on purpose is none of its census: downloads and images are, the registry is not.
    fn count(&self) -> Census {
        self.host.census()
    }
}

/// A UUID of its own for each kind and number.
#[expect(clippy::expect_used, reason = "the kind's letter makes it other than nil")]
fn uuid(kind: u8, n: u32) -> Uuid {
    let [a, b, c, d] = n.to_be_bytes();
    let bytes = [kind, 0xee, 0, 0, 0, 0, 0x40, 0, 0x80, 0, 0, 0, a, b, c, d];
    Uuid::from_bytes(bytes).expect("it is not nil")
}

/// A value of a type of the contract from a text of this file.
#[expect(clippy::expect_used, reason = "the texts are this file's own")]
fn parsed<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> T {
    text.parse().expect("a text of this file")
}

fn image_ref(name: &str, n: u32) -> ImageRef {
    parsed(&format!("registry.test:5000/{name}/n{n}:1"))
}

#[async_trait]
impl HypervisorBench for ReferenceBench {
    fn node(&self) -> HostId {
        self.host.node()
    }

    async fn open(&self) -> Result<Arc<dyn Hypervisor>> {
        let driver = self.host.hypervisor();
        Ok(if self.has_whole_spec { driver } else { driver.without_whole_spec() })
    }

    #[expect(clippy::expect_used, reason = "constants within the bounds")]
    async fn vm(&self, n: u32) -> VmSpec {
        let kernel = BootFiles::Kernel { kernel: parsed("/boot/kernel"), initrd: None };
        let boot = BootSpec::new(BootKind::DirectLinux, "/boot/kernel".to_owned(), Some(kernel));
        let cpus = CpuCount::new(1).expect("one CPU");
        let memory = MemoryMib::new(64).expect("64 MiB");
        VmSpec::new(VmId::new(uuid(b'v', n)), parsed(&format!("vm {n}")), cpus, memory, boot)
    }

    async fn disk(&self, n: u32) -> Option<DiskSpec> {
        let path = parsed(&format!("/bench/disk-{n}"));
        let backing = Backing::File { path, format: DiskFormat::Raw };
        let volume = VolumeId::new(uuid(b'd', n));
        Some(DiskSpec::new(parsed(&format!("disk-{n}")), volume, backing))
    }

    async fn nic(&self, n: u32) -> Option<NicHandle> {
        let port = PortId::new(uuid(b'n', n));
        let (name, device) = (parsed(&format!("nic-{n}")), parsed(&format!("bench{n}")));
        Some(NicHandle::new(name, port, device, MacAddr::derived(port)))
    }

    async fn plant_foreign(&self, vm: &VmSpec) -> Plant {
        self.host.plant_foreign_vm(vm.uuid);
        Plant::Done
    }

    async fn fingerprint_foreign(&self, vm: &VmSpec) -> String {
        self.host.foreign_vm(vm.uuid).unwrap_or_default()
    }

    async fn remove_foreign(&self, vm: &VmSpec) {
        self.host.remove_foreign_vm(vm.uuid);
    }

    fn half_made(&self) -> Vec<&'static str> {
        vec!["empty-directory"]
    }

    async fn plant_half_made(&self, vm: &VmSpec, _state: &str) -> Plant {
        self.host.plant_half_made_vm(vm.uuid);
        Plant::Done
    }

    async fn silence_vmm(&self, vm: VmId) -> Plant {
        if self.host.freeze_vmm(vm, true) { Plant::Done } else { Plant::not_tried("no VMM") }
    }

    async fn wake_vmm(&self, vm: VmId) {
        self.host.freeze_vmm(vm, false);
    }

    async fn kill_vmm(&self, vm: VmId) -> Plant {
        if self.host.kill_vm(vm) { Plant::Done } else { Plant::not_tried("the VM does not run") }
    }

    async fn break_backend(&self) -> Plant {
        self.host.set_down(true);
        Plant::Done
    }

    async fn mend(&self) {
        self.host.set_down(false);
    }

    async fn census(&self) -> Census {
        self.count()
    }
}

#[async_trait]
impl NetworkBench for ReferenceBench {
    fn node(&self) -> HostId {
        self.host.node()
    }

    async fn open(&self) -> Result<Arc<dyn Network>> {
        Ok(self.host.network())
    }

    async fn network(&self, n: u32) -> NetworkSpec {
        let (high, low) = (n / 256, n % 256);
        let id = NetworkId::new(uuid(b'w', n));
        let mut spec = NetworkSpec::new(id, parsed(&format!("net {n}")), self.network_type);
        spec.cidr = Some(parsed(&format!("10.{}.{low}.0/24", 100 + high)));
        spec.gateway = Some(parsed(&format!("10.{}.{low}.1", 100 + high)));
        spec
    }

    async fn port(&self, network: &NetworkSpec, n: u32) -> PortSpec {
        let id = PortId::new(uuid(b'p', n));
        let (vm, mac) = (VmId::new(uuid(b'v', n)), MacAddr::derived(id));
        let mut spec = PortSpec::new(id, vm, network.uuid, parsed("eth0"), mac);
        let address: Option<IpAddr> =
            network.cidr.as_ref().and_then(|range: &IpCidr| range.nth(u128::from(n % 200) + 10));
        spec.addresses.extend(address);
        spec
    }

    async fn plant_foreign_network(&self, network: &NetworkSpec) -> Plant {
        match self.host.network_device(network.uuid) {
            Some(name) => self.host.plant_foreign_device(name),
            None => return Plant::not_tried("the network has no device name"),
        }
        Plant::Done
    }

    async fn plant_foreign_port(&self, port: &PortSpec) -> Plant {
        match self.host.port_device(port.uuid) {
            Some(name) => self.host.plant_foreign_device(name),
            None => return Plant::not_tried("the port has no device name"),
        }
        Plant::Done
    }

    async fn fingerprint_foreign(&self) -> String {
        format!("{:?}", self.host.foreign_devices())
    }

    async fn remove_foreign(&self) {
        for (name, _) in self.host.foreign_devices() {
            self.host.remove_foreign_device(&name);
        }
    }

    fn network_parts(&self) -> Vec<&'static str> {
        super::links::NETWORK_PARTS.to_vec()
    }

    async fn remove_network_part(&self, network: &NetworkSpec, part: &str) -> Plant {
        if self.host.remove_network_part(network.uuid, part) {
            Plant::Done
        } else {
            Plant::not_tried("the part is not there")
        }
    }

    fn port_parts(&self) -> Vec<&'static str> {
        super::links::PORT_PARTS.to_vec()
    }

    async fn remove_port_part(&self, port: &PortSpec, part: &str) -> Plant {
        if self.host.remove_port_part(port.uuid, part) {
            Plant::Done
        } else {
            Plant::not_tried("the part is not there")
        }
    }

    async fn break_backend(&self) -> Plant {
        self.host.set_down(true);
        Plant::Done
    }

    async fn mend(&self) {
        self.host.set_down(false);
    }

    async fn census(&self) -> Census {
        self.count()
    }
}

#[async_trait]
impl VolumeBench for ReferenceBench {
    fn node(&self) -> HostId {
        self.host.node()
    }

    async fn open(&self) -> Result<Arc<dyn Volume>> {
        Ok(self.host.volume())
    }

    #[expect(clippy::expect_used, reason = "a constant within the bounds")]
    async fn volume(&self, n: u32) -> VolumeSpec {
        let size = SizeGib::new(1).expect("1 GiB");
        let id = VolumeId::new(uuid(b'd', n));
        VolumeSpec::new(id, parsed(&format!("volume {n}")), size, DiskFormat::Qcow2)
    }

    async fn source(&self) -> Option<VolumeSource> {
        let reference = image_ref("image", 0);
        let images = self.host.image();
        let pulled = images.pull(&drivers_api::Context::new(), &reference).await.ok()?;
        let path = pulled.value.files.main_path().clone();
        Some(VolumeSource::new(reference, Some(path), DiskFormat::Qcow2))
    }

    async fn plant_foreign(&self, volume: &VolumeSpec) -> Plant {
        self.host.plant_foreign_volume(volume.uuid);
        Plant::Done
    }

    async fn fingerprint_foreign(&self, volume: &VolumeSpec) -> String {
        self.host.foreign_volume(volume.uuid).unwrap_or_default()
    }

    async fn remove_foreign(&self, volume: &VolumeSpec) {
        self.host.remove_foreign_volume(volume.uuid);
    }

    fn half_made(&self) -> Vec<&'static str> {
        vec!["empty-file"]
    }

    async fn plant_half_made(&self, volume: &VolumeSpec, _state: &str) -> Plant {
        self.host.plant_half_made_volume(volume.uuid);
        Plant::Done
    }

    async fn fill_backend(&self) -> Plant {
        self.host.set_volume_capacity(Some(1 << 30));
        Plant::Done
    }

    async fn break_backend(&self) -> Plant {
        self.host.set_down(true);
        Plant::Done
    }

    async fn mend(&self) {
        self.host.set_down(false);
        self.host.set_volume_capacity(None);
    }

    async fn census(&self) -> Census {
        self.count()
    }
}

#[async_trait]
impl ImageBench for ReferenceBench {
    async fn open(&self) -> Result<Arc<dyn Image>> {
        Ok(self.host.image())
    }

    async fn image(&self, n: u32) -> ImageRef {
        image_ref("image", n)
    }

    async fn alias(&self, n: u32) -> Option<ImageRef> {
        Some(image_ref("alias", n))
    }

    async fn absent(&self) -> ImageRef {
        image_ref("absent", 0)
    }

    async fn downloads(&self, n: u32) -> Option<u64> {
        Some(self.host.downloads(&image_ref("image", n)))
    }

    fn half_made(&self) -> Vec<&'static str> {
        vec!["partial-download"]
    }

    async fn plant_half_made(&self, reference: &ImageRef, _state: &str) -> Plant {
        self.host.plant_half_made_image(reference);
        Plant::Done
    }

    async fn break_source(&self) -> Plant {
        self.host.set_registry_down(true);
        Plant::Done
    }

    async fn break_backend(&self) -> Plant {
        self.host.set_down(true);
        Plant::Done
    }

    async fn mend(&self) {
        self.host.set_registry_down(false);
        self.host.set_down(false);
    }

    async fn census(&self) -> Census {
        self.count()
    }
}
