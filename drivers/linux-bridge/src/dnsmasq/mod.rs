//! DHCP, router advertisements and names: one dnsmasq a network, which outlives the agent.
//!
//! ```text
//! RUN_DIR/NETWORK/dnsmasq.conf   what it was started with
//!                 hosts/PORT     one line a port; dnsmasq sees a new file by itself
//!                 identity       the process, and the hash of what it was started with
//!                 pid, leases    dnsmasq's own
//!                 log            what it said while it started
//!                 lock           held while one is started
//! ```
//!
//! A killed agent may leave a process without an identity. The path of its configuration, which no other process has in its
//! arguments, finds it: before a start all such processes are ended. The lock is inherited by the child until its exec, so
//! a successor cannot look before there is something to see.

use std::{
    collections::HashMap,
    io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use drivers_api::{EventKind, HostEvent, NetworkId, ObjectRef, PortId};
use host::{events::EventHub, files, process::Identity};
use rustix::process::Signal;
use tokio::task::AbortHandle;

mod access;
mod conf;
mod leases;
mod process;

pub(crate) use conf::{Plan, host_line, valid_hostname};

use access::User;

/// How long a process may take to end after it was asked to.
const GRACE: Duration = Duration::from_secs(2);
/// How long one may take to be ready.
const READY: Duration = Duration::from_secs(5);

/// Why there is no DHCP.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DnsmasqError {
    #[error("cannot {operation} {}", path.display())]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("dnsmasq ended while it started: {log}")]
    Ended { log: String },
    #[error("another agent is starting dnsmasq: {} is locked", path.display())]
    Busy { path: PathBuf },
    #[error("dnsmasq was not ready after {READY:?}")]
    NotReady,
}

impl From<files::FileError> for DnsmasqError {
    fn from(error: files::FileError) -> Self {
        Self::Io { operation: error.operation, path: error.path, source: error.source }
    }
}

/// How a network's dnsmasq is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It runs with what is wanted.
    Runs,
    /// It runs with something else.
    Outdated,
    /// It does not run.
    Ended,
}

/// What came of writing a port's entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Put {
    /// It is as it was.
    Same,
    /// It was written.
    Written,
    /// It was not written: an address of it is leased to a guest that was there before, and dnsmasq would not give it to
    /// another for the rest of that lease. Starting anew forgets it.
    Leased,
    /// It was not written: the network has no DHCP server.
    NoServer,
}

/// All dnsmasq processes of the driver.
#[derive(Debug)]
pub(crate) struct Dnsmasq {
    program: PathBuf,
    run_dir: PathBuf,
    user: Option<User>,
    hub: EventHub,
    watched: Mutex<HashMap<NetworkId, (Identity, AbortHandle)>>,
}

impl Dnsmasq {
    /// Opens the run directory. Blocks.
    pub(crate) fn open(
        program: PathBuf,
        run_dir: PathBuf,
        user: &str,
        hub: EventHub,
    ) -> Result<Self, DnsmasqError> {
        files::private_dir(&run_dir)?;
        let user = access::usable_user(user, &run_dir)?;
        Ok(Self { program, run_dir, user, hub, watched: Mutex::default() })
    }

    fn dir(&self, network: NetworkId) -> PathBuf {
        self.run_dir.join(network.to_string())
    }

    /// How the network's process is. Blocks. One that runs is watched from now on.
    pub(crate) fn state(&self, network: NetworkId, plan: &Plan) -> Result<State, DnsmasqError> {
        let dir = self.dir(network);
        let Some((identity, hash)) = process::recorded(&dir)? else { return Ok(State::Ended) };
        let open = identity.open().map_err(failed("open the process of", &dir))?;
        if open.is_none() {
            return Ok(State::Ended);
        }
        let wanted = plan.hash(&self.conf(network, plan));
        self.watch(network, &identity);
        Ok(if hash == wanted { State::Runs } else { State::Outdated })
    }

    fn conf(&self, network: NetworkId, plan: &Plan) -> String {
        let (user, group) = match &self.user {
            Some(user) => (user.name.as_str(), user.group.as_str()),
            None => ("root", "root"),
        };
        plan.text(&self.dir(network), user, group)
    }

