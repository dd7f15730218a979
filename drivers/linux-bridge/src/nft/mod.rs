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

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::{Arc, PoisonError},
    time::Duration,
};

use drivers_api::{Context, ErrorKind, EventKind, HostEvent, NetworkId, ObjectRef, PortId};
use host::{
    bound,
    events::EventHub,
    run::{Run, RunError},
};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

mod base;
mod detect;
mod expr;
mod listing;
mod port;
mod ruleset;
mod socket;
mod transaction;

#[cfg(test)]
mod tests;

pub(crate) use detect::{ForeignDrop, Mode};
pub(crate) use ruleset::{Leaving, Part, has_own_bridge};

use crate::{error::chain, locks::Shared, names::Names, records::Store};
use listing::Found;
use ruleset::{Builder, Family, mark_chain};
use socket::{GenerationSocket, MonitorSocket};
use transaction::Transaction;

/// How long one run of nft may take. A load of a thousand ports takes a quarter of a second.
const LIMIT: Duration = Duration::from_secs(20);
/// A listing of ten thousand ports is some 15 MB.
const LISTING: usize = 64 << 20;
/// How often a listing is repeated because the ruleset changed under it.
const TRIES: usize = 3;

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
        let task = Task {
            nft,
            table: names.table().to_owned(),
            mark: mark_chain(&names),
            builder: Builder::new(names),
            store,
            hub,
            generations: GenerationSocket::open()?,
            monitor: MonitorSocket::open()?,
            shared,
            mode: None,
            known: None,
            chains_stale: true,
            foreign_drops: Vec::new(),
            networks: Vec::new(),
        };
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

/// What is known of our tables, good for one generation of the ruleset.
#[derive(Debug)]
struct Known {
    generation: u32,
    found: Found,
}

struct Task {
    nft: PathBuf,
    table: String,
    mark: String,
    builder: Builder,
    store: Arc<Store>,
    hub: EventHub,
    generations: GenerationSocket,
    monitor: MonitorSocket,
    shared: Arc<Shared>,
    mode: Option<Mode>,
    known: Option<Known>,
    chains_stale: bool,
    foreign_drops: Vec<ForeignDrop>,
    /// The networks of the records when they were last read.
    networks: Vec<NetworkId>,
}

impl Task {
    async fn run(mut self, mut requests: mpsc::UnboundedReceiver<Request>) {
        loop {
            tokio::select! {
                // Both arms are cancel-safe: a request stays in the queue, a notification in the socket.
                request = requests.recv() => {
                    let Some(request) = request else { return };
                    let mut batch = vec![request];
                    while let Ok(more) = requests.try_recv() {
                        batch.push(more);
                    }
                    self.serve(batch).await;
                }
                ready = self.monitor.readable() => match ready {
                    Ok(()) => self.notice().await,
                    Err(error) => {
                        tracing::error!(%error, "changes of nftables can no longer be watched");
                        // The rules are still compared at each call.
                        while let Some(request) = requests.recv().await {
                            self.serve(vec![request]).await;
                        }
                        return;
                    }
                },
            }
        }
    }

    async fn serve(&mut self, batch: Vec<Request>) {
        let mut syncs = Vec::new();
        let mut views = Vec::new();
        for request in batch {
            match request {
                Request::Sync(wish, reply) => {
                    self.take(wish);
                    syncs.push((wish, reply));
                }
                Request::View(reply) => views.push(reply),
                // Who asked may have given up: then there is nobody to tell, here and below.
                Request::Mode(reply) => drop(reply.send(self.mode().await)),
            }
        }
        if !syncs.is_empty() {
            let answer = self.commit().await;
            let asked: BTreeSet<Part> = syncs.iter().map(|(wish, _)| wish.part()).collect();
            for (at, (wish, reply)) in syncs.into_iter().enumerate() {
                // What was mended for nobody here is the first one's doing.
                let wrote = |parts: &BTreeSet<Part>| {
                    parts.contains(&wish.part()) || (at == 0 && !parts.is_subset(&asked))
                };
                drop(reply.send(answer.as_ref().map(wrote).map_err(Clone::clone)));
            }
        }
        if !views.is_empty() {
            let view = self.look().await.map(Arc::new);
            for reply in views {
                drop(reply.send(view.clone()));
            }
        }
    }

