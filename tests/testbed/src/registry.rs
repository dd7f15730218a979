//! A real registry.
