//! The reconciler over the reference drivers, on paused time.

#![cfg(test)]

mod basics;
mod clocks;
mod common;
mod crash;
mod faults;
mod many;
mod model;
mod refusals;
mod starve;