    fn take(&self, wish: Wish) {
        let mut leaving = self.shared.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        match wish {
            Wish::Network(id) => leaving.networks.remove(&id),
            Wish::Port(id) => leaving.ports.remove(&id),
            Wish::NoNetwork(id) => leaving.networks.insert(id),
            Wish::NoPort(id) => leaving.ports.insert(id),
        };
    }

    async fn mode(&mut self) -> Result<Mode, NftError> {
        match self.mode {
            Some(mode) => Ok(mode),
            None => {
                let mode = Mode::detect(&self.nft, &Context::new()).await?;
                tracing::info!(?mode, "connection tracking on bridges");
                self.mode = Some(mode);
                Ok(mode)
            }
        }
    }

    /// The way from what is there to what the records say.
    async fn plan(&mut self) -> Result<(Transaction, Found), NftError> {
        let mode = self.mode().await?;
        self.refresh().await?;
        let store = Arc::clone(&self.store);
        let records = bound::blocking("read", move || {
            store.snapshot().map_err(|error| {
                drivers_api::Error::new(
                    ErrorKind::Unavailable,
                    "read",
                    "the records",
                    chain(&error),
                )
            })
        })
        .await
        .map_err(|error| NftError::Program { kind: error.kind(), text: error.chain() })?;
        // What is gone for good need not be remembered as leaving.
        let mut leaving = self.shared.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        leaving.networks.retain(|id| records.networks.contains_key(id));
        leaving.ports.retain(|id| records.ports.contains_key(id));
        self.networks = records.networks.keys().copied().collect();
        let wanted = self.builder.build(mode, &records, &leaving);
        drop(leaving);
        let found = self.known.as_ref().map(|known| &known.found);
        let none = Found::default();
        let transaction = Transaction::between(&self.table, found.unwrap_or(&none), &wanted);
        Ok((transaction, Found::after(&wanted)))
    }

    /// Writes the difference; answers whom it concerned.
    async fn commit(&mut self) -> Result<BTreeSet<Part>, NftError> {
        let (transaction, after) = self.plan().await?;
        if transaction.is_empty() {
            return Ok(BTreeSet::new());
        }
        self.check_owner(&after)?;
        tracing::debug!(faults = ?transaction.faults, "write the firewall");
        let before = self.known.take().map(|known| known.generation);
        let run =
            Run::new(&self.nft).args(["-j", "-f", "-"]).stdin(transaction.document()).limit(LIMIT);
        run.success(&Context::new()).await.map_err(program_error)?;
        host::fault::point("linux-bridge.firewall.committed")
            .map_err(|error| NftError::Program { kind: error.kind(), text: error.to_string() })?;
        let generation = self.generation()?;
        if before.is_some_and(|before| before.wrapping_add(1) == generation) {
            // Ours was the only commit, so what is there is what we wrote.
            self.known = Some(Known { generation, found: after });
        }
        Ok(transaction.parts)
    }

    /// Refuses a table of our name that somebody else made.
    fn check_owner(&self, after: &Found) -> Result<(), NftError> {
        let Some(known) = &self.known else { return Ok(()) };
        let touched = known.found.families.union(&after.families);
        for family in touched {
            if !transaction::is_ours(&known.found, *family, &self.mark) {
                return Err(NftError::Foreign {
                    family: family.as_str(),
                    table: self.table.clone(),
                });
            }
        }
        Ok(())
    }

    async fn look(&mut self) -> Result<View, NftError> {
        let (transaction, _) = self.plan().await?;
        Ok(View {
            broken: transaction.parts,
            faults: transaction.faults,
            foreign_drops: self.foreign_drops.clone(),
        })
    }

    fn generation(&self) -> Result<u32, NftError> {
        self.generations.generation().map_err(|error| NftError::Socket { text: error.to_string() })
    }

    /// Takes notifications into account; answers the commits that may have changed our tables.
    fn drain(&mut self) -> (Vec<socket::Commit>, bool) {
        let notified = self.monitor.drain(&self.table);
        let mut foreign = Vec::new();
        for commit in notified.commits {
            let Some(known) = &mut self.known else {
                foreign.push(commit);
                continue;
            };
            // How far the commit is beyond what we know; our own are not beyond.
            match commit.generation.wrapping_sub(known.generation) {
                1 => {
                    self.chains_stale |= commit.chains;
                    known.generation = commit.generation;
                    if commit.touched {
                        self.known = None;
                        foreign.push(commit);
                    }
                }
                0 | 0x8000_0000.. => {}
                _ => {
                    self.known = None;
                    foreign.push(commit);
                }
            }
        }
        if notified.lost {
            self.known = None;
        }
        (foreign, notified.lost)
    }

