//! The node agent.

pub mod config;
pub mod manifest;
pub mod node_id;
pub mod store;
pub mod strict;
