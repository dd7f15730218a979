//! The agent: built from a configuration and drivers, run until it is told to stop.

use std::{
    future::Future,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::Path,
    sync::Arc,
    time::Duration,
};

use drivers_api::{HostId, Hypervisor, Image, Network, SecretResolver, Volume};
use reconciler::{Capacity, Drivers, Reconciler, Settings};
use rustix::fs::inotify;
use tokio::sync::watch;

use crate::{
    api::{Bound, ServeError},
    builtin::{self, BuiltIn},
    collect,
    config::Config,
    node::{Node, Parts},
    node_id, notify,
    secrets::Secrets,
    store::{Access, OpenError, Store, Trouble},
};

/// How long running steps may take to end when the agent stops.
const SHUTDOWN: Duration = Duration::from_secs(10);

/// Why an agent did not start, or failed.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The node has no identity.
    #[error(transparent)]
    NodeId(#[from] node_id::NodeIdError),
    /// The store was not opened.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// A driver was not opened.
    #[error("a driver was not opened")]
    Driver(#[source] drivers_api::Error),
    /// The API is not served.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The directory for what belongs to this boot cannot be used.
    #[error("run_dir {path} cannot be used")]
    RunDir {
        /// The directory.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Another agent may have taken the state directory; this one stopped changing things.
    #[error("the agent stopped: {0}")]
    Lost(String),
}

/// How an agent ended that was told to stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// In order.
    Stopped,
    /// In order, but it could not work all the time: its store was only read.
    ReadOnly(Trouble),
}

/// Puts an agent together.
#[derive(Clone, Default)]
pub struct AgentBuilder {
    config: Config,
    drivers: Drivers,
    built_in: BuiltIn,
    secrets: Option<Arc<dyn SecretResolver>>,
}

impl std::fmt::Debug for AgentBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AgentBuilder")
            .field("config", &self.config)
            .field("drivers", &self.drivers)
            .field("built_in", &self.built_in)
            .finish_non_exhaustive()
    }
}

macro_rules! add_driver {
    ($name:ident, $trait:ident, $what:literal) => {
        #[doc = concat!("With a ", $what, " of your own. The first of its kind is the default; a built-in one of the same id is left out.")]
        #[must_use]
        pub fn $name(mut self, id: impl Into<String>, driver: Arc<dyn $trait>) -> Self {
            self.drivers = self.drivers.$name(id, driver);
            self
        }
    };
}

impl AgentBuilder {
    /// With a configuration other than the default.
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    add_driver!(hypervisor, Hypervisor, "hypervisor");
    add_driver!(network, Network, "network driver");
    add_driver!(volume, Volume, "volume driver");
    add_driver!(image, Image, "image driver");

    /// With a resolver of secret references of your own, in place of files and variables (`[secrets]`).
    #[must_use]
    pub fn secrets(mut self, resolver: Arc<dyn SecretResolver>) -> Self {
        self.secrets = Some(resolver);
        self
    }

    /// Without the built-in drivers: only those that you add.
    #[must_use]
    pub fn without_built_in_drivers(mut self) -> Self {
        self.built_in = BuiltIn::None;
        self
    }

    /// With reference drivers over a host in memory in place of the built-in ones: nothing on the real host is touched.
    /// For trying the agent and its clients.
    #[must_use]
    pub fn with_reference_drivers(mut self) -> Self {
        self.built_in = BuiltIn::Reference;
        self
    }

    /// Opens the store, the drivers and the socket. Nothing is changed on the host yet, but for the directories.
    ///
    /// # Errors
    /// When one of them cannot be opened: among others when another agent has the state directory, which is told within
    /// a second.
    pub async fn build(self) -> Result<Agent, AgentError> {
        let Self { config, drivers, built_in, secrets } = self;
        let id = config.node_id.map_or_else(node_id::of_this_machine, Ok)?;
        let hostname = hostname(&config);
        let dir = config.state_dir.clone();
        // The lock first: a second agent must fail before it touches anything.
        let store =
            tokio::task::spawn_blocking(move || Store::open(&dir)).await.map_err(|error| {
                OpenError::Step { path: config.state_dir.clone(), reason: error.to_string() }
            })??;
        make_run_dir(&config.run_dir)?;
        if config.qemu.uid_base != 0 {
            pass_through(&config.state_dir)?;
        }
        let drivers = builtin::open(built_in, &config, id, &hostname, drivers)
            .await
            .map_err(AgentError::Driver)?;
        let mode = config.mode().unwrap_or(0o660);
        let bound = Bound::bind(&config.socket, mode, &config.write_group).await?;
        let secrets = secrets.unwrap_or_else(|| {
            Arc::new(Secrets::new(&config.secrets.dir, config.secrets.env.clone()))
        });
        Ok(Agent { id, config, store: Arc::new(store), drivers, secrets, bound })
    }
}

