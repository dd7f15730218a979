//! Why an image cannot be had.

use std::{fmt, sync::Arc, time::Duration};

use drivers_api::{Error, ErrorKind};
use host::files::FileError;

/// Why an image cannot be had. Shared by all who wait for one download, so it is turned into the contract's error for each
/// of them by [`to_error`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImageError {
    /// The artifact, or what a registry says about it, breaks the rules.
    #[error("{what}: {reason}")]
    Malformed { what: String, reason: String },
    /// The bytes are not those that the digest names.
    #[error("digest mismatch of {what}: wanted {wanted}, got {got}")]
    Mismatch { what: String, wanted: String, got: String },
    /// More bytes than the configuration allows.
    #[error("{what} is too large: more than {limit} bytes")]
    TooLarge { what: String, limit: u64 },
    /// Not enough room.
    #[error("{what} needs {needed} bytes, {free} are free for the cache")]
    NoRoom { what: String, needed: u64, free: u64 },
    /// The other side does not have it.
    #[error("{what}: {reason}")]
    NotFound { what: String, reason: String },
    /// The other side, or our own policy, says no.
    #[error("{what}: {reason}")]
    Denied { what: String, reason: String },
    /// The other side does not answer, or not with what helps.
    #[error("{what}: {reason}")]
    Unavailable { what: String, reason: String, retry_after: Option<Duration> },
    /// A file of the cache cannot be worked with.
    #[error("{0}")]
    File(FileError),
    /// A part of the agent failed: the secret resolver, a fault point.
    #[error("{}", .0.reason())]
    Inner(Error),
    /// Nobody waits for it any more.
    #[error("nobody waits for it any more")]
    Abandoned,
    /// Content that was there when the pull began was removed before it could be named.
    #[error("it was removed while it was pulled")]
    Vanished,
    /// A fault of ours.
    #[error("{0}")]
    Internal(String),
}

/// What most functions of this crate answer.
pub(crate) type Result<T> = std::result::Result<T, ImageError>;

impl From<FileError> for ImageError {
    fn from(error: FileError) -> Self {
        Self::File(error)
    }
}

impl From<Error> for ImageError {
    fn from(error: Error) -> Self {
        Self::Inner(error)
    }
}

impl ImageError {
    pub(crate) fn malformed(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Malformed { what: what.into(), reason: reason.into() }
    }

    pub(crate) fn unavailable(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Unavailable { what: what.into(), reason: reason.into(), retry_after: None }
    }

    pub(crate) fn denied(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Denied { what: what.into(), reason: reason.into() }
    }

    pub(crate) fn not_found(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::NotFound { what: what.into(), reason: reason.into() }
    }

    fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::TooLarge { .. } => Some("raise max_image_bytes if the image is trusted"),
            Self::NoRoom { .. } => Some("collect unused images or give the cache more room"),
            Self::Mismatch { .. } => {
                Some("the registry or a proxy before it holds other bytes; push the image again")
            }
            Self::Malformed { .. }
            | Self::NotFound { .. }
            | Self::Denied { .. }
            | Self::Unavailable { .. }
            | Self::File(_)
            | Self::Inner(_)
            | Self::Abandoned
            | Self::Vanished
            | Self::Internal(_) => None,
        }
    }
}

/// The causes of an error as one text: the original is shared and cannot be moved into the contract's error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Cause(String);

/// The contract's error for one of those who wait.
pub(crate) fn to_error(
    error: &Arc<ImageError>,
    operation: &'static str,
    object: impl fmt::Display,
) -> Error {
    let error = error.as_ref();
    let kind = match error {
        ImageError::Malformed { .. } | ImageError::Mismatch { .. } => ErrorKind::InvalidSpec,
        ImageError::TooLarge { .. } | ImageError::NoRoom { .. } => ErrorKind::Exhausted,
        ImageError::NotFound { .. } => ErrorKind::NotFound,
        ImageError::Denied { .. } => ErrorKind::Denied,
        ImageError::Unavailable { .. } => ErrorKind::Unavailable,
        ImageError::File(file) => file_kind(file),
        ImageError::Inner(inner) => inner.kind(),
        // Whoever asks again starts anew.
        ImageError::Abandoned | ImageError::Vanished => ErrorKind::Unavailable,
        ImageError::Internal(_) => ErrorKind::Internal,
    };
    let mut answer = Error::new(kind, operation, object, error.to_string());
    if let Some(remedy) = error.remedy() {
        answer = answer.with_remedy(remedy);
    }
    match error {
        ImageError::Unavailable { retry_after: Some(after), .. } => answer.with_retry_after(*after),
        ImageError::File(file) => answer.with_source(Cause(file.source.to_string())),
        ImageError::Inner(inner) => {
            let answer =
                inner.remedy().map(str::to_owned).into_iter().fold(answer, Error::with_remedy);
            match std::error::Error::source(inner) {
                Some(cause) => answer.with_source(Cause(cause.to_string())),
                None => answer,
            }
        }
        ImageError::Unavailable { retry_after: None, .. }
        | ImageError::Malformed { .. }
        | ImageError::Mismatch { .. }
        | ImageError::TooLarge { .. }
        | ImageError::NoRoom { .. }
        | ImageError::NotFound { .. }
        | ImageError::Denied { .. }
        | ImageError::Abandoned
        | ImageError::Vanished
        | ImageError::Internal(_) => answer,
    }
}

fn file_kind(error: &FileError) -> ErrorKind {
    let again = FileError {
        operation: error.operation,
        path: error.path.clone(),
        source: std::io::Error::from(error.source.kind()),
    };
    again.into_error("use", "").kind()
}

/// Foreign text for a message: at most 200 characters, control characters escaped.
pub(crate) fn shown(text: &str) -> String {
    text.chars().flat_map(char::escape_debug).take(200).collect()
}
