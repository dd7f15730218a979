//! The kit fails a driver for each rule that it breaks, in the case of that rule.

#![expect(clippy::unwrap_used, reason = "the helpers of a test")]

use std::{
    collections::BTreeSet,
    fs::File,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use conformance::{
    Census, Options, Plant, VolumeBench, check_volume,
    reference::{Host, ReferenceBench},
};
use drivers_api::{
    AttachRequest, AttachedVolume, Backing, BackingKind, Change, Context, DetachRequest, Error,
    ErrorKind, HostId, HostInfo, Outcome, Result, Uuid, Volume, VolumeId, VolumeSource, VolumeSpec,
    VolumeStatus,
};

/// One way to break the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    WritesOnEachCall,
    AbsentIsAnError,
    Shrinks,
    ForgetsOnRestart,
    SetsNoMark,
    IgnoresTheContext,
    Panics,
    BlocksTheExecutor,
    LeaksDescriptors,
    RemovesForeignThings,
    SharesWriters,
    ForcesRemoval,
    NamesNoField,
    KeepsItsLockWhenDropped,
    NeverAnswers,
    TakesSilenceForAbsence,
    RefusesConcurrentCalls,
    ChangesItsAnswer,
    SaysUnavailableForAbsent,
    ListsTwice,
}

/// The reference driver with a flaw.
struct Flawed {
    inner: Arc<dyn Volume>,
    flaw: Flaw,
    host: Host,
    lock: Arc<tokio::sync::Mutex<()>>,
    made_here: Mutex<BTreeSet<VolumeId>>,
    leaked: Arc<Mutex<Vec<File>>>,
}

impl Flawed {
    fn is(&self, flaw: Flaw) -> bool {
        self.flaw == flaw
    }

    /// The context of the caller, or one that never ends.
    fn cx(&self, cx: &Context) -> Context {
        if self.is(Flaw::IgnoresTheContext) { Context::new() } else { cx.clone() }
    }

    fn filter(&self, mut status: VolumeStatus) -> Option<VolumeStatus> {
        if self.is(Flaw::SetsNoMark) {
            status.mark.node = HostId::new(Uuid::from_bytes([7; 16]).unwrap());
        }
        let made = self.made_here.lock().unwrap_or_else(PoisonError::into_inner);
        (!self.is(Flaw::ForgetsOnRestart) || made.contains(&status.uuid)).then_some(status)
    }
}

#[async_trait]
impl Volume for Flawed {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn local(&self) -> bool {
        self.inner.local()
    }

    fn backings(&self) -> &[BackingKind] {
        self.inner.backings()
    }

    async fn host_info(&self, cx: &Context) -> Result<HostInfo> {
        self.inner.host_info(cx).await
    }

