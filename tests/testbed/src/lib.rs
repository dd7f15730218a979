//! Real parts for tests: network namespaces that a test makes and leaves, a guest that boots in a tenth of a second, a
//! registry on a loopback port.
//!
//! Whatever a test starts through this crate ends with the test.

pub mod guest;
pub mod netns;
pub mod registry;
