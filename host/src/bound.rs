//! Ends a wait at the caller's deadline or cancellation.

use std::{fmt, future::Future, time::Duration};

use drivers_api::{Context, Error, ErrorKind, Result};
use tokio::time::Instant;

/// Waits for `future`, but no longer than the context allows.
///
/// The future is dropped when the deadline passes or the caller cancels, so it must be safe to end at each `await`; the
/// answer is then [`ErrorKind::Deadline`] or [`ErrorKind::Cancelled`] with `operation` and `object` in its text.
///
/// # Errors
/// The future's own, `Deadline` or `Cancelled`.
pub async fn bounded<T>(
    cx: &Context,
    operation: &'static str,
    object: impl fmt::Display,
    future: impl Future<Output = Result<T>>,
) -> Result<T> {
    check(cx, operation, &object)?;
    let deadline = async {
        match cx.deadline() {
            Some(at) => tokio::time::sleep_until(Instant::from_std(at)).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        // Polled in order: work that is done is reported even when the deadline has just passed.
        biased;
        answer = future => answer,
        () = cx.cancel().cancelled() => Err(cancelled(operation, object)),
        () = deadline => Err(past_deadline(operation, object)),
    }
}

/// Fails at once when the context has ended already.
///
/// # Errors
/// `Deadline` or `Cancelled`.
pub fn check(cx: &Context, operation: &'static str, object: impl fmt::Display) -> Result<()> {
    if cx.cancel().is_cancelled() {
        return Err(cancelled(operation, object));
    }
    match cx.deadline() {
        Some(at) if Instant::from_std(at) <= Instant::now() => {
            Err(past_deadline(operation, object))
        }
        Some(_) | None => Ok(()),
    }
}

/// How long the context allows from now on; `None` without a deadline.
#[must_use]
pub fn remaining(cx: &Context) -> Option<Duration> {
    cx.deadline().map(|at| Instant::from_std(at).saturating_duration_since(Instant::now()))
}

/// Runs blocking work off the executor. The work goes on when the caller's context ends, so it must be short or bounded
/// itself.
///
/// # Errors
/// The work's own; `Internal` when it panicked.
pub async fn blocking<T: Send + 'static>(
    operation: &'static str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(answer) => answer,
        Err(join) => {
            Err(Error::new(ErrorKind::Internal, operation, "host", "a worker thread panicked")
                .with_source(join))
        }
    }
}

fn cancelled(operation: &'static str, object: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Cancelled, operation, object, "the caller cancelled the call")
}

fn past_deadline(operation: &'static str, object: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Deadline, operation, object, "the deadline passed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_at_the_deadline_with_its_kind() {
        let cx = Context::new().with_deadline(Instant::now().into_std() + Duration::from_secs(3));
        let begun = Instant::now();
        let error =
            bounded::<()>(&cx, "wait for", "the moon", std::future::pending()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Deadline);
        assert_eq!(begun.elapsed(), Duration::from_secs(3));
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_when_the_caller_cancels() {
        let cx = Context::new();
        let flag = cx.cancel().clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            flag.cancel();
        });
        let error =
            bounded::<()>(&cx, "wait for", "the moon", std::future::pending()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
    }
}
