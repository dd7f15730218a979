//! Sizes and counts with their unit in the type and their bounds checked.

use std::{fmt, num::NonZeroU16};

use crate::uuid::ParseError;

macro_rules! bounded {
    ($(#[$meta:meta])* $name:ident($int:ty) = $what:literal, $min:literal ..= $max:literal, $reason:literal) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "serde", serde(try_from = "u64", into = "u64"))]
        pub struct $name($int);

        impl $name {
            /// The least value.
            pub const MIN: $int = $min;
            /// The greatest value.
            pub const MAX: $int = $max;

            /// Checks the bounds.
            ///
            /// # Errors
            /// When the value is outside the bounds, zero included.
            pub fn new(value: u64) -> Result<Self, ParseError> {
                <$int>::try_from(value)
                    .ok()
                    .filter(|value| (Self::MIN..=Self::MAX).contains(value))
                    .map(Self)
                    .ok_or_else(|| ParseError::new($what, $reason, &value.to_string()))
            }

            /// The plain number.
            #[must_use]
            pub const fn get(self) -> $int {
                self.0
            }
        }

        impl TryFrom<u64> for $name {
            type Error = ParseError;
            fn try_from(value: u64) -> Result<Self, ParseError> {
                Self::new(value)
            }
        }

        impl From<$name> for u64 {
            fn from(value: $name) -> Self {
                value.0.into()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

bounded! {
    /// Virtual CPUs of a VM. The upper bound is what QEMU's q35 takes without an x2APIC with IOMMU.
    CpuCount(u16) = "CPU count", 1..=255, "wanted 1 to 255"
}
bounded! {
    /// Memory of a VM in MiB: at least 1 MiB, at most 16 TiB.
    MemoryMib(u64) = "memory size in MiB", 1..=16_777_216, "wanted 1 to 16777216 MiB"
}
bounded! {
    /// Size of a volume in GiB: at least 1 GiB, at most 1 PiB.
    SizeGib(u64) = "volume size in GiB", 1..=1_048_576, "wanted 1 to 1048576 GiB"
}
bounded! {
    /// An interface's MTU in bytes. 1280 is what IPv6 needs (RFC 8200 section 5).
    MtuBytes(u16) = "MTU in bytes", 1280..=65_521, "wanted 1280 to 65521 bytes"
}
bounded! {
    /// An 802.1Q VLAN tag; 0 and 4095 are reserved by the standard.
    VlanId(u16) = "VLAN tag", 1..=4_094, "wanted 1 to 4094"
}

impl MemoryMib {
    /// In bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0 << 20
    }
}

impl SizeGib {
    /// In bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0 << 30
    }
}

/// A TCP or UDP port, never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct PortNumber(NonZeroU16);

impl PortNumber {
    /// Checks that it is not zero.
    ///
    /// # Errors
    /// For zero.
    pub fn new(value: u16) -> Result<Self, ParseError> {
        NonZeroU16::new(value)
            .map(Self)
            .ok_or_else(|| ParseError::new("port number", "wanted 1 to 65535", "0"))
    }

    /// The plain number.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0.get()
    }
}

impl fmt::Display for PortNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
