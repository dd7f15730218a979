//! The one error of the contract, and what its kind makes the reconciler do.

use std::{borrow::Cow, error::Error as StdError, fmt, time::Duration};

/// What a driver call answers.
pub type Result<T> = std::result::Result<T, Error>;

/// What class of failure this is. Callers decide by the kind, never by the text.
///
/// The kinds are few on purpose: each one leads to another next step (see [`ErrorKind::next_step`]). Every kind
/// survives the process boundary under its [`ErrorKind::code`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request itself is wrong and stays wrong until somebody changes it.
    InvalidSpec,
    /// Something is there that this call must not touch: another owner's object of the same name, an id in use.
    Conflict,
    /// The driver knows what is asked and does not implement it ("patch welcome").
    Unsupported,
    /// The request makes no sense for this driver, by design: rotating a mesh peer on a bridge.
    NotApplicable,
    /// A look-up's object is not there. Never answered by a delete, stop or detach.
    NotFound,
    /// The host or a peer refused: permission, credentials, policy.
    Denied,
    /// A resource ran out: disk space, memory, addresses, PCI slots.
    Exhausted,
    /// Something needed does not answer now: a daemon, a registry, a lock held for a moment.
    Unavailable,
    /// The deadline of the [`Context`](crate::Context) passed. What was done so far is safe to repeat.
    Deadline,
    /// The caller gave up. What was done so far is safe to repeat.
    Cancelled,
    /// It is not known whether the call took effect; look before you act again.
    UnknownOutcome,
    /// A fault of the driver itself.
    Internal,
}

/// What the reconciler does after an error of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NextStep {
    /// Try again with back-off.
    Retry,
    /// Look at the host first, then plan anew, with back-off.
    ObserveThenRetry,
    /// Nothing helps but a change of the wanted state or by a person. Looked at again at the slow interval, since a
    /// person may mend the host without telling us.
    WaitForChange,
    /// The object is not there: plan anew at once.
    PlanAnew,
    /// The caller itself ended the call: nothing to do here.
    Nothing,
}

impl ErrorKind {
    /// All kinds, for tests and generated documentation.
    pub const ALL: [Self; 12] = [
        Self::InvalidSpec,
        Self::Conflict,
        Self::Unsupported,
        Self::NotApplicable,
        Self::NotFound,
        Self::Denied,
        Self::Exhausted,
        Self::Unavailable,
        Self::Deadline,
        Self::Cancelled,
        Self::UnknownOutcome,
        Self::Internal,
    ];

    /// The kind's name on every wire: lower-case kebab-case, never changed once published.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::InvalidSpec => "invalid-spec",
            Self::Conflict => "conflict",
            Self::Unsupported => "unsupported",
            Self::NotApplicable => "not-applicable",
            Self::NotFound => "not-found",
            Self::Denied => "denied",
            Self::Exhausted => "exhausted",
            Self::Unavailable => "unavailable",
            Self::Deadline => "deadline",
            Self::Cancelled => "cancelled",
            Self::UnknownOutcome => "unknown-outcome",
            Self::Internal => "internal",
        }
    }

    /// The kind of a code; a code that this version does not know is [`ErrorKind::Internal`].
    #[must_use]
    pub fn from_code(code: &str) -> Self {
        Self::ALL.into_iter().find(|kind| kind.code() == code).unwrap_or(Self::Internal)
    }

    /// The one decision from kind to what happens next. No wildcard: a new kind forces a decision here.
    ///
    /// Kinds that a person or another process may mend on the host at any time (`Denied`, `Exhausted`, `Conflict`)
    /// are tried again: when unsure, retry. `Internal` is retried too, since a fault of ours must not need a restart.
    #[must_use]
    pub const fn next_step(self) -> NextStep {
        match self {
            Self::InvalidSpec | Self::Unsupported | Self::NotApplicable => NextStep::WaitForChange,
            Self::Conflict | Self::Denied | Self::Exhausted | Self::Unavailable => NextStep::Retry,
            Self::Deadline | Self::UnknownOutcome | Self::Internal => NextStep::ObserveThenRetry,
            Self::NotFound => NextStep::PlanAnew,
            Self::Cancelled => NextStep::Nothing,
        }
    }

    /// Whether the same call may succeed later without a change of what is wanted.
    #[must_use]
    pub const fn is_retryable(self) -> bool {
        matches!(
            self.next_step(),
            NextStep::Retry | NextStep::ObserveThenRetry | NextStep::PlanAnew
        )
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

/// A failed driver call: its kind, what was tried on which object, why it failed, and what a person can do.
///
/// `Display` prints this error's own part only; the causes are in [`StdError::source`], and [`Error::chain`] prints
/// all of them. No part of it may hold a secret.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    operation: Cow<'static, str>,
    object: String,
    reason: String,
    remedy: Option<Cow<'static, str>>,
    field: Option<String>,
    retry_after: Option<Duration>,
    source: Option<Box<dyn StdError + Send + Sync + 'static>>,
}

