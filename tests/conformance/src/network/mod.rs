//! The cases of the network trait.

mod drift;
mod interrupted;
mod networks;
mod ports;

use std::sync::Arc;

use async_trait::async_trait;
use drivers_api::{
    Change, HostInfo, Mark, Network, NetworkSpec, NetworkStatus, NicHandle, Outcome, PortSpec,
    PortStatus,
};

use crate::{
    Census, DriverKind, NetworkBench, Options, Report,
    kit::{Case, Check, Run, Subject, cases, expect, failed, same},
    runner::run_cases,
};

/// Checks a network driver.
pub async fn check_network(bench: &dyn NetworkBench, options: &Options) -> Report {
    let kit = Kit { bench, run: Run::new(options) };
    run_cases(&kit, DriverKind::Network, &all()).await
}

pub(super) struct Kit<'a> {
    bench: &'a dyn NetworkBench,
    run: Run<'a>,
}

#[rustfmt::skip]
fn all<'k>() -> Vec<Case<Kit<'k>>> { cases! { Kit<'k>:
    "ensure": "EnsureNetwork creates the host-side construct for this network." => networks::ensure;
    "ensure-again": "EnsureNetwork is idempotent: spurious retries must not break things." => networks::ensure_again;
    "ensure-at-once": "EnsureNetwork twice, the second call while the first is running: one network, both calls succeed." => networks::ensure_at_once;
    "ensure-changed": "A changed spec is applied once; the same spec again: unchanged." => networks::ensure_changed;
    "invalid-network": "A spec that cannot work is refused with the field's path, before any effect." => networks::invalid;
    "overlap": "A range that overlaps another network's is refused." => networks::overlap;
    "odd-names": "A name is free text: it round-trips byte for byte or is refused." => networks::odd_names;
    "lifecycle-of-absent": "DestroyNetwork: no-op if it never existed; DetachPort follows the same contract." => networks::lifecycle_of_absent;
    "lookup-of-absent": "ErrNotFound is returned by lookup-shaped methods." => networks::lookup_of_absent;
    "create-after-destroy": "A network of the same identity can be made at once after its removal." => networks::create_after_destroy;
    "side-by-side": "Calls for different objects run side by side." => networks::side_by_side;
    "fresh-start": "With an empty memory, list finds all that is there, with its mark and its spec as applied." => networks::fresh_start;
    "foreign-network": "What is not marked ours is never changed or removed: a device of the network's name is a conflict." => networks::foreign;
    "security-group": "A group's rules are made, changed and removed; each again: unchanged." => networks::security_group;
    "back-end-down": "Already gone is success only when the absence was seen; else the answer is unavailable." => networks::backend_down;
    "attach": "AttachPort wires a VM NIC to the network and returns the NIC handle that the hypervisor needs." => ports::attach;
    "attach-again": "AttachPort again: unchanged, the same answer." => ports::attach_again;
    "attach-at-once": "AttachPort twice, the second call while the first is running: one port, both calls succeed." => ports::attach_at_once;
    "attach-many": "Each port has a device of its own, named within 15 bytes." => ports::attach_many;
    "attach-taken": "An address or a MAC of another port is a conflict." => ports::taken;
    "invalid-port": "An address outside the range, the network's own, the broadcast or the gateway is refused before any effect." => ports::invalid;
    "detach": "DetachPort tears down the host-side port state; again: unchanged." => ports::detach;
    "destroy-in-use": "DestroyNetwork while ports are on it is a conflict that names them." => ports::destroy_in_use;
    "port-fresh": "A port is found, and kept, by an instance with an empty memory." => ports::fresh_start;
    "foreign-port": "What is not marked ours is never changed or removed: a device of the port's name is a conflict." => ports::foreign;
    "rotate-other": "RotateMeshPeer is only meaningful for mesh-type networks; else not-applicable." => ports::rotate_other;
    "rotate": "RotateMeshPeer updates the peer entry for one port." => ports::rotate;
    "network-drift": "EnsureNetwork puts back what is missing." => drift::network;
    "port-drift": "AttachPort puts back what is missing." => drift::port;
    "half-destroy": "DestroyNetwork and DetachPort remove whatever is there." => drift::destroy_what_is_left;
    "deadline": "A driver gives up at the deadline, and leaves the host so that a repeat converges." => interrupted::deadline;
    "cancelled": "A call ends soon after its cancellation, and leaves the host so that a repeat converges." => interrupted::cancelled;
    "drop-ensure": "Every await of ensure may be the last one." => interrupted::drop_ensure;
    "drop-destroy": "Every await of destroy may be the last one." => interrupted::drop_destroy;
    "drop-attach": "Every await of attach may be the last one." => interrupted::drop_attach;
    "drop-detach": "Every await of detach may be the last one." => interrupted::drop_detach;
} }

