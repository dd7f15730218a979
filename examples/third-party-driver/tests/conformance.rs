//! The driver passes the kit.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use conformance::{Census, Options, Plant, VolumeBench, async_trait, check_volume};
use drivers_api::{
    Context, DiskFormat, HostId, Result, SizeGib, Uuid, Volume, VolumeId, VolumeSpec,
};
use plain_volume::PlainVolume;

/// A directory of this test, gone with it.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("plain-volume-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

struct Bench {
    directory: Directory,
}

impl Bench {
    fn volumes(&self) -> PathBuf {
        self.directory.0.join("volumes")
    }

    fn file(&self, volume: &VolumeSpec, extension: &str) -> PathBuf {
        self.volumes().join(format!("{}.{extension}", volume.uuid))
    }
}

#[async_trait]
impl VolumeBench for Bench {
    fn node(&self) -> HostId {
        HostId::new(Uuid::from_bytes(*b"the-test's-node!").unwrap())
    }

    async fn open(&self) -> Result<Arc<dyn Volume>> {
        Ok(Arc::new(PlainVolume::open(self.node(), self.volumes())?))
    }

    async fn volume(&self, n: u32) -> VolumeSpec {
        let id = VolumeId::new(Uuid::from_bytes(u128::from(n + 1).to_be_bytes()).unwrap());
        let name = format!("volume {n}").parse().unwrap();
        VolumeSpec::new(id, name, SizeGib::new(1).unwrap(), DiskFormat::Raw)
    }

    async fn plant_foreign(&self, volume: &VolumeSpec) -> Plant {
        fs::write(self.file(volume, "raw"), "somebody else's").unwrap();
        Plant::Done
    }

    async fn fingerprint_foreign(&self, volume: &VolumeSpec) -> String {
        let files = ["raw", "meta", "tmp"].map(|extension| self.file(volume, extension));
        format!("{:?}", files.map(|file| fs::read(file).ok()))
    }

    async fn remove_foreign(&self, volume: &VolumeSpec) {
        fs::remove_file(self.file(volume, "raw")).unwrap();
    }

    fn half_made(&self) -> Vec<&'static str> {
        vec!["mark-only", "empty-file", "half-removed"]
    }

    async fn plant_half_made(&self, volume: &VolumeSpec, state: &str) -> Plant {
        let driver = self.open().await.unwrap();
        let _ = driver.ensure_volume(&Context::new(), volume).await.unwrap();
        let mark = self.file(volume, "meta");
        let text = fs::read_to_string(&mark).unwrap();
        assert!(text.contains("state=ready"));
        fs::write(mark, text.replace("state=ready", "state=partial")).unwrap();
        let raw = self.file(volume, "raw");
        match state {
            "mark-only" => fs::remove_file(raw).unwrap(),
            "empty-file" => fs::write(raw, "").unwrap(),
            _ => {}
        }
        Plant::Done
    }

    async fn break_backend(&self) -> Plant {
        fs::rename(self.volumes(), self.directory.0.join("away")).unwrap();
        Plant::Done
    }

    async fn mend(&self) {
        let away = self.directory.0.join("away");
        if Path::exists(&away) {
            fs::rename(away, self.volumes()).unwrap();
        }
    }

    async fn census(&self) -> Census {
        let mut census = Census::new();
        census.add_tree("files", &self.volumes()).unwrap();
        census
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_plain_volume_driver_passes_the_kit() {
    let bench = Bench { directory: Directory::new() };
    check_volume(&bench, &Options::default()).await.assert_passed();
}
