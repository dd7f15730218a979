//! The kit fails a network driver for each rule that it breaks, in the case of that rule.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use conformance::{
    Census, NetworkBench, Options, Plant, check_network,
    reference::{Host, ReferenceBench},
};
use drivers_api::{
    Change, Context, Error, ErrorKind, HostId, HostInfo, IfName, Network, NetworkId, NetworkSpec,
    NetworkStatus, NetworkType, NicHandle, Outcome, PortId, PortSpec, PortStatus, Result,
};

/// One way to break the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    NamesADeviceAnew,
    CallsSickThingsHealthy,
    RemovesPortsWithTheirNetwork,
    ForgetsPortsOnRestart,
    GivesAnAddressTwice,
    RotatesAnything,
    TakesForeignDevices,
    AbsentPortIsAnError,
}

struct Flawed {
    inner: Arc<dyn Network>,
    host: Host,
    flaw: Flaw,
    attached_here: Mutex<BTreeSet<PortId>>,
}

impl Flawed {
    fn is(&self, flaw: Flaw) -> bool {
        self.flaw == flaw
    }

    fn filter(&self, mut status: PortStatus) -> Option<PortStatus> {
        status.healthy |= self.is(Flaw::CallsSickThingsHealthy);
        let here = self.attached_here.lock().unwrap_or_else(PoisonError::into_inner);
        (!self.is(Flaw::ForgetsPortsOnRestart) || here.contains(&status.uuid)).then_some(status)
    }

    fn network(&self, mut status: NetworkStatus) -> NetworkStatus {
        status.healthy |= self.is(Flaw::CallsSickThingsHealthy);
        status
    }
}

#[async_trait]
impl Network for Flawed {
    fn types(&self) -> &[NetworkType] {
        self.inner.types()
    }
    async fn host_info(&self, cx: &Context) -> Result<HostInfo> {
        self.inner.host_info(cx).await
    }
    async fn ensure_network(&self, cx: &Context, spec: &NetworkSpec) -> Result<Change> {
        if self.is(Flaw::TakesForeignDevices)
            && let Some(name) = self.host.network_device(spec.uuid)
        {
            self.host.remove_foreign_device(&name);
        }
        self.inner.ensure_network(cx, spec).await
    }
    async fn destroy_network(&self, cx: &Context, network: NetworkId) -> Result<Change> {
        if self.is(Flaw::RemovesPortsWithTheirNetwork) {
            for port in self.inner.list_ports(cx).await? {
                let _change = self.inner.detach_port(cx, port.uuid).await?;
            }
        }
        self.inner.destroy_network(cx, network).await
    }
    async fn attach_port(&self, cx: &Context, spec: &PortSpec) -> Result<Outcome<NicHandle>> {
        self.attached_here.lock().unwrap_or_else(PoisonError::into_inner).insert(spec.uuid);
        let answer = self.inner.attach_port(cx, spec).await;
        match (self.flaw, answer) {
            (Flaw::NamesADeviceAnew, Ok(mut outcome)) if !outcome.change.wrote() => {
                outcome.value.device =
                    IfName::derived("new", spec.uuid.uuid()).unwrap_or(outcome.value.device);
                Ok(outcome)
            }
            (Flaw::GivesAnAddressTwice, Err(error)) if error.kind() == ErrorKind::Conflict => {
                let device = IfName::derived("tap", spec.uuid.uuid()).map_err(|_| error)?;
                let nic = NicHandle::new(spec.name.clone(), spec.uuid, device, spec.mac);
                Ok(Outcome::new(Change::Created, nic))
            }
            (_, answer) => answer,
        }
    }
    async fn detach_port(&self, cx: &Context, port: PortId) -> Result<Change> {
        match self.inner.detach_port(cx, port).await {
            Ok(Change::Unchanged) if self.is(Flaw::AbsentPortIsAnError) => {
                Err(Error::not_found("detach", port))
            }
            answer => answer,
        }
    }
    async fn rotate_mesh_peer(&self, cx: &Context, spec: &PortSpec) -> Result<Change> {
        if self.is(Flaw::RotatesAnything) {
            return Ok(Change::Unchanged);
        }
        self.inner.rotate_mesh_peer(cx, spec).await
    }
    async fn list(&self, cx: &Context) -> Result<Vec<NetworkStatus>> {
        Ok(self.inner.list(cx).await?.into_iter().map(|status| self.network(status)).collect())
    }
    async fn get(&self, cx: &Context, network: NetworkId) -> Result<Option<NetworkStatus>> {
        Ok(self.inner.get(cx, network).await?.map(|status| self.network(status)))
    }
    async fn list_ports(&self, cx: &Context) -> Result<Vec<PortStatus>> {
        let all = self.inner.list_ports(cx).await?;
        Ok(all.into_iter().filter_map(|status| self.filter(status)).collect())
    }
    async fn get_port(&self, cx: &Context, port: PortId) -> Result<Option<PortStatus>> {
        Ok(self.inner.get_port(cx, port).await?.and_then(|status| self.filter(status)))
    }
}

