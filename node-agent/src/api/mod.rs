//! gRPC on a Unix socket: the wire of [`Node`](crate::Node), who may call it, and how errors look.

mod convert;
mod peer;
mod server;
mod service;
mod streams;

/// The messages, the client and the server of `bcd.node.v1`.
#[expect(
    missing_docs,
    unused_qualifications,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    clippy::doc_markdown,
    clippy::missing_errors_doc,
    clippy::too_many_lines,
    reason = "generated"
)]
pub mod proto {
    tonic::include_proto!("bcd.node.v1");
}

/// The compiled definition, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/node.bin"));
/// The most bytes of a message.
pub const MAX_MESSAGE: usize = 16 << 20;

pub use convert::{details, faults_of, status_of};
pub use peer::Peer;
pub use server::{Bound, ServeError};
