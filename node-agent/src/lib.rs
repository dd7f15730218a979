//! The node agent: holds the wanted state of one VM host and keeps the host as wanted, through drivers.
//!
//! The binary `bcd-node` is a thin wrapper. A program that embeds the agent adds drivers of its own:
//!
//! ```no_run
//! # async fn example(mine: std::sync::Arc<dyn drivers_api::Volume>) -> Result<(), node_agent::AgentError> {
//! use node_agent::{Agent, config::Config};
//!
//! let agent = Agent::builder().config(Config::default()).volume("mine", mine).build().await?;
//! agent.run(async { tokio::signal::ctrl_c().await.unwrap_or_default() }).await?;
//! # Ok(())
//! # }
//! ```
//!
//! * [`config`]: the configuration file. [`manifest`]: what an operator writes. [`strict`]: how both are read.
//! * [`secrets`]: where the values of secret references come from.
//! * [`store`]: the wanted state on disk. [`accept`]: what a request changes in it.
//! * [`Node`]: what each call of the API does. [`api`]: the same over gRPC, with credentials and error details.
//! * [`cli`]: the command line, a client of the API.

mod agent;
mod builtin;
mod collect;
mod fault;
mod node;
mod notify;

pub mod accept;
pub mod api;
pub mod cli;
pub mod config;
pub mod doctor;
pub mod events;
pub mod inventory;
pub mod logging;
pub mod manifest;
pub mod node_id;
pub mod secrets;
pub mod store;
pub mod strict;

pub use agent::{Agent, AgentBuilder, AgentError, Ended};
pub use fault::{Fault, Faults};
pub use node::{Node, Object};
