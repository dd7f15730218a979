//! From a manifest to what is downloaded and how it is unpacked. Pure.

use drivers_api::{Architecture, ArtifactKind};
use oci_client::manifest::{IMAGE_CONFIG_MEDIA_TYPE, IMAGE_DOCKER_CONFIG_MEDIA_TYPE};
use serde::Deserialize;

use crate::{
    error::{ImageError, Result, shown},
    manifest::{Descriptor, Manifest},
    media::{Claim, LayerKind, Packing, Role, layer_kind},
};

/// The config of an artifact of ours.
const OUR_CONFIG: &str = "application/vnd.bcd.image.config.v1+json";
/// The annotation, of the kernel's layer or the manifest, with the kernel's command line.
const CMDLINE: &str = "vnd.bcd.kernel.cmdline";
/// The annotation that names a layer's file (OCI image specification, "Annotations").
const TITLE: &str = "org.opencontainers.image.title";
/// The annotation by which `oras` marks a packed directory.
const UNPACK: &str = "io.deis.oras.content.unpack";
/// `COMMAND_LINE_SIZE` of x86 (`arch/x86/include/asm/setup.h`).
const MAX_CMDLINE: usize = 2048;
/// The most bytes of a config that is read.
pub(crate) const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// One file that is one blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) claim: Claim,
    pub(crate) packing: Packing,
    pub(crate) blob: Descriptor,
}

/// What is downloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Files, one blob each.
    Files(Vec<Part>),
    /// The layers of a container image with the disk at `disk/FILE` (the containerDisk layout of `KubeVirt`), each once,
    /// with how often the manifest names it.
    Container(Vec<(Descriptor, Packing, u64)>),
}

/// What a manifest asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) content: Content,
    pub(crate) cmdline: Option<String>,
    /// The config, when it is of a type that we read.
    pub(crate) config: Option<Descriptor>,
}

impl Plan {
    /// The blobs that are downloaded.
    pub(crate) fn blobs(&self) -> impl Iterator<Item = &Descriptor> {
        let (parts, layers) = match &self.content {
            Content::Files(parts) => (parts.as_slice(), [].as_slice()),
            Content::Container(layers) => ([].as_slice(), layers.as_slice()),
        };
        parts.iter().map(|part| &part.blob).chain(layers.iter().map(|(blob, _, _)| blob))
    }

    /// The bytes that are downloaded.
    pub(crate) fn download_bytes(&self) -> u64 {
        self.blobs().fold(0, |sum, blob| sum.saturating_add(blob.size))
    }
}

/// Makes the plan.
pub(crate) fn plan(manifest: &Manifest) -> Result<Plan> {
    let mut files = Vec::new();
    let mut layers: Vec<(Descriptor, Packing, u64)> = Vec::new();
    let mut cmdline = manifest.annotations.get(CMDLINE);
    for layer in &manifest.layers {
        let title = layer.annotations.get(TITLE).map(String::as_str);
        let unpack = layer.annotations.get(UNPACK).is_some_and(|value| value == "true");
        match layer_kind(&layer.media_type, title, unpack) {
            LayerKind::File(claim, packing) => {
                cmdline = layer.annotations.get(CMDLINE).or(cmdline);
                files.push(Part { claim, packing, blob: layer.clone() });
            }
            LayerKind::Tar(packing) => {
                match layers.iter_mut().find(|(known, _, _)| known.digest == layer.digest) {
                    Some((_, _, times)) => *times = times.saturating_add(1),
                    None => layers.push((layer.clone(), packing, 1)),
                }
            }
            LayerKind::Unsupported(what) => {
                let reason = format!("{what} is not supported; use plain, gzip or zstd");
                return Err(ImageError::malformed("manifest", reason));
            }
            LayerKind::Other => {}
        }
    }
    let content = match (files.is_empty(), layers.is_empty()) {
        (false, true) => {
            kind_of(files.iter().map(|part| part.claim.role))?;
            Content::Files(files)
        }
        (true, false) => Content::Container(layers),
        (false, false) => {
            return Err(ImageError::malformed(
                "manifest",
                "has both plain files and layers of a container image",
            ));
        }
        (true, true) => return Err(nothing_known(manifest)),
    };
    Ok(Plan {
        content,
        cmdline: cmdline.map(|text| checked_cmdline(text)).transpose()?,
        config: known_config(&manifest.config),
    })
}

fn nothing_known(manifest: &Manifest) -> ImageError {
    let types: Vec<&str> =
        manifest.layers.iter().take(5).map(|layer| layer.media_type.as_str()).collect();
    let reason = format!(
        "holds no disk, kernel or UKI as docs/images.md names them; its layers are [{}]",
        types.join(", ")
    );
    ImageError::malformed("manifest", shown(&reason))
}

fn known_config(config: &Descriptor) -> Option<Descriptor> {
    [IMAGE_CONFIG_MEDIA_TYPE, IMAGE_DOCKER_CONFIG_MEDIA_TYPE, OUR_CONFIG]
        .contains(&config.media_type.as_str())
        .then(|| config.clone())
}

