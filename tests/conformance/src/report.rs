//! What a run of the kit answers.

use std::{fmt, time::Duration};

/// Which of the four traits a run is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DriverKind {
    /// [`drivers_api::Hypervisor`].
    Hypervisor,
    /// [`drivers_api::Network`].
    Network,
    /// [`drivers_api::Volume`].
    Volume,
    /// [`drivers_api::Image`].
    Image,
}

impl DriverKind {
    /// The kind's name as commands take it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hypervisor => "hypervisor",
            Self::Network => "network",
            Self::Volume => "volume",
            Self::Image => "image",
        }
    }
}

impl fmt::Display for DriverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How a case ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The rule holds.
    Passed,
    /// The rule is broken: what was seen.
    Failed(String),
    /// The rule says nothing about this driver: why.
    NotApplicable(String),
    /// The bench could not set the case up: why. The rule is neither kept nor broken.
    NotTried(String),
}

impl Verdict {
    /// The word in the table.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed(_) => "FAILED",
            Self::NotApplicable(_) => "not applicable",
            Self::NotTried(_) => "not tried",
        }
    }

    /// What was seen, or why the case was not run; empty for a pass.
    #[must_use]
    pub fn detail(&self) -> &str {
        match self {
            Self::Passed => "",
            Self::Failed(detail) | Self::NotApplicable(detail) | Self::NotTried(detail) => detail,
        }
    }
}

/// One case of a run.
#[derive(Clone, Debug)]
pub struct CaseReport {
    /// The case's name, such as `create-again`; stable between versions.
    pub name: &'static str,
    /// The sentence that the case holds.
    pub sentence: &'static str,
    /// How it ended.
    pub verdict: Verdict,
    /// How long it took.
    pub took: Duration,
}

/// A run of the kit over one driver. Plain data; [`fmt::Display`] prints the table.
#[derive(Clone, Debug)]
pub struct Report {
    /// Which trait.
    pub kind: DriverKind,
    /// What the driver calls itself, from its `host_info`.
    pub driver: String,
    /// The version of its back-end, where it has one.
    pub backend: Option<String>,
    /// The cases in the order in which they ran.
    pub cases: Vec<CaseReport>,
}

impl Report {
    /// Whether no case failed. Cases that were not tried do not count as failed: see [`Report::complete`].
    #[must_use]
    pub fn passed(&self) -> bool {
        self.failures().next().is_none() && !self.cases.is_empty()
    }

    /// Whether no case failed and each that applies was tried.
    #[must_use]
    pub fn complete(&self) -> bool {
        self.passed() && !self.cases.iter().any(|case| matches!(case.verdict, Verdict::NotTried(_)))
    }

    /// The cases that failed.
    pub fn failures(&self) -> impl Iterator<Item = &CaseReport> {
        self.cases.iter().filter(|case| matches!(case.verdict, Verdict::Failed(_)))
    }

    /// One case by its name.
    #[must_use]
    pub fn case(&self, name: &str) -> Option<&CaseReport> {
        self.cases.iter().find(|case| case.name == name)
    }

    /// Prints the table, for `cargo test -- --nocapture` and for the output of a failed test.
    ///
    /// # Panics
    /// When a case failed: this is the assertion of a driver's test.
    #[track_caller]
    #[expect(clippy::panic, clippy::print_stdout, reason = "the verdict of a test, and its output")]
    pub fn assert_passed(&self) {
        println!("{self}");
        if !self.passed() {
            let names: Vec<&str> = self.failures().map(|case| case.name).collect();
            panic!("the driver breaks the contract in {}: see the table above", names.join(", "));
        }
    }

    /// As [`Report::assert_passed`], and refuses a run in which a case was not tried.
    ///
    /// # Panics
    /// When a case failed or was not tried.
    #[track_caller]
    #[expect(clippy::panic, reason = "the verdict of a test")]
    pub fn assert_complete(&self) {
        self.assert_passed();
        if !self.complete() {
            panic!("cases were not tried: see the table above");
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "conformance of {} driver {}", self.kind, self.driver)?;
        if let Some(backend) = &self.backend {
            write!(f, " over {backend}")?;
        }
        writeln!(f)?;
        let width = self.cases.iter().map(|case| case.name.len()).max().unwrap_or_default();
        for case in &self.cases {
            let (name, verdict) = (case.name, case.verdict.as_str());
            let ms = case.took.as_millis();
            writeln!(f, "  {verdict:<14}  {name:<width$}  {ms:>6} ms  {}", case.sentence)?;
            for line in case.verdict.detail().lines() {
                writeln!(f, "  {:<14}  {:<width$}    {line}", "", "")?;
            }
        }
        let count = |word| self.cases.iter().filter(|case| case.verdict.as_str() == word).count();
        write!(
            f,
            "{} cases: {} passed, {} failed, {} not applicable, {} not tried",
            self.cases.len(),
            count("passed"),
            count("FAILED"),
            count("not applicable"),
            count("not tried")
        )
    }
}
