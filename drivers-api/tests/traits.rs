//! Every trait of the contract can be written as `#[async_trait] impl`, with and without its defaults, and used as `dyn`.

#![expect(clippy::unwrap_used, reason = "the helpers of a test")]

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use drivers_api::{
    AttachRequest, AttachedVolume, BackingKind, BoxFuture, Change, CollectReport, Console,
    ConsoleStream, Context, CpuCount, DetachRequest, DiskSpec, Error, ErrorKind, EventKind,
    EventStream, GuestAgent, GuestInfo, HostEvent, HostEvents, HostInfo, HostPath, Hypervisor,
    HypervisorAbilities, IfName, Image, ImageCollect, ImageRef, ImageStatus, InstanceSpec, MacAddr,
    MemoryMib, Migrate, Network, NetworkId, NetworkSpec, NetworkStatus, NetworkType, NicHandle,
    Outcome, PortId, PortSpec, PortStatus, Resize, Result, SecretRef, SecretResolver, SecretValue,
    SecurityGroupId, SecurityGroupSpec, SnapshotInfo, Snapshots, VmId, VmSpec, VmStatus, Volume,
    VolumeId, VolumeSpec, VolumeStatus, WholeSpec,
};

/// Answers every call with the call's name, so that a method wired to another one is seen.
struct Echo;

fn echo<T>(call: &'static str, object: impl std::fmt::Display) -> Result<T> {
    Err(Error::new(ErrorKind::Internal, call, object, "echo"))
}

#[async_trait]
impl Hypervisor for Echo {
    fn abilities(&self) -> HypervisorAbilities {
        HypervisorAbilities::new(Vec::new(), Vec::new(), Vec::new())
    }
    fn whole_spec(&self) -> Option<&dyn WholeSpec> {
        Some(self)
    }
    fn console(&self) -> Option<&dyn Console> {
        Some(self)
    }
    fn resize(&self) -> Option<&dyn Resize> {
        Some(self)
    }
    fn snapshots(&self) -> Option<&dyn Snapshots> {
        Some(self)
    }
    fn migrate(&self) -> Option<&dyn Migrate> {
        Some(self)
    }
    fn guest_agent(&self) -> Option<&dyn GuestAgent> {
        Some(self)
    }
    async fn host_info(&self, _cx: &Context) -> Result<HostInfo> {
        Ok(HostInfo::new(None, "host", "echo"))
    }
    async fn create_vm(&self, _cx: &Context, spec: &VmSpec) -> Result<Change> {
        echo("create_vm", spec.uuid)
    }
    async fn start_vm(&self, _cx: &Context, vm: VmId) -> Result<Change> {
        echo("start_vm", vm)
    }
    async fn stop_vm(&self, _cx: &Context, vm: VmId, grace: Duration) -> Result<Change> {
        echo("stop_vm", format_args!("{vm} {grace:?}"))
    }
    async fn reboot_vm(&self, _cx: &Context, vm: VmId, _grace: Duration) -> Result<Change> {
        echo("reboot_vm", vm)
    }
    async fn delete_vm(&self, _cx: &Context, vm: VmId) -> Result<Change> {
        echo("delete_vm", vm)
    }
    async fn attach_disk(&self, _cx: &Context, vm: VmId, disk: &DiskSpec) -> Result<Change> {
        echo("attach_disk", format_args!("{vm} {}", disk.volume_uuid))
    }
    async fn detach_disk(&self, _cx: &Context, vm: VmId, volume: VolumeId) -> Result<Change> {
        echo("detach_disk", format_args!("{vm} {volume}"))
    }
    async fn attach_nic(&self, _cx: &Context, vm: VmId, nic: &NicHandle) -> Result<Change> {
        echo("attach_nic", format_args!("{vm} {}", nic.device))
    }
    async fn detach_nic(&self, _cx: &Context, vm: VmId, device: &IfName) -> Result<Change> {
        echo("detach_nic", format_args!("{vm} {device}"))
    }
    async fn list(&self, _cx: &Context) -> Result<Vec<VmStatus>> {
        echo("list", "vms")
    }
    async fn get(&self, _cx: &Context, vm: VmId) -> Result<Option<VmStatus>> {
        echo("get", vm)
    }
}

