//! The reconciler over the reference drivers, on paused time.

mod basics;
mod common;
