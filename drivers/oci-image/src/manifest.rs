//! Manifests and indexes: parsed, bounded, every digest and size checked before anything is asked for. Pure.

use std::collections::BTreeMap;

use drivers_api::{Architecture, Digest};
use oci_client::manifest::{
    IMAGE_MANIFEST_LIST_MEDIA_TYPE, IMAGE_MANIFEST_MEDIA_TYPE, ImageIndexEntry,
    OCI_IMAGE_INDEX_MEDIA_TYPE, OCI_IMAGE_MEDIA_TYPE, OciDescriptor, OciImageIndex,
    OciImageManifest,
};
use serde::{Deserialize, de::IgnoredAny};

use crate::error::{ImageError, Result, shown};

/// The most bytes of a manifest or index: what registries accept at most (distribution specification, "Pushing
/// Manifests": 4 MiB).
pub(crate) const MAX_MANIFEST_BYTES: u64 = 4 << 20;
/// The most layers of an image.
const MAX_LAYERS: usize = 512;
/// The most entries of an index.
const MAX_ENTRIES: usize = 1024;
/// How many entries without a platform are looked at.
const MAX_UNNAMED: usize = 8;

/// The media types that are asked for.
pub(crate) const ACCEPT: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";

/// A checked descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    pub(crate) media_type: String,
    pub(crate) annotations: BTreeMap<String, String>,
}

/// A checked manifest.
#[derive(Clone, Debug)]
pub(crate) struct Manifest {
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
    pub(crate) annotations: BTreeMap<String, String>,
}

/// What a registry answers for a tag.
#[derive(Debug)]
pub(crate) enum Document {
    Manifest(Manifest),
    Index(OciImageIndex),
}

/// What decides whether a document is a manifest or an index.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Shape {
    #[serde(default)]
    media_type: Option<String>,
    #[serde(default)]
    layers: Option<IgnoredAny>,
    #[serde(default)]
    manifests: Option<IgnoredAny>,
}

/// Parses a document.
///
/// One that is a manifest to one reader and an index to another is refused, as the image specification asks.
pub(crate) fn parse(bytes: &[u8]) -> Result<Document> {
    let refuse = |reason: String| ImageError::malformed("manifest", reason);
    let json = |error: serde_json::Error| refuse(shown(&error.to_string()));
    let shape: Shape = serde_json::from_slice(bytes).map_err(json)?;
    let is_index = match (shape.layers.is_some(), shape.manifests.is_some()) {
        (true, false) => false,
        (false, true) => true,
        (true, true) => return Err(refuse("has both layers and manifests".to_owned())),
        (false, false) => return Err(refuse("has neither layers nor manifests".to_owned())),
    };
    let allowed = if is_index {
        [OCI_IMAGE_INDEX_MEDIA_TYPE, IMAGE_MANIFEST_LIST_MEDIA_TYPE]
    } else {
        [OCI_IMAGE_MEDIA_TYPE, IMAGE_MANIFEST_MEDIA_TYPE]
    };
    if let Some(said) = &shape.media_type
        && !allowed.contains(&said.as_str())
    {
        return Err(refuse(format!("does not hold what its media type {} says", shown(said))));
    }
    if is_index {
        let index: OciImageIndex = serde_json::from_slice(bytes).map_err(json)?;
        return Ok(Document::Index(index));
    }
    let manifest: OciImageManifest = serde_json::from_slice(bytes).map_err(json)?;
    if manifest.schema_version != 2 {
        return Err(refuse(format!("has schema version {}, wanted 2", manifest.schema_version)));
    }
    if manifest.layers.len() > MAX_LAYERS {
        let count = manifest.layers.len();
        return Err(refuse(format!("has {count} layers, at most {MAX_LAYERS} are taken")));
    }
    let config = checked("manifest.config", manifest.config)?;
    let layers = manifest
        .layers
        .into_iter()
        .enumerate()
        .map(|(at, layer)| checked(&format!("manifest.layers[{at}]"), layer))
        .collect::<Result<_>>()?;
    let annotations = manifest.annotations.unwrap_or_default();
    Ok(Document::Manifest(Manifest { config, layers, annotations }))
}

