//! Names, paths and references that people write, checked before anything is built from them.

use std::{fmt, path::Path, str::FromStr};

use crate::uuid::{ParseError, serde_as_text};

macro_rules! text_type {
    ($(#[$meta:meta])* $name:ident = $what:literal, $check:expr) => {
        $(#[$meta])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(String);

        impl $name {
            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = ParseError;
            fn from_str(text: &str) -> Result<Self, ParseError> {
                let check: fn(&str) -> Result<(), &'static str> = $check;
                check(text).map_err(|reason| ParseError::new($what, reason, text))?;
                Ok(Self(text.to_owned()))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        serde_as_text!($name);
    };
}

text_type! {
    /// What people call an object: 1 to 255 bytes without control characters.
    ///
    /// Free text otherwise, so no path, option or document may be built from it without the escaping of that place;
    /// [`fmt::Debug`] escapes it for logs.
    DisplayName = "name", |text| {
        if text.is_empty() || text.len() > 255 {
            Err("wanted 1 to 255 bytes")
        } else if text.chars().any(char::is_control) {
            Err("control characters are not allowed")
        } else {
            Ok(())
        }
    }
}

text_type! {
    /// The name of a disk or NIC within its VM: 1 to 32 of `a-z 0-9 -`, starting with a letter. Safe as a part of a
    /// VMM's device id.
    DeviceName = "device name", |text| {
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if text.is_empty() || text.len() > 32 {
            Err("wanted 1 to 32 characters")
        } else if !text.bytes().all(allowed) || !text.starts_with(|first: char| first.is_ascii_lowercase()) {
            Err("wanted lower-case letters, digits and hyphens, starting with a letter")
        } else {
            Ok(())
        }
    }
}

text_type! {
    /// An absolute path on the host: at most 4096 bytes of UTF-8, without `.`, `..`, empty components or control
    /// characters. Never a URI or a VMM's pseudo-protocol, since it starts with a slash.
    HostPath = "host path", |text| {
        if !text.starts_with('/') {
            return Err("wanted an absolute path");
        }
        if text.len() > 4096 {
            return Err("wanted at most 4096 bytes");
        }
        if text.chars().any(char::is_control) {
            return Err("control characters are not allowed");
        }
        let mut parts = text.split('/').skip(1);
        if text != "/" && parts.any(|part| part.is_empty() || part == "." || part == "..") {
            return Err("empty, \".\" and \"..\" components are not allowed");
        }
        Ok(())
    }
}

impl HostPath {
    /// As a path.
    #[must_use]
    pub fn as_path(&self) -> &Path {
        Path::new(&self.0)
    }
}

text_type! {
    /// A SHA-256 digest as OCI writes it: `sha256:` and 64 lower-case hexadecimal digits
    /// (OCI image specification, "Digests"). Upper case is refused, not folded.
    Digest = "digest", |text| {
        let hex = text.strip_prefix("sha256:").ok_or("wanted sha256: and 64 hexadecimal digits")?;
        if hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)) {
            Ok(())
        } else {
            Err("wanted 64 lower-case hexadecimal digits")
        }
    }
}

impl Digest {
    /// The 64 hexadecimal digits.
    #[must_use]
    pub fn hex(&self) -> &str {
        self.0.strip_prefix("sha256:").unwrap_or_default()
    }
}

text_type! {
    /// Where a secret is: `secret://…`, `vault://…` or `env://…`. The value never stands in a spec.
    SecretRef = "secret reference", |text| {
        let rest = ["secret://", "vault://", "env://"].iter().find_map(|scheme| text.strip_prefix(scheme));
        match rest {
            Some(rest) if !rest.is_empty() && text.len() <= 1024 && rest.chars().all(|c| c.is_ascii_graphic()) => Ok(()),
            _ => Err("wanted secret://, vault:// or env:// and a name"),
        }
    }
}

text_type! {
    /// What an image driver can pull.
    ///
    /// * `[oci://]REGISTRY[:PORT]/REPOSITORY[:TAG][@sha256:HEX]`: an OCI artifact. Registry and repository are explicit:
    ///   there is no default registry. Without tag and digest the tag is `latest`.
    /// * `https://HOST/PATH#sha256:HEX`: one file, whose hash is required since nothing else names its content.
    ///   `http://` in the same form, which a driver takes for loopback or where it is configured.
    /// * `file:///ABSOLUTE/PATH#sha256:HEX`: one file of this host.
    ImageRef = "image reference", check_image_ref
}

/// What an [`ImageRef`] names, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImageSource<'a> {
    /// An artifact in a registry.
    Oci {
        /// `HOST` or `HOST:PORT`.
        registry: &'a str,
        /// The repository's path.
        repository: &'a str,
        /// The tag, where one is given.
        tag: Option<&'a str>,
        /// The digest, where one is given: `sha256:…`.
        digest: Option<&'a str>,
    },
    /// One file over HTTP.
    Http {
        /// The URL without the fragment.
        url: &'a str,
        /// The wanted hash: `sha256:…`.
        digest: &'a str,
    },
    /// One file of the host.
    File {
        /// Its absolute path.
        path: &'a str,
        /// The wanted hash: `sha256:…`.
        digest: &'a str,
    },
}

impl ImageRef {
    /// The parts.
    ///
    /// # Errors
    /// Never for a value that was made by `from_str`; the signature spares a panic.
    pub fn source(&self) -> Result<ImageSource<'_>, ParseError> {
        split_image_ref(&self.0)
            .map_err(|reason| ParseError::new("image reference", reason, &self.0))
    }
}