#[async_trait]
impl WholeSpec for Echo {
    async fn ensure_vm(&self, _cx: &Context, spec: &InstanceSpec) -> Result<Change> {
        echo("ensure_vm", spec.vm.uuid)
    }
}

#[async_trait]
impl Console for Echo {
    async fn open_console(
        &self,
        _cx: &Context,
        vm: VmId,
        _history: usize,
    ) -> Result<Box<dyn ConsoleStream>> {
        echo("open_console", vm)
    }
    async fn console_log(&self, _cx: &Context, vm: VmId, bytes: usize) -> Result<Vec<u8>> {
        echo("console_log", format_args!("{vm} {bytes}"))
    }
}

#[async_trait]
impl Resize for Echo {
    async fn resize_disk(
        &self,
        _cx: &Context,
        vm: VmId,
        volume: VolumeId,
        bytes: u64,
    ) -> Result<Change> {
        echo("resize_disk", format_args!("{vm} {volume} {bytes}"))
    }
    async fn resize_cpus(&self, _cx: &Context, _vm: VmId, cpus: CpuCount) -> Result<Change> {
        echo("resize_cpus", cpus)
    }
    async fn resize_memory(&self, _cx: &Context, _vm: VmId, memory: MemoryMib) -> Result<Change> {
        echo("resize_memory", memory)
    }
}

#[async_trait]
impl Snapshots for Echo {
    async fn take_snapshot(&self, _cx: &Context, _vm: VmId, name: &str) -> Result<Change> {
        echo("take_snapshot", name)
    }
    async fn revert_snapshot(&self, _cx: &Context, _vm: VmId, name: &str) -> Result<Change> {
        echo("revert_snapshot", name)
    }
    async fn delete_snapshot(&self, _cx: &Context, _vm: VmId, name: &str) -> Result<Change> {
        echo("delete_snapshot", name)
    }
    async fn list_snapshots(&self, _cx: &Context, vm: VmId) -> Result<Vec<SnapshotInfo>> {
        echo("list_snapshots", vm)
    }
}

#[async_trait]
impl Migrate for Echo {
    async fn receive_vm(&self, _cx: &Context, spec: &InstanceSpec) -> Result<String> {
        echo("receive_vm", spec.vm.uuid)
    }
    async fn send_vm(&self, _cx: &Context, _vm: VmId, destination: &str) -> Result<Change> {
        echo("send_vm", destination)
    }
}

#[async_trait]
impl GuestAgent for Echo {
    async fn guest_info(&self, _cx: &Context, vm: VmId) -> Result<GuestInfo> {
        echo("guest_info", vm)
    }
    async fn freeze(&self, _cx: &Context, _vm: VmId, limit: Duration) -> Result<Change> {
        echo("freeze", format_args!("{limit:?}"))
    }
    async fn thaw(&self, _cx: &Context, vm: VmId) -> Result<Change> {
        echo("thaw", vm)
    }
}

/// A network driver that leaves every default as it is.
struct Least;

#[async_trait]
impl Network for Least {
    fn types(&self) -> &[NetworkType] {
        &[NetworkType::Isolated]
    }
    async fn host_info(&self, _cx: &Context) -> Result<HostInfo> {
        Ok(HostInfo::new(None, "host", "least"))
    }
    async fn ensure_network(&self, _cx: &Context, spec: &NetworkSpec) -> Result<Change> {
        echo("ensure_network", spec.uuid)
    }
    async fn destroy_network(&self, _cx: &Context, network: NetworkId) -> Result<Change> {
        echo("destroy_network", network)
    }
    async fn attach_port(&self, _cx: &Context, spec: &PortSpec) -> Result<Outcome<NicHandle>> {
        echo("attach_port", spec.uuid)
    }
    async fn detach_port(&self, _cx: &Context, port: PortId) -> Result<Change> {
        echo("detach_port", port)
    }
    async fn list(&self, _cx: &Context) -> Result<Vec<NetworkStatus>> {
        Ok(Vec::new())
    }
    async fn get(&self, _cx: &Context, _network: NetworkId) -> Result<Option<NetworkStatus>> {
        Ok(None)
    }
    async fn list_ports(&self, _cx: &Context) -> Result<Vec<PortStatus>> {
        Ok(Vec::new())
    }
    async fn get_port(&self, _cx: &Context, _port: PortId) -> Result<Option<PortStatus>> {
        Ok(None)
    }
}

