//! A small typed client of the QEMU Machine Protocol
//! (<https://www.qemu.org/docs/master/interop/qmp-spec.html>).
//!
//! The peer is not trusted: a VMM that its guest has taken over may send anything, or nothing. A message has a bound, a
//! reply is matched by its number, a call has a limit, and what cannot be understood closes the connection.

mod client;
mod types;

pub(crate) use client::Client;
pub(crate) use types::{Event, QmpError, RunState};

#[cfg(test)]
mod tests;