impl Error {
    /// A new error: `operation` is what was tried (`"attach disk"`), `object` on what (`"vm 3f2b…"`), `reason` why it
    /// failed.
    pub fn new(
        kind: ErrorKind,
        operation: impl Into<Cow<'static, str>>,
        object: impl fmt::Display,
        reason: impl fmt::Display,
    ) -> Self {
        Self(Box::new(Inner {
            kind,
            operation: operation.into(),
            object: object.to_string(),
            reason: reason.to_string(),
            remedy: None,
            field: None,
            retry_after: None,
            source: None,
        }))
    }

    /// An [`ErrorKind::InvalidSpec`] that names the field by its path in the spec (`disks[1].bus`).
    pub fn invalid(field: impl Into<String>, reason: impl fmt::Display) -> Self {
        let mut error = Self::new(ErrorKind::InvalidSpec, "check", "spec", reason);
        error.0.field = Some(field.into());
        error
    }

    /// [`ErrorKind::NotApplicable`]: `operation` makes no sense for `driver`.
    pub fn not_applicable(operation: &'static str, driver: impl fmt::Display) -> Self {
        Self::new(
            ErrorKind::NotApplicable,
            operation,
            driver,
            "the operation does not apply to this driver",
        )
    }

    /// [`ErrorKind::Unsupported`]: `driver` does not implement `operation`.
    pub fn unsupported(operation: &'static str, driver: impl fmt::Display) -> Self {
        Self::new(
            ErrorKind::Unsupported,
            operation,
            driver,
            "the driver does not implement the operation",
        )
    }

    /// [`ErrorKind::NotFound`] of a look-up.
    pub fn not_found(operation: &'static str, object: impl fmt::Display) -> Self {
        Self::new(ErrorKind::NotFound, operation, object, "no such object")
    }

    /// Adds what a person can do about it.
    #[must_use]
    pub fn with_remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.0.remedy = Some(remedy.into());
        self
    }

    /// Adds the path of the field that is at fault.
    #[must_use]
    pub fn with_field(mut self, field: impl Into<String>) -> Self {
        self.0.field = Some(field.into());
        self
    }

    /// Replaces operation and object, which an inner helper could not know.
    #[must_use]
    pub fn during(
        mut self,
        operation: impl Into<Cow<'static, str>>,
        object: impl fmt::Display,
    ) -> Self {
        self.0.operation = operation.into();
        self.0.object = object.to_string();
        self
    }

    /// Adds the least time after which a retry makes sense, when the other side said so.
    #[must_use]
    pub fn with_retry_after(mut self, after: Duration) -> Self {
        self.0.retry_after = Some(after);
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn StdError + Send + Sync + 'static>>,
    ) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// The kind: what callers decide by.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What was tried.
    #[must_use]
    pub fn operation(&self) -> &str {
        &self.0.operation
    }

    /// On what object it was tried.
    #[must_use]
    pub fn object(&self) -> &str {
        &self.0.object
    }

    /// Why it failed, without the causes.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.0.reason
    }

    /// What a person can do.
    #[must_use]
    pub fn remedy(&self) -> Option<&str> {
        self.0.remedy.as_deref()
    }

    /// The path of the field at fault.
    #[must_use]
    pub fn field(&self) -> Option<&str> {
        self.0.field.as_deref()
    }

    /// The least time to wait before a retry, when the other side named one.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// This error and all its causes in one line, outermost first, separated by `": "`.
    #[must_use]
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut next = self.source();
        while let Some(cause) = next {
            text.push_str(": ");
            text.push_str(&cause.to_string());
            next = cause.source();
        }
        text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &self.0;
        write!(f, "cannot {} {}", inner.operation, inner.object)?;
        if let Some(field) = &inner.field {
            write!(f, ": {field}")?;
        }
        write!(f, ": {}", inner.reason)?;
        if let Some(remedy) = &inner.remedy {
            write!(f, " ({remedy})")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error[{}]: {}", self.0.kind, self.chain())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}