#[async_trait]
impl Volume for Echo {
    fn name(&self) -> &str {
        "echo"
    }
    fn local(&self) -> bool {
        true
    }
    fn backings(&self) -> &[BackingKind] {
        &[BackingKind::File]
    }
    async fn host_info(&self, _cx: &Context) -> Result<HostInfo> {
        Ok(HostInfo::new(None, "host", "echo"))
    }
    async fn ensure_volume(&self, _cx: &Context, spec: &VolumeSpec) -> Result<Change> {
        echo("ensure_volume", spec.uuid)
    }
    async fn destroy_volume(&self, _cx: &Context, volume: VolumeId) -> Result<Change> {
        echo("destroy_volume", volume)
    }
    async fn attach_volume(
        &self,
        _cx: &Context,
        request: &AttachRequest,
    ) -> Result<Outcome<AttachedVolume>> {
        echo("attach_volume", request.volume_uuid)
    }
    async fn detach_volume(&self, _cx: &Context, request: &DetachRequest) -> Result<Change> {
        echo("detach_volume", request.volume_uuid)
    }
    async fn list(&self, _cx: &Context) -> Result<Vec<VolumeStatus>> {
        Ok(Vec::new())
    }
    async fn get(&self, _cx: &Context, _volume: VolumeId) -> Result<Option<VolumeStatus>> {
        Ok(None)
    }
}

#[async_trait]
impl Image for Echo {
    fn collect(&self) -> Option<&dyn ImageCollect> {
        Some(self)
    }
    async fn host_info(&self, _cx: &Context) -> Result<HostInfo> {
        Ok(HostInfo::new(None, "host", "echo"))
    }
    async fn pull(&self, _cx: &Context, reference: &ImageRef) -> Result<Outcome<ImageStatus>> {
        echo("pull", reference)
    }
    async fn local_path(&self, _cx: &Context, reference: &ImageRef) -> Result<HostPath> {
        echo("local_path", reference)
    }
    async fn delete(&self, _cx: &Context, reference: &ImageRef) -> Result<Change> {
        echo("delete", reference)
    }
    async fn in_cache(&self, _cx: &Context, _reference: &ImageRef) -> Result<bool> {
        Ok(false)
    }
    async fn list(&self, _cx: &Context) -> Result<Vec<ImageStatus>> {
        Ok(Vec::new())
    }
    async fn get(&self, _cx: &Context, _reference: &ImageRef) -> Result<Option<ImageStatus>> {
        Ok(None)
    }
}

#[async_trait]
impl ImageCollect for Echo {
    async fn collect(
        &self,
        _cx: &Context,
        limit_bytes: u64,
        keep: &[ImageRef],
    ) -> Result<CollectReport> {
        echo("collect", format_args!("{limit_bytes} {}", keep.len()))
    }
}

// The three traits of small helpers borrow for one lifetime: they are written with `Box::pin`, without the attribute.
impl SecretResolver for Echo {
    fn resolve<'a>(&'a self, reference: &'a SecretRef) -> BoxFuture<'a, Result<SecretValue>> {
        Box::pin(async move { Ok(SecretValue::new(reference.as_str().as_bytes().to_vec())) })
    }
}

impl HostEvents for Echo {
    fn next(&mut self) -> BoxFuture<'_, Option<HostEvent>> {
        Box::pin(async { Some(HostEvent::resync("echo")) })
    }
}

impl ConsoleStream for Echo {
    fn read(&mut self) -> BoxFuture<'_, Result<Vec<u8>>> {
        Box::pin(async { Ok(b"echo".to_vec()) })
    }
    fn write<'a>(&'a mut self, bytes: &'a [u8]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move { echo("write", bytes.len()) })
    }
}

const ID: &str = "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b";

fn named<T: std::fmt::Debug>(answer: Result<T>) -> String {
    let error = answer.unwrap_err();
    format!("{} {}", error.operation(), error.object())
}

