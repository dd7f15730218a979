//! What the driver is told at its start.

use std::path::PathBuf;

use drivers_api::{Error, HostId, IfName, Result, Uuid};

/// Where the driver works, and with what.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BridgeConfig {
    /// The node, which stands in every mark.
    pub node: HostId,
    /// The host's name, for `host_info`.
    pub hostname: String,
    /// Where the records are: one file per network and port. Must outlive a reboot, so that addresses are kept.
    pub state_dir: PathBuf,
    /// Where the files of running helpers are. May be emptied by a reboot. If its parents let the user of the DHCP server
    /// pass, that server runs as this user, else as root.
    pub run_dir: PathBuf,
    /// The `nft` program, version 1.0.2 or later.
    pub nft: PathBuf,
    /// The `dnsmasq` program, version 2.86 or later.
    pub dnsmasq: PathBuf,
    /// The user that `dnsmasq` becomes, where there is such a user.
    pub dnsmasq_user: String,
    /// What the names of all links begin with: 1 to 3 lower-case letters or digits. The nftables tables have it as their name.
    pub prefix: String,
}

impl BridgeConfig {
    /// The configuration with programs from the search path and the prefix `bcd`.
    pub fn new(
        node: HostId,
        hostname: impl Into<String>,
        state_dir: impl Into<PathBuf>,
        run_dir: impl Into<PathBuf>,
    ) -> Self {
        Self {
            node,
            hostname: hostname.into(),
            state_dir: state_dir.into(),
            run_dir: run_dir.into(),
            nft: PathBuf::from("nft"),
            dnsmasq: PathBuf::from("dnsmasq"),
            dnsmasq_user: "dnsmasq".to_owned(),
            prefix: "bcd".to_owned(),
        }
    }

    /// Checks what does not depend on the host.
    pub(crate) fn validate(&self) -> Result<()> {
        let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        if self.prefix.is_empty()
            || self.prefix.len() > 3
            || !self.prefix.bytes().all(good)
            || !self.prefix.starts_with(|first: char| first.is_ascii_lowercase())
        {
            return Err(Error::invalid(
                "prefix",
                "wanted 1 to 3 lower-case letters or digits, starting with a letter",
            ));
        }
        // Both kinds of name are checked once here, so that deriving one later cannot fail for its prefix.
        for kind in ["b", "t"] {
            let any = Uuid::from_bytes([1; 16])
                .map(|id| IfName::derived(&format!("{}{kind}", self.prefix), id));
            if let Some(Err(error)) = any {
                return Err(error.in_field("prefix"));
            }
        }
        for (field, path) in [("state_dir", &self.state_dir), ("run_dir", &self.run_dir)] {
            let text = path.to_str().unwrap_or_default();
            if !path.is_absolute() || text.chars().any(|c| c.is_control() || c.is_whitespace()) {
                // The path stands in dnsmasq's configuration, whose lines have no quoting.
                return Err(Error::invalid(
                    field,
                    "wanted an absolute path of UTF-8 without spaces and control characters",
                ));
            }
        }
        Ok(())
    }
}
