//! The parts of the protocol that this driver uses.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

/// Why a call of the monitor failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QmpError {
    /// The socket failed.
    #[error("the monitor's socket failed while it was to {doing}")]
    Io {
        doing: &'static str,
        #[source]
        source: std::io::Error,
    },
    /// The connection is closed.
    #[error("the monitor closed its connection")]
    Closed,
    /// No answer in time. The command may still take effect.
    #[error("the monitor did not answer {command} within {limit:?}")]
    Silent { command: &'static str, limit: Duration },
    /// QEMU answered with an error.
    #[error("QEMU refused {command}: {description}")]
    Refused { command: &'static str, class: String, description: String },
    /// What came is not the protocol.
    #[error("the monitor's answer to {command} is not understood")]
    Malformed {
        command: &'static str,
        #[source]
        source: serde_json::Error,
    },
}

impl QmpError {
    /// Whether QEMU said that the device or node of the command is not there.
    pub(crate) fn is_absent(&self) -> bool {
        match self {
            Self::Refused { class, description, .. } => {
                class == "DeviceNotFound"
                    || description.contains("Failed to find node")
                    || description.contains("not found")
            }
            Self::Io { .. } | Self::Closed | Self::Silent { .. } | Self::Malformed { .. } => false,
        }
    }

    /// Whether QEMU said that a device still uses the node.
    pub(crate) fn is_in_use(&self) -> bool {
        match self {
            Self::Refused { description, .. } => description.ends_with("is in use"),
            Self::Io { .. } | Self::Closed | Self::Silent { .. } | Self::Malformed { .. } => false,
        }
    }

    /// Whether it is unknown if the command took effect.
    pub(crate) const fn is_open(&self) -> bool {
        match self {
            Self::Io { .. } | Self::Closed | Self::Silent { .. } | Self::Malformed { .. } => true,
            Self::Refused { .. } => false,
        }
    }
}

/// What QEMU tells without being asked.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) name: String,
    pub(crate) data: Value,
}

impl Event {
    /// A field of the data that is a text.
    pub(crate) fn text(&self, field: &str) -> Option<&str> {
        self.data.get(field).and_then(Value::as_str)
    }
}

/// A message of QEMU, taken apart.
#[derive(Debug)]
pub(super) enum Message {
    Greeting,
    Reply { id: u64, answer: Result<Value, Refusal> },
    Event(Event),
}

#[derive(Debug, Deserialize)]
pub(super) struct Refusal {
    #[serde(rename = "class")]
    pub(super) class: String,
    #[serde(rename = "desc")]
    pub(super) description: String,
}

#[derive(Deserialize)]
struct Raw {
    #[serde(rename = "QMP")]
    greeting: Option<Value>,
    id: Option<u64>,
    #[serde(rename = "return")]
    answer: Option<Value>,
    error: Option<Refusal>,
    event: Option<String>,
    #[serde(default)]
    data: Value,
}

impl Message {
    /// Reads one line; `None` for a message that no command of ours asked for.
    pub(super) fn parse(line: &[u8]) -> Result<Option<Self>, serde_json::Error> {
        let raw: Raw = serde_json::from_slice(line)?;
        if let Some(name) = raw.event {
            return Ok(Some(Self::Event(Event { name, data: raw.data })));
        }
        if raw.greeting.is_some() {
            return Ok(Some(Self::Greeting));
        }
        Ok(match (raw.id, raw.error, raw.answer) {
            (Some(id), Some(refusal), _) => Some(Self::Reply { id, answer: Err(refusal) }),
            (Some(id), None, Some(value)) => Some(Self::Reply { id, answer: Ok(value) }),
            (Some(_), None, None) | (None, _, _) => None,
        })
    }
}

/// `RunState` of QEMU's `qapi/run-state.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RunState {
    Running,
    Prelaunch,
    Inmigrate,
    Paused,
    IoError,
    InternalError,
    GuestPanicked,
    Shutdown,
    Suspended,
    Watchdog,
    /// One that stops the guest for a while, or that this version does not know.
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
pub(super) struct StatusReply {
    pub(super) status: RunState,
}

/// A child of a QOM path.
#[derive(Deserialize)]
pub(super) struct QomEntry {
    pub(super) name: String,
    #[serde(rename = "type")]
    pub(super) kind: String,
}

/// A block node with a name.
#[derive(Debug, Deserialize)]
pub(crate) struct BlockNode {
    #[serde(rename = "node-name")]
    pub(crate) name: Option<String>,
    pub(crate) image: BlockImage,
}

/// What a block node holds.
#[derive(Debug, Deserialize)]
pub(crate) struct BlockImage {
    #[serde(rename = "virtual-size")]
    pub(crate) virtual_size: u64,
}

#[derive(Deserialize)]
pub(super) struct BlockDevice {
    #[serde(rename = "io-status")]
    pub(super) io_status: Option<String>,
}
