//! What the driver is opened with.

use std::path::PathBuf;

use drivers_api::{Architecture, Error, HostId, HostPath, Result, SecretRef};

/// The largest image, expanded, that is taken when nothing else is configured: 64 GiB.
pub const DEFAULT_MAX_IMAGE_BYTES: u64 = 64 << 30;
/// How many images are downloaded or unpacked at once when nothing else is configured.
pub const DEFAULT_CONCURRENCY: usize = 3;
/// Space that a pull leaves free on the cache's file system when nothing else is configured: 256 MiB.
pub const DEFAULT_RESERVE_BYTES: u64 = 256 << 20;

/// Who the driver is to a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegistryCredentials {
    /// The registry as references name it: `HOST` or `HOST:PORT`.
    pub registry: String,
    /// The user's name.
    pub username: String,
    /// Where the password or token is. Resolved by the caller's [`Context`](drivers_api::Context) when it is needed.
    pub password: SecretRef,
}

impl RegistryCredentials {
    /// A user of a registry.
    pub fn new(
        registry: impl Into<String>,
        username: impl Into<String>,
        password: SecretRef,
    ) -> Self {
        Self { registry: registry.into(), username: username.into(), password }
    }
}

/// The configuration of an [`OciImage`](crate::OciImage).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OciImageConfig {
    /// The node whose agent this is: the owner of the cache.
    pub node: HostId,
    /// The host's name.
    pub hostname: String,
    /// The cache: a directory of its own, made where it is not there.
    pub dir: PathBuf,
    /// Registries and hosts (`HOST` or `HOST:PORT`) that are asked by plain HTTP. Loopback addresses always are.
    pub insecure: Vec<String>,
    /// The most bytes that one image may have when it is unpacked, over all its files and layers.
    pub max_image_bytes: u64,
    /// The most bytes that the whole cache may take; `None` for what the file system has.
    pub max_cache_bytes: Option<u64>,
    /// Bytes that a pull leaves free on the file system.
    pub reserve_bytes: u64,
    /// Who the driver is to which registry.
    pub credentials: Vec<RegistryCredentials>,
    /// Hosts (`HOST` or `HOST:PORT`) that a registry on another host may name as its token service.
    pub token_hosts: Vec<String>,
    /// PEM files with certificates that are trusted beside the host's own.
    pub extra_roots: Vec<PathBuf>,
    /// The architecture that images are chosen for.
    pub platform: Option<Architecture>,
    /// How many images are downloaded or unpacked at once.
    pub concurrency: usize,
    /// Directories under which `file://` sources are allowed. Empty: none are.
    pub file_roots: Vec<HostPath>,
}

impl OciImageConfig {
    /// A cache in `dir` with the defaults: no plain HTTP but on loopback, no credentials, no `file://` sources, Docker
    /// Hub's token service, the architecture of this program.
    pub fn new(node: HostId, hostname: impl Into<String>, dir: impl Into<PathBuf>) -> Self {
        Self {
            node,
            hostname: hostname.into(),
            dir: dir.into(),
            insecure: Vec::new(),
            max_image_bytes: DEFAULT_MAX_IMAGE_BYTES,
            max_cache_bytes: None,
            reserve_bytes: DEFAULT_RESERVE_BYTES,
            credentials: Vec::new(),
            token_hosts: vec!["auth.docker.io".to_owned()],
            extra_roots: Vec::new(),
            platform: Architecture::here(),
            concurrency: DEFAULT_CONCURRENCY,
            file_roots: Vec::new(),
        }
    }

    /// Refuses what cannot work.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.dir.is_absolute() {
            return Err(Error::invalid("dir", "wanted an absolute path"));
        }
        if self.concurrency == 0 {
            return Err(Error::invalid("concurrency", "wanted at least 1"));
        }
        if self.max_image_bytes == 0 {
            return Err(Error::invalid("max_image_bytes", "wanted at least 1"));
        }
        if self.platform.is_none() {
            return Err(Error::invalid("platform", "this program's architecture has no name"));
        }
        Ok(())
    }
}
