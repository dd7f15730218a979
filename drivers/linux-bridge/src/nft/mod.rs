//! The firewall: our own nftables tables, written by one task that gathers what is waiting into one commit.
//!
//! ```text
//!   calls ──► queue ──► records ─► wanted ruleset ┐
//!                       kernel  ─► found ruleset  ┴─► one transaction ─► nft -j -f -
//! ```
//!
//! The wanted ruleset is built from all records each time, so one commit also mends whatever else is damaged. What is found
//! is kept from one commit to the next and is good as long as the kernel's generation says that nobody else committed;
//! else our tables are listed. Without a difference nothing is run and nothing is written.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use drivers_api::{ErrorKind, NetworkId, PortId};
use host::{events::EventHub, run::RunError};
use tokio::sync::{mpsc, oneshot};

mod base;
mod detect;
mod expr;
mod listing;
mod port;
mod ruleset;
mod socket;
mod task;
mod transaction;

#[cfg(test)]
mod tests;

pub(crate) use detect::ForeignDrop;
pub use detect::Mode;
pub(crate) use ruleset::{Leaving, Part, has_own_bridge};

use crate::{error::chain, locks::Shared, names::Names, records::Store};
use task::Task;

/// Why the firewall is not as wanted.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum NftError {
    #[error("nft failed: {text}")]
    Program { kind: ErrorKind, text: String },
    #[error("the kernel's netfilter interface failed: {text}")]
    Socket { text: String },
    #[error("nft's output was not understood: {text}")]
    Output { text: String },
    #[error("a table {family} {table} is there that is not ours")]
    Foreign { family: &'static str, table: String },
    #[error("the driver is shutting down")]
    Gone,
}

fn program_error(error: RunError) -> NftError {
    let text = chain(&error);
    let denied = text.contains("Operation not permitted");
    let kind = error.into_error("run", "nft").kind();
    NftError::Program { kind: if denied { ErrorKind::Denied } else { kind }, text }
}

/// The firewall at one moment.
#[derive(Clone, Debug)]
pub(crate) struct View {
    /// Whose rules are not as the records say.
    pub(crate) broken: BTreeSet<Part>,
    /// What is wrong, for people.
    pub(crate) faults: Vec<String>,
    pub(crate) foreign_drops: Vec<ForeignDrop>,
}

/// What a call wants of the firewall.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wish {
    /// The network's record holds.
    Network(NetworkId),
    /// The port's record holds.
    Port(PortId),
    /// The network has no rules, though its record is still there.
    NoNetwork(NetworkId),
    /// The port has no rules, though its record is still there.
    NoPort(PortId),
}

impl Wish {
    const fn part(self) -> Part {
        match self {
            Self::Network(_) | Self::NoNetwork(_) => Part::Base,
            Self::Port(port) | Self::NoPort(port) => Part::Port(port),
        }
    }
}

#[derive(Debug)]
enum Request {
    Sync(Wish, oneshot::Sender<Result<bool, NftError>>),
    View(oneshot::Sender<Result<Arc<View>, NftError>>),
    Mode(oneshot::Sender<Result<Mode, NftError>>),
}

/// The way to the firewall's task; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Firewall(mpsc::UnboundedSender<Request>);

impl Firewall {
    /// Starts the task. It ends when the last clone is dropped.
    pub(crate) fn start(
        nft: PathBuf,
        names: Names,
        store: Arc<Store>,
        shared: Arc<Shared>,
        hub: EventHub,
    ) -> std::io::Result<Self> {
        let (send, receive) = mpsc::unbounded_channel();
        let task = Task::new(nft, names, store, shared, hub)?;
        tokio::spawn(task.run(receive));
        Ok(Self(send))
    }

    /// Brings the rules to what the records say, with whatever else waits. Answers whether something of the wish's was
    /// written. The work goes on when the future is dropped.
    pub(crate) async fn sync(&self, wish: Wish) -> Result<bool, NftError> {
        self.ask(|reply| Request::Sync(wish, reply)).await
    }

    /// The firewall as it is.
    pub(crate) async fn view(&self) -> Result<Arc<View>, NftError> {
        self.ask(Request::View).await
    }

    /// What the kernel can do.
    pub(crate) async fn mode(&self) -> Result<Mode, NftError> {
        self.ask(Request::Mode).await
    }

    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<Result<T, NftError>>) -> Request,
    ) -> Result<T, NftError> {
        let (reply, answer) = oneshot::channel();
        self.0.send(request(reply)).map_err(|_| NftError::Gone)?;
        answer.await.map_err(|_| NftError::Gone)?
    }
}