fn checked(what: &str, descriptor: OciDescriptor) -> Result<Descriptor> {
    let digest = digest(what, &descriptor.digest)?;
    let size = size(what, descriptor.size)?;
    let annotations = descriptor.annotations.unwrap_or_default();
    Ok(Descriptor { digest, size, media_type: descriptor.media_type, annotations })
}

fn digest(what: &str, text: &str) -> Result<Digest> {
    text.parse().map_err(|error: drivers_api::ParseError| {
        ImageError::malformed(format!("{what}.digest"), format!("invalid digest: {error}"))
    })
}

fn size(what: &str, size: i64) -> Result<u64> {
    u64::try_from(size)
        .map_err(|_| ImageError::malformed(format!("{what}.size"), "wanted a size of at least 0"))
}

/// Chooses from an index: the first entry of the wanted platform, else the entries that name none, whose configs decide.
///
/// Attestations and entries of an unknown platform are skipped. An empty choice is an error that lists what there is.
pub(crate) fn choose(index: &OciImageIndex, want: Architecture) -> Result<Vec<Descriptor>> {
    if index.manifests.len() > MAX_ENTRIES {
        let count = index.manifests.len();
        let reason = format!("has {count} entries, at most {MAX_ENTRIES} are taken");
        return Err(ImageError::malformed("index", reason));
    }
    let images: Vec<(usize, &ImageIndexEntry)> =
        index.manifests.iter().enumerate().filter(|(_, entry)| is_image(entry)).collect();
    let entry = |(at, entry): &(usize, &ImageIndexEntry)| {
        let what = format!("index.manifests[{at}]");
        Ok(Descriptor {
            digest: digest(&what, &entry.digest)?,
            size: size(&what, entry.size)?,
            media_type: entry.media_type.clone(),
            annotations: entry.annotations.clone().unwrap_or_default(),
        })
    };
    let matching = images.iter().find(|(_, entry)| {
        entry.platform.as_ref().is_some_and(|platform| {
            platform.os.to_string() == "linux" && platform.architecture.to_string() == want.as_str()
        })
    });
    if let Some(found) = matching {
        return Ok(vec![entry(found)?]);
    }
    let unnamed: Vec<Descriptor> = images
        .iter()
        .filter(|(_, entry)| entry.platform.is_none())
        .take(MAX_UNNAMED)
        .map(entry)
        .collect::<Result<_>>()?;
    if unnamed.is_empty() {
        return Err(no_platform(want, images.iter().map(|(_, entry)| *entry)));
    }
    Ok(unnamed)
}

fn no_platform<'a>(
    want: Architecture,
    there: impl Iterator<Item = &'a ImageIndexEntry>,
) -> ImageError {
    let there: Vec<String> = there
        .filter_map(|entry| entry.platform.as_ref())
        .take(20)
        .map(|platform| format!("{}/{}", platform.os, platform.architecture))
        .collect();
    let there = if there.is_empty() { "nothing".to_owned() } else { there.join(", ") };
    let reason = format!("no manifest for linux/{}; there is {}", want.as_str(), shown(&there));
    ImageError::not_found("index", reason)
}

