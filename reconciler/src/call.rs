//! Calls of drivers, such that no driver can take the reconciler along: one that panics is a failure, one that never returns
//! is abandoned, and neither holds a worker's place.
//!
//! A call is never dropped to end it: it runs in a task of its own. After its deadline, or once it is cancelled, it has
//! [`Settings::abandon_after`](crate::Settings::abandon_after) to end; then the pass goes on without it, with
//! [`ErrorKind::UnknownOutcome`]. As long as an abandoned call of an object has not ended, no further call is made for the
//! object, so that two never write side by side; a look alone hinders nothing, until several are out. A deletion alone is tried beside it, since it must not wait for ever; but
//! the object is not taken for gone before the abandoned call has ended and the host was looked at again.

use std::{
    any::Any,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use drivers_api::{CancelFlag, Context, Error, ErrorKind, Progress, ProgressSink};
use tokio::{
    sync::OwnedSemaphorePermit,
    task::JoinHandle,
    time::{Instant, sleep, sleep_until},
};

use crate::{engine::Engine, note::Abandoned, plan::Action, wanted::Key};

/// A driver call, made from its context.
pub(crate) type Call<T> =
    Box<dyn FnOnce(Context) -> Pin<Box<dyn Future<Output = Result<T, Error>> + Send>> + Send>;

/// What is called, for messages.
#[derive(Clone, Debug)]
pub(crate) struct Label {
    pub(crate) action: Action,
    pub(crate) driver: Arc<str>,
    pub(crate) object: String,
}

/// Who calls: an object's pass. Holds a worker's place, except through calls that take long.
pub(crate) struct Caller {
    pub(crate) engine: Arc<Engine>,
    /// The object for whose sake the calls are; `None` for lists, which are for all.
    key: Option<Key>,
    pub(crate) cancel: CancelFlag,
    place: Mutex<Option<OwnedSemaphorePermit>>,
    /// How many calls were abandoned and have not ended.
    out: Arc<AtomicUsize>,
}

impl Caller {
    /// For an object's pass.
    pub(crate) fn new(engine: Arc<Engine>, key: Key, cancel: CancelFlag) -> Self {
        Self { engine, key: Some(key), cancel, place: Mutex::default(), out: Arc::default() }
    }

    /// For a list; `out` outlives the caller.
    pub(crate) fn for_list(engine: Arc<Engine>, out: Arc<AtomicUsize>) -> Self {
        Self { engine, key: None, cancel: CancelFlag::new(), place: Mutex::default(), out }
    }

    /// Waits for a worker's place, unless it has one.
    pub(crate) async fn take_place(&self) {
        if self.place.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            return;
        }
        // The semaphore is never closed; were it, going on without a place would be right.
        let place = Arc::clone(&self.engine.places).acquire_owned().await.ok();
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = place;
    }

    /// Gives the place back while this pass only waits.
    pub(crate) fn give_place(&self) {
        drop(self.place.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    fn context(&self, deadline: Instant) -> Context {
        let mut cx =
            Context::new().with_deadline(deadline.into_std()).with_cancel(self.cancel.clone());
        if let Some(secrets) = &self.engine.settings.secrets {
            cx = cx.with_secrets(Arc::clone(secrets));
        }
        let Some(key) = self.key.clone() else { return cx };
        let engine = Arc::downgrade(&self.engine);
        cx.with_progress(Arc::new(Sink { engine, key, last: Mutex::new(None) }))
    }

    /// Makes one call.
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        label: Label,
        limit: Duration,
        call: Call<T>,
    ) -> Result<T, Error> {
        let begun = Instant::now();
        let future = call(self.context(begun + limit));
        let mut task = self.engine.spawn(future);
        let slack = self.engine.settings.abandon_after;
        let hard = sleep_until(begun + limit + slack);
        let cancelled = async {
            self.cancel.cancelled().await;
            sleep(slack).await;
        };
        let slow = sleep(self.engine.settings.slow_call);
        tokio::pin!(hard, cancelled, slow);
        let mut counts = true;
        loop {
            // All arms are cancel-safe: the call is a task, the others only wait.
            tokio::select! {
                biased;
                answer = &mut task => return settle(answer, &label),
                () = &mut slow, if counts => {
                    counts = false;
                    self.give_place();
                }
                () = &mut hard => return Err(self.abandon(task, &label)),
                () = &mut cancelled => return Err(self.abandon(task, &label)),
            }
        }
    }

    /// Goes on without a call, and remembers it until it ends.
    fn abandon<T: Send + 'static>(&self, task: Finished<T>, label: &Label) -> Error {
        let text = format!("{:?} {} [{}]", label.action, label.object, label.driver);
        tracing::warn!(call = %text, "a driver call did not return");
        self.out.fetch_add(1, Ordering::SeqCst);
        let call = Abandoned { text, looks: label.action == Action::Observe };
        if let Some(key) = &self.key {
            self.engine.with_note(key, |note| note.abandoned.push(call.clone()));
        }
        let (engine, key, out) =
            (Arc::clone(&self.engine), self.key.clone(), Arc::clone(&self.out));
        self.engine.run(async move {
            // Only that it ended counts: what it did is looked up on the host.
            drop(task.await);
            out.fetch_sub(1, Ordering::SeqCst);
            let Some(key) = key else { return };
            engine.with_note(&key, |note| {
                if let Some(at) = note.abandoned.iter().position(|one| *one == call) {
                    note.abandoned.swap_remove(at);
                }
            });
            engine.queue.wake_now(&key);
        });
        Error::new(
            ErrorKind::UnknownOutcome,
            verb(label.action),
            &label.object,
            format!("driver {} did not return in time", label.driver),
        )
        .with_remedy("it is waited for; only a deletion is tried meanwhile")
    }
}

