//! The driver itself: opens its parts, and hands each call to the module that does it.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use drivers_api::{
    Change, Context, Error, ErrorKind, EventStream, HostInfo, Network, NetworkId, NetworkSpec,
    NetworkStatus, NetworkType, NicHandle, Outcome, PortId, PortSpec, PortStatus, Result, Uuid,
};
use host::{bound, events::EventHub};
use tokio::task::AbortHandle;

use crate::{
    config::BridgeConfig,
    dnsmasq::{Dnsmasq, DnsmasqError},
    error::During,
    locks::Shared,
    names::Names,
    netlink::{Netlink, NetlinkError},
    network,
    nft::Firewall,
    port,
    records::{RecordError, Records, Store},
    status, validate, watch,
};

const TYPES: &[NetworkType] = &[NetworkType::Nat, NetworkType::Isolated, NetworkType::Bridged];

/// The parts that calls work with.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) names: Names,
    pub(crate) store: Arc<Store>,
    pub(crate) netlink: Netlink,
    pub(crate) firewall: Firewall,
    pub(crate) dnsmasq: Arc<Dnsmasq>,
    pub(crate) shared: Arc<Shared>,
}

impl Inner {
    /// All records.
    pub(crate) async fn records(&self, operation: &'static str) -> Result<Arc<Records>> {
        let store = Arc::clone(&self.store);
        bound::blocking(operation, move || store.snapshot().during(operation, "the records")).await
    }

    /// Looks at or changes the files of DHCP.
    pub(crate) async fn dhcp<T: Send + 'static>(
        &self,
        operation: &'static str,
        object: &str,
        work: impl FnOnce(&Dnsmasq) -> std::result::Result<T, DnsmasqError> + Send + 'static,
    ) -> Result<T> {
        let (dnsmasq, object) = (Arc::clone(&self.dnsmasq), object.to_owned());
        bound::blocking(operation, move || work(&dnsmasq).during(operation, object)).await
    }

    /// Changes the records.
    pub(crate) async fn store<T: Send + 'static>(
        &self,
        operation: &'static str,
        object: Uuid,
        work: impl FnOnce(&Store) -> std::result::Result<T, RecordError> + Send + 'static,
    ) -> Result<T> {
        let store = Arc::clone(&self.store);
        bound::blocking(operation, move || work(&store).during(operation, object)).await
    }
}

/// The driver. See the crate's documentation.
pub struct LinuxBridge {
    config: BridgeConfig,
    inner: Arc<Inner>,
    hub: EventHub,
    tasks: Vec<AbortHandle>,
}

impl fmt::Debug for LinuxBridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LinuxBridge").field("config", &self.config).finish_non_exhaustive()
    }
}

impl LinuxBridge {
    /// Opens the driver: makes its directories and starts to watch the host. Nothing else is changed.
    ///
    /// Call it within a Tokio runtime, in the network namespace in which the driver is to work. Blocks for the time of a
    /// few system calls.
    ///
    /// # Errors
    /// `InvalidSpec` for a bad configuration; `Denied` or `Unavailable` when a directory or a netlink socket cannot be had.
    pub fn open(config: BridgeConfig) -> Result<Self> {
        config.validate()?;
        const OPEN: &str = "open";
        const WHAT: &str = "driver linux-bridge";
        let hub = EventHub::new();
        let names = Names::new(config.node, &config.prefix);
        let store = Arc::new(Store::open(&config.state_dir).during(OPEN, WHAT)?);
        let shared = Shared::of(&config.state_dir)
            .map_err(host::files::FileError::of("look at", &config.state_dir))
            .map_err(RecordError::from)
            .during(OPEN, WHAT)?;
        let (connection, handle, _) = rtnetlink::new_connection()
            .map_err(|source| NetlinkError::Open { source })
            .during(OPEN, WHAT)?;
        let mut tasks = vec![tokio::spawn(connection).abort_handle()];
        tasks.extend(watch::start(config.node, &hub).during(OPEN, WHAT)?);
        let firewall = Firewall::start(
            config.nft.clone(),
            names.clone(),
            Arc::clone(&store),
            Arc::clone(&shared),
            hub.clone(),
        )
        .map_err(|source| NetlinkError::Open { source })
        .during(OPEN, WHAT)?;
        let dnsmasq = Dnsmasq::open(
            config.dnsmasq.clone(),
            config.run_dir.clone(),
            &config.dnsmasq_user,
            hub.clone(),
        )
        .during(OPEN, WHAT)?;
        let inner = Arc::new(Inner {
            names,
            store,
            netlink: Netlink::new(handle),
            firewall,
            dnsmasq: Arc::new(dnsmasq),
            shared,
        });
        Ok(Self { config, inner, hub, tasks })
    }