/// An attestation carries an annotation of `BuildKit`'s, and an unknown platform.
fn is_image(entry: &ImageIndexEntry) -> bool {
    let attestation = entry.annotations.as_ref().is_some_and(|annotations| {
        annotations
            .get("vnd.docker.reference.type")
            .is_some_and(|kind| kind.contains("attestation"))
    });
    let unknown = entry.platform.as_ref().is_some_and(|platform| {
        platform.os.to_string() == "unknown" || platform.architecture.to_string() == "unknown"
    });
    let manifest = [OCI_IMAGE_MEDIA_TYPE, IMAGE_MANIFEST_MEDIA_TYPE];
    !attestation && !unknown && manifest.contains(&entry.media_type.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest_text(fill: char) -> String {
        format!("sha256:{}", String::from(fill).repeat(64))
    }

    fn index(entries: &str) -> OciImageIndex {
        let text = format!("{{\"schemaVersion\":2,\"manifests\":[{entries}]}}");
        match parse(text.as_bytes()).unwrap() {
            Document::Index(index) => index,
            Document::Manifest(_) => panic!("an index was wanted"),
        }
    }

    fn entry(fill: char, rest: &str) -> String {
        let digest = digest_text(fill);
        format!(
            "{{\"mediaType\":\"{OCI_IMAGE_MEDIA_TYPE}\",\"digest\":\"{digest}\",\"size\":5{rest}}}"
        )
    }

    fn platform(os: &str, arch: &str) -> String {
        format!(",\"platform\":{{\"os\":\"{os}\",\"architecture\":\"{arch}\"}}")
    }

    #[test]
    fn upg_02_the_first_matching_entry_wins_and_attestations_are_skipped() {
        let attestation = format!(
            "{},\"annotations\":{{\"vnd.docker.reference.type\":\"attestation-manifest\"}}",
            platform("unknown", "unknown")
        );
        let index = index(
            &[
                entry('a', &attestation),
                entry('b', &platform("linux", "arm64")),
                entry('c', &platform("linux", "amd64")),
                entry('d', &platform("linux", "amd64")),
                entry('e', ""),
            ]
            .join(","),
        );
        for _ in 0..3 {
            let chosen = choose(&index, Architecture::Amd64).unwrap();
            assert_eq!(chosen.len(), 1);
            assert_eq!(chosen[0].digest.as_str(), digest_text('c'));
        }
        let chosen = choose(&index, Architecture::Riscv64).unwrap();
        assert_eq!(chosen[0].digest.as_str(), digest_text('e'), "no platform: the config decides");
    }

    #[test]
    fn upg_02_without_a_match_the_error_lists_what_there_is() {
        let index = index(
            &[entry('a', &platform("linux", "s390x")), entry('b', &platform("linux", "ppc64le"))]
                .join(","),
        );
        let error = choose(&index, Architecture::Amd64).unwrap_err().to_string();
        assert!(error.contains("no manifest for linux/amd64"), "{error}");
        assert!(error.contains("linux/s390x, linux/ppc64le"), "{error}");
    }

    #[test]
    fn pth_02_a_digest_that_is_no_digest_is_refused_with_its_place() {
        for bad in [
            "sha256:../../../../../tmp/agent-escape/digest",
            "sha256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
            "sha512:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
            "",
        ] {
            let text = format!(
                "{{\"schemaVersion\":2,\"config\":{{\"mediaType\":\"x\",\"digest\":\"{}\",\"size\":1}},\
                 \"layers\":[{{\"mediaType\":\"x\",\"digest\":\"{bad}\",\"size\":1}}]}}",
                digest_text('a')
            );
            let error = parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("manifest.layers[0].digest: invalid digest"), "{error}");
        }
    }

    #[test]
    fn a_document_that_is_two_things_is_refused() {
        let text = "{\"schemaVersion\":2,\"layers\":[],\"manifests\":[]}";
        assert!(parse(text.as_bytes()).unwrap_err().to_string().contains("both"));
        assert!(parse(b"{}").is_err());
        assert!(parse(b"[1,2").is_err());
        let text = format!("{{\"mediaType\":\"{OCI_IMAGE_MEDIA_TYPE}\",\"manifests\":[]}}");
        assert!(parse(text.as_bytes()).is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(0_u8.., 0..200)) {
            drop(parse(&bytes));
        }
    }
}
