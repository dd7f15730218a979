//! What a reference names: a digest, and what must be done to have its content.

use std::sync::Arc;

use drivers_api::{Digest, DiskFormat, HostPath, ImageRef, ImageSource, SecretResolver};
use oci_client::manifest::OciImageIndex;
use reqwest::{Url, header::HeaderName};
use sha2::{Digest as _, Sha256};

use super::{Puller, blocking};
use crate::{
    error::{ImageError, Result, shown},
    fetch::{Ask, auth::Session, blob::hex, read_all},
    manifest::{self, Descriptor, Document, MAX_MANIFEST_BYTES, Manifest},
    media::{Claim, Packing, single_file},
    plan::{MAX_CONFIG_BYTES, Plan, check_config, plan},
};

/// The header with a manifest's digest (distribution specification, "Pulling manifests").
const CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");

/// What a reference resolved to.
#[derive(Debug)]
pub(crate) struct Resolved {
    /// The digest of the manifest or index, or of the file.
    pub(crate) digest: Digest,
    /// The key of the content.
    pub(crate) key: String,
    pub(crate) job: Job,
}

/// What must be done to have a content.
#[derive(Debug)]
pub(crate) enum Job {
    /// Nothing: it was there.
    Nothing,
    Oci {
        session: Arc<Session>,
        plan: Plan,
    },
    Http {
        url: Url,
        file: SingleFile,
    },
    File {
        path: HostPath,
        file: SingleFile,
    },
}

impl Job {
    /// What is downloaded.
    pub(crate) fn blobs(&self) -> Vec<Digest> {
        match self {
            Self::Nothing => Vec::new(),
            Self::Oci { plan, .. } => plan.blobs().map(|blob| blob.digest.clone()).collect(),
            Self::Http { file, .. } | Self::File { file, .. } => vec![file.digest.clone()],
        }
    }
}

/// A source that is one file.
#[derive(Clone, Debug)]
pub(crate) struct SingleFile {
    pub(crate) claim: Claim,
    pub(crate) packing: Packing,
    pub(crate) digest: Digest,
}

impl SingleFile {
    fn new(name: &str, digest: Digest) -> Result<Self> {
        let (claim, packing) = single_file(name).map_err(|what| {
            ImageError::malformed(
                "source",
                format!("{what} is not supported; use plain, gzip or zstd"),
            )
        })?;
        Ok(Self { claim, packing, digest })
    }

    /// The same bytes under another claim are another image.
    fn key(&self) -> String {
        let format = self.claim.format.map_or("open", DiskFormat::as_str);
        let (role, packing) = (self.claim.role.as_str(), self.packing.as_str());
        format!("file-{role}-{format}-{packing}-{}", self.digest.hex())
    }
}

fn oci_key(digest: &Digest) -> String {
    format!("oci-{}", digest.hex())
}

fn parsed(text: &str) -> Result<Digest> {
    text.parse().map_err(|error: drivers_api::ParseError| {
        ImageError::malformed("reference", error.to_string())
    })
}

impl Puller {
    /// Resolves a reference. Asks a registry unless the content is here under the reference's own digest.
    pub(crate) async fn resolve(
        &self,
        reference: &ImageRef,
        secrets: Option<Arc<dyn SecretResolver>>,
    ) -> Result<Resolved> {
        let source = reference
            .source()
            .map_err(|error| ImageError::malformed("reference", error.to_string()))?;
        match source {
            ImageSource::Oci { registry, repository, tag, digest } => {
                let user = self.config.credentials.iter().find(|known| known.registry == registry);
                let session = Arc::new(Session {
                    origin: self.fetcher.registry_url(registry)?,
                    repository: repository.to_owned(),
                    user: user.map(|user| (user.username.clone(), user.password.clone())),
                    secrets,
                });
                let digest = digest.map(parsed).transpose()?;
                self.resolve_oci(session, tag.unwrap_or("latest"), digest).await
            }
            ImageSource::Http { url, digest } => {
                let url = Url::parse(url)
                    .map_err(|error| ImageError::malformed("reference", error.to_string()))?;
                self.fetcher.check_url(&url)?;
                let file = SingleFile::new(url.path(), parsed(digest)?)?;
                let (key, digest) = (file.key(), file.digest.clone());
                Ok(Resolved { digest, key, job: Job::Http { url, file } })
            }
            ImageSource::File { path, digest } => {
                let path: HostPath = path.parse().map_err(|error: drivers_api::ParseError| {
                    ImageError::malformed("reference", error.to_string())
                })?;
                let file = SingleFile::new(path.as_str(), parsed(digest)?)?;
                let (key, digest) = (file.key(), file.digest.clone());
                Ok(Resolved { digest, key, job: Job::File { path, file } })
            }
            _ => Err(ImageError::malformed("reference", "this kind of source is not known")),
        }
    }