/// The directory of this boot. Not private itself: the users of helpers pass through it; what is in it is.
fn make_run_dir(path: &Path) -> Result<(), AgentError> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o755).create(path);
    made.map_err(|source| AgentError::RunDir { path: path.display().to_string(), source })
}

/// The users of VMMs open their disks by path: they may pass through the state directory, and list or read nothing in it.
fn pass_through(state_dir: &Path) -> Result<(), AgentError> {
    std::fs::set_permissions(state_dir, std::fs::Permissions::from_mode(0o711)).map_err(|error| {
        let error = host::files::FileError::of("set the mode of", state_dir)(error);
        AgentError::Store(OpenError::Directory(error))
    })
}

fn hostname(config: &Config) -> String {
    if config.hostname.is_empty() {
        rustix::system::uname().nodename().to_string_lossy().into_owned()
    } else {
        config.hostname.clone()
    }
}

/// An agent that is ready to run.
pub struct Agent {
    id: HostId,
    config: Config,
    store: Arc<Store>,
    drivers: Drivers,
    secrets: Arc<dyn SecretResolver>,
    bound: Bound,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent")
            .field("id", &self.id)
            .field("drivers", &self.drivers)
            .finish_non_exhaustive()
    }
}

impl Agent {
    /// The way to an agent.
    #[must_use]
    pub fn builder() -> AgentBuilder {
        AgentBuilder::default()
    }

    /// Reconciles and serves until `stop` ends. VMs, networks and DHCP go on without the agent.
    ///
    /// # Errors
    /// When the API server fails, or the exclusion on the state directory is lost.
    pub async fn run(self, stop: impl Future<Output = ()> + Send) -> Result<Ended, AgentError> {
        let Self { id, config, store, drivers, secrets, bound } = self;
        let trouble = match store.access() {
            Access::ReadWrite => None,
            Access::ReadOnly(trouble) => Some(trouble.clone()),
        };
        let mut settings = settings(&config, id);
        settings.secrets = Some(Arc::clone(&secrets));
        let reconciler = trouble.is_none().then(|| {
            let wanted: Arc<dyn reconciler::store::WantedStore> = Arc::clone(&store) as _;
            Reconciler::start(wanted, drivers.clone(), settings)
        });
        let parts = Parts { config, store: Arc::clone(&store), drivers, secrets };
        let node = Node::new(id, parts, reconciler.clone());
        // Ends with the reconciler, whose events it follows.
        let collector = reconciler
            .as_ref()
            .map(|reconciler| tokio::spawn(collect::run(node.clone(), reconciler.subscribe())));
        let (stopping, told) = watch::channel(false);
        let guard = tokio::spawn(watch_lock(Arc::clone(&store)));
        let mut server = tokio::spawn(bound.serve(node.clone(), told));
        tracing::info!(node = %id, socket = %node.config().socket.display(), version = env!("CARGO_PKG_VERSION"), "the agent runs");
        notify::notify("READY=1");
        let mut lost = store.lost();
        let outcome = tokio::select! {
            () = stop => Ok(()),
            ended = &mut server => Err(match ended {
                Ok(Err(error)) => error.into(),
                Ok(Ok(())) | Err(_) => AgentError::Lost("the API server ended".to_owned()),
            }),
            Ok(reason) = async { lost.wait_for(Option::is_some).await.map(|reason| reason.clone()) } => {
                Err(AgentError::Lost(reason.unwrap_or_default()))
            }
        };
        notify::notify("STOPPING=1");
        tracing::info!("the agent stops; VMs run on");
        guard.abort();
        if let Some(collector) = &collector {
            collector.abort();
        }
        stopping.send_replace(true);
        if let Some(reconciler) = &reconciler
            && tokio::time::timeout(SHUTDOWN, reconciler.shutdown()).await.is_err()
        {
            tracing::warn!(
                "running steps did not end in time; the next start looks at the host and goes on"
            );
        }
        if !server.is_finished()
            && let Ok(Err(error)) = (&mut server).await
        {
            tracing::warn!(%error, "the API server did not end in order");
        }
        // Not when the last task has let go of it: whoever starts the next agent may do so when this returns.
        let closed = tokio::task::spawn_blocking(move || store.close()).await;
        if let Err(error) = closed {
            tracing::error!(%error, "the store was not closed in order");
        }
        outcome?;
        Ok(trouble.map_or(Ended::Stopped, Ended::ReadOnly))
    }
}

