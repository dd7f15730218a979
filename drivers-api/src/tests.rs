//! Tests of the contract's own types.
