//! The reconciler over the reference drivers, on paused time.

mod basics;
mod common;
mod crash;
mod faults;
mod many;
mod refusals;
mod wild;
