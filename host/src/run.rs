//! The command runner: the only place that starts a short-lived process.
//!
//! An argument vector and no shell; a fixed environment; a deadline; bounds on the output; the whole process group killed
//! at the end; a log line with the argument vector, in which what was given as secret is not shown.

use std::{
    ffi::{OsStr, OsString},
    fmt,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use drivers_api::{Context, Error, ErrorKind};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};

use crate::bound;

/// How long a command may take when its context has no deadline.
const DEFAULT_LIMIT: Duration = Duration::from_secs(60);
/// How much of each output is kept when nothing else is asked for.
const DEFAULT_OUTPUT: usize = 1 << 20;

/// A command about to be run.
#[derive(Clone, Debug)]
pub struct Run {
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    stdin: Vec<u8>,
    limit: Duration,
    output_limit: usize,
}

/// What a command left.
#[derive(Debug)]
pub struct Output {
    /// How it ended.
    pub status: ExitStatus,
    /// What it wrote to its standard output, up to the bound.
    pub stdout: Vec<u8>,
    /// What it wrote to its standard error, up to the bound.
    pub stderr: Vec<u8>,
}

/// Why a command gave no output.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program cannot be started.
    #[error("cannot start {program}")]
    Start {
        /// The program.
        program: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Reading its output or feeding its input failed.
    #[error("cannot talk to {program}")]
    Pipe {
        /// The program.
        program: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It took longer than its limit and was killed.
    #[error("{program} was killed after {limit:?}")]
    TooSlow {
        /// The program.
        program: String,
        /// The limit.
        limit: Duration,
    },
    /// It wrote more than its bound and was killed.
    #[error("{program} wrote more than {bytes} bytes and was killed")]
    TooMuch {
        /// The program.
        program: String,
        /// The bound.
        bytes: usize,
    },
    /// It ended with a failure.
    #[error("{program} failed with {status}: {stderr}")]
    Failed {
        /// The program.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// The last lines of its standard error, escaped.
        stderr: String,
    },
}

impl RunError {
    /// As an error of the contract: a missing program or a failure is `Unavailable`, a passed limit `Deadline`.
    #[must_use]
    pub fn into_error(self, operation: &'static str, object: impl fmt::Display) -> Error {
        let kind = match &self {
            Self::Start { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => {
                ErrorKind::Denied
            }
            Self::TooSlow { .. } => ErrorKind::Deadline,
            Self::Start { .. } | Self::Pipe { .. } | Self::Failed { .. } => ErrorKind::Unavailable,
            Self::TooMuch { .. } => ErrorKind::Internal,
        };
        Error::new(kind, operation, object, "a command of the host failed").with_source(self)
    }
}

impl Run {
    /// The command `program` without arguments. `program` is a path, or a name looked up in the fixed `PATH`.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            stdin: Vec::new(),
            limit: DEFAULT_LIMIT,
            output_limit: DEFAULT_OUTPUT,
        }
    }

    /// With one more argument. Secrets never go here: anybody on the host can read them.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// With more arguments.
    #[must_use]
    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// With one more variable beside `PATH` and `LC_ALL`.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// With these bytes on standard input. They are not logged.
    #[must_use]
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = bytes.into();
        self
    }

    /// With another limit than 60 seconds. The context's deadline holds too.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// With another bound on each output than 1 MiB.
    #[must_use]
    pub fn output_limit(mut self, bytes: usize) -> Self {
        self.output_limit = bytes;
        self
    }

    /// Runs the command to its end.
    ///
    /// Dropping the future kills the command's process group. Cancellation by the context does the same.
    ///
    /// # Errors
    /// When it cannot be started, is too slow or writes too much. A failure exit is no error here: see [`Run::success`].
    pub async fn output(&self, cx: &Context) -> Result<Output, RunError> {
        let program = self.program.display().to_string();
        tracing::debug!(program, args = ?self.args, "run");
        let mut child =
            self.spawn().map_err(|source| RunError::Start { program: program.clone(), source })?;
        let mut group =
            GroupGuard(child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw));
        let (stdin, stdout, stderr) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let feed = async {
            if let Some(mut pipe) = stdin
                && let Err(error) = pipe.write_all(&self.stdin).await
                && error.kind() != std::io::ErrorKind::BrokenPipe
            {
                return Err(error);
            }
            Ok(())
        };
        let limit = bound::remaining(cx).map_or(self.limit, |left| left.min(self.limit));
        let work = async {
            let (fed, out, err) = tokio::join!(
                feed,
                read_bounded(stdout, self.output_limit),
                read_bounded(stderr, self.output_limit)
            );
            let pipe = |source| RunError::Pipe { program: program.clone(), source };
            fed.map_err(pipe)?;
            let too_much =
                || RunError::TooMuch { program: program.clone(), bytes: self.output_limit };
            let stdout = out.map_err(pipe)?.ok_or_else(too_much)?;
            let stderr = err.map_err(pipe)?.ok_or_else(too_much)?;
            let status = child.wait().await.map_err(pipe)?;
            Ok(Output { status, stdout, stderr })
        };
        let answer = tokio::select! {
            biased;
            answer = work => answer,
            () = tokio::time::sleep(limit) => Err(RunError::TooSlow { program: program.clone(), limit }),
            () = cx.cancel().cancelled() => Err(RunError::TooSlow { program: program.clone(), limit: Duration::ZERO }),
        };
        if answer.is_ok() {
            // Reaped: its number may be another process's by now.
            group.0 = None;
        }
        drop(group);
        answer
    }

    /// As [`Run::output`], where a failure exit is an error.
    ///
    /// # Errors
    /// As [`Run::output`], and [`RunError::Failed`].
    pub async fn success(&self, cx: &Context) -> Result<Output, RunError> {
        let output = self.output(cx).await?;
        if output.status.success() {
            return Ok(output);
        }
        let program = self.program.display().to_string();
        Err(RunError::Failed {
            program,
            status: output.status,
            stderr: escaped_tail(&output.stderr, 400),
        })
    }

    #[expect(clippy::disallowed_methods, reason = "this is the command runner")]
    fn spawn(&self) -> std::io::Result<tokio::process::Child> {
        let mut command = tokio::process::Command::new(&self.program);
        command
            .args(&self.args)
            .env_clear()
            .env("PATH", FIXED_PATH)
            .env("LC_ALL", "C.UTF-8")
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .current_dir("/")
            .stdin(if self.stdin.is_empty() { Stdio::null() } else { Stdio::piped() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        command.spawn()
    }
}

/// The search path of every process that the agent starts.
pub const FIXED_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Kills the process group when dropped, so that a grandchild that holds the pipes does not outlive its parent.
struct GroupGuard(Option<Pid>);

impl Drop for GroupGuard {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // ESRCH: the group has ended already.
            if let Err(error) = kill_process_group(group, Signal::KILL)
                && error != rustix::io::Errno::SRCH
            {
                tracing::warn!(%error, "a command's process group could not be killed");
            }
        }
    }
}

