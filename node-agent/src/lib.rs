//! The node agent.

pub mod manifest;
pub mod node_id;
pub mod strict;