/// What files of these roles make together.
pub(crate) fn kind_of(roles: impl Iterator<Item = Role>) -> Result<ArtifactKind> {
    let mut roles: Vec<Role> = roles.collect();
    roles.sort_unstable();
    match roles.as_slice() {
        [Role::Disk] => Ok(ArtifactKind::Disk),
        [Role::Kernel] | [Role::Kernel, Role::Initrd] => Ok(ArtifactKind::Kernel),
        [Role::Uki] => Ok(ArtifactKind::Uki),
        other => {
            let names: Vec<&str> = other.iter().take(8).map(|role| role.as_str()).collect();
            let reason = format!(
                "holds [{}]; wanted one disk, one UKI, or one kernel with at most one initrd",
                names.join(", ")
            );
            Err(ImageError::malformed("manifest", reason))
        }
    }
}

/// Files that people write end with a line end, which is no part of the command line.
fn checked_cmdline(text: &str) -> Result<String> {
    let text = text.trim();
    if text.len() >= MAX_CMDLINE || text.chars().any(char::is_control) {
        let reason = format!("wanted less than {MAX_CMDLINE} bytes without control characters");
        return Err(ImageError::malformed("kernel command line", reason));
    }
    Ok(text.to_owned())
}

/// What a config says that matters here.
#[derive(Debug, Default, Deserialize)]
struct Config {
    #[serde(default)]
    architecture: Option<String>,
    #[serde(default)]
    os: Option<String>,
    #[serde(default)]
    cmdline: Option<String>,
}

/// Checks a config against the wanted platform; answers the command line that it suggests.
pub(crate) fn check_config(bytes: &[u8], want: Architecture) -> Result<Option<String>> {
    let config: Config = serde_json::from_slice(bytes)
        .map_err(|error| ImageError::malformed("config", shown(&error.to_string())))?;
    let arch = config.architecture.as_deref().filter(|arch| !arch.is_empty());
    let os = config.os.as_deref().filter(|os| !os.is_empty());
    if arch.is_some_and(|arch| arch != want.as_str()) || os.is_some_and(|os| os != "linux") {
        let found = format!("{}/{}", os.unwrap_or("linux"), arch.unwrap_or("unknown"));
        let reason = format!(
            "no manifest for linux/{}; the image's own config says {}",
            want.as_str(),
            shown(&found)
        );
        return Err(ImageError::not_found("config", reason));
    }
    config.cmdline.as_deref().map(checked_cmdline).transpose()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn layer(fill: char, media_type: &str) -> Descriptor {
        Descriptor {
            digest: format!("sha256:{}", String::from(fill).repeat(64)).parse().unwrap(),
            size: 10,
            media_type: media_type.to_owned(),
            annotations: BTreeMap::new(),
        }
    }

    fn manifest(layers: Vec<Descriptor>) -> Manifest {
        let config = layer('0', "application/vnd.oci.empty.v1+json");
        Manifest { config, layers, annotations: BTreeMap::new() }
    }

    #[test]
    fn a_kernel_and_an_initrd_make_a_kernel_with_its_command_line() {
        let mut kernel = layer('1', "application/vnd.bcd.kernel.v1");
        kernel.annotations.insert(CMDLINE.to_owned(), "console=ttyS0".to_owned());
        let initrd = layer('2', "application/vnd.bcd.initrd.v1");
        let plan = plan(&manifest(vec![kernel, initrd])).unwrap();
        assert_eq!(plan.cmdline.as_deref(), Some("console=ttyS0"));
        assert_eq!(plan.download_bytes(), 20);
    }

    #[test]
    fn combinations_that_are_no_image_are_refused() {
        let disk = || layer('1', "application/vnd.bcd.disk.raw.v1");
        let kernel = || layer('2', "application/vnd.bcd.kernel.v1");
        let tar = || layer('3', "application/vnd.oci.image.layer.v1.tar+gzip");
        for layers in [
            vec![],
            vec![disk(), kernel()],
            vec![disk(), disk()],
            vec![disk(), tar()],
            vec![layer('4', "application/vnd.bcd.initrd.v1")],
            vec![layer('5', "text/plain")],
        ] {
            assert!(plan(&manifest(layers.clone())).is_err(), "{layers:?}");
        }
    }

    #[test]
    fn a_layer_that_is_named_many_times_is_fetched_once_and_counted_each_time() {
        let tar = || layer('3', "application/vnd.oci.image.layer.v1.tar+gzip");
        let plan = plan(&manifest(vec![tar(), tar(), tar()])).unwrap();
        let Content::Container(layers) = plan.content else { panic!("a container was wanted") };
        assert_eq!(layers.len(), 1);
        assert_eq!(layers[0].2, 3);
    }

    #[test]
    fn upg_02_a_config_of_another_architecture_is_refused() {
        let error = check_config(b"{\"architecture\":\"arm64\"}", Architecture::Amd64).unwrap_err();
        assert!(error.to_string().contains("linux/arm64"), "{error}");
        assert!(check_config(b"{}", Architecture::Amd64).is_ok());
        let ours = b"{\"architecture\":\"amd64\",\"cmdline\":\"quiet\"}";
        assert_eq!(check_config(ours, Architecture::Amd64).unwrap().as_deref(), Some("quiet"));
    }

    #[test]
    fn a_command_line_with_control_characters_is_refused() {
        assert_eq!(checked_cmdline("console=ttyS0 quiet\n").unwrap(), "console=ttyS0 quiet");
        assert!(checked_cmdline("a\nb").is_err());
        assert!(checked_cmdline(&"x".repeat(2048)).is_err());
    }
}
