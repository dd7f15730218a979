//! The driver contract, over each format and each way to come by an image's bytes.

#![cfg(test)]

mod common;

use std::{fs, path::PathBuf, sync::Arc};

use common::{Bench, copy_of, node, text_of};
use conformance::{Census, Options, Plant, VolumeBench, async_trait};
use drivers_api::{
    DiskFormat, HostId, Result, SizeGib, Volume, VolumeId, VolumeSource, VolumeSpec,
};

/// A pool, and an image of a format on its filesystem or on another.
struct FileBench {
    pool: Bench,
    format: DiskFormat,
    image: PathBuf,
    image_format: DiskFormat,
}

impl FileBench {
    fn dir(&self, volume: &VolumeSpec) -> PathBuf {
        self.pool.volume_dir(volume.uuid)
    }
}

#[async_trait]
impl VolumeBench for FileBench {
    fn node(&self) -> HostId {
        node(1)
    }

    async fn open(&self) -> Result<Arc<dyn Volume>> {
        Ok(Arc::new(driver_file_volume::FileVolume::open(self.pool.config())?))
    }

    async fn volume(&self, n: u32) -> VolumeSpec {
        let uuid: VolumeId = format!("3f2b8c1e-9a4d-4e6f-8b7a-1c2d{n:08x}").parse().unwrap();
        let name = format!("volume {n}").parse().unwrap();
        VolumeSpec::new(uuid, name, SizeGib::new(1).unwrap(), self.format)
    }

    async fn source(&self) -> Option<VolumeSource> {
        copy_of(0, 1, self.format, &self.image, self.image_format).source
    }

    async fn plant_foreign(&self, volume: &VolumeSpec) -> Plant {
        fs::create_dir(self.dir(volume)).unwrap();
        fs::write(self.dir(volume).join("disk.raw"), "somebody's").unwrap();
        Plant::Done
    }

    async fn fingerprint_foreign(&self, volume: &VolumeSpec) -> String {
        let id = volume.uuid.to_string();
        self.pool.census().into_iter().filter(|line| line.contains(&id)).collect()
    }

    async fn remove_foreign(&self, volume: &VolumeSpec) {
        fs::remove_dir_all(self.dir(volume)).unwrap();
    }

    fn half_made(&self) -> Vec<&'static str> {
        vec!["an empty directory", "a record that was cut off", "a disk without a record"]
    }

    async fn plant_half_made(&self, volume: &VolumeSpec, state: &str) -> Plant {
        let dir = self.pool.pool().join(format!(".new-{}", volume.uuid));
        fs::create_dir(&dir).unwrap();
        match state {
            "an empty directory" => {}
            "a record that was cut off" => fs::write(dir.join("volume.json"), "{\"sch").unwrap(),
            _ => fs::write(dir.join("disk.raw"), "half").unwrap(),
        }
        Plant::Done
    }

    async fn break_backend(&self) -> Plant {
        fs::rename(self.pool.pool(), self.pool.dir.path().join("away")).unwrap();
        // What an unmounted filesystem leaves: an empty directory.
        fs::create_dir(self.pool.pool()).unwrap();
        Plant::Done
    }

    async fn mend(&self) {
        fs::remove_dir(self.pool.pool()).unwrap();
        fs::rename(self.pool.dir.path().join("away"), self.pool.pool()).unwrap();
    }

    async fn census(&self) -> Census {
        let mut census = Census::new();
        // The directory of copies is made once and stays.
        let bases = format!("{}/bases/", text_of(&self.pool.pool()));
        census.extend("files", self.pool.contents().iter().filter(|line| **line != bases));
        census
    }
}

async fn check(format: DiskFormat, image_format: DiskFormat, images: &Bench) {
    let image = if image_format == DiskFormat::Qcow2 {
        images.qcow2_image("image", 8, "the image").await
    } else {
        images.file("image", &vec![7; 3 << 20])
    };
    let bench = FileBench { pool: Bench::new(), format, image, image_format };
    conformance::check_volume(&bench, &Options::default()).await.assert_passed();
}

/// One test, since the kit counts the descriptors of the process, and a second runtime has some.
#[tokio::test]
async fn volumes_of_each_format_and_origin_hold_the_contract() {
    let (here, there) = (Bench::new(), Bench::under(std::path::Path::new("/dev/shm")));
    // Linked, copied into the pool, converted, copied into the volume.
    check(DiskFormat::Qcow2, DiskFormat::Qcow2, &here).await;
    check(DiskFormat::Qcow2, DiskFormat::Raw, &there).await;
    check(DiskFormat::Raw, DiskFormat::Qcow2, &here).await;
    check(DiskFormat::Raw, DiskFormat::Raw, &there).await;
}
