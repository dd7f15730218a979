//! Why a request was refused: every problem with its field, its reason and what to do.

use std::fmt;

use drivers_api::{Error, ErrorKind};
use reconciler::status::Refusal;

use crate::manifest::ManifestError;

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kind: what callers decide by.
    pub kind: ErrorKind,
    /// What was tried; empty for a manifest.
    pub operation: String,
    /// The object, as far as it is known.
    pub object: String,
    /// The path of the field.
    pub field: String,
    /// Why.
    pub reason: String,
    /// What a person can do.
    pub remedy: Option<String>,
    /// Which document of the manifest text, from 1; 0 when it is none.
    pub document: usize,
    /// Which line of the manifest text, where it is known.
    pub line: Option<usize>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        match (self.document, self.line) {
            (0, _) => {}
            (document, None) => parts.push(format!("document {document}")),
            (document, Some(line)) => parts.push(format!("document {document}, line {line}")),
        }
        match (self.operation.as_str(), self.object.as_str()) {
            ("", "") => {}
            ("", object) => parts.push(object.to_owned()),
            (operation, object) => parts.push(format!("cannot {operation} {object}")),
        }
        if !self.field.is_empty() {
            parts.push(self.field.clone());
        }
        parts.push(self.reason.clone());
        f.write_str(&parts.join(": "))?;
        match &self.remedy {
            Some(remedy) => write!(f, " ({remedy})"),
            None => Ok(()),
        }
    }
}

/// All problems of a refused request: never none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults(Vec<Fault>);

impl Faults {
    /// The problems.
    #[must_use]
    pub fn list(&self) -> &[Fault] {
        &self.0
    }

    /// The kind of the first.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.first().map_or(ErrorKind::Internal, |fault| fault.kind)
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, fault) in self.0.iter().enumerate() {
            if at > 0 {
                f.write_str("\n")?;
            }
            fmt::Display::fmt(fault, f)?;
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}

impl From<Error> for Faults {
    fn from(error: Error) -> Self {
        let mut reason = error.reason().to_owned();
        let mut cause = std::error::Error::source(&error);
        while let Some(next) = cause {
            reason = format!("{reason}: {next}");
            cause = next.source();
        }
        Self(vec![Fault {
            kind: error.kind(),
            operation: error.operation().to_owned(),
            object: error.object().to_owned(),
            field: error.field().unwrap_or_default().to_owned(),
            reason,
            remedy: error.remedy().map(str::to_owned),
            document: 0,
            line: None,
        }])
    }
}

impl From<Vec<ManifestError>> for Faults {
    fn from(errors: Vec<ManifestError>) -> Self {
        let faults = errors.into_iter().map(|error| Fault {
            kind: ErrorKind::InvalidSpec,
            operation: String::new(),
            object: error.object,
            field: error.problem.path,
            reason: error.problem.reason,
            remedy: error.problem.remedy,
            document: error.document,
            line: error.line,
        });
        Self(faults.collect())
    }
}

impl Faults {
    /// Of a set that does not fit together. `document` tells in which document of the text an object is, from 1.
    pub(crate) fn of_refusals(
        refusals: Vec<Refusal>,
        document: impl Fn(&reconciler::wanted::Key) -> usize,
    ) -> Self {
        let faults = refusals.into_iter().map(|refusal| Fault {
            kind: ErrorKind::InvalidSpec,
            operation: String::new(),
            document: document(&refusal.key),
            object: refusal.key.to_string(),
            field: refusal.field,
            reason: refusal.reason,
            remedy: refusal.hint,
            line: None,
        });
        Self(faults.collect())
    }
}
