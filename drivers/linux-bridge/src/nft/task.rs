//! The one task that reads and writes our tables.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::{Arc, PoisonError},
    time::Duration,
};

use drivers_api::{Context, ErrorKind, EventKind, HostEvent, NetworkId, ObjectRef};
use host::{bound, events::EventHub, run::Run};
use serde_json::Value;
use tokio::sync::mpsc;

use super::{
    ForeignDrop, Mode, NftError, Part, Request, View, Wish, detect,
    listing::Found,
    program_error,
    ruleset::{Builder, Family, Touched, mark_chain},
    socket::{self, GenerationSocket, MonitorSocket},
    transaction::{self, Transaction},
};
use crate::{error::chain, locks::Shared, names::Names, records::Store};

/// How long one run of nft may take. A load of a thousand ports takes a quarter of a second.
const LIMIT: Duration = Duration::from_secs(20);
/// A listing of ten thousand ports is some 15 MB.
const LISTING: usize = 64 << 20;
/// How often a listing is repeated because the ruleset changed under it.
const TRIES: usize = 3;

/// What is known of our tables, good for one generation of the ruleset.
#[derive(Debug)]
struct Known {
    generation: u32,
    found: Found,
    /// Whether it is as wanted but for what was touched since. If not, everything has to be compared.
    is_current: bool,
}

pub(super) struct Task {
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
    pub(super) fn new(
        nft: PathBuf,
        names: Names,
        store: Arc<Store>,
        shared: Arc<Shared>,
        hub: EventHub,
    ) -> std::io::Result<Self> {
        Ok(Self {
            nft,
            table: names.table().to_owned(),
            mark: mark_chain(&names),
            builder: Builder::new(names),
            store,
            shared,
            hub,
            generations: GenerationSocket::open()?,
            monitor: MonitorSocket::open()?,
            mode: None,
            known: None,
            chains_stale: true,
            foreign_drops: Vec::new(),
            networks: Vec::new(),
        })
    }

    /// Serves until nobody can ask any more.
    pub(super) async fn run(mut self, mut requests: mpsc::UnboundedReceiver<Request>) {
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
    async fn plan(&mut self) -> Result<Transaction, NftError> {
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
        self.builder.update(mode, &records, &leaving);
        drop(leaving);
        let Some(known) = &mut self.known else {
            let text = "the ruleset is not known after it was listed".to_owned();
            return Err(NftError::Output { text });
        };
        let only = known.is_current.then_some(&self.builder.touched);
        let transaction =
            Transaction::between(&self.table, &known.found, &self.builder.wanted, only);
        if transaction.is_empty() {
            known.is_current = true;
            self.builder.touched = Touched::default();
        }
        Ok(transaction)
    }

    /// Writes the difference; answers whom it concerned.
    async fn commit(&mut self) -> Result<BTreeSet<Part>, NftError> {
        let transaction = self.plan().await?;
        if transaction.is_empty() {
            return Ok(BTreeSet::new());
        }
        self.check_owner()?;
        tracing::debug!(faults = ?transaction.faults, "write the firewall");
        let before = self.known.take();
        let run =
            Run::new(&self.nft).args(["-j", "-f", "-"]).stdin(transaction.document()).limit(LIMIT);
        run.success(&Context::new()).await.map_err(program_error)?;
        host::fault::point("linux-bridge.firewall.committed")
            .map_err(|error| NftError::Program { kind: error.kind(), text: error.to_string() })?;
        let generation = self.generation()?;
        if let Some(mut known) =
            before.filter(|known| known.generation.wrapping_add(1) == generation)
        {
            // Ours was the only commit, so what is there is what we wrote.
            let only = known.is_current.then_some(&self.builder.touched);
            known.found.take_over(&self.builder.wanted, only);
            self.known = Some(Known { generation, found: known.found, is_current: true });
            self.builder.touched = Touched::default();
        }
        Ok(transaction.parts)
    }

    /// Refuses a table of our name that somebody else made.
    fn check_owner(&self) -> Result<(), NftError> {
        let Some(known) = &self.known else { return Ok(()) };
        let touched = known.found.families.union(&self.builder.wanted.families);
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
        let transaction = self.plan().await?;
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
            self.known = Some(Known { generation, found, is_current: false });
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
            Ok(transaction) if transaction.is_empty() => {}
            Ok(transaction) => {
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