    /// Starts the process, after ending what runs. The entries of `hosts` are written first; leases that are of none of
    /// them, or of an address in `forget`, are forgotten.
    pub(crate) async fn start(
        &self,
        network: NetworkId,
        plan: &Plan,
        hosts: Vec<(PortId, String)>,
        forget: Vec<IpAddr>,
    ) -> Result<(), DnsmasqError> {
        self.unwatch(network);
        let launch = process::Launch {
            program: self.program.clone(),
            dir: self.dir(network),
            conf: self.conf(network, plan),
            hash: plan.hash(&self.conf(network, plan)),
            user: self.user.clone(),
            hosts,
            forget,
        };
        let identity = launch.run().await?;
        self.watch(network, &identity);
        Ok(())
    }

    /// Ends the process and removes its files; answers whether there was something.
    pub(crate) async fn remove(&self, network: NetworkId) -> Result<bool, DnsmasqError> {
        self.unwatch(network);
        let dir = self.dir(network);
        let ended = process::end_all(&dir).await?;
        let removed = files_gone(&dir)?;
        Ok(ended || removed)
    }

    /// Writes a port's entry. dnsmasq takes a new file by itself (inotify), and forgets what an old one said only when it
    /// is told. Blocks.
    pub(crate) fn put_host(
        &self,
        network: NetworkId,
        port: PortId,
        line: &str,
    ) -> Result<Put, DnsmasqError> {
        let dir = self.dir(network);
        let path = dir.join("hosts").join(port.to_string());
        if !dir.join("hosts").exists() {
            return Ok(Put::NoServer);
        }
        let before = files::read_bounded(&path, 4096)?;
        if before.as_deref() == Some(line.as_bytes()) {
            return Ok(Put::Same);
        }
        if leases::is_held_by_another(&leases::read(&dir)?, line) {
            return Ok(Put::Leased);
        }
        access::write_for(&path, line.as_bytes(), self.user.as_ref())?;
        if before.is_some() {
            self.reload(network)?;
        }
        Ok(Put::Written)
    }

    /// Whether the port's entry is as wanted. Blocks.
    pub(crate) fn has_host(
        &self,
        network: NetworkId,
        port: PortId,
        line: &str,
    ) -> Result<bool, DnsmasqError> {
        let path = self.dir(network).join("hosts").join(port.to_string());
        Ok(files::read_bounded(&path, 4096)?.as_deref() == Some(line.as_bytes()))
    }

    /// Removes a port's entry; answers whether there was one. Blocks.
    pub(crate) fn remove_host(
        &self,
        network: NetworkId,
        port: PortId,
    ) -> Result<bool, DnsmasqError> {
        let was = files::remove_file(&self.dir(network).join("hosts").join(port.to_string()))?;
        if was {
            self.reload(network)?;
        }
        Ok(was)
    }

    /// Has dnsmasq read its hosts anew.
    fn reload(&self, network: NetworkId) -> Result<(), DnsmasqError> {
        let dir = self.dir(network);
        if let Some((identity, _)) = process::recorded(&dir)?
            && let Some(process) = identity.open().map_err(failed("open the process of", &dir))?
        {
            process.signal(Signal::HUP).map_err(failed("signal the process of", &dir))?;
        }
        Ok(())
    }

    /// Publishes the end of a process, once.
    fn watch(&self, network: NetworkId, identity: &Identity) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if watched
            .get(&network)
            .is_some_and(|(known, task)| known == identity && !task.is_finished())
        {
            return;
        }
        let Ok(Some(process)) = identity.open() else { return };
        let hub = self.hub.clone();
        let task = tokio::spawn(async move {
            let message = match process.ended().await {
                Ok(how) => format!("the network's dnsmasq ended: {how:?}"),
                Err(error) => format!("the network's dnsmasq cannot be watched: {error}"),
            };
            hub.publish(HostEvent::new(ObjectRef::Network(network), EventKind::Changed, message));
        });
        if let Some((_, old)) = watched.insert(network, (identity.clone(), task.abort_handle())) {
            old.abort();
        }
    }

    fn unwatch(&self, network: NetworkId) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, task)) = watched.remove(&network) {
            task.abort();
        }
    }
}

impl Drop for Dnsmasq {
    fn drop(&mut self) {
        let watched = self.watched.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (_, (_, task)) in watched.drain() {
            task.abort();
        }
    }
}

fn files_gone(dir: &Path) -> Result<bool, DnsmasqError> {
    Ok(files::remove_tree(dir)?)
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DnsmasqError {
    let path = path.to_owned();
    move |source| DnsmasqError::Io { operation, path, source }
}