struct Bench {
    inner: ReferenceBench,
    flaw: Flaw,
}

impl Bench {
    fn reference(&self) -> &dyn NetworkBench {
        &self.inner
    }
}

#[async_trait]
impl NetworkBench for Bench {
    fn node(&self) -> HostId {
        self.reference().node()
    }
    async fn open(&self) -> Result<Arc<dyn Network>> {
        Ok(Arc::new(Flawed {
            inner: self.reference().open().await?,
            host: self.inner.host().clone(),
            flaw: self.flaw,
            attached_here: Mutex::default(),
        }))
    }
    async fn network(&self, n: u32) -> NetworkSpec {
        self.reference().network(n).await
    }
    async fn port(&self, network: &NetworkSpec, n: u32) -> PortSpec {
        self.reference().port(network, n).await
    }
    async fn plant_foreign_network(&self, network: &NetworkSpec) -> Plant {
        self.reference().plant_foreign_network(network).await
    }
    async fn fingerprint_foreign(&self) -> String {
        self.reference().fingerprint_foreign().await
    }
    async fn remove_foreign(&self) {
        self.reference().remove_foreign().await;
    }
    fn network_parts(&self) -> Vec<&'static str> {
        self.reference().network_parts()
    }
    async fn remove_network_part(&self, network: &NetworkSpec, part: &str) -> Plant {
        self.reference().remove_network_part(network, part).await
    }
    fn port_parts(&self) -> Vec<&'static str> {
        self.reference().port_parts()
    }
    async fn remove_port_part(&self, port: &PortSpec, part: &str) -> Plant {
        self.reference().remove_port_part(port, part).await
    }
    async fn census(&self) -> Census {
        self.reference().census().await
    }
}

/// Checks that a flaw fails the case of its rule.
async fn caught(flaw: Flaw, case: &str) {
    let bench = Bench { inner: ReferenceBench::new(Host::new()), flaw };
    let options = Options {
        call_limit: Duration::from_millis(500),
        settle: Duration::from_millis(50),
        process_census: false,
        only: vec![case.to_owned()],
        ..Options::default()
    };
    let report = check_network(&bench, &options).await;
    let failed: Vec<_> = report.failures().map(|case| case.name).collect();
    assert!(failed.contains(&case), "{flaw:?} is not caught by {case}, but by {failed:?}");
}

#[tokio::test]
async fn each_flaw_fails_the_case_of_its_rule() {
    caught(Flaw::NamesADeviceAnew, "attach-again").await;
    caught(Flaw::CallsSickThingsHealthy, "network-drift").await;
    caught(Flaw::CallsSickThingsHealthy, "port-drift").await;
    caught(Flaw::RemovesPortsWithTheirNetwork, "destroy-in-use").await;
    caught(Flaw::ForgetsPortsOnRestart, "port-fresh").await;
    caught(Flaw::GivesAnAddressTwice, "attach-taken").await;
    caught(Flaw::RotatesAnything, "rotate-other").await;
    caught(Flaw::TakesForeignDevices, "foreign-network").await;
    caught(Flaw::AbsentPortIsAnError, "lifecycle-of-absent").await;
}
