//! The log on standard error: one event a line, whatever its fields hold.

use std::fmt;

use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    EnvFilter,
    fmt::{
        FmtContext, FormatEvent, FormatFields, format::Writer, time::FormatTime, time::SystemTime,
    },
    registry::LookupSpan,
};

use crate::config::{Log, LogFormat};

/// Why the log was not set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// `log.level` is no filter.
    #[error("log.level: \"{level}\" is no level and no list of directives")]
    Level {
        /// The text.
        level: String,
        /// Why.
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
    /// The process has a log already.
    #[error("the log is set up already")]
    Again(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Sets up the process's log. An embedder may use its own instead.
///
/// # Errors
/// For a level that cannot be read, or when there is a log already.
pub fn start(log: &Log) -> Result<(), LogError> {
    let filter = EnvFilter::try_new(&log.level)
        .map_err(|source| LogError::Level { level: crate::strict::escaped(&log.level), source })?;
    let base = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match log.format {
        LogFormat::Json => base.json().flatten_event(true).try_init(),
        LogFormat::Text => base.event_format(Escaped).try_init(),
    }
    .map_err(LogError::Again)
}

/// `TIME LEVEL TARGET MESSAGE NAME=VALUE …`, where a value with anything but plain characters is quoted and escaped, so
/// that no tool's output and no object's name can begin a line or colour it.
#[derive(Debug)]
struct Escaped;

impl<S, N> FormatEvent<S, N> for Escaped
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        SystemTime.format_time(&mut writer)?;
        let meta = event.metadata();
        write!(writer, " {:>5} {}", meta.level(), meta.target())?;
        let mut fields = Fields::default();
        event.record(&mut fields);
        writeln!(writer, "{}{}", fields.message, fields.rest)
    }
}

#[derive(Default)]
struct Fields {
    message: String,
    rest: String,
}

impl Fields {
    fn put(&mut self, name: &str, text: &str) {
        if name == "message" {
            let escaped: String = text.chars().flat_map(escape).collect();
            self.message = format!(" {escaped}");
            return;
        }
        let plain = |c: char| c.is_alphanumeric() || "-_./:@%+,".contains(c);
        if !text.is_empty() && text.chars().all(plain) {
            self.rest.push_str(&format!(" {name}={text}"));
        } else {
            let escaped: String = text.chars().flat_map(escape_quoted).collect();
            self.rest.push_str(&format!(" {name}=\"{escaped}\""));
        }
    }
}

fn escape(c: char) -> impl Iterator<Item = char> {
    let keep = !needs_escape(c);
    let plain = keep.then_some(c);
    let escaped = (!keep).then(|| c.escape_default());
    plain.into_iter().chain(escaped.into_iter().flatten())
}

fn escape_quoted(c: char) -> impl Iterator<Item = char> {
    let mark = matches!(c, '"' | '\\');
    mark.then_some('\\').into_iter().chain(escape(c))
}

/// Control characters, and those that change the direction or the line of a text.
fn needs_escape(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field.name(), value);
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        let mut text = value.to_string();
        let mut cause = value.source();
        while let Some(next) = cause {
            text = format!("{text}: {next}");
            cause = next.source();
        }
        self.put(field.name(), &text);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field.name(), &format!("{value:?}"));
    }
}

/// A text for a terminal: control characters and marks of direction escaped.
#[must_use]
pub fn for_terminal(text: &str) -> String {
    text.chars().flat_map(escape).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Memory(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Memory {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn no_value_can_forge_a_line_or_colour_it() {
        let memory = Memory::default();
        let writer = memory.clone();
        let subscriber = tracing_subscriber::fmt()
            .event_format(Escaped)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let name = "a\n2026-01-01T00:00:00Z ERROR bcd forged\u{1b}[31m\u{202e}\" x=y";
            tracing::info!(name, plain = 7, path = "/a/b", "starting {name}");
        });
        let text = String::from_utf8(memory.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{text}");
        assert!(
            text.contains(
                r#"name="a\n2026-01-01T00:00:00Z ERROR bcd forged\u{1b}[31m\u{202e}\" x=y""#
            ),
            "{text}"
        );
        assert!(text.contains(" plain=7 path=/a/b"), "{text}");
    }
}
