//! Waits for a descriptor without reading from it.

use std::{io, os::fd::BorrowedFd};

use tokio::io::{Interest, unix::AsyncFd};

/// Waits until `fd` is readable: a pidfd whose process ended, a socket with data. Cancel-safe.
///
/// # Errors
/// When the descriptor cannot be waited on.
#[expect(
    unsafe_code,
    reason = "tokio's safe constructor is deprecated as unsound for types that lie about their descriptor"
)]
pub async fn readable(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: a `BorrowedFd` stays open and the same for its lifetime, which is longer than this future's.
    let watched = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
    watched.readable().await?.retain_ready();
    Ok(())
}
