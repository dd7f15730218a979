//! Manifests and blobs as bytes.

use std::{collections::BTreeMap, io, path::Path};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// The media type of an OCI image manifest.
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// The digest of bytes as OCI writes it.
#[must_use]
pub fn digest_of(bytes: &[u8]) -> String {
    let hash = Sha256::digest(bytes);
    let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// One layer of an artifact.
#[derive(Clone, Debug)]
pub struct Blob {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Its media type.
    pub media_type: String,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
}

impl Blob {
    /// A layer without annotations.
    pub fn new(media_type: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        Self { bytes: bytes.into(), media_type: media_type.into(), annotations: BTreeMap::new() }
    }

    /// With one more annotation.
    #[must_use]
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    /// With the title annotation that names the file.
    #[must_use]
    pub fn title(self, name: &str) -> Self {
        self.annotation("org.opencontainers.image.title", name)
    }

    fn descriptor(&self) -> Value {
        let mut value = json!({
            "mediaType": self.media_type,
            "digest": digest_of(&self.bytes),
            "size": self.bytes.len(),
        });
        if let (Some(object), false) = (value.as_object_mut(), self.annotations.is_empty()) {
            object.insert("annotations".to_owned(), json!(self.annotations));
        }
        value
    }
}

/// A manifest's bytes with their media type.
#[derive(Clone, Debug)]
pub struct Manifest {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// The media type.
    pub media_type: String,
}

impl Manifest {
    /// Its digest.
    #[must_use]
    pub fn digest(&self) -> String {
        digest_of(&self.bytes)
    }
}

/// An artifact: a config, layers, and the manifest that names them.
#[derive(Clone, Debug)]
pub struct Artifact {
    /// The config blob.
    pub config: Blob,
    /// The layers.
    pub layers: Vec<Blob>,
    /// The annotations of the manifest.
    pub annotations: BTreeMap<String, String>,
}

impl Artifact {
    /// An artifact with OCI's empty config.
    #[must_use]
    pub fn new(layers: Vec<Blob>) -> Self {
        let config = Blob::new("application/vnd.oci.empty.v1+json", "{}");
        Self { config, layers, annotations: BTreeMap::new() }
    }

    /// A container image of an architecture.
    #[must_use]
    pub fn container(architecture: &str, layers: Vec<Blob>) -> Self {
        let config = json!({
            "architecture": architecture, "os": "linux", "config": {},
            "rootfs": { "type": "layers", "diff_ids": [] },
        });
        let config =
            Blob::new("application/vnd.oci.image.config.v1+json", config.to_string().into_bytes());
        Self { config, layers, annotations: BTreeMap::new() }
    }

    /// Its manifest.
    #[must_use]
    pub fn manifest(&self) -> Manifest {
        let layers: Vec<Value> = self.layers.iter().map(Blob::descriptor).collect();
        let mut value = json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": self.config.descriptor(), "layers": layers,
        });
        if let (Some(object), false) = (value.as_object_mut(), self.annotations.is_empty()) {
            object.insert("annotations".to_owned(), json!(self.annotations));
        }
        Manifest { bytes: value.to_string().into_bytes(), media_type: MANIFEST.to_owned() }
    }

    /// Config and layers.
    pub fn blobs(&self) -> impl Iterator<Item = &Blob> {
        std::iter::once(&self.config).chain(&self.layers)
    }
}

/// An OCI image layout on disk, as it is: digests are not checked, so that hostile layouts can be read.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The tags with their descriptors' digests, in the order of the index; a tag may come more than once.
    pub tags: Vec<(String, String)>,
    /// The index as it stands.
    pub index: Vec<u8>,
    /// Each file under `blobs/sha256` with the digest that its name says.
    pub blobs: Vec<(String, Vec<u8>)>,
}

impl Layout {
    /// Reads a layout.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read(dir: &Path) -> io::Result<Self> {
        let index = std::fs::read(dir.join("index.json"))?;
        let value: Value = serde_json::from_slice(&index)?;
        let mut tags = Vec::new();
        for entry in value.get("manifests").and_then(Value::as_array).into_iter().flatten() {
            let tag = entry.pointer("/annotations/org.opencontainers.image.ref.name");
            let digest = entry.get("digest");
            if let (Some(tag), Some(digest)) =
                (tag.and_then(Value::as_str), digest.and_then(Value::as_str))
            {
                tags.push((tag.to_owned(), digest.to_owned()));
            }
        }
        let mut blobs = Vec::new();
        let files = dir.join("blobs/sha256");
        if files.exists() {
            for file in std::fs::read_dir(files)? {
                let file = file?;
                let digest = format!("sha256:{}", file.file_name().to_string_lossy());
                blobs.push((digest, std::fs::read(file.path())?));
            }
        }
        Ok(Self { tags, index, blobs })
    }
}