#[async_trait]
impl Subject for Kit<'_> {
    fn run(&self) -> &Run<'_> {
        &self.run
    }

    async fn info(&self) -> Check<HostInfo> {
        let driver = self.open().await?;
        let info = self.run.ok("host_info", driver.host_info(&self.run.cx())).await?;
        same("the host's uuid", &info.uuid, &Some(self.bench.node()))?;
        expect(!info.driver.is_empty(), "the driver's id is empty")?;
        expect(!info.hostname.is_empty(), "the host's name is empty")?;
        expect(!driver.types().is_empty(), "the driver says that it serves no type")?;
        let kind = self.bench.network(0).await.network_type;
        expect(
            driver.types().contains(&kind),
            "the bench's networks are of no type of the driver",
        )?;
        let _ = self.run.ok("list", driver.list(&self.run.cx())).await?;
        Ok(info)
    }

    async fn clear(&self) -> Check {
        let used = self.run.take_used();
        if used.is_empty() {
            return Ok(());
        }
        let driver = self.open().await?;
        let networks: Vec<_> =
            futures_util::future::join_all(used.iter().map(|n| self.bench.network(*n))).await;
        let ids: Vec<_> = networks.iter().map(|network| network.uuid).collect();
        let ports = self.run.ok("list_ports", driver.list_ports(&self.run.cx())).await?;
        for port in ports {
            let ours = port.spec.as_ref().is_none_or(|spec| ids.contains(&spec.network_uuid));
            if ours {
                let cx = self.run.cx();
                let _ = self.run.ok("detach_port", driver.detach_port(&cx, port.uuid)).await?;
            }
        }
        for network in ids {
            let cx = self.run.cx();
            let _ = self.run.ok("destroy_network", driver.destroy_network(&cx, network)).await?;
        }
        Ok(())
    }

    async fn census(&self) -> Census {
        self.bench.census().await
    }
}