    /// Runs a change as a task of its own under the object's lock; see the crate's documentation.
    async fn change<T, F>(
        &self,
        cx: &Context,
        operation: &'static str,
        object: (&'static str, Uuid),
        work: impl FnOnce(Arc<Inner>) -> F + Send + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let name = format!("{} {}", object.0, object.1);
        let inner = Arc::clone(&self.inner);
        let id = object.1;
        let run = async {
            // The lock is waited for by the caller, so that who gives up while waiting begins nothing.
            let guard = inner.shared.locks.lock(id).await;
            let task = tokio::spawn(async move {
                let answer = work(inner).await;
                drop(guard);
                answer
            });
            match task.await {
                Ok(answer) => answer,
                Err(join) => {
                    Err(Error::new(ErrorKind::Internal, operation, &name, "the change ended badly")
                        .with_source(join))
                }
            }
        };
        bound::bounded(cx, operation, &name, run).await.map_err(|error| {
            // A refusal of the spec keeps its own words; all else says what was tried on what.
            if error.kind() == ErrorKind::InvalidSpec {
                error
            } else {
                error.during(operation, &name)
            }
        })
    }
}

impl Drop for LinuxBridge {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

#[async_trait]
impl Network for LinuxBridge {
    fn types(&self) -> &[NetworkType] {
        TYPES
    }

    fn events(&self) -> Option<EventStream> {
        Some(self.hub.subscribe())
    }

    async fn host_info(&self, cx: &Context) -> Result<HostInfo> {
        bound::check(cx, "describe", "the host")?;
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let mut info =
            HostInfo::new(Some(self.config.node), self.config.hostname.clone(), "linux-bridge");
        info.backend_version = Some(format!("Linux {release}"));
        Ok(info)
    }

    async fn ensure_network(&self, cx: &Context, spec: &NetworkSpec) -> Result<Change> {
        validate::network(spec)?;
        let spec = spec.clone();
        self.change(cx, "make", (NetworkId::WHAT, spec.uuid.uuid()), |inner| async move {
            network::ensure(&inner, spec).await
        })
        .await
    }

    async fn destroy_network(&self, cx: &Context, network: NetworkId) -> Result<Change> {
        self.change(cx, "remove", (NetworkId::WHAT, network.uuid()), move |inner| async move {
            network::destroy(&inner, network).await
        })
        .await
    }

    async fn attach_port(&self, cx: &Context, spec: &PortSpec) -> Result<Outcome<NicHandle>> {
        validate::port(spec)?;
        let spec = spec.clone();
        self.change(cx, "attach", (PortId::WHAT, spec.uuid.uuid()), |inner| async move {
            port::attach(&inner, spec).await
        })
        .await
    }

    async fn detach_port(&self, cx: &Context, port: PortId) -> Result<Change> {
        self.change(cx, "detach", (PortId::WHAT, port.uuid()), move |inner| async move {
            port::detach(&inner, port).await
        })
        .await
    }

    async fn list(&self, cx: &Context) -> Result<Vec<NetworkStatus>> {
        bound::bounded(cx, "list", "networks", status::networks(&self.inner, status::Scope::All))
            .await
    }

    async fn get(&self, cx: &Context, network: NetworkId) -> Result<Option<NetworkStatus>> {
        let look = status::network(&self.inner, network);
        bound::bounded(cx, "look at", validate::object(network), look).await
    }

    async fn list_ports(&self, cx: &Context) -> Result<Vec<PortStatus>> {
        bound::bounded(cx, "list", "ports", status::ports(&self.inner, status::Scope::All)).await
    }

    async fn get_port(&self, cx: &Context, port: PortId) -> Result<Option<PortStatus>> {
        let look = status::port(&self.inner, port);
        bound::bounded(cx, "look at", format!("port {port}"), look).await
    }
}
