//! The drivers of an agent, as `bcd-node drivers list` shows them.

use std::{future::Future, time::Duration};

use drivers_api::{Context, HostInfo};
use futures_util::future::join_all;
use reconciler::Drivers;
use serde_json::{Value, json};
use tokio::time::Instant;

/// The kinds of driver.
pub const KINDS: [&str; 4] = ["hypervisor", "network", "volume", "image"];
/// How long a driver may take to say where it works.
const LIMIT: Duration = Duration::from_secs(5);

/// A driver and what it says of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct DriverInfo {
    /// One of [`KINDS`].
    pub kind: &'static str,
    /// Its id.
    pub id: String,
    /// Whether it serves objects that name no driver.
    pub is_default: bool,
    /// What it works through: `QEMU 7.2.22`.
    pub backend: String,
    /// What it can do.
    pub abilities: Value,
    /// Why it does not answer.
    pub error: Option<String>,
}

async fn ask(
    asked: impl Future<Output = drivers_api::Result<HostInfo>>,
    mut info: DriverInfo,
) -> DriverInfo {
    // The bound holds for a driver that ignores its deadline too.
    match tokio::time::timeout(LIMIT + Duration::from_secs(1), asked).await {
        Ok(Ok(host)) => info.backend = host.backend_version.unwrap_or_default(),
        Ok(Err(error)) => info.error = Some(error.chain()),
        Err(_) => info.error = Some("it does not answer".to_owned()),
    }
    info
}

/// All drivers, asked side by side.
pub async fn drivers(drivers: &Drivers) -> Vec<DriverInfo> {
    let cx = Context::new().with_deadline((Instant::now() + LIMIT).into_std());
    let info = |kind, id: &str, default: Option<&str>, abilities| DriverInfo {
        kind,
        id: id.to_owned(),
        is_default: default == Some(id),
        backend: String::new(),
        abilities,
        error: None,
    };
    let mut asked = Vec::<drivers_api::BoxFuture<'_, DriverInfo>>::new();
    let default = drivers.find_hypervisor(None).map(|(id, _)| id);
    for (id, driver) in drivers.hypervisors() {
        let mut abilities = serde_json::to_value(driver.abilities()).unwrap_or_default();
        if let Value::Object(map) = &mut abilities {
            map.insert("console".to_owned(), driver.console().is_some().into());
            map.insert("resize".to_owned(), driver.resize().is_some().into());
            map.insert("whole_spec".to_owned(), driver.whole_spec().is_some().into());
            map.insert("snapshots".to_owned(), driver.snapshots().is_some().into());
            map.insert("migrate".to_owned(), driver.migrate().is_some().into());
        }
        let about = info("hypervisor", id, default, abilities);
        asked.push(Box::pin(ask(driver.host_info(&cx), about)));
    }
    let default = drivers.find_network(None).map(|(id, _)| id);
    for (id, driver) in drivers.networks() {
        let about = info("network", id, default, json!({ "types": driver.types() }));
        asked.push(Box::pin(ask(driver.host_info(&cx), about)));
    }
    let default = drivers.find_volume(None).map(|(id, _)| id);
    for (id, driver) in drivers.volumes() {
        let about = info("volume", id, default, json!({ "local": driver.local() }));
        asked.push(Box::pin(ask(driver.host_info(&cx), about)));
    }
    let default = drivers.find_image(None).map(|(id, _)| id);
    for (id, driver) in drivers.images() {
        let about = info("image", id, default, json!({ "collect": driver.collect().is_some() }));
        asked.push(Box::pin(ask(driver.host_info(&cx), about)));
    }
    join_all(asked).await
}
