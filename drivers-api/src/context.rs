//! What every call carries first: how long it may take, whether it is still wanted, and who asks.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Poll, Waker},
    time::Instant,
};

use crate::{BoxFuture, Result, SecretRef};

/// The context of one call.
///
/// Cheap to clone. A driver gives up at the deadline with [`ErrorKind::Deadline`](crate::ErrorKind::Deadline) and on
/// cancellation with [`ErrorKind::Cancelled`](crate::ErrorKind::Cancelled), and leaves the host so that a repeat of the
/// same call converges. The caller does not drop a driver's future to end it (it may: every `await` of a driver must be
/// safe as the last one); it waits for the driver to notice.
#[derive(Clone, Default)]
pub struct Context {
    deadline: Option<Instant>,
    cancel: CancelFlag,
    traceparent: Option<Arc<str>>,
    idempotency_key: Option<Arc<str>>,
    progress: Option<Arc<dyn ProgressSink>>,
    secrets: Option<Arc<dyn SecretResolver>>,
}

impl Context {
    /// A context without a deadline, which nobody cancels.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// With a deadline on the monotonic clock. Wall-clock deadlines of a caller (`not_after`) are turned into this at
    /// the edge, so that a step of the clock moves nothing.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// With a flag that ends the call.
    #[must_use]
    pub fn with_cancel(mut self, cancel: CancelFlag) -> Self {
        self.cancel = cancel;
        self
    }

    /// With a W3C `traceparent` value.
    #[must_use]
    pub fn with_traceparent(mut self, traceparent: impl Into<Arc<str>>) -> Self {
        self.traceparent = Some(traceparent.into());
        self
    }

    /// With a key under which a repeat of this call is the same call.
    #[must_use]
    pub fn with_idempotency_key(mut self, key: impl Into<Arc<str>>) -> Self {
        self.idempotency_key = Some(key.into());
        self
    }

    /// With a receiver of progress.
    #[must_use]
    pub fn with_progress(mut self, progress: Arc<dyn ProgressSink>) -> Self {
        self.progress = Some(progress);
        self
    }

    /// With a resolver of secret references.
    #[must_use]
    pub fn with_secrets(mut self, secrets: Arc<dyn SecretResolver>) -> Self {
        self.secrets = Some(secrets);
        self
    }

    /// When the driver gives up.
    #[must_use]
    pub const fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The flag that ends the call.
    #[must_use]
    pub const fn cancel(&self) -> &CancelFlag {
        &self.cancel
    }

    /// The W3C `traceparent` of the caller.
    #[must_use]
    pub fn traceparent(&self) -> Option<&str> {
        self.traceparent.as_deref()
    }

    /// The key under which a repeat of this call is the same call.
    #[must_use]
    pub fn idempotency_key(&self) -> Option<&str> {
        self.idempotency_key.as_deref()
    }

    /// Reports progress, if anybody listens. Never blocks.
    pub fn report(&self, progress: &Progress) {
        if let Some(sink) = &self.progress {
            sink.report(progress);
        }
    }

    /// The resolver of secret references.
    #[must_use]
    pub fn secrets(&self) -> Option<&Arc<dyn SecretResolver>> {
        self.secrets.as_ref()
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("deadline", &self.deadline)
            .field("cancelled", &self.cancel.is_cancelled())
            .field("traceparent", &self.traceparent)
            .field("idempotency_key", &self.idempotency_key)
            .finish_non_exhaustive()
    }
}

/// A flag that is raised once and never lowered; clones share it.
#[derive(Clone, Default)]
pub struct CancelFlag(Arc<CancelState>);

#[derive(Default)]
struct CancelState {
    raised: AtomicBool,
    next: AtomicU64,
    wakers: Mutex<Vec<(u64, Waker)>>,
}

impl CancelFlag {
    /// A flag that is not raised.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Raises the flag and wakes all who wait for it. Raising it again does nothing.
    pub fn cancel(&self) {
        self.0.raised.store(true, Ordering::SeqCst);
        let wakers =
            std::mem::take(&mut *self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner));
        for (_, waker) in wakers {
            waker.wake();
        }
    }

    /// Whether it is raised.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.raised.load(Ordering::SeqCst)
    }

    /// Waits until the flag is raised. Cancel-safe: dropping the future forgets the wait and nothing else.
    pub fn cancelled(&self) -> Cancelled {
        Cancelled { state: Arc::clone(&self.0), key: self.0.next.fetch_add(1, Ordering::Relaxed) }
    }
}

impl fmt::Debug for CancelFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CancelFlag").field(&self.is_cancelled()).finish()
    }
}

/// The future of [`CancelFlag::cancelled`].
#[must_use = "a future does nothing until it is awaited"]
pub struct Cancelled {
    state: Arc<CancelState>,
    key: u64,
}

impl fmt::Debug for Cancelled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cancelled").finish_non_exhaustive()
    }
}

impl Future for Cancelled {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<()> {
        let mut wakers = self.state.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        // Read under the lock: `cancel` raises the flag before it takes the wakers, so none is missed.
        if self.state.raised.load(Ordering::SeqCst) {
            return Poll::Ready(());
        }
        match wakers.iter_mut().find(|(key, _)| *key == self.key) {
            Some((_, waker)) => waker.clone_from(cx.waker()),
            None => wakers.push((self.key, cx.waker().clone())),
        }
        Poll::Pending
    }
}

impl Drop for Cancelled {
    fn drop(&mut self) {
        let mut wakers = self.state.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        wakers.retain(|(key, _)| *key != self.key);
    }
}

/// How far a long call is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Progress {
    /// A short name of the phase: `"download"`.
    pub phase: String,
    /// What a person reads.
    pub message: String,
    /// How much is done, in the unit of `total`.
    pub done: u64,
    /// How much there is to do, where that is known.
    pub total: Option<u64>,
}

impl Progress {
    /// A report of a phase of which nothing is done yet.
    pub fn new(phase: impl Into<String>, message: impl Into<String>) -> Self {
        Self { phase: phase.into(), message: message.into(), done: 0, total: None }
    }

    /// With how much is done of how much.
    #[must_use]
    pub fn with_amount(mut self, done: u64, total: Option<u64>) -> Self {
        self.done = done;
        self.total = total;
        self
    }
}

/// Receives progress.
pub trait ProgressSink: Send + Sync {
    /// Takes one report. Must not block: a slow receiver drops reports.
    fn report(&self, progress: &Progress);
}

/// A secret's value: cleared when dropped, never printed.
pub struct SecretValue(Vec<u8>);

impl SecretValue {
    /// Takes the bytes.
    #[must_use]
    pub const fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The bytes, for the one call that needs them.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for SecretValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretValue(…)")
    }
}

impl Drop for SecretValue {
    fn drop(&mut self) {
        self.0.fill(0);
        // Keeps the compiler from removing the writes to memory that is about to be freed.
        std::hint::black_box(&self.0);
    }
}

/// Turns references into secrets.
pub trait SecretResolver: Send + Sync {
    /// The value of a reference.
    ///
    /// # Errors
    /// `NotFound`, `Denied` or `Unavailable`; the text names the reference, never a value.
    fn resolve<'a>(&'a self, reference: &'a SecretRef) -> BoxFuture<'a, Result<SecretValue>>;
}