    #[expect(
        clippy::panic,
        clippy::disallowed_methods,
        clippy::wildcard_enum_match_arm,
        reason = "the flaws of a test"
    )]
    async fn ensure_volume(&self, cx: &Context, spec: &VolumeSpec) -> Result<Change> {
        self.made_here.lock().unwrap_or_else(PoisonError::into_inner).insert(spec.uuid);
        match self.flaw {
            Flaw::Panics if spec.name.as_str().contains('\u{202e}') => panic!("an odd name"),
            Flaw::BlocksTheExecutor => std::thread::sleep(Duration::from_millis(30)),
            Flaw::LeaksDescriptors => {
                let file = File::open("/proc/self/exe").unwrap();
                self.leaked.lock().unwrap_or_else(PoisonError::into_inner).push(file);
            }
            Flaw::NeverAnswers => std::future::pending().await,
            Flaw::RefusesConcurrentCalls => {
                let Ok(_turn) = self.lock.try_lock() else {
                    return Err(Error::new(ErrorKind::Conflict, "ensure", spec.uuid, "busy"));
                };
                return self.inner.ensure_volume(cx, spec).await;
            }
            Flaw::KeepsItsLockWhenDropped => {
                let turn = Arc::clone(&self.lock).lock_owned().await;
                let held = std::mem::ManuallyDrop::new(turn);
                let answer = self.inner.ensure_volume(cx, spec).await;
                drop(std::mem::ManuallyDrop::into_inner(held));
                return answer;
            }
            _ => {}
        }
        let answer = self.inner.ensure_volume(&self.cx(cx), spec).await;
        match (self.flaw, answer) {
            (Flaw::WritesOnEachCall, Ok(Change::Unchanged)) => Ok(Change::Changed),
            (Flaw::Shrinks, Err(error)) if error.field() == Some("size_gib") => Ok(Change::Changed),
            (Flaw::NamesNoField, Err(error)) if error.kind() == ErrorKind::InvalidSpec => {
                Err(Error::new(ErrorKind::InvalidSpec, "ensure", spec.uuid, "wrong"))
            }
            (_, answer) => answer,
        }
    }

    async fn destroy_volume(&self, cx: &Context, volume: VolumeId) -> Result<Change> {
        if self.is(Flaw::RemovesForeignThings) {
            self.host.remove_foreign_volume(volume);
        }
        if self.is(Flaw::ForcesRemoval)
            && let Some(status) = self.inner.get(cx, volume).await?
        {
            for open in status.attachments {
                let request = DetachRequest::new(volume, open.host_uuid, open.vm_uuid);
                let _change = self.inner.detach_volume(cx, &request).await?;
            }
        }
        let answer = self.inner.destroy_volume(&self.cx(cx), volume).await;
        match (self.flaw, answer) {
            (Flaw::AbsentIsAnError, Ok(Change::Unchanged)) => {
                Err(Error::not_found("destroy", volume))
            }
            (Flaw::SaysUnavailableForAbsent, Ok(Change::Unchanged)) => {
                Err(Error::new(ErrorKind::Unavailable, "destroy", volume, "not there"))
            }
            (Flaw::TakesSilenceForAbsence, Err(error))
                if error.kind() == ErrorKind::Unavailable =>
            {
                Ok(Change::Unchanged)
            }
            (_, answer) => answer,
        }
    }

    async fn attach_volume(
        &self,
        cx: &Context,
        request: &AttachRequest,
    ) -> Result<Outcome<AttachedVolume>> {
        let answer = self.inner.attach_volume(cx, request).await;
        match (self.flaw, answer) {
            (Flaw::SharesWriters, Err(error)) if error.kind() == ErrorKind::Conflict => {
                let path = "/shared".parse().unwrap();
                let backing = Backing::BlockDevice { path };
                Ok(Outcome::new(Change::Created, AttachedVolume::new(backing, false)))
            }
            (Flaw::ChangesItsAnswer, Ok(mut outcome)) if !outcome.change.wrote() => {
                outcome.value.read_only = !outcome.value.read_only;
                Ok(outcome)
            }
            (_, answer) => answer,
        }
    }

    async fn detach_volume(&self, cx: &Context, request: &DetachRequest) -> Result<Change> {
        self.inner.detach_volume(cx, request).await
    }

    async fn list(&self, cx: &Context) -> Result<Vec<VolumeStatus>> {
        let all = self.inner.list(cx).await?;
        let twice = if self.is(Flaw::ListsTwice) { all.clone() } else { Vec::new() };
        Ok(all.into_iter().chain(twice).filter_map(|status| self.filter(status)).collect())
    }

    async fn get(&self, cx: &Context, volume: VolumeId) -> Result<Option<VolumeStatus>> {
        Ok(self.inner.get(cx, volume).await?.and_then(|status| self.filter(status)))
    }
}

struct FlawedBench {
    inner: ReferenceBench,
    flaw: Flaw,
    lock: Arc<tokio::sync::Mutex<()>>,
    leaked: Arc<Mutex<Vec<File>>>,
}

impl FlawedBench {
    fn reference(&self) -> &dyn VolumeBench {
        &self.inner
    }
}