/// The host's CPUs that are online. Not those that this process may use: VMs are not bound by the agent's own limits.
fn cpus() -> u32 {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let here = || std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    count_cpus(&online).unwrap_or_else(|| u32::try_from(here()).unwrap_or(u32::MAX))
}

/// The size of a list such as `0-3,8` (the kernel's Documentation/admin-guide/cputopology.rst).
fn count_cpus(list: &str) -> Option<u32> {
    let sizes = list.trim().split(',').map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        last.checked_sub(first)?.checked_add(1)
    });
    sizes.sum::<Option<u32>>().filter(|count| *count > 0)
}

fn settings(config: &Config, id: HostId) -> Settings {
    let mut settings = Settings::new(id);
    let cpus = cpus();
    let memory_mib = rustix::system::sysinfo();
    let memory_mib = (memory_mib.totalram.saturating_mul(memory_mib.mem_unit.into())) >> 20;
    let mut capacity =
        Capacity::new(cpus, memory_mib.saturating_sub(config.capacity.reserved_memory_mib));
    capacity.cpu_overcommit = config.capacity.cpu_overcommit;
    capacity.memory_overcommit = config.capacity.memory_overcommit;
    settings.capacity = capacity;
    let reconcile = &config.reconcile;
    let count = |value: u32| usize::try_from(value).unwrap_or(usize::MAX);
    settings.workers = count(reconcile.workers);
    settings.parallel_starts = count(reconcile.parallel_starts);
    settings.resync = Duration::from_secs(reconcile.resync_seconds.into());
    settings.backoff.most = Duration::from_secs(reconcile.max_backoff_seconds.into());
    settings.crash_backoff.most = settings.backoff.most;
    settings.deadlines.pull = Duration::from_secs(reconcile.pull_timeout_seconds.into());
    settings
}

/// Looks at the lock whenever something happens in the state directory, and once when the directory itself goes.
async fn watch_lock(store: Arc<Store>) {
    let watching = || -> rustix::io::Result<_> {
        let fd = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        let flags = inotify::WatchFlags::CREATE
            | inotify::WatchFlags::DELETE
            | inotify::WatchFlags::MOVE
            | inotify::WatchFlags::DELETE_SELF
            | inotify::WatchFlags::MOVE_SELF;
        inotify::add_watch(&fd, store.dir(), flags)?;
        Ok(fd)
    };
    let fd = match watching() {
        Ok(fd) => fd,
        Err(error) => {
            tracing::warn!(%error, "the lock file is not watched; it is still checked before each write");
            return;
        }
    };
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    while store.holds_lock() {
        if let Err(error) = host::readiness::readable(std::os::fd::AsFd::as_fd(&fd)).await {
            tracing::warn!(%error, "the lock file is no longer watched");
            return;
        }
        let mut reader = inotify::Reader::new(&fd, &mut buffer);
        while reader.next().is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_capacity_is_the_hosts_as_far_as_the_configuration_allows() {
        assert_eq!(count_cpus("0-3,8\n"), Some(5));
        assert_eq!(count_cpus("0"), Some(1));
        for odd in ["", "3-1", "a", "0-", "-"] {
            assert_eq!(count_cpus(odd), None, "{odd}");
        }
        let mut config = Config::default();
        config.capacity.cpu_overcommit = 2.5;
        config.capacity.memory_overcommit = 1.5;
        config.capacity.reserved_memory_mib = 0;
        let id: HostId = "0d9e8f7a-6b5c-4d3e-8f2a-1b0c9d8e7f6a".parse().unwrap();
        let all = settings(&config, id).capacity;
        assert_eq!(all.cpus, Some(cpus()));
        assert_eq!((all.cpu_overcommit, all.memory_overcommit), (2.5, 1.5));
        let text = std::fs::read_to_string("/proc/meminfo").unwrap();
        let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
        let kib: u64 = total.trim().trim_end_matches(" kB").parse().unwrap();
        assert_eq!(all.memory_mib, Some(kib >> 10));
        config.capacity.reserved_memory_mib = 100;
        assert_eq!(settings(&config, id).capacity.memory_mib, Some((kib >> 10) - 100));
        config.capacity.reserved_memory_mib = u64::MAX;
        assert_eq!(settings(&config, id).capacity.memory_mib, Some(0));
    }
}