async fn read_bounded(
    pipe: Option<impl AsyncRead + Unpin>,
    limit: usize,
) -> std::io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        let bound = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
        pipe.take(bound).read_to_end(&mut bytes).await?;
    }
    Ok((bytes.len() <= limit).then_some(bytes))
}

/// The last `most` characters of what a tool wrote, with control characters escaped and line ends as ` | `.
#[must_use]
pub fn escaped_tail(bytes: &[u8], most: usize) -> String {
    let text = String::from_utf8_lossy(bytes);
    let line = text.trim().lines().map(str::trim).collect::<Vec<_>>().join(" | ");
    let escaped: String = line.chars().flat_map(|c| c.escape_debug()).collect();
    let skip = escaped.chars().count().saturating_sub(most);
    escaped.chars().skip(skip).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn input_and_output_pass_and_the_environment_is_fixed() {
        let cx = Context::new();
        let out = Run::new("cat").stdin("hello").success(&cx).await.unwrap();
        assert_eq!(out.stdout, b"hello");
        let out = Run::new("env").env("ONE", "1").success(&cx).await.unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let mut names: Vec<_> =
            text.lines().filter_map(|line| line.split_once('=')).map(|(name, _)| name).collect();
        names.sort_unstable();
        assert_eq!(names, ["LC_ALL", "ONE", "PATH"]);
    }

    #[tokio::test]
    async fn a_slow_command_is_killed_with_its_group() {
        let cx = Context::new();
        let run = Run::new("sh")
            .args(["-c", "sleep 1000 & echo $!; sleep 1000"])
            .limit(Duration::from_millis(300));
        let error = run.output(&cx).await.unwrap_err();
        assert!(matches!(error, RunError::TooSlow { .. }), "{error}");
    }

    #[tokio::test]
    async fn output_beyond_the_bound_is_refused() {
        let error = Run::new("head")
            .args(["-c", "100", "/dev/zero"])
            .output_limit(10)
            .output(&Context::new())
            .await;
        assert!(matches!(error, Err(RunError::TooMuch { .. })));
    }

    #[tokio::test]
    async fn a_failure_shows_the_tail_of_its_error_output_escaped() {
        let run = Run::new("sh").args(["-c", "printf 'one\\ntwo\\033[31m\\n' >&2; exit 3"]);
        let error = run.success(&Context::new()).await.unwrap_err().to_string();
        assert!(
            error.contains("exit status: 3") && error.contains("one | two\\u{1b}[31m"),
            "{error}"
        );
    }
}
