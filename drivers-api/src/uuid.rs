//! Identifiers: one newtype per kind of object over one checked UUID.

use std::{fmt, str::FromStr};

/// Why a text is no identifier, name, address or size. Carries the wanted form, never the whole input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    what: &'static str,
    reason: &'static str,
    found: String,
}

impl ParseError {
    /// `what` is the name of the type as people say it, `found` the input, of which at most 64 escaped characters are
    /// kept.
    pub(crate) fn new(what: &'static str, reason: &'static str, found: &str) -> Self {
        Self { what, reason, found: found.chars().flat_map(char::escape_debug).take(64).collect() }
    }

    /// Why it was refused.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        self.reason
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\" is not a valid {}: {}", self.found, self.what, self.reason)
    }
}

impl std::error::Error for ParseError {}

impl ParseError {
    /// As an [`InvalidSpec`](crate::ErrorKind::InvalidSpec) error that names the field.
    #[must_use]
    pub fn in_field(self, field: impl Into<String>) -> crate::Error {
        crate::Error::invalid(field, self)
    }
}

/// Writes serde implementations through `Display` and `FromStr`, so that text on every wire has one form.
macro_rules! serde_as_text {
    ($name:ident) => {
        #[cfg(feature = "serde")]
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
        #[cfg(feature = "serde")]
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}
pub(crate) use serde_as_text;

/// A UUID in the one accepted spelling: 36 characters, hyphenated hexadecimal, either case; never nil.
///
/// Two spellings of one UUID are one value (RFC 9562 section 4: output lower case, input case-insensitive). Braces,
/// `urn:uuid:`, missing hyphens and surrounding space are refused rather than folded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Uuid([u8; 16]);

impl Uuid {
    /// From its sixteen bytes, most significant first; `None` for the nil UUID, which names nothing.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Option<Self> {
        if u128::from_be_bytes(bytes) == 0 { None } else { Some(Self(bytes)) }
    }

    /// The sixteen bytes, most significant first.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl FromStr for Uuid {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        const FORM: &str = "wanted 8-4-4-4-12 hexadecimal digits";
        let refuse = |reason| ParseError::new("UUID", reason, text);
        if text.len() != 36 {
            return Err(refuse(FORM));
        }
        let mut digits = [0_u8; 32];
        let mut next = digits.iter_mut();
        for (at, byte) in text.bytes().enumerate() {
            if matches!(at, 8 | 13 | 18 | 23) {
                if byte != b'-' {
                    return Err(refuse(FORM));
                }
                continue;
            }
            let value = char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
            let (Some(slot), Some(value)) = (next.next(), value) else { return Err(refuse(FORM)) };
            *slot = value;
        }
        let mut bytes = [0_u8; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = pair.iter().fold(0, |value, digit| (value << 4) | digit);
        }
        Self::from_bytes(bytes).ok_or_else(|| refuse("the nil UUID names nothing"))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

serde_as_text!(Uuid);

macro_rules! ids {
    ($($(#[$meta:meta])* $name:ident = $what:literal;)*) => { $(
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Uuid);

        impl $name {
            /// What people call this kind of object.
            pub const WHAT: &'static str = $what;

            /// The identifier over a UUID.
            #[must_use]
            pub const fn new(uuid: Uuid) -> Self {
                Self(uuid)
            }

            /// The UUID itself.
            #[must_use]
            pub const fn uuid(self) -> Uuid {
                self.0
            }
        }

        impl FromStr for $name {
            type Err = ParseError;
            fn from_str(text: &str) -> Result<Self, ParseError> {
                text.parse().map(Self)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }

        serde_as_text!($name);
    )* };
}

ids! {
    /// A virtual machine.
    VmId = "vm";
    /// A network.
    NetworkId = "network";
    /// A port: one NIC of one VM on one network.
    PortId = "port";
    /// A volume.
    VolumeId = "volume";
    /// A security group.
    SecurityGroupId = "security group";
    /// A project, the owner of objects as people see it.
    ProjectId = "project";
    /// A host of the fleet: the node that runs the agent.
    HostId = "host";
}