#[async_trait]
impl VolumeBench for FlawedBench {
    fn node(&self) -> HostId {
        self.reference().node()
    }
    async fn open(&self) -> Result<Arc<dyn Volume>> {
        Ok(Arc::new(Flawed {
            inner: self.reference().open().await?,
            flaw: self.flaw,
            host: self.inner.host().clone(),
            lock: Arc::clone(&self.lock),
            made_here: Mutex::default(),
            leaked: Arc::clone(&self.leaked),
        }))
    }
    async fn volume(&self, n: u32) -> VolumeSpec {
        self.reference().volume(n).await
    }
    async fn source(&self) -> Option<VolumeSource> {
        self.reference().source().await
    }
    async fn plant_foreign(&self, volume: &VolumeSpec) -> Plant {
        self.reference().plant_foreign(volume).await
    }
    async fn fingerprint_foreign(&self, volume: &VolumeSpec) -> String {
        self.reference().fingerprint_foreign(volume).await
    }
    async fn remove_foreign(&self, volume: &VolumeSpec) {
        self.reference().remove_foreign(volume).await;
    }
    fn half_made(&self) -> Vec<&'static str> {
        self.reference().half_made()
    }
    async fn plant_half_made(&self, volume: &VolumeSpec, state: &str) -> Plant {
        self.reference().plant_half_made(volume, state).await
    }
    async fn break_backend(&self) -> Plant {
        self.reference().break_backend().await
    }
    async fn mend(&self) {
        self.reference().mend().await;
    }
    async fn census(&self) -> Census {
        self.reference().census().await
    }
}

/// The cases that fail for a flaw.
async fn failures(flaw: Flaw, only: &[&str]) -> BTreeSet<&'static str> {
    let bench = FlawedBench {
        inner: ReferenceBench::new(Host::new()),
        flaw,
        lock: Arc::default(),
        leaked: Arc::default(),
    };
    let options = Options {
        call_limit: Duration::from_millis(300),
        prompt: Duration::from_millis(200),
        poll_limit: Duration::from_millis(20),
        settle: Duration::from_millis(100),
        only: only.iter().map(|name| (*name).to_owned()).collect(),
        ..Options::default()
    };
    let report = check_volume(&bench, &options).await;
    assert!(!report.passed(), "{flaw:?} passes");
    report.failures().map(|case| case.name).collect()
}

/// Checks that a flaw fails the case of its rule.
async fn caught(flaw: Flaw, case: &str) {
    let failed = failures(flaw, &[case]).await;
    assert!(failed.contains(case), "{flaw:?} is not caught by {case}, but by {failed:?}");
}

#[tokio::test]
async fn each_flaw_fails_the_case_of_its_rule() {
    caught(Flaw::WritesOnEachCall, "ensure-again").await;
    caught(Flaw::AbsentIsAnError, "lifecycle-of-absent").await;
    caught(Flaw::SaysUnavailableForAbsent, "lifecycle-of-absent").await;
    caught(Flaw::Shrinks, "shrink").await;
    caught(Flaw::NamesNoField, "shrink").await;
    caught(Flaw::ForgetsOnRestart, "fresh-start").await;
    caught(Flaw::SetsNoMark, "ensure").await;
    caught(Flaw::ListsTwice, "ensure").await;
    caught(Flaw::IgnoresTheContext, "deadline").await;
    caught(Flaw::IgnoresTheContext, "cancelled").await;
    caught(Flaw::Panics, "odd-names").await;
    caught(Flaw::RemovesForeignThings, "foreign").await;
    caught(Flaw::SharesWriters, "attach-other").await;
    caught(Flaw::SharesWriters, "attach-readers").await;
    caught(Flaw::ChangesItsAnswer, "attach-again").await;
    caught(Flaw::ForcesRemoval, "destroy-attached").await;
    caught(Flaw::KeepsItsLockWhenDropped, "drop-ensure").await;
    caught(Flaw::NeverAnswers, "ensure").await;
    caught(Flaw::TakesSilenceForAbsence, "back-end-down").await;
    caught(Flaw::RefusesConcurrentCalls, "ensure-at-once").await;
    let blocked = failures(Flaw::BlocksTheExecutor, &["ensure-again"]).await;
    assert_eq!(blocked, BTreeSet::from(["executor"]));
    let leaked = failures(Flaw::LeaksDescriptors, &["ensure-again"]).await;
    assert_eq!(leaked, BTreeSet::from(["census"]));
}
