//! The contract's kit over this driver: once with Debian's `docker-registry`, once with a registry that counts.

#![cfg(test)]

mod common;

use std::{collections::HashMap, path::PathBuf, sync::Arc};

use common::{config, noise, raw_disk};
use conformance::{Census, ImageBench, Options, Plant, async_trait};
use driver_oci_image::OciImage;
use drivers_api::{Context, Image, ImageRef, Result};
use tempfile::TempDir;
use testbed::registry::{Artifact, FakeRegistry, RealRegistry, digest_of};
use tokio::sync::Mutex;

/// Where the images come from.
enum Source {
    Real(Mutex<RealRegistry>),
    Fake(FakeRegistry),
}

struct Bench {
    dir: TempDir,
    source: Source,
    host: String,
    /// The digests of the manifests that were pushed.
    pushed: Mutex<HashMap<u32, String>>,
}

impl Bench {
    async fn real() -> Self {
        let registry = RealRegistry::start().await.unwrap();
        let host = registry.host();
        Self::new(Source::Real(Mutex::new(registry)), host)
    }

    async fn fake() -> Self {
        let registry = FakeRegistry::start().await.unwrap();
        let host = registry.host();
        Self::new(Source::Fake(registry), host)
    }

    fn new(source: Source, host: String) -> Self {
        Self { dir: tempfile::tempdir().unwrap(), source, host, pushed: Mutex::default() }
    }

    fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    fn bytes(n: u32) -> Vec<u8> {
        noise(u64::from(n) + 1000, 20_000)
    }

    fn artifact(n: u32) -> Artifact {
        raw_disk(&Self::bytes(n))
    }

    async fn digest(&self, n: u32) -> String {
        let mut pushed = self.pushed.lock().await;
        if let Some(digest) = pushed.get(&n) {
            return digest.clone();
        }
        let (artifact, tag) = (Self::artifact(n), format!("t{n}"));
        let digest = match &self.source {
            Source::Real(registry) => {
                registry.lock().await.push("kit", &tag, &artifact).await.unwrap()
            }
            Source::Fake(registry) => registry.put("kit", &tag, &artifact),
        };
        pushed.insert(n, digest.clone());
        digest
    }

    /// The number in a reference's tag.
    fn number(reference: &ImageRef) -> u32 {
        reference.as_str().rsplit_once(":t").unwrap().1.parse().unwrap()
    }

    fn away(&self) -> PathBuf {
        self.dir.path().join("refs-away")
    }
}

#[async_trait]
impl ImageBench for Bench {
    async fn open(&self) -> Result<Arc<dyn Image>> {
        Ok(Arc::new(OciImage::open(config(self.dir.path()))?))
    }

    async fn image(&self, n: u32) -> ImageRef {
        self.digest(n).await;
        format!("{}/kit:t{n}", self.host).parse().unwrap()
    }

    async fn alias(&self, n: u32) -> Option<ImageRef> {
        let digest = self.digest(n).await;
        Some(format!("{}/kit@{digest}", self.host).parse().unwrap())
    }

    async fn absent(&self) -> ImageRef {
        format!("{}/kit:none", self.host).parse().unwrap()
    }

    async fn downloads(&self, n: u32) -> Option<u64> {
        match &self.source {
            Source::Real(_) => None,
            Source::Fake(registry) => {
                u64::try_from(registry.count(&digest_of(&Self::bytes(n)))).ok()
            }
        }
    }

    fn half_made(&self) -> Vec<&'static str> {
        vec![
            "a part of the download",
            "a wrong part of the download",
            "content without its record",
            "content without its reference",
            "a reference without its content",
            "a directory in which an image was built",
        ]
    }

    async fn plant_half_made(&self, reference: &ImageRef, state: &str) -> Plant {
        let n = Self::number(reference);
        let bytes = Self::bytes(n);
        let digest = digest_of(&bytes);
        let partial = self.cache().join("partial").join(digest.trim_start_matches("sha256:"));
        let key = format!("oci-{}", self.digest(n).await.trim_start_matches("sha256:"));
        let content = self.cache().join("content").join(key);
        let whole = async || {
            let driver = OciImage::open(config(self.dir.path())).unwrap();
            drop(driver.pull(&Context::new(), reference).await.unwrap().value);
        };
        match state {
            "a part of the download" => std::fs::write(partial, &bytes[..9000]).unwrap(),
            "a wrong part of the download" => std::fs::write(partial, noise(1, 9000)).unwrap(),
            "content without its record" => {
                std::fs::create_dir(&content).unwrap();
                std::fs::write(content.join("disk"), &bytes[..9000]).unwrap();
            }
            "content without its reference" => {
                whole().await;
                let refs = self.cache().join("refs");
                for entry in std::fs::read_dir(refs).unwrap() {
                    let path = entry.unwrap().path();
                    if std::fs::read_to_string(&path).unwrap().contains(reference.as_str()) {
                        std::fs::remove_file(path).unwrap();
                    }
                }
            }
            "a reference without its content" => {
                whole().await;
                std::fs::remove_dir_all(content).unwrap();
            }
            _ => {
                let dir = self.cache().join("staging").join(format!("1-{n}"));
                std::fs::create_dir(&dir).unwrap();
                std::fs::write(dir.join("disk"), b"half").unwrap();
            }
        }
        Plant::Done
    }

    async fn break_source(&self) -> Plant {
        match &self.source {
            Source::Real(registry) => {
                registry.lock().await.stop().await.unwrap();
                Plant::Done
            }
            Source::Fake(_) => Plant::not_tried("the real registry's run does it"),
        }
    }

    async fn break_backend(&self) -> Plant {
        std::fs::rename(self.cache().join("refs"), self.away()).unwrap();
        Plant::Done
    }

    async fn mend(&self) {
        if self.away().exists() {
            std::fs::rename(self.away(), self.cache().join("refs")).unwrap();
        }
        if let Source::Real(registry) = &self.source {
            let mut registry = registry.lock().await;
            // Up already: the case broke something else.
            if tokio::net::TcpStream::connect(registry.host()).await.is_err() {
                registry.start_again().await.unwrap();
            }
        }
    }

    async fn census(&self) -> Census {
        let mut census = Census::new();
        census.add_tree("files", &self.cache()).unwrap();
        census
    }
}

#[tokio::test]
async fn the_driver_keeps_the_contract_on_a_real_registry_and_on_one_that_counts() {
    conformance::check_image(&Bench::real().await, &Options::default()).await.assert_complete();
    conformance::check_image(&Bench::fake().await, &Options::default()).await.assert_passed();
}
