//! What the kernel can do, and whose firewall is in the way.

use std::{path::Path, time::Duration};

use drivers_api::Context;
use host::run::Run;
use serde_json::{Value, json};

use super::{NftError, program_error};
use crate::error::During;

/// How connections are known to the rules of a bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The bridge family tracks connections itself (`nf_conntrack_bridge`).
    Native,
    /// `br_netfilter` shows bridged frames to the inet family, which leaves what it knows in two bits of the packet mark.
    Mark,
    /// Neither. Only what is routed is known.
    Stateless,
}

impl Mode {
    /// Asks the kernel by the `nft` program, without a change of the host. `Stateless` may become `Mark` when the driver
    /// makes its first rules: it loads `br_netfilter` then.
    ///
    /// # Errors
    /// `Unavailable` when the program cannot be run.
    pub async fn look(nft: &Path, cx: &Context) -> drivers_api::Result<Self> {
        Self::present(nft, cx).await.during("ask", "the firewall")
    }

    async fn present(nft: &Path, cx: &Context) -> Result<Self, NftError> {
        let rule = json!({ "nftables": [
            { "add": { "table": { "family": "bridge", "name": "bcd-probe" } } },
            { "add": { "chain": { "family": "bridge", "table": "bcd-probe", "name": "c",
                "type": "filter", "hook": "prerouting", "prio": 0, "policy": "accept" } } },
            { "add": { "rule": { "family": "bridge", "table": "bcd-probe", "chain": "c", "expr": [
                super::expr::ct_state(&["established"]), { "accept": null } ] } } },
        ] });
        let check = Run::new(nft).args(["-c", "-j", "-f", "-"]).stdin(rule.to_string());
        let answer = check.output(cx).await.map_err(program_error)?;
        if answer.status.success() {
            return Ok(Self::Native);
        }
        Ok(if has_br_netfilter() { Self::Mark } else { Self::Stateless })
    }

    /// As [`Mode::look`]. Loads `br_netfilter` when nothing else helps.
    pub(super) async fn detect(nft: &Path, cx: &Context) -> Result<Self, NftError> {
        let present = Self::present(nft, cx).await?;
        if present == Self::Stateless {
            let load = Run::new("modprobe").arg("br_netfilter").limit(Duration::from_secs(10));
            if let Err(error) = load.success(cx).await {
                tracing::warn!(%error, "no connection tracking on bridges: the kernel has neither nf_conntrack_bridge nor br_netfilter");
            }
            return Ok(if has_br_netfilter() { Self::Mark } else { Self::Stateless });
        }
        Ok(present)
    }
}

fn has_br_netfilter() -> bool {
    Path::new("/proc/sys/net/bridge").exists()
}

/// A chain of somebody else that drops what it does not accept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ForeignDrop {
    pub(crate) family: String,
    pub(crate) table: String,
    pub(crate) chain: String,
}

/// The foreign forward chains with policy drop, of a listing of all chains.
pub(super) fn foreign_drops(listing: &[Value], own_table: &str) -> Vec<ForeignDrop> {
    let text = |chain: &Value, key: &str| {
        chain.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    listing
        .iter()
        .filter_map(|object| object.get("chain"))
        .filter(|chain| text(chain, "hook") == "forward" && text(chain, "policy") == "drop")
        .map(|chain| ForeignDrop {
            family: text(chain, "family"),
            table: text(chain, "table"),
            chain: text(chain, "name"),
        })
        .filter(|chain| chain.table != own_table)
        .collect()
}
