//! What the tests of this driver share.
#![cfg(test)]
#![allow(dead_code, clippy::allow_attributes, reason = "each test binary uses a part of it")]

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use driver_oci_image::{OciImage, OciImageConfig};
use drivers_api::{
    Change, Context, Error, ErrorKind, HostId, Image, ImageRef, ImageStatus, Outcome, Progress,
    ProgressSink, Result,
};
use tempfile::TempDir;
use testbed::registry::{Artifact, Blob};

pub(crate) const NODE: &str = "6f1c9c1e-0f4b-4a55-9d51-1a2b3c4d5e6f";

/// A driver with a cache of its own.
pub(crate) struct Bed {
    pub(crate) dir: TempDir,
    pub(crate) driver: Arc<OciImage>,
}

pub(crate) fn node() -> HostId {
    NODE.parse().unwrap()
}

pub(crate) fn config(dir: &Path) -> OciImageConfig {
    OciImageConfig::new(node(), "test-host", dir.join("cache"))
}

impl Bed {
    pub(crate) fn new() -> Self {
        Self::with(|_| ())
    }

    pub(crate) fn with(change: impl FnOnce(&mut OciImageConfig)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(dir.path());
        change(&mut config);
        let driver = Arc::new(OciImage::open(config).unwrap());
        Self { dir, driver }
    }

    pub(crate) async fn pull(&self, reference: &str) -> Result<Outcome<ImageStatus>> {
        let cx = within(Duration::from_secs(60));
        self.driver.pull(&cx, &reference.parse().unwrap()).await
    }

    /// Pulls what must succeed.
    pub(crate) async fn got(&self, reference: &str) -> ImageStatus {
        match self.pull(reference).await {
            Ok(outcome) => outcome.value,
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Pulls what must fail, and checks that nothing is left of it.
    pub(crate) async fn refused(&self, reference: &str) -> Error {
        let error = self.pull(reference).await.expect_err(reference);
        self.settled().await;
        assert_eq!(self.files("content"), Vec::<String>::new(), "{reference}: content");
        assert_eq!(self.files("refs"), Vec::<String>::new(), "{reference}: refs");
        assert_eq!(self.files("partial"), Vec::<String>::new(), "{reference}: partial");
        let parsed: ImageRef = reference.parse().unwrap();
        assert!(!self.driver.in_cache(&Context::new(), &parsed).await.unwrap());
        error
    }

    pub(crate) fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    /// The names in a directory of the cache.
    pub(crate) fn files(&self, name: &str) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.cache().join(name))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// Waits until what was given up is cleared away, which happens behind the answer.
    pub(crate) async fn settled(&self) {
        for _ in 0..500 {
            if self.files("staging").is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("left in staging: {:?}", self.files("staging"));
    }

    /// Every path below the cache with its size and time of change, without the records of use.
    pub(crate) fn census(&self) -> Vec<(PathBuf, u64, std::time::SystemTime)> {
        fn walk(dir: &Path, out: &mut Vec<(PathBuf, u64, std::time::SystemTime)>) {
            for entry in std::fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                let found = std::fs::symlink_metadata(&path).unwrap();
                out.push((path.clone(), found.len(), found.modified().unwrap()));
                if found.is_dir() {
                    walk(&path, out);
                }
            }
        }
        let mut out = Vec::new();
        walk(&self.cache(), &mut out);
        out.sort();
        out
    }
}

pub(crate) fn within(limit: Duration) -> Context {
    Context::new().with_deadline((tokio::time::Instant::now() + limit).into_std())
}

pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

pub(crate) fn read_data(name: &str) -> Vec<u8> {
    std::fs::read(data(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Bytes that do not compress, the same for each seed.
pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// A raw disk as an artifact.
pub(crate) fn raw_disk(bytes: &[u8]) -> Artifact {
    Artifact::new(vec![Blob::new("application/vnd.bcd.disk.raw.v1", bytes)])
}

/// A kernel and an initrd as an artifact.
pub(crate) fn kernel(seed: u64) -> Artifact {
    Artifact::new(vec![
        Blob::new("application/vnd.bcd.kernel.v1", noise(seed, 70_000))
            .annotation("vnd.bcd.kernel.cmdline", "console=ttyS0 quiet"),
        Blob::new("application/vnd.bcd.initrd.v1", noise(seed + 1, 90_000)),
    ])
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub(crate) fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::stream::encode_all(bytes, 3).unwrap()
}

/// A tar archive of plain files.
pub(crate) fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_ustar();
        header.set_size(u64::try_from(bytes.len()).unwrap());
        header.set_mode(0o644);
        builder.append_data(&mut header, name, *bytes).unwrap();
    }
    builder.into_inner().unwrap()
}

/// Keeps what is reported.
#[derive(Default)]
pub(crate) struct Reports(pub(crate) Mutex<Vec<Progress>>);

impl ProgressSink for Reports {
    fn report(&self, progress: &Progress) {
        self.0.lock().unwrap().push(progress.clone());
    }
}

#[track_caller]
pub(crate) fn expect_kind(error: &Error, kind: ErrorKind, text: &str) {
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(text), "{error}: wanted \"{text}\"");
}

#[track_caller]
pub(crate) fn expect_change(outcome: &Outcome<ImageStatus>, change: Change) {
    assert_eq!(outcome.change, change, "{:?}", outcome.value);
}
