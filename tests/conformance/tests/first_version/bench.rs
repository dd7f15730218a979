use std::sync::Arc;

use conformance::{Census, VolumeBench, async_trait};
use drivers_api::{DiskFormat, HostId, Result, SizeGib, Uuid, Volume, VolumeId, VolumeSpec};
use my_volume::MyVolume;

pub struct Bench;

#[async_trait]
impl VolumeBench for Bench {
    fn node(&self) -> HostId {
        "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b".parse().unwrap()
    }

    async fn open(&self) -> Result<Arc<dyn Volume>> {
        Ok(Arc::new(MyVolume { node: self.node(), known: Default::default() }))
    }

    async fn volume(&self, n: u32) -> VolumeSpec {
        let uuid = Uuid::from_bytes(u128::from(n + 1).to_be_bytes()).unwrap();
        let (name, size) = (format!("volume {n}").parse().unwrap(), SizeGib::new(1).unwrap());
        VolumeSpec::new(VolumeId::new(uuid), name, size, DiskFormat::Raw)
    }

    async fn census(&self) -> Census {
        Census::new()
    }
}