    /// Makes sure that what is known is what is there.
    async fn refresh(&mut self) -> Result<(), NftError> {
        // What is noticed here concerns a call that compares everything anyway.
        drop(self.drain());
        for _ in 0..TRIES {
            let generation = self.generation()?;
            if self.known.as_ref().is_some_and(|known| known.generation == generation) {
                if self.chains_stale {
                    let chains = self.list(&["chains"]).await?;
                    self.foreign_drops = detect::foreign_drops(&chains, &self.table);
                    self.chains_stale = false;
                    continue;
                }
                return Ok(());
            }
            let (found, drops) = match self.read_all().await {
                Ok(read) => read,
                // A table may go between the listing of tables and its own.
                Err(error) if self.generation()? == generation => return Err(error),
                Err(_) => continue,
            };
            self.known = Some(Known { generation, found });
            self.foreign_drops = drops;
            self.chains_stale = false;
        }
        let text = "the ruleset changes faster than it can be listed".to_owned();
        Err(NftError::Program { kind: ErrorKind::Unavailable, text })
    }

    async fn read_all(&self) -> Result<(Found, Vec<ForeignDrop>), NftError> {
        let chains = self.list(&["chains"]).await?;
        let mut found = Found::default();
        for family in Family::ALL {
            let is_there = chains.iter().filter_map(|object| object.get("chain")).any(|chain| {
                let is = |key: &str, wanted: &str| {
                    chain.get(key).and_then(Value::as_str) == Some(wanted)
                };
                is("family", family.as_str()) && is("table", &self.table)
            });
            if is_there {
                found.read(family, &self.list(&["table", family.as_str(), &self.table]).await?);
            }
        }
        Ok((found, detect::foreign_drops(&chains, &self.table)))
    }

    async fn list(&self, what: &[&str]) -> Result<Vec<Value>, NftError> {
        let run =
            Run::new(&self.nft).args(["-j", "list"]).args(what).limit(LIMIT).output_limit(LISTING);
        let output = run.success(&Context::new()).await.map_err(program_error)?;
        let parsed: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| NftError::Output { text: error.to_string() })?;
        match parsed.get("nftables").and_then(Value::as_array) {
            Some(objects) => Ok(objects.clone()),
            None => {
                Err(NftError::Output { text: "there is no list \"nftables\" in it".to_owned() })
            }
        }
    }

    /// Somebody committed: tells the subscribers whose rules were hurt.
    async fn notice(&mut self) {
        let (foreign, lost) = self.drain();
        if lost {
            self.hub.publish(HostEvent::resync("notifications of nftables were lost"));
        }
        let Some(last) = foreign.iter().rfind(|commit| commit.touched) else { return };
        let process = last.process.clone();
        match self.plan().await {
            Ok((transaction, _)) if transaction.is_empty() => {}
            Ok((transaction, _)) => {
                let faults = transaction.faults.join("; ");
                tracing::warn!(
                    process,
                    faults,
                    "another process changed our firewall rules; they hold again after the next pass"
                );
                self.publish(&transaction.parts, &format!("{process} changed our rules: {faults}"));
            }
            Err(error) => {
                tracing::warn!(process, %error, "another process changed our firewall rules, and they cannot be read");
                self.hub.publish(HostEvent::resync("our firewall rules cannot be read"));
            }
        }
    }

    fn publish(&self, parts: &BTreeSet<Part>, message: &str) {
        if parts.contains(&Part::Base) {
            for network in &self.networks {
                self.hub.publish(HostEvent::new(
                    ObjectRef::Network(*network),
                    EventKind::Changed,
                    message,
                ));
            }
        }
        for part in parts {
            if let Part::Port(port) = part {
                self.hub.publish(HostEvent::new(
                    ObjectRef::Port(*port),
                    EventKind::Changed,
                    message,
                ));
            }
        }
    }
}