#[tokio::test]
async fn a_hypervisor_works_as_a_trait_object_on_another_thread() {
    let driver: Arc<dyn Hypervisor> = Arc::new(Echo);
    let vm: VmId = ID.parse().unwrap();
    let volume: VolumeId = ID.parse().unwrap();
    let calls = tokio::spawn(async move {
        let cx = Context::new();
        assert_eq!(driver.host_info(&cx).await.unwrap().driver, "echo");
        assert_eq!(named(driver.start_vm(&cx, vm).await), format!("start_vm {ID}"));
        let stopped = driver.stop_vm(&cx, vm, Duration::from_secs(3)).await;
        assert_eq!(named(stopped), format!("stop_vm {ID} 3s"));
        let detached = driver.detach_disk(&cx, vm, volume).await;
        assert_eq!(named(detached), format!("detach_disk {ID} {ID}"));
        let device: IfName = "tap0".parse().unwrap();
        assert_eq!(
            named(driver.detach_nic(&cx, vm, &device).await),
            format!("detach_nic {ID} tap0")
        );
        assert!(driver.vmm_uid(vm).is_none() && driver.events().is_none());
        driver
    });
    let driver = calls.await.unwrap();
    let cx = Context::new();
    let resize = driver.resize().unwrap();
    let resized = resize.resize_disk(&cx, vm, volume, 7).await;
    assert_eq!(named(resized), format!("resize_disk {ID} {ID} 7"));
    let snapshots = driver.snapshots().unwrap();
    assert_eq!(named(snapshots.take_snapshot(&cx, vm, "s1").await), "take_snapshot s1");
    let sent = driver.migrate().unwrap().send_vm(&cx, vm, "host-b").await;
    assert_eq!(named(sent), "send_vm host-b");
    let console = driver.console().unwrap();
    assert_eq!(named(console.console_log(&cx, vm, 9).await), format!("console_log {ID} 9"));
    let guest = driver.guest_agent().unwrap();
    assert_eq!(named(guest.freeze(&cx, vm, Duration::from_secs(1)).await), "freeze 1s");
    assert!(driver.whole_spec().is_some());
}

#[tokio::test]
async fn a_network_driver_without_meshes_and_groups_says_so_with_the_right_kinds() {
    let driver: Box<dyn Network> = Box::new(Least);
    let cx = Context::new();
    let (port, vm): (PortId, VmId) = (ID.parse().unwrap(), ID.parse().unwrap());
    let network: NetworkId = ID.parse().unwrap();
    let name = "eth0".parse().unwrap();
    let spec = PortSpec::new(port, vm, network, name, MacAddr::derived(port));
    let rotated = driver.rotate_mesh_peer(&cx, &spec).await.unwrap_err();
    assert_eq!(rotated.kind(), ErrorKind::NotApplicable);
    let group: SecurityGroupId = ID.parse().unwrap();
    let spec = SecurityGroupSpec::new(group, "g".parse().unwrap());
    let ensured = driver.ensure_security_group(&cx, &spec).await.unwrap_err();
    assert_eq!(ensured.kind(), ErrorKind::Unsupported);
    assert_eq!(driver.destroy_security_group(&cx, group).await.unwrap(), Change::Unchanged);
}

#[tokio::test]
async fn volume_and_image_drivers_work_as_trait_objects() {
    let cx = Context::new();
    let volumes: Arc<dyn Volume> = Arc::new(Echo);
    let volume: VolumeId = ID.parse().unwrap();
    let destroyed = volumes.destroy_volume(&cx, volume).await;
    assert_eq!(named(destroyed), format!("destroy_volume {ID}"));
    let images: Arc<dyn Image> = Arc::new(Echo);
    let reference: ImageRef = "localhost:5000/a:1".parse().unwrap();
    assert_eq!(named(images.pull(&cx, &reference).await), "pull localhost:5000/a:1");
    let collected = images.collect().unwrap().collect(&cx, 5, &[reference]).await;
    assert_eq!(named(collected), "collect 5 1");
}

#[tokio::test]
async fn a_secret_comes_through_the_context() {
    let cx = Context::new().with_secrets(Arc::new(Echo));
    let reference: SecretRef = "secret://ceph/key".parse().unwrap();
    let value = cx.secrets().unwrap().resolve(&reference).await.unwrap();
    assert_eq!(value.expose(), b"secret://ceph/key");
}

#[tokio::test]
async fn events_and_consoles_work_as_trait_objects() {
    let mut events: EventStream = Box::new(Echo);
    assert_eq!(events.next().await.unwrap().kind, EventKind::Resync);
    let mut console: Box<dyn ConsoleStream> = Box::new(Echo);
    assert_eq!(console.read().await.unwrap(), b"echo");
    assert_eq!(named(console.write(b"abc").await), "write 3");
}
