//! Why a round failed.

use std::fmt;

/// What was tried and why it failed, in one line or with the lines of a difference.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Failure(pub(crate) String);

/// The answer of most functions here.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// Says what was tried when something else failed.
pub(crate) trait During<T> {
    /// With what was tried before the reason.
    fn during(self, what: impl fmt::Display) -> Result<T>;
}

impl<T, E: std::error::Error> During<T> for std::result::Result<T, E> {
    fn during(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|error| {
            let mut text = format!("cannot {what}: {error}");
            let mut cause = error.source();
            while let Some(next) = cause {
                text = format!("{text}: {next}");
                cause = next.source();
            }
            Failure(text)
        })
    }
}
