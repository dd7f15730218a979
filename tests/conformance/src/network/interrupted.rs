//! Calls that end early: at their deadline, by cancellation, or because their future is dropped.

use drivers_api::{BoxFuture, Change, Network, NetworkSpec, PortSpec};

use super::Kit;
use crate::kit::{Check, Ending, expect, same};

impl Kit<'_> {
    /// Making the network converges, seen by an instance with an empty memory.
    async fn converges(&self, spec: &NetworkSpec) -> Check {
        let driver = self.open().await?;
        let _ = self.ensure(&*driver, spec).await?;
        self.whole(&*driver, spec).await?;
        let again = self.ensure(&*driver, spec).await?;
        same("ensure_network after the repeat", &again, &Change::Unchanged)
    }

    async fn clears(&self, spec: &NetworkSpec) -> Check {
        let driver = self.open().await?;
        let _ = self.destroy(&*driver, spec).await?;
        self.gone(&*driver, spec).await
    }

    async fn port_converges(&self, spec: &PortSpec) -> Check {
        let driver = self.open().await?;
        let first = self.attach(&*driver, spec).await?;
        self.port_whole(&*driver, spec, &first.value).await?;
        let again = self.attach(&*driver, spec).await?;
        same("attach_port after the repeat", &again.change, &Change::Unchanged)
    }

    async fn port_clears(&self, spec: &PortSpec) -> Check {
        let driver = self.open().await?;
        let _ = self.detach(&*driver, spec).await?;
        self.port_gone(&*driver, spec).await
    }
}

fn nothing<'a>() -> BoxFuture<'a, Check> {
    Box::pin(std::future::ready(Ok(())))
}

pub(super) async fn deadline(kit: &Kit<'_>) -> Check {
    ended(kit, Ending::Deadline).await
}

pub(super) async fn cancelled(kit: &Kit<'_>) -> Check {
    ended(kit, Ending::Cancel).await
}

async fn ended(kit: &Kit<'_>, how: Ending) -> Check {
    let driver: &dyn Network = &*kit.open().await?;
    let spec = &kit.network(0).await;
    let untouched = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            let there = kit.get(driver, spec).await?.is_some();
            expect(!there, "a call whose context had ended made the network")
        })
    };
    let remade = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            kit.converges(spec).await?;
            kit.clears(spec).await
        })
    };
    let ensure = |cx| -> BoxFuture<'_, _> {
        Box::pin(async move { driver.ensure_network(&cx, spec).await })
    };
    kit.run.ended("ensure_network", how, ensure, untouched, remade).await?;
    kit.converges(spec).await?;
    let port = &kit.port(spec, 0).await;
    let attach =
        |cx| -> BoxFuture<'_, _> { Box::pin(async move { driver.attach_port(&cx, port).await }) };
    let untouched = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            let there = kit.get_port(driver, port).await?.is_some();
            expect(!there, "a call whose context had ended made the port")
        })
    };
    let reattached = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            kit.port_converges(port).await?;
            kit.port_clears(port).await
        })
    };
    kit.run.ended("attach_port", how, attach, untouched, reattached).await?;
    let destroy = |cx| -> BoxFuture<'_, _> {
        Box::pin(async move { driver.destroy_network(&cx, spec.uuid).await })
    };
    let cleared = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            kit.clears(spec).await?;
            kit.converges(spec).await
        })
    };
    kit.run.ended("destroy_network", how, destroy, nothing, cleared).await
}

pub(super) async fn drop_ensure(kit: &Kit<'_>) -> Check {
    let driver: &dyn Network = &*kit.open().await?;
    let spec = &kit.network(0).await;
    let call = |cx| -> BoxFuture<'_, _> {
        Box::pin(async move { driver.ensure_network(&cx, spec).await })
    };
    let remade = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            kit.converges(spec).await?;
            kit.clears(spec).await
        })
    };
    let cleared = || -> BoxFuture<'_, Check> { Box::pin(kit.clears(spec)) };
    kit.run.dropped("ensure_network", nothing, call, remade).await?;
    kit.run.dropped("ensure_network", nothing, call, cleared).await
}

pub(super) async fn drop_destroy(kit: &Kit<'_>) -> Check {
    let driver: &dyn Network = &*kit.open().await?;
    let spec = &kit.network(0).await;
    let made = || -> BoxFuture<'_, Check> { Box::pin(kit.converges(spec)) };
    let call = |cx| -> BoxFuture<'_, _> {
        Box::pin(async move { driver.destroy_network(&cx, spec.uuid).await })
    };
    let cleared = || -> BoxFuture<'_, Check> { Box::pin(kit.clears(spec)) };
    kit.run.dropped("destroy_network", made, call, cleared).await?;
    // What a removal left half-made, a make takes up again.
    kit.run.dropped("destroy_network", made, call, made).await
}

pub(super) async fn drop_attach(kit: &Kit<'_>) -> Check {
    let driver: &dyn Network = &*kit.open().await?;
    let network = kit.made(driver, 0).await?;
    let port = &kit.port(&network, 0).await;
    let call =
        |cx| -> BoxFuture<'_, _> { Box::pin(async move { driver.attach_port(&cx, port).await }) };
    let remade = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            kit.port_converges(port).await?;
            kit.port_clears(port).await
        })
    };
    let cleared = || -> BoxFuture<'_, Check> { Box::pin(kit.port_clears(port)) };
    kit.run.dropped("attach_port", nothing, call, remade).await?;
    kit.run.dropped("attach_port", nothing, call, cleared).await
}

pub(super) async fn drop_detach(kit: &Kit<'_>) -> Check {
    let driver: &dyn Network = &*kit.open().await?;
    let network = kit.made(driver, 0).await?;
    let port = &kit.port(&network, 0).await;
    let made = || -> BoxFuture<'_, Check> { Box::pin(kit.port_converges(port)) };
    let call = |cx| -> BoxFuture<'_, _> {
        Box::pin(async move { driver.detach_port(&cx, port.uuid).await })
    };
    let cleared = || -> BoxFuture<'_, Check> { Box::pin(kit.port_clears(port)) };
    kit.run.dropped("detach_port", made, call, cleared).await?;
    kit.run.dropped("detach_port", made, call, made).await
}