fn check_image_ref(text: &str) -> Result<(), &'static str> {
    split_image_ref(text).map(|_| ())
}

fn split_image_ref(text: &str) -> Result<ImageSource<'_>, &'static str> {
    if text.len() > 1024 || !text.chars().all(|c| c.is_ascii_graphic()) {
        return Err("wanted at most 1024 printable ASCII characters");
    }
    if text.starts_with("https://") || text.starts_with("http://") {
        let (url, digest) = split_file_digest(text)?;
        let rest = url.split_once("://").map_or("", |(_, rest)| rest);
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        if host.is_empty() || host.contains('@') || path.is_empty() {
            return Err("wanted https://HOST/PATH#sha256:HEX, without user information");
        }
        return Ok(ImageSource::Http { url, digest });
    }
    if let Some(rest) = text.strip_prefix("file://") {
        let (path, digest) = split_file_digest(rest)?;
        path.parse::<HostPath>().map_err(|error| error.reason())?;
        return Ok(ImageSource::File { path, digest });
    }
    split_oci(text.strip_prefix("oci://").unwrap_or(text))
}

fn split_file_digest(text: &str) -> Result<(&str, &str), &'static str> {
    let (location, digest) =
        text.split_once('#').ok_or("wanted #sha256:HEX at the end: a plain file needs its hash")?;
    digest.parse::<Digest>().map_err(|error| error.reason())?;
    Ok((location, digest))
}

/// Grammar: OCI distribution specification, "Pulling manifests".
fn split_oci(text: &str) -> Result<ImageSource<'_>, &'static str> {
    let (text, digest) =
        text.split_once('@').map_or((text, None), |(name, digest)| (name, Some(digest)));
    if let Some(digest) = digest {
        digest.parse::<Digest>().map_err(|error| error.reason())?;
    }
    let (registry, rest) =
        text.split_once('/').ok_or("wanted REGISTRY/REPOSITORY; there is no default registry")?;
    let (repository, tag) =
        rest.split_once(':').map_or((rest, None), |(name, tag)| (name, Some(tag)));
    let (host, port) =
        registry.split_once(':').map_or((registry, None), |(host, port)| (host, Some(port)));
    let host_ok = !host.is_empty()
        && host.len() <= 253
        && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-".contains(&byte))
        && !host.starts_with(['-', '.'])
        && (host.contains('.') || port.is_some() || host == "localhost");
    if !host_ok || port.is_some_and(|port| port.parse::<u16>().map_or(true, |port| port == 0)) {
        return Err(
            "wanted a registry HOST[:PORT] before the first slash (with a dot, a port, or localhost)",
        );
    }
    let component = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
            && part.ends_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
            && part
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b))
            && !part.contains("..")
    };
    if repository.len() > 255 || !repository.split('/').all(component) {
        return Err("wanted a repository of lower-case letters, digits, '.', '_', '-' and '/'");
    }
    let tag_ok = |tag: &str| {
        tag.len() <= 128
            && tag.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            && tag.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
    };
    if tag.is_some_and(|tag| !tag_ok(tag)) {
        return Err("wanted a tag of at most 128 letters, digits, '.', '_' and '-'");
    }
    Ok(ImageSource::Oci { registry, repository, tag, digest })
}