/// A spawned call; `None` when the engine ended first.
pub(crate) type Finished<T> = JoinHandle<Option<Result<T, Error>>>;

fn settle<T>(
    answer: Result<Option<Result<T, Error>>, tokio::task::JoinError>,
    label: &Label,
) -> Result<T, Error> {
    match answer {
        Ok(Some(answer)) => answer,
        Ok(None) => Err(Error::new(
            ErrorKind::Cancelled,
            verb(label.action),
            &label.object,
            "the reconciler ended",
        )),
        Err(join) => {
            let reason = match join.try_into_panic() {
                Ok(panic) => {
                    format!("driver {} panicked: {}", label.driver, panic_text(panic.as_ref()))
                }
                Err(join) => format!("the call was ended: {join}"),
            };
            Err(Error::new(ErrorKind::Internal, verb(label.action), &label.object, reason)
                .with_remedy("this is a fault of the driver: report it with the agent's log"))
        }
    }
}

/// What a panic said, shortened.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").chars().flat_map(char::escape_debug).take(200).collect()
}

/// An action as "cannot … object" reads.
pub(crate) const fn verb(action: Action) -> &'static str {
    match action {
        Action::Observe => "look at",
        Action::Pull => "pull",
        Action::RemoveImage => "remove image",
        Action::EnsureVolume => "ensure",
        Action::DestroyVolume => "destroy",
        Action::AttachVolume => "attach volume of",
        Action::DetachVolume => "detach volume of",
        Action::EnsureNetwork => "ensure",
        Action::DestroyNetwork => "destroy",
        Action::AttachPort => "attach port of",
        Action::DetachPort => "detach port of",
        Action::EnsureVm => "ensure",
        Action::CreateVm => "create",
        Action::AttachDisk => "attach",
        Action::DetachDisk => "detach",
        Action::ResizeDisk => "resize",
        Action::AttachNic => "attach",
        Action::DetachNic => "detach",
        Action::StartVm => "start",
        Action::StopVm => "stop",
        Action::RebootVm => "reboot",
        Action::DeleteVm => "delete",
    }
}

/// Shows progress in the object's status, at most twice a second.
struct Sink {
    engine: std::sync::Weak<Engine>,
    key: Key,
    last: Mutex<Option<Instant>>,
}

impl ProgressSink for Sink {
    fn report(&self, progress: &Progress) {
        let now = Instant::now();
        {
            let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            if last.is_some_and(|at| now - at < Duration::from_millis(500)) {
                return;
            }
            *last = Some(now);
        }
        let Some(engine) = self.engine.upgrade() else { return };
        let share = progress.total.filter(|total| *total > 0).map_or(String::new(), |total| {
            format!(" {} %", progress.done.saturating_mul(100) / total)
        });
        engine.progress(&self.key, format!("{}{share}: {}", progress.phase, progress.message));
    }
}
