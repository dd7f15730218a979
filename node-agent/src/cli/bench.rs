//! The back-ends on which `bcd-node driver test` tries drivers.

use std::{path::PathBuf, sync::Arc};

use conformance::{
    AnyBench, Census, Plant, VolumeBench, async_trait,
    reference::{Host, ReferenceBench},
};
use driver_file_volume::{FileVolume, FileVolumeConfig};
use drivers_api::{
    DiskFormat, Error, ErrorKind, HostId, Result, SizeGib, Uuid, Volume, VolumeId, VolumeSpec,
};

/// The drivers that can be tried here.
pub(crate) const DRIVERS: [&str; 2] = ["reference", "file-volume"];

/// The benches of a driver; `dir` is an empty directory of the caller's. `None` for a driver without one.
pub(crate) fn of(driver: &str, dir: PathBuf) -> Option<Vec<AnyBench>> {
    match driver {
        "reference" => {
            let bench = || ReferenceBench::new(Host::new());
            Some(vec![
                AnyBench::Hypervisor(Box::new(bench())),
                AnyBench::Network(Box::new(bench())),
                AnyBench::Volume(Box::new(bench())),
                AnyBench::Image(Box::new(bench())),
            ])
        }
        "file-volume" => Some(vec![AnyBench::Volume(Box::new(Files { dir }))]),
        _ => None,
    }
}

/// `file-volume` over a directory.
struct Files {
    dir: PathBuf,
}

impl Files {
    fn path(&self, volume: &VolumeSpec) -> PathBuf {
        self.dir.join("pool").join(volume.uuid.to_string())
    }
}

/// An identity of this bench.
fn identity(number: u32) -> Uuid {
    let mut bytes = *b"bcd-node-kit\0\0\0\0";
    for (slot, byte) in bytes.iter_mut().rev().zip(number.to_le_bytes()) {
        *slot = byte;
    }
    // It is not nil, so the fallback is never taken.
    Uuid::from_bytes(bytes).unwrap_or_else(|| HostId::new(identity(number)).uuid())
}

#[async_trait]
impl VolumeBench for Files {
    fn node(&self) -> HostId {
        HostId::new(identity(u32::MAX))
    }

    async fn open(&self) -> Result<Arc<dyn Volume>> {
        let config = FileVolumeConfig::new(self.node(), "bench", self.dir.join("pool"));
        let opened = host::bound::blocking("open", move || FileVolume::open(config)).await?;
        Ok(Arc::new(opened))
    }

    #[expect(clippy::expect_used, reason = "the texts and numbers are this function's own")]
    async fn volume(&self, n: u32) -> VolumeSpec {
        let name = format!("volume {n}").parse().expect("a name of this file");
        let size = SizeGib::new(1).expect("one is a size");
        VolumeSpec::new(VolumeId::new(identity(n)), name, size, DiskFormat::Qcow2)
    }

    async fn plant_foreign(&self, volume: &VolumeSpec) -> Plant {
        let dir = self.path(volume);
        match std::fs::create_dir(&dir)
            .and_then(|()| std::fs::write(dir.join("disk.raw"), "foreign"))
        {
            Ok(()) => Plant::Done,
            Err(error) => Plant::not_tried(error.to_string()),
        }
    }

    async fn fingerprint_foreign(&self, volume: &VolumeSpec) -> String {
        std::fs::read_to_string(self.path(volume).join("disk.raw")).unwrap_or_default()
    }

    async fn remove_foreign(&self, volume: &VolumeSpec) {
        if let Err(error) = std::fs::remove_dir_all(self.path(volume)) {
            tracing::warn!(%error, "the planted volume was not removed");
        }
    }

    async fn census(&self) -> Census {
        let mut census = Census::new();
        let pool = self.dir.join("pool");
        let entries = std::fs::read_dir(&pool).into_iter().flatten().flatten();
        census.extend("files", entries.map(|entry| entry.path().display().to_string()));
        census
    }
}

/// Why a driver cannot be tried.
pub(crate) fn unknown(driver: &str) -> Error {
    let known = format!("known here: {}", DRIVERS.join(", "));
    Error::new(ErrorKind::NotFound, "try the driver", crate::strict::escaped(driver), "it has no back-end of its own here")
        .with_remedy(format!("{known}; the others are tried by their crates' tests: cargo test -p driver-NAME --test conformance"))
}
