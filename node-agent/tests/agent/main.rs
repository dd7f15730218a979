//! The agent as a whole: the built binary and the library, over reference drivers and over real ones.

#![cfg(test)]

mod api;
mod cli;
mod common;
mod images;
mod terminal;
