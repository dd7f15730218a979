//! Commands that go on: console, logs, events, pull.

use std::{
    io::{self, IsTerminal, Write},
    os::fd::AsFd,
    path::Path,
    time::Duration,
};

use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{
    CliError, Done,
    args::{self, Format},
    client::{connect, refused},
    exit,
    output::{Out, note},
    terminal::RawMode,
};
use crate::api::proto;

/// Ctrl-]: ends a console session.
const ESCAPE: u8 = 0x1d;
/// How long a console is shown after the end of an input that is no terminal.
const LINGER: Duration = Duration::from_secs(1);

fn failed(error: impl std::fmt::Display) -> CliError {
    CliError::new(error.to_string())
}

pub(crate) async fn console(socket: &Path, args: args::Console) -> Done {
    let mut client = connect(socket).await?;
    let (typed, keys) = mpsc::channel(16);
    let first = proto::ConsoleInput { name: args.name, history: args.history, data: Vec::new() };
    typed.send(first).await.map_err(failed)?;
    let answer = client.console(ReceiverStream::new(keys)).await;
    let mut output = answer.map_err(|status| refused(&status))?.into_inner();
    let stdin = io::stdin();
    let is_terminal = stdin.is_terminal();
    if is_terminal {
        note("connected; Ctrl-] ends the session");
    }
    // Restores the terminal when it is dropped, also on an error.
    let raw = if is_terminal { Some(RawMode::enter(stdin.as_fd()).map_err(failed)?) } else { None };
    let mut out = Out::new();
    let mut buffer = vec![0_u8; 4096];
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
        .map_err(failed)?;
    let mut reading = true;
    let ended = loop {
        tokio::select! {
            // All are cancel-safe: readiness consumes nothing, a message is taken whole or not at all.
            ready = readable(stdin.as_fd()), if reading => {
                ready.map_err(failed)?;
                let read = rustix::io::read(stdin.as_fd(), &mut buffer).map_err(failed)?;
                let bytes = buffer.get(..read).unwrap_or_default();
                let escape = bytes.iter().position(|byte| *byte == ESCAPE).filter(|_| is_terminal);
                let data = bytes.get(..escape.unwrap_or(read)).unwrap_or_default().to_vec();
                if !data.is_empty() {
                    let input = proto::ConsoleInput { data, ..Default::default() };
                    if typed.send(input).await.is_err() {
                        break Ok(());
                    }
                }
                if escape.is_some() {
                    break Ok(());
                }
                reading = read > 0;
            }
            () = tokio::time::sleep(LINGER), if !reading => break Ok(()),
            message = output.message() => match message {
                Ok(Some(message)) => out.bytes(&message.data).map_err(failed)?,
                Ok(None) => break Ok(()),
                Err(status) => break Err(refused(&status)),
            },
            _ = terminate.recv() => break Ok(()),
        }
    };
    drop(raw);
    if is_terminal {
        note("");
        note("the console session has ended");
    }
    ended.map(|()| exit::OK)
}

/// Waits for input. A regular file cannot be waited for and is always ready.
async fn readable(fd: std::os::fd::BorrowedFd<'_>) -> io::Result<()> {
    match host::readiness::readable(fd).await {
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::PERM.raw_os_error()) => {
            Ok(())
        }
        other => other,
    }
}

pub(crate) async fn logs(socket: &Path, args: args::Logs) -> Done {
    let mut client = connect(socket).await?;
    let request = proto::LogsRequest { name: args.name, bytes: args.bytes };
    let mut chunks = client.logs(request).await.map_err(|status| refused(&status))?.into_inner();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.message().await.map_err(|status| refused(&status))? {
        bytes.extend(chunk.data);
    }
    let mut out = Out::new();
    if out.is_terminal() && !args.raw {
        for line in String::from_utf8_lossy(&bytes).lines() {
            out.line(line.trim_end_matches('\r')).map_err(failed)?;
        }
    } else {
        out.bytes(&bytes).map_err(failed)?;
    }
    Ok(exit::OK)
}

pub(crate) fn event_line(event: &proto::Event) -> String {
    let object =
        event.key.as_ref().map(|key| format!(" {} {}:", key.kind, key.name)).unwrap_or_default();
    format!("{} {:<8}{object} {}", time(event.time_ms), event.kind, event.message)
}

