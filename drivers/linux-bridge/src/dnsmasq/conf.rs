//! The configuration of a network's dnsmasq, from checked values alone: no name that people write stands in it but a port's
//! hostname, which is checked to be a DNS label.

use std::{
    net::{IpAddr, Ipv4Addr},
    path::Path,
};

use drivers_api::{IpCidr, NetworkSpec, NetworkType, PortSpec};

/// How long a lease holds. Addresses are static; a short lease has a guest see a changed option soon.
const LEASE: &str = "1h";
/// The domain of guests' names, of the range that RFC 9476 and ICANN keep back for private use.
const DOMAIN: &str = "vm.internal";

/// What a network's dnsmasq is to do.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) device: String,
    /// The device's index: dnsmasq binds to it, so a device that was made anew needs a new dnsmasq.
    pub(crate) index: u32,
    pub(crate) spec: NetworkSpec,
    /// The host's address in the network: the gateway, or a helper address outside the range.
    pub(crate) helper: Option<Ipv4Addr>,
}

impl Plan {
    /// The v4 range and gateway: a v6-only network has its v6 range in `cidr`.
    fn v4(&self) -> Option<(IpCidr, Option<IpAddr>)> {
        self.spec.cidr.filter(|range| !range.is_v6()).map(|range| (range, self.spec.gateway))
    }

    fn v6(&self) -> Option<(IpCidr, IpAddr)> {
        let (range, gateway) = match self.spec.cidr {
            Some(range) if range.is_v6() => (Some(range), self.spec.gateway),
            Some(_) | None => (self.spec.cidr6, self.spec.gateway6),
        };
        range.zip(gateway)
    }

    /// Whether the guests' resolver is this dnsmasq.
    fn serves_names(&self) -> bool {
        let servers = &self.spec.dns_servers;
        let is_gateway = |server: &IpAddr| self.spec.gateways().any(|gateway| gateway == *server);
        self.spec.gateways().next().is_some()
            && (servers.is_empty() || servers.iter().any(is_gateway))
    }

    /// The resolvers of a family that guests are told.
    fn resolvers(&self, v6: bool) -> Vec<IpAddr> {
        let of_family = |address: &IpAddr| address.is_ipv6() == v6;
        if self.spec.dns_servers.is_empty() {
            self.spec.gateways().filter(of_family).collect()
        } else {
            self.spec.dns_servers.iter().copied().filter(of_family).collect()
        }
    }

    /// The configuration file.
    pub(super) fn text(&self, dir: &Path, user: &str, group: &str) -> String {
        let dir = dir.display();
        let device = &self.device;
        let mut text = format!(
            "user={user}\ngroup={group}\nkeep-in-foreground\nbind-dynamic\ninterface={device}\nexcept-interface=lo\nno-hosts\n\
             dhcp-authoritative\ndhcp-no-override\ndhcp-hostsdir={dir}/hosts\ndhcp-leasefile={dir}/leases\n\
             pid-file={dir}/pid\nquiet-dhcp\nquiet-dhcp6\nquiet-ra\n"
        );
        let mut line = |text_line: String| {
            text.push_str(&text_line);
            text.push('\n');
        };
        if self.serves_names() {
            line(format!("local=/{DOMAIN}/\ndomain={DOMAIN}\nbogus-priv\ndomain-needed"));
            if self.spec.network_type != NetworkType::Nat {
                // An isolated network has no way out, also not for names.
                line("no-resolv".to_owned());
            }
        } else {
            line("port=0\nno-resolv".to_owned());
        }
        if let Some((range, gateway)) = self.v4() {
            line(format!("dhcp-range={},static,{},{LEASE}", range.address(), mask(range)));
            match gateway {
                Some(gateway) => line(format!("dhcp-option=option:router,{gateway}")),
                None => line(format!(
                    "shared-network={device},{}\ndhcp-option=option:router",
                    range.address()
                )),
            }
            line(format!("dhcp-option=option:dns-server{}", list(&self.resolvers(false), "")));
            if let Some(mtu) = self.spec.mtu_bytes {
                line(format!("dhcp-option=option:mtu,{mtu}"));
            }
        }
        if let Some((range, _)) = self.v6() {
            // Without the autonomous flag: guests ask for the address that their port has.
            line(format!(
                "enable-ra\ndhcp-range={},static,{},{LEASE}",
                range.address(),
                range.prefix_len()
            ));
            if self.spec.network_type != NetworkType::Nat {
                line(format!("ra-param={device},0,0"));
            }
            let resolvers = self.resolvers(true);
            if !resolvers.is_empty() {
                line(format!("dhcp-option=option6:dns-server{}", list(&resolvers, "[")));
            }
        }
        text
    }

    /// What a process is started with, in short.
    pub(super) fn hash(&self, text: &str) -> String {
        let helper = self.helper.map(|helper| helper.to_string()).unwrap_or_default();
        let whole = format!("{}\n{helper}\n{text}", self.index);
        format!("{:016x}", crate::fnv1a(whole.as_bytes()))
    }
}

fn mask(range: IpCidr) -> Ipv4Addr {
    let host_bits = 32_u32.saturating_sub(range.prefix_len().into());
    Ipv4Addr::from_bits(u32::MAX.checked_shl(host_bits).unwrap_or(0))
}

/// Each address after a comma; IPv6 ones in brackets.
fn list(addresses: &[IpAddr], open: &str) -> String {
    let close = if open.is_empty() { "" } else { "]" };
    addresses.iter().map(|address| format!(",{open}{address}{close}")).collect()
}

/// The line of a port (`dhcp-host` of dnsmasq(8)); `None` for a port without addresses.
pub(crate) fn host_line(port: &PortSpec) -> Option<String> {
    if port.addresses.is_empty() {
        return None;
    }
    let mut line = port.mac.to_string();
    for address in &port.addresses {
        line.push_str(&match address {
            IpAddr::V4(v4) => format!(",{v4}"),
            IpAddr::V6(v6) => format!(",[{v6}]"),
        });
    }
    if let Some(name) = &port.hostname {
        line.push(',');
        line.push_str(name);
    }
    line.push('\n');
    Some(line)
}

/// Whether a hostname is one DNS label (RFC 1123 section 2.1), so that no line can be broken with it.
pub(crate) fn valid_hostname(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 63
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        && !name.starts_with('-')
        && !name.ends_with('-')
        // dnsmasq reads these words in place of a name, and a number as a lease time.
        && !matches!(name, "ignore" | "infinite")
        && !name.starts_with(|first: char| first.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostname_cannot_break_a_line_or_be_read_as_an_option() {
        for good in ["web", "web-1", "A"] {
            assert!(valid_hostname(good), "{good}");
        }
        for bad in [
            "",
            "-a",
            "a-",
            "a.b",
            "a,b",
            "a\nb",
            "a b",
            "45m",
            "infinite",
            "ignore",
            "ä",
            &"a".repeat(64),
        ] {
            assert!(!valid_hostname(bad), "{bad}");
        }
    }

    #[test]
    fn the_mask_of_a_range() {
        assert_eq!(mask("10.77.0.0/24".parse().unwrap()), Ipv4Addr::new(255, 255, 255, 0));
        assert_eq!(mask("10.0.0.0/8".parse().unwrap()), Ipv4Addr::new(255, 0, 0, 0));
    }
}
