//! How cases run: their calls bounded and timed, their panics caught, what they made cleared.

use std::{
    collections::BTreeSet,
    pin::pin,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    task::Poll,
    time::Duration,
};

use async_trait::async_trait;
use drivers_api::{BoxFuture, CancelFlag, Context, Error, ErrorKind, HostInfo};
use tokio::time::Instant;

use crate::{Census, Options, Plant};

/// Why a case ended before its end.
#[derive(Debug)]
pub(crate) enum Stop {
    Failed(String),
    NotApplicable(String),
    NotTried(String),
}

/// How a case ends.
pub(crate) type Check<T = ()> = Result<T, Stop>;

/// The rule is broken.
pub(crate) fn failed<T>(what: impl std::fmt::Display) -> Check<T> {
    Err(Stop::Failed(what.to_string()))
}

/// The rule says nothing about this driver.
pub(crate) fn not_applicable<T>(why: impl std::fmt::Display) -> Check<T> {
    Err(Stop::NotApplicable(why.to_string()))
}

/// The bench cannot set it up.
pub(crate) fn not_tried<T>(why: impl std::fmt::Display) -> Check<T> {
    Err(Stop::NotTried(why.to_string()))
}

/// Fails unless a condition holds.
pub(crate) fn expect(holds: bool, what: impl std::fmt::Display) -> Check {
    if holds { Ok(()) } else { failed(what) }
}

/// Fails unless two values are the same.
pub(crate) fn same<T: PartialEq + std::fmt::Debug>(
    what: impl std::fmt::Display,
    found: &T,
    wanted: &T,
) -> Check {
    expect(found == wanted, format_args!("{what}: found {found:?}, wanted {wanted:?}"))
}

impl Plant {
    /// Ends the case where the bench could not do it.
    pub(crate) fn check(self) -> Check {
        match self {
            Self::Done => Ok(()),
            Self::NotTried(why) => not_tried(why),
        }
    }
}

/// One rule of the contract.
pub(crate) struct Case<K: ?Sized> {
    pub(crate) name: &'static str,
    pub(crate) sentence: &'static str,
    pub(crate) run: for<'a> fn(&'a K) -> BoxFuture<'a, Check>,
}

/// A list of cases: `name: "sentence" => function;`.
macro_rules! cases {
    ($kit:ty: $($name:literal: $sentence:literal => $run:path;)*) => {
        vec![$($crate::kit::Case::<$kit> { name: $name, sentence: $sentence, run: |kit| Box::pin($run(kit)) },)*]
    };
}
pub(crate) use cases;

/// What the cases of one kind share.
#[async_trait]
pub(crate) trait Subject: Sync {
    fn run(&self) -> &Run<'_>;
    async fn info(&self) -> Check<HostInfo>;
    /// Removes all that the last case made.
    async fn clear(&self) -> Check;
    async fn census(&self) -> Census;
}

/// The state of a run.
pub(crate) struct Run<'a> {
    pub(crate) options: &'a Options,
    /// The first number of the case that runs; each case has [`Run::BLOCK`] of them.
    pub(crate) base: AtomicU32,
    used: Mutex<BTreeSet<u32>>,
    slowest: Mutex<Option<(String, Duration)>>,
}

impl<'a> Run<'a> {
    /// How many numbers a case has for its objects.
    pub(crate) const BLOCK: u32 = 10;

    pub(crate) const fn new(options: &'a Options) -> Self {
        Self {
            options,
            base: AtomicU32::new(0),
            used: Mutex::new(BTreeSet::new()),
            slowest: Mutex::new(None),
        }
    }

    /// The number of the case's `n`th object.
    pub(crate) fn number(&self, n: u32) -> u32 {
        let number = self.base.load(Ordering::Relaxed) + n % Self::BLOCK;
        self.used.lock().unwrap_or_else(PoisonError::into_inner).insert(number);
        number
    }

