//! What the conformance kit tries on the driver.

use std::sync::Arc;

use crate::common::*;
use conformance::{Census, HypervisorBench, Plant, async_trait};
use drivers_api::{DiskSpec, HostId, Hypervisor, NicHandle, VmId, VmSpec};
use testbed::netns::tool;

pub(crate) struct Bench {
    pub(crate) bed: Bed,
}

fn id(n: u32) -> VmId {
    format!("3f2b8c1e-9a4d-4e6f-8b7a-0000{n:08x}").parse().unwrap()
}

#[async_trait]
impl HypervisorBench for Bench {
    fn node(&self) -> HostId {
        NODE.parse().unwrap()
    }

    async fn open(&self) -> drivers_api::Result<Arc<dyn Hypervisor>> {
        Ok(Arc::new(driver_qemu_kvm::QemuKvm::open(self.bed.config()).await?))
    }

    async fn vm(&self, n: u32) -> VmSpec {
        self.bed.spec(id(n), "i")
    }

    async fn disk(&self, n: u32) -> Option<DiskSpec> {
        let mut disk = self.bed.disk(1);
        let path = self.bed.dir.path().join(format!("conformance-{n}.raw"));
        if !path.exists() {
            std::fs::File::create(&path).unwrap().set_len(8 << 20).unwrap();
        }
        disk.backing = drivers_api::Backing::File {
            path: path.to_str().unwrap().parse().unwrap(),
            format: drivers_api::DiskFormat::Raw,
        };
        disk.name = format!("disk{n}").parse().unwrap();
        disk.volume_uuid = format!("aaaaaaaa-9a4d-4e6f-8b7a-0000{n:08x}").parse().unwrap();
        Some(disk)
    }

    async fn nic(&self, n: u32) -> Option<NicHandle> {
        let device = format!("ctap{n}");
        if !std::path::Path::new("/sys/class/net").join(&device).exists() {
            tool(&["ip", "tuntap", "add", "dev", &device, "mode", "tap"]);
        }
        Some(NicHandle::new(
            format!("nic{n}").parse().unwrap(),
            format!("bbbbbbbb-9a4d-4e6f-8b7a-0000{n:08x}").parse().unwrap(),
            device.parse().unwrap(),
            format!("02:00:00:00:{:02x}:{:02x}", n / 256, n % 256).parse().unwrap(),
        ))
    }

    async fn plant_foreign(&self, vm: &VmSpec) -> Plant {
        let dir = self.bed.state(vm.uuid);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("precious"), "not ours").unwrap();
        Plant::Done
    }

    async fn fingerprint_foreign(&self, vm: &VmSpec) -> String {
        let dir = self.bed.state(vm.uuid);
        let text = std::fs::read_to_string(dir.join("precious")).unwrap();
        let changed = std::fs::metadata(&dir).unwrap().modified().unwrap();
        format!("{:?} {text} {changed:?}", entries(&dir))
    }

    async fn remove_foreign(&self, vm: &VmSpec) {
        std::fs::remove_dir_all(self.bed.state(vm.uuid)).unwrap();
    }

    fn half_made(&self) -> Vec<&'static str> {
        vec!["mark-only", "without-boot-files"]
    }

    async fn plant_half_made(&self, vm: &VmSpec, state: &str) -> Plant {
        let driver = self.bed.driver().await;
        driver.create_vm(&within(10), vm).await.map(drop).unwrap();
        let dir = self.bed.state(vm.uuid);
        std::fs::remove_dir_all(dir.join("boot")).unwrap();
        if state == "mark-only" {
            std::fs::remove_file(dir.join("vm.json")).unwrap();
        }
        Plant::Done
    }

    async fn kill_vmm(&self, vm: VmId) -> Plant {
        let text = std::fs::read_to_string(self.bed.run(vm).join("vmm")).unwrap();
        let process = text.parse::<host::process::Identity>().unwrap().open().unwrap().unwrap();
        process.signal(rustix::process::Signal::KILL).unwrap();
        Plant::Done
    }

    async fn break_backend(&self) -> Plant {
        let dir = self.bed.dir.path();
        std::fs::rename(dir.join("state"), dir.join("away")).unwrap();
        Plant::Done
    }

    async fn mend(&self) {
        let dir = self.bed.dir.path();
        std::fs::rename(dir.join("away"), dir.join("state")).unwrap();
    }

    async fn census(&self) -> Census {
        let mut census = Census::new();
        for name in ["state", "run"] {
            census.add_tree("files", &self.bed.dir.path().join(name)).unwrap();
        }
        census.extend("vmms", self.bed.vmms());
        census
    }
}
