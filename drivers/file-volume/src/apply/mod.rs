//! Changes to the host. Each call holds its volume's lock from its look at what is there to its last effect; blocking work
//! runs off the executor and takes the lock along, so a dropped call lets nobody else in before its work has ended.

mod attach;
mod create;
mod destroy;
mod ensure;

pub(crate) use attach::{attach, detach};
pub(crate) use destroy::destroy;
pub(crate) use ensure::ensure;