    /// The numbers used since the last call.
    pub(crate) fn take_used(&self) -> BTreeSet<u32> {
        std::mem::take(&mut *self.used.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A context with the deadline that every call has.
    pub(crate) fn cx(&self) -> Context {
        self.cx_in(self.options.call_limit)
    }

    /// A context whose deadline is this far away.
    pub(crate) fn cx_in(&self, limit: Duration) -> Context {
        Context::new().with_deadline((Instant::now() + limit).into_std())
    }

    /// Makes a call, which must end by itself.
    pub(crate) async fn call<T>(
        &self,
        what: &str,
        call: impl Future<Output = drivers_api::Result<T>>,
    ) -> Check<drivers_api::Result<T>> {
        let limit = self.options.call_limit + self.options.prompt;
        match tokio::time::timeout(limit, self.timed(what, call)).await {
            Ok(answer) => {
                if let Err(error) = &answer {
                    well_formed(what, error)?;
                }
                Ok(answer)
            }
            Err(_) => failed(format_args!("{what} did not end within {limit:?}")),
        }
    }

    /// Makes a call that must succeed.
    pub(crate) async fn ok<T>(
        &self,
        what: &str,
        call: impl Future<Output = drivers_api::Result<T>>,
    ) -> Check<T> {
        match self.call(what, call).await? {
            Ok(value) => Ok(value),
            Err(error) => failed(format_args!("{what}: {error:?}")),
        }
    }

    /// Makes a call that must fail with one of these kinds.
    pub(crate) async fn fails<T: std::fmt::Debug>(
        &self,
        what: &str,
        kinds: &[ErrorKind],
        call: impl Future<Output = drivers_api::Result<T>>,
    ) -> Check<Error> {
        match self.call(what, call).await? {
            Err(error) if kinds.contains(&error.kind()) => Ok(error),
            Err(error) => failed(format_args!("{what}: wanted {kinds:?}, found {error:?}")),
            Ok(value) => {
                failed(format_args!("{what}: wanted an error of {kinds:?}, found Ok({value:?})"))
            }
        }
    }

    /// Measures how long each poll of a future holds its thread. Time in which the kernel ran somebody else does not
    /// count.
    pub(crate) async fn timed<T>(&self, what: &str, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        std::future::poll_fn(|task| {
            let (begun, waited) = (Instant::now(), run_delay());
            let answer = future.as_mut().poll(task);
            let held = begun.elapsed().saturating_sub(run_delay().saturating_sub(waited));
            let mut slowest = self.slowest.lock().unwrap_or_else(PoisonError::into_inner);
            if slowest.as_ref().is_none_or(|(_, longest)| held > *longest) {
                *slowest = Some((what.to_owned(), held));
            }
            answer
        })
        .await
    }

    /// Whether no poll so far held its thread for too long.
    pub(crate) fn check_polls(&self) -> Check {
        let slowest = self.slowest.lock().unwrap_or_else(PoisonError::into_inner).take();
        match slowest {
            Some((what, held)) if held > self.options.poll_limit => failed(format_args!(
                "one poll of {what} held its thread for {held:?}; blocking work belongs into spawn_blocking"
            )),
            Some(_) | None => Ok(()),
        }
    }

    /// Drops the future of a call at each of its awaits in turn. Before each, `before` brings the host to where the call
    /// starts; after each, `after` checks that the call converges and clears up.
    pub(crate) async fn dropped<'f, T>(
        &self,
        what: &str,
        before: impl Fn() -> BoxFuture<'f, Check>,
        call: impl Fn(Context) -> BoxFuture<'f, drivers_api::Result<T>>,
        after: impl Fn() -> BoxFuture<'f, Check>,
    ) -> Check {
        for point in 0..=self.options.drop_points {
            before().await?;
            let cx = self.cx();
            let limit = self.options.call_limit + self.options.prompt;
            let dropped = drop_after(self.timed(what, call(cx)), point);
            let Ok(answer) = tokio::time::timeout(limit, dropped).await else {
                return failed(format_args!("{what} did not end within {limit:?}"));
            };
            if let Some(Err(error)) = &answer {
                return failed(format_args!("{what}: {error:?}"));
            }
            let checked = after().await;
            checked.map_err(|stop| match &stop {
                Stop::Failed(why) if answer.is_none() => {
                    Stop::Failed(format!("{what}, dropped at its await {point}: {why}"))
                }
                Stop::Failed(_) | Stop::NotApplicable(_) | Stop::NotTried(_) => stop,
            })?;
            if answer.is_some() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Ends the context of a call before it begins, and at moments in its course: by deadline and by cancellation. The
    /// call must end soon with the right kind; `untouched` holds after the first two, `after` after each of the rest.
    pub(crate) async fn ended<'f, T: std::fmt::Debug>(
        &self,
        what: &str,
        how: Ending,
        call: impl Fn(Context) -> BoxFuture<'f, drivers_api::Result<T>>,
        untouched: impl Fn() -> BoxFuture<'f, Check>,
        after: impl Fn() -> BoxFuture<'f, Check>,
    ) -> Check {
        let kind = how.kind();
        let what_past = format!("{what} whose context had ended");
        let begun = Instant::now();
        self.fails(&what_past, &[kind], call(how.past())).await?;
        expect(
            begun.elapsed() <= self.options.prompt,
            format_args!("{what_past} took {:?}", begun.elapsed()),
        )?;
        untouched().await?;
        for ms in [0_u64, 1, 3, 10, 30, 100] {
            let limit = Duration::from_millis(ms);
            let cx = how.after(limit);
            let begun = Instant::now();
            let name = format!("{what} ({kind} after {ms} ms)");
            let answer = self.call(&name, call(cx)).await?;
            let took = begun.elapsed();
            expect(took <= limit + self.options.prompt, format_args!("{name} took {took:?}"))?;
            if let Err(error) = &answer {
                expect(
                    error.kind() == kind,
                    format_args!("{name}: wanted {kind}, found {error:?}"),
                )?;
            }
            after().await?;
            if answer.is_ok() {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// How a context ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ending {
    Deadline,
    Cancel,
}

impl Ending {
    const fn kind(self) -> ErrorKind {
        match self {
            Self::Deadline => ErrorKind::Deadline,
            Self::Cancel => ErrorKind::Cancelled,
        }
    }

    /// A context that has ended.
    fn past(self) -> Context {
        match self {
            Self::Deadline => Context::new().with_deadline(Instant::now().into_std()),
            Self::Cancel => {
                let flag = CancelFlag::new();
                flag.cancel();
                Context::new().with_cancel(flag)
            }
        }
    }

    /// A context that ends after a while.
    fn after(self, limit: Duration) -> Context {
        match self {
            Self::Deadline => Context::new().with_deadline((Instant::now() + limit).into_std()),
            Self::Cancel => {
                let flag = CancelFlag::new();
                let raise = flag.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(limit).await;
                    raise.cancel();
                });
                Context::new().with_cancel(flag)
            }
        }
    }
}

/// An error that a person can act on names what was tried, on what, and why it failed; a bad spec names the field.
fn well_formed(what: &str, error: &Error) -> Check {
    let parts =
        [("operation", error.operation()), ("object", error.object()), ("reason", error.reason())];
    for (part, text) in parts {
        expect(!text.trim().is_empty(), format_args!("{what}: the error's {part} is empty"))?;
    }
    let text = error.to_string();
    expect(
        !text.contains(|c: char| c.is_control() && c != '\n'),
        format_args!("{what}: the error's text has control characters: {text:?}"),
    )?;
    expect(
        error.kind() != ErrorKind::InvalidSpec || error.field().is_some(),
        format_args!("{what}: an invalid-spec error names no field: {error:?}"),
    )
}

/// Polls a future until it has been pending `points` times, then drops it; `None` unless it was ready before.
async fn drop_after<T>(future: impl Future<Output = T>, points: usize) -> Option<T> {
    let mut future = pin!(future);
    let mut left = points;
    std::future::poll_fn(|task| {
        if left == 0 {
            return Poll::Ready(None);
        }
        match future.as_mut().poll(task) {
            Poll::Ready(value) => Poll::Ready(Some(value)),
            Poll::Pending => {
                left -= 1;
                if left == 0 { Poll::Ready(None) } else { Poll::Pending }
            }
        }
    })
    .await
}

/// For how long this thread was ready and the kernel ran others: the second field of `/proc/PID/schedstat`
/// (Documentation/scheduler/sched-stats.rst), in nanoseconds.
fn run_delay() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let field = text.split_ascii_whitespace().nth(1);
    Duration::from_nanos(field.and_then(|field| field.parse().ok()).unwrap_or_default())
}