impl Kit<'_> {
    async fn open(&self) -> Check<Arc<dyn Network>> {
        self.run.ok("opening the driver", self.bench.open()).await
    }

    /// The case's `n`th network, which is cleared after the case with its ports.
    async fn network(&self, n: u32) -> NetworkSpec {
        self.bench.network(self.run.number(n)).await
    }

    /// The case's `n`th port on a network.
    async fn port(&self, network: &NetworkSpec, n: u32) -> PortSpec {
        self.bench.port(network, self.run.number(n)).await
    }

    /// Makes the case's `n`th network.
    async fn made(&self, driver: &dyn Network, n: u32) -> Check<NetworkSpec> {
        let spec = self.network(n).await;
        let _ = self.ensure(driver, &spec).await?;
        Ok(spec)
    }

    async fn get(&self, driver: &dyn Network, spec: &NetworkSpec) -> Check<Option<NetworkStatus>> {
        self.run.ok("get", driver.get(&self.run.cx(), spec.uuid)).await
    }

    async fn status(&self, driver: &dyn Network, spec: &NetworkSpec) -> Check<NetworkStatus> {
        match self.get(driver, spec).await? {
            Some(status) => {
                same("the mark", &status.mark, &Mark::new(self.bench.node(), spec.uuid.uuid()))?;
                Ok(status)
            }
            None => failed("get: the network is not there"),
        }
    }

    async fn get_port(&self, driver: &dyn Network, spec: &PortSpec) -> Check<Option<PortStatus>> {
        self.run.ok("get_port", driver.get_port(&self.run.cx(), spec.uuid)).await
    }

    async fn port_status(&self, driver: &dyn Network, spec: &PortSpec) -> Check<PortStatus> {
        match self.get_port(driver, spec).await? {
            Some(status) => {
                same("the mark", &status.mark, &Mark::new(self.bench.node(), spec.uuid.uuid()))?;
                Ok(status)
            }
            None => failed("get_port: the port is not there"),
        }
    }

    async fn ensure(&self, driver: &dyn Network, spec: &NetworkSpec) -> Check<Change> {
        self.run.ok("ensure_network", driver.ensure_network(&self.run.cx(), spec)).await
    }

    async fn destroy(&self, driver: &dyn Network, spec: &NetworkSpec) -> Check<Change> {
        self.run.ok("destroy_network", driver.destroy_network(&self.run.cx(), spec.uuid)).await
    }

    async fn attach(&self, driver: &dyn Network, spec: &PortSpec) -> Check<Outcome<NicHandle>> {
        self.run.ok("attach_port", driver.attach_port(&self.run.cx(), spec)).await
    }

    async fn detach(&self, driver: &dyn Network, spec: &PortSpec) -> Check<Change> {
        self.run.ok("detach_port", driver.detach_port(&self.run.cx(), spec.uuid)).await
    }

    /// Checks that a network is healthy and as its spec says.
    async fn whole(&self, driver: &dyn Network, spec: &NetworkSpec) -> Check {
        let status = self.status(driver, spec).await?;
        let messages = status.messages.join("; ");
        expect(status.healthy, format_args!("the network is not healthy: {messages}"))?;
        same("the spec as applied", &status.spec, &Some(spec.clone()))
    }

    /// Checks that a port is healthy, as its spec says, and has this NIC.
    async fn port_whole(&self, driver: &dyn Network, spec: &PortSpec, nic: &NicHandle) -> Check {
        let status = self.port_status(driver, spec).await?;
        let messages = status.messages.join("; ");
        expect(status.healthy, format_args!("the port is not healthy: {messages}"))?;
        same("the spec as applied", &status.spec, &Some(spec.clone()))?;
        same("the port's NIC", &status.nic.as_ref(), &Some(nic))
    }

    async fn gone(&self, driver: &dyn Network, spec: &NetworkSpec) -> Check {
        expect(self.get(driver, spec).await?.is_none(), "get: the removed network is there")?;
        let all = self.run.ok("list", driver.list(&self.run.cx())).await?;
        expect(!all.iter().any(|n| n.uuid == spec.uuid), "list: the removed network is there")?;
        let again = self.destroy(driver, spec).await?;
        same("destroy_network of the removed network", &again, &Change::Unchanged)
    }

    async fn port_gone(&self, driver: &dyn Network, spec: &PortSpec) -> Check {
        expect(self.get_port(driver, spec).await?.is_none(), "get_port: the port is there")?;
        let all = self.run.ok("list_ports", driver.list_ports(&self.run.cx())).await?;
        expect(!all.iter().any(|p| p.uuid == spec.uuid), "list_ports: the port is there")?;
        let again = self.detach(driver, spec).await?;
        same("detach_port of the removed port", &again, &Change::Unchanged)
    }

    async fn unwritten(&self, before: &Census) -> Check {
        let diff = before.diff(&self.bench.census().await);
        expect(diff.is_empty(), format_args!("the host was changed: {}", diff.join(", ")))
    }
}