    async fn resolve_oci(
        &self,
        session: Arc<Session>,
        tag: &str,
        digest: Option<Digest>,
    ) -> Result<Resolved> {
        if let Some(digest) = &digest
            && self.is_here(oci_key(digest)).await?
        {
            let (key, digest) = (oci_key(digest), digest.clone());
            return Ok(Resolved { digest, key, job: Job::Nothing });
        }
        let name = digest.as_ref().map_or(tag, Digest::as_str);
        let (top, document) = self.manifest(&session, name, digest.as_ref(), None).await?;
        match document {
            Document::Manifest(manifest) => {
                let (key, job) = self.image(&session, &top, &manifest).await?;
                Ok(Resolved { digest: top, key, job })
            }
            Document::Index(index) => {
                let (key, job) = self.entry_of(&session, &index).await?;
                Ok(Resolved { digest: top, key, job })
            }
        }
    }

    /// Takes the first entry of an index that fits.
    async fn entry_of(
        &self,
        session: &Arc<Session>,
        index: &OciImageIndex,
    ) -> Result<(String, Job)> {
        let want = self.platform()?;
        let mut refused = None;
        for entry in manifest::choose(index, want)? {
            let size = Some(&entry);
            let (digest, document) =
                self.manifest(session, entry.digest.as_str(), Some(&entry.digest), size).await?;
            let Document::Manifest(manifest) = document else {
                return Err(ImageError::malformed("index", "an entry is an index itself"));
            };
            match self.image(session, &digest, &manifest).await {
                Ok(found) => return Ok(found),
                // Of another platform, says its config; the next entry without a platform may fit.
                Err(error @ ImageError::NotFound { .. }) => refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(refused.unwrap_or_else(|| ImageError::not_found("index", "it is empty")))
    }

    /// What must be done for one manifest.
    async fn image(
        &self,
        session: &Arc<Session>,
        digest: &Digest,
        manifest: &Manifest,
    ) -> Result<(String, Job)> {
        let key = oci_key(digest);
        let mut plan = plan(manifest)?;
        if self.is_here(key.clone()).await? {
            return Ok((key, Job::Nothing));
        }
        if let Some(config) = &plan.config {
            let bytes = self.config(session, config).await?;
            let cmdline = check_config(&bytes, self.platform()?)?;
            plan.cmdline = plan.cmdline.or(cmdline);
        }
        Ok((key, Job::Oci { session: Arc::clone(session), plan }))
    }

    fn platform(&self) -> Result<drivers_api::Architecture> {
        self.config.platform.ok_or_else(|| ImageError::Internal("no platform".to_owned()))
    }

    async fn is_here(&self, key: String) -> Result<bool> {
        let cache = Arc::clone(&self.cache);
        blocking(move || Ok(cache.entry(&key)?.is_some())).await
    }

    /// Gets a manifest or index and checks its bytes.
    async fn manifest(
        &self,
        session: &Session,
        name: &str,
        wanted: Option<&Digest>,
        descriptor: Option<&Descriptor>,
    ) -> Result<(Digest, Document)> {
        let what = format!("manifest {name} of {}", session.repository);
        let too_large = |limit| ImageError::TooLarge { what: what.clone(), limit };
        if descriptor.is_some_and(|entry| entry.size > MAX_MANIFEST_BYTES) {
            return Err(too_large(MAX_MANIFEST_BYTES));
        }
        let url = session.url("manifests", name)?;
        let ask = Ask { url, what: &what, accept: Some(manifest::ACCEPT), from: 0 };
        let answer = self.fetcher.get(&ask, Some(session)).await?;
        let said = answer
            .headers()
            .get(&CONTENT_DIGEST)
            .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
        let body = read_all(answer, MAX_MANIFEST_BYTES, &what).await?;
        let got = hex(&Sha256::digest(&body));
        let size = u64::try_from(body.len()).unwrap_or(u64::MAX);
        let mismatch = |wanted: String, got: String| {
            Err(ImageError::Mismatch { what: what.clone(), wanted, got })
        };
        if let Some(wanted) = wanted
            && wanted.as_str() != got
        {
            return mismatch(wanted.to_string(), got);
        }
        if let Some(entry) = descriptor
            && entry.size != size
        {
            return mismatch(format!("{} bytes", entry.size), format!("{size} bytes"));
        }
        // A registry that says another digest than that of its own bytes is not to be believed in anything. Other
        // algorithms than SHA-256 cannot be compared.
        if let Some(said) = said
            && said.starts_with("sha256:")
            && said != got
        {
            return mismatch(format!("{} (the registry's header)", shown(&said)), got);
        }
        Ok((parsed(&got)?, manifest::parse(&body)?))
    }

    /// Gets a config and checks its bytes.
    async fn config(&self, session: &Session, config: &Descriptor) -> Result<Vec<u8>> {
        let what = format!("config {}", config.digest);
        if config.size > MAX_CONFIG_BYTES {
            return Err(ImageError::TooLarge { what, limit: MAX_CONFIG_BYTES });
        }
        let url = session.url("blobs", config.digest.as_str())?;
        let ask = Ask { url, what: &what, accept: None, from: 0 };
        let answer = self.fetcher.get(&ask, Some(session)).await?;
        let body = read_all(answer, MAX_CONFIG_BYTES, &what).await?;
        let got = hex(&Sha256::digest(&body));
        if got != config.digest.as_str() || u64::try_from(body.len()).ok() != Some(config.size) {
            let wanted = format!("{} bytes of {}", config.size, config.digest);
            let got = format!("{} bytes of {got}", body.len());
            return Err(ImageError::Mismatch { what, wanted, got });
        }
        Ok(body)
    }
}