/// A time of the wall clock as UTC (RFC 3339, with milliseconds).
fn time(ms: u64) -> String {
    let (days, rest) = (ms / 86_400_000, ms % 86_400_000);
    let (year, month, day) = civil(days);
    let (hour, minute) = (rest / 3_600_000, rest / 60_000 % 60);
    let (second, ms) = (rest / 1000 % 60, rest % 1000);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

/// The date of a day counted from 1970-01-01: years of 365.2425 days that begin in March, so that a leap day is the last.
const fn civil(days: u64) -> (u64, u64, u64) {
    let day = days + 719_468;
    let era = day / 146_097;
    let of_era = day % 146_097;
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + if month <= 2 { 1 } else { 0 };
    (year, month, of_year - (153 * shifted + 2) / 5 + 1)
}

pub(crate) async fn events(socket: &Path, args: args::Events) -> Done {
    let mut client = connect(socket).await?;
    let request = proto::EventsRequest { follow: args.follow, history: args.last };
    let mut events = client.events(request).await.map_err(|status| refused(&status))?.into_inner();
    let mut out = Out::new();
    loop {
        let message = tokio::select! {
            // Both are cancel-safe: a message is taken whole or not at all.
            message = events.message() => message.map_err(|status| refused(&status))?,
            interrupted = tokio::signal::ctrl_c() => {
                interrupted.map_err(failed)?;
                return Ok(exit::INTERRUPTED);
            }
        };
        let Some(event) = message else { return Ok(exit::OK) };
        match args.output.output {
            Format::Table => out.line(&event_line(&event)).map_err(failed)?,
            Format::Json | Format::Yaml => {
                let key = event.key.clone().unwrap_or_default();
                let value = json!({
                    "sequence": event.sequence, "time": time(event.time_ms), "event": event.kind,
                    "kind": key.kind, "name": key.name, "message": event.message,
                });
                let text = match args.output.output {
                    Format::Yaml => {
                        format!("---\n{}", serde_yaml_ng::to_string(&value).map_err(failed)?)
                    }
                    Format::Json | Format::Table => format!("{value}\n"),
                };
                out.bytes(text.as_bytes()).map_err(failed)?;
            }
        }
    }
}

pub(crate) async fn pull(socket: &Path, args: args::Pull) -> Done {
    let mut client = connect(socket).await?;
    let driver = args.driver.unwrap_or_default();
    let request = proto::PullImageRequest { reference: args.reference, driver };
    let mut updates =
        client.pull_image(request).await.map_err(|status| refused(&status))?.into_inner();
    let mut shown = Shown::default();
    loop {
        let message = tokio::select! {
            // Both are cancel-safe: a message is taken whole or not at all.
            message = updates.message() => message.map_err(|status| { shown.end(); refused(&status) })?,
            interrupted = tokio::signal::ctrl_c() => {
                interrupted.map_err(failed)?;
                shown.end();
                return Err(CliError::with_code(exit::INTERRUPTED, "the pull is ended; what was downloaded is kept for the next try"));
            }
        };
        let Some(update) = message else {
            return Err(CliError::new("the agent ended before the pull did"));
        };
        if update.image.is_empty() {
            shown.show(&update);
            continue;
        }
        shown.end();
        let image: Value = serde_json::from_str(&update.image).map_err(failed)?;
        let mut out = Out::new();
        match args.output.output {
            Format::Table => {
                let text = |path| {
                    image.pointer(path).map_or_else(String::new, |value| {
                        value.as_str().map_or_else(|| value.to_string(), str::to_owned)
                    })
                };
                let line = format!(
                    "{} {} ({} bytes) {}",
                    text("/reference"),
                    text("/digest"),
                    text("/size_bytes"),
                    update.change
                );
                out.line(&line).map_err(failed)?;
            }
            Format::Json => out.bytes(format!("{image:#}\n").as_bytes()).map_err(failed)?,
            Format::Yaml => {
                let text = serde_yaml_ng::to_string(&image).map_err(failed)?;
                out.bytes(text.as_bytes()).map_err(failed)?;
            }
        }
        return Ok(exit::OK);
    }
}

/// Progress on standard error: one line that changes on a terminal, one line a phase elsewhere.
#[derive(Default)]
struct Shown {
    phase: String,
    open: bool,
}

impl Shown {
    fn show(&mut self, update: &proto::PullUpdate) {
        let amount = match (update.done, update.total) {
            (0, 0) => String::new(),
            (done, 0) => format!(" {} MiB", done >> 20),
            (done, total) => {
                let percent = done.saturating_mul(100) / total.max(1);
                format!(" {percent}% of {} MiB", total >> 20)
            }
        };
        let line = format!("{}{amount}: {}", update.phase, update.message);
        let mut err = io::stderr().lock();
        if err.is_terminal() {
            let line: String = crate::logging::for_terminal(&line).chars().take(100).collect();
            // Nobody is left to be told.
            drop(write!(err, "\r\x1b[K{line}").and_then(|()| err.flush()));
            self.open = true;
        } else if self.phase != update.phase {
            drop(err);
            note(&line);
        }
        self.phase.clone_from(&update.phase);
    }

    fn end(&mut self) {
        if std::mem::take(&mut self.open) {
            note("");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (ms, wanted) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_709_251_199_999, "2024-02-29T23:59:59.999Z"),
            (4_102_444_800_000, "2100-01-01T00:00:00.000Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(time(ms), wanted);
        }
    }
}
