//! The forwarding switches that nat networks need; see [`sysctl`](crate::sysctl).

use drivers_api::{NetworkId, NetworkSpec, NetworkType, Result};

use crate::{driver::Inner, error::During, records::NetworkRecord, sysctl, validate};

/// The name under `STATE_DIR` of what the switches were.
const SWITCHES: &str = "sysctls.json";

/// Which families a network needs forwarding for.
pub(crate) fn forwards(spec: &NetworkSpec) -> (bool, bool) {
    let is_nat = spec.network_type == NetworkType::Nat;
    (
        is_nat && spec.ranges().any(|range| !range.is_v6()),
        is_nat && spec.ranges().any(|range| range.is_v6()),
    )
}

/// Switches on what the network needs; answers whether something was off.
pub(crate) async fn switch_forwarding(inner: &Inner, record: &NetworkRecord) -> Result<bool> {
    let (v4, v6) = forwards(&record.spec);
    if !v4 && !v6 {
        return Ok(false);
    }
    let _admission = inner.shared.admission.lock().await;
    inner
        .store("switch forwarding for", record.spec.uuid.uuid(), move |store| {
            let notes = store.path(SWITCHES);
            Ok(sysctl::missing(v4, v6)
                .map_err(|source| sysctl::SysctlError {
                    name: "net".to_owned(),
                    value: "1".to_owned(),
                    source,
                })
                .and_then(|missing| {
                    if missing.is_empty() {
                        return Ok(false);
                    }
                    sysctl::set(&notes, &missing).map(|()| true)
                }))
        })
        .await?
        .during("switch forwarding for", validate::object(record.spec.uuid))
}

/// Puts the forwarding switches back when no other network needs them.
pub(crate) async fn restore_forwarding(inner: &Inner, leaving: NetworkId) -> Result<bool> {
    let _admission = inner.shared.admission.lock().await;
    let records = inner.records("look at").await?;
    let mut others = records.good_networks().filter(|record| record.spec.uuid != leaving);
    if others.any(|record| forwards(&record.spec) != (false, false)) {
        return Ok(false);
    }
    inner
        .store("switch forwarding back for", leaving.uuid(), |store| {
            let notes = store.path(SWITCHES);
            Ok(if sysctl::has_notes(&notes) { sysctl::restore(&notes) } else { Ok(false) })
        })
        .await?
        .during("switch forwarding back for", validate::object(leaving))
}
