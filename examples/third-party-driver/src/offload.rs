//! Runs blocking file work on threads, so that a call never blocks the caller's executor, whatever executor that is.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    task::{Poll, Waker},
    thread,
    time::Instant,
};

use drivers_api::{Cancelled, Context, Error, ErrorKind, Result};

/// Whether work on a thread is still wanted.
pub(crate) struct Wanted {
    cx: Context,
    /// Raised when the caller dropped the future.
    dropped: AtomicBool,
    operation: &'static str,
    object: String,
}

impl Wanted {
    /// Ends the work between two steps when nobody waits for it any more.
    pub(crate) fn check(&self) -> Result<()> {
        if self.cx.cancel().is_cancelled() || self.dropped.load(Ordering::SeqCst) {
            return Err(self.error(ErrorKind::Cancelled, "the caller gave up"));
        }
        match self.cx.deadline() {
            Some(at) if at <= Instant::now() => {
                Err(self.error(ErrorKind::Deadline, "the deadline passed"))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn error(&self, kind: ErrorKind, reason: impl std::fmt::Display) -> Error {
        Error::new(kind, self.operation, &self.object, reason)
    }
}

/// The answer of the work, and who waits for it.
struct Slot<T> {
    answer: Option<Result<T>>,
    waker: Option<Waker>,
}

/// The future of [`offload`].
pub(crate) struct Offloaded<T> {
    slot: Arc<Mutex<Slot<T>>>,
    wanted: Arc<Wanted>,
    cancelled: Pin<Box<Cancelled>>,
}

/// Runs `work` on a thread. Ends at the context's deadline and at its cancellation even when the work hangs in the
/// kernel; the thread then ends on its own at its next [`Wanted::check`].
pub(crate) fn offload<T: Send + 'static>(
    cx: &Context,
    operation: &'static str,
    object: impl std::fmt::Display,
    work: impl FnOnce(&Wanted) -> Result<T> + Send + 'static,
) -> Offloaded<T> {
    let dropped = AtomicBool::new(false);
    let wanted =
        Arc::new(Wanted { cx: cx.clone(), dropped, operation, object: object.to_string() });
    let slot = Arc::new(Mutex::new(Slot { answer: None, waker: None }));
    let cancelled = Box::pin(cx.cancel().cancelled());
    let (send, receive) = mpsc::channel();
    let worker = {
        let wanted = Arc::clone(&wanted);
        move || {
            let answer = wanted.check().and_then(|()| work(&wanted));
            // The receiver is gone when the deadline came first.
            let _ = send.send(answer);
        }
    };
    // One thread works, the other one keeps the deadline.
    let keeper = {
        let (slot, wanted) = (Arc::clone(&slot), Arc::clone(&wanted));
        move || {
            let answer = match wanted.cx.deadline() {
                Some(at) => receive.recv_timeout(at.saturating_duration_since(Instant::now())),
                None => receive.recv().map_err(RecvTimeoutError::from),
            };
            let answer = answer.unwrap_or_else(|why| match why {
                RecvTimeoutError::Timeout => {
                    Err(wanted.error(ErrorKind::Deadline, "the deadline passed"))
                }
                RecvTimeoutError::Disconnected => {
                    Err(wanted.error(ErrorKind::Internal, "the worker thread ended early"))
                }
            });
            let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            slot.answer = Some(answer);
            if let Some(waker) = slot.waker.take() {
                waker.wake();
            }
        }
    };
    let started = thread::Builder::new()
        .spawn(keeper)
        .and_then(|_| thread::Builder::new().spawn(worker))
        .map(drop);
    if let Err(error) = started {
        let error =
            wanted.error(ErrorKind::Exhausted, "no thread can be started").with_source(error);
        slot.lock().unwrap_or_else(PoisonError::into_inner).answer = Some(Err(error));
    }
    Offloaded { slot, wanted, cancelled }
}

impl<T> Future for Offloaded<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, task: &mut std::task::Context<'_>) -> Poll<Result<T>> {
        {
            let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(answer) = slot.answer.take() {
                return Poll::Ready(answer);
            }
            slot.waker = Some(task.waker().clone());
        }
        match self.cancelled.as_mut().poll(task) {
            Poll::Ready(()) => {
                Poll::Ready(Err(self.wanted.error(ErrorKind::Cancelled, "the caller cancelled")))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T> Drop for Offloaded<T> {
    fn drop(&mut self) {
        self.wanted.dropped.store(true, Ordering::SeqCst);
    }
}
