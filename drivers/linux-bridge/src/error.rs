//! From each module's error to the contract's.

use std::fmt;

use drivers_api::{Error, ErrorKind};

use crate::{
    dnsmasq::DnsmasqError, netlink::NetlinkError, nft::NftError, records::RecordError,
    sysctl::SysctlError,
};

/// Turns a module's error into the contract's, with the operation and the object.
pub(crate) trait During<T> {
    /// The contract's error.
    fn during(self, operation: &'static str, object: impl fmt::Display) -> drivers_api::Result<T>;
}

/// What an error of a module means to the caller.
pub(crate) trait Meaning: std::error::Error + Send + Sync + 'static {
    fn kind(&self) -> ErrorKind;
    fn remedy(&self) -> Option<String> {
        None
    }
}

impl<T, E: Meaning> During<T> for Result<T, E> {
    fn during(self, operation: &'static str, object: impl fmt::Display) -> drivers_api::Result<T> {
        self.map_err(|error| {
            let answer = Error::new(error.kind(), operation, object, &error);
            let answer = match error.remedy() {
                Some(remedy) => answer.with_remedy(remedy),
                None => answer,
            };
            match error.source() {
                // The source of an error cannot be moved out of it; its text is kept.
                Some(source) => answer.with_source(chain(source)),
                None => answer,
            }
        })
    }
}

/// The texts of an error and its causes.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

/// The kind of a failed system call.
pub(crate) fn io_kind(error: &std::io::Error) -> ErrorKind {
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "a foreign enumeration of dozens; the rest is retried"
    )]
    match error.kind() {
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
            ErrorKind::Denied
        }
        std::io::ErrorKind::StorageFull
        | std::io::ErrorKind::QuotaExceeded
        | std::io::ErrorKind::OutOfMemory => ErrorKind::Exhausted,
        std::io::ErrorKind::Unsupported => ErrorKind::Unsupported,
        _ => ErrorKind::Unavailable,
    }
}

impl Meaning for NetlinkError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Open { source } => io_kind(source),
            Self::Request { source, .. } => io_kind(source),
            Self::Lost { .. } => ErrorKind::Unavailable,
            Self::Tap { source, .. } => match source.raw_os_error() {
                // EBUSY with IFF_TUN_EXCL: a link of this name came between our look and the making.
                Some(libc::EBUSY | libc::EEXIST) => ErrorKind::Conflict,
                Some(_) | None => io_kind(source),
            },
        }
    }

    fn remedy(&self) -> Option<String> {
        match self {
            Self::Tap { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                Some("load the kernel module tun: modprobe tun".to_owned())
            }
            Self::Open { .. } | Self::Request { .. } | Self::Lost { .. } | Self::Tap { .. } => None,
        }
    }
}

impl Meaning for NftError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Program { kind, .. } => *kind,
            Self::Socket { .. } | Self::Gone => ErrorKind::Unavailable,
            Self::Output { .. } => ErrorKind::Internal,
            Self::Foreign { .. } => ErrorKind::Conflict,
        }
    }

    fn remedy(&self) -> Option<String> {
        match self {
            Self::Foreign { .. } => {
                Some("rename or delete that table, or configure another prefix".to_owned())
            }
            Self::Program { .. } => Some("see whether nft is installed and works".to_owned()),
            Self::Socket { .. } | Self::Gone | Self::Output { .. } => None,
        }
    }
}

impl Meaning for DnsmasqError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Io { source, .. } => io_kind(source),
            Self::Ended { .. } | Self::Busy { .. } | Self::NotReady => ErrorKind::Unavailable,
        }
    }

    fn remedy(&self) -> Option<String> {
        match self {
            Self::Io { operation: "start", .. } => Some("install dnsmasq".to_owned()),
            Self::Io { .. } | Self::Ended { .. } | Self::Busy { .. } | Self::NotReady => None,
        }
    }
}

impl Meaning for RecordError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::File { source } => io_kind(&source.source),
            Self::Encode { .. } => ErrorKind::Internal,
        }
    }
}

impl Meaning for SysctlError {
    fn kind(&self) -> ErrorKind {
        io_kind(&self.source)
    }

    fn remedy(&self) -> Option<String> {
        Some(format!("set it by hand: sysctl -w {}={}", self.name, self.value))
    }
}
