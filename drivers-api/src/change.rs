//! What an idempotent call did.

/// What a call did to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[must_use = "whether the host changed decides what is reported"]
pub enum Change {
    /// Everything was as wanted. The call wrote nothing.
    Unchanged,
    /// Something that was there was changed, finished or removed.
    Changed,
    /// Something that was not there was made.
    Created,
}

impl Change {
    /// `Unchanged`, unless `changed`.
    pub const fn changed_if(changed: bool) -> Self {
        if changed { Self::Changed } else { Self::Unchanged }
    }

    /// The greater of two: what a call of two parts did.
    pub fn and(self, other: Self) -> Self {
        self.max(other)
    }

    /// Whether the host was written to.
    #[must_use]
    pub const fn wrote(self) -> bool {
        !matches!(self, Self::Unchanged)
    }
}

/// A value with what it took to have it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[must_use = "whether the host changed decides what is reported"]
pub struct Outcome<T> {
    /// What the call did.
    pub change: Change,
    /// What it answers.
    pub value: T,
}

impl<T> Outcome<T> {
    /// A value and what it took.
    pub const fn new(change: Change, value: T) -> Self {
        Self { change, value }
    }
}
