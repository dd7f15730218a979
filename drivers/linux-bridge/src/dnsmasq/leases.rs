//! dnsmasq's own list of leases, and what of it stands in the way of another guest.
//!
//! A line is `EXPIRY MAC ADDRESS NAME CLIENT-ID` for IPv4, `EXPIRY IAID ADDRESS NAME DUID` for IPv6, or `duid DUID`, the
//! server's own (`lease_update_file` writes it).

use std::{net::IpAddr, path::Path};

use host::files;

use super::DnsmasqError;

/// The list; empty when there is none. Blocks.
pub(super) fn read(dir: &Path) -> Result<String, DnsmasqError> {
    let bytes = files::read_bounded(&dir.join("leases"), 64 << 20)?.unwrap_or_default();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Who has which address.
fn lease(line: &str) -> Option<(&str, IpAddr)> {
    let mut fields = line.split(' ');
    let holder = fields.nth(1)?;
    Some((holder, fields.next()?.parse().ok()?))
}

/// The MAC address and the addresses of a port's entry.
fn entry(line: &str) -> (&str, Vec<IpAddr>) {
    let mut fields = line.trim_end().split(',');
    let mac = fields.next().unwrap_or_default();
    let addresses = fields.filter_map(|field| {
        field
            .strip_prefix('[')
            .and_then(|field| field.strip_suffix(']'))
            .unwrap_or(field)
            .parse()
            .ok()
    });
    (mac, addresses.collect())
}

/// Whether an address of the entry is leased to another guest. The list does not say whose an IPv6 lease is, so one of an
/// address that a port did not have before counts.
pub(super) fn is_held_by_another(leases: &str, host: &str) -> bool {
    let (mac, addresses) = entry(host);
    leases.lines().filter_map(lease).any(|(holder, address)| {
        addresses.contains(&address) && (address.is_ipv6() || holder != mac)
    })
}

/// The list with the leases of these entries alone, and without those of the addresses in `forget`.
pub(super) fn keep(leases: &str, hosts: &[&str], forget: &[IpAddr]) -> String {
    let hosts: Vec<_> = hosts.iter().map(|line| entry(line)).collect();
    let is_kept = |line: &&str| match lease(line) {
        None => true,
        Some((holder, address)) => {
            !forget.contains(&address)
                && hosts.iter().any(|(mac, addresses)| {
                    addresses.contains(&address) && (address.is_ipv6() || holder == *mac)
                })
        }
    };
    leases.lines().filter(is_kept).flat_map(|line| [line, "\n"]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASES: &str = "1 52:54:00:00:00:01 10.0.0.1 a 01:52\n1 52:54:00:00:00:02 10.0.0.2 * 01:52\nduid 00:01\n1 7 fd00::1 a 00:02\n";

    #[test]
    fn an_address_is_held_by_another_only_under_another_mac() {
        assert!(is_held_by_another(LEASES, "52:54:00:00:00:09,10.0.0.1,x\n"));
        assert!(!is_held_by_another(LEASES, "52:54:00:00:00:01,10.0.0.1,x\n"));
        assert!(!is_held_by_another(LEASES, "52:54:00:00:00:09,10.0.0.9\n"));
        assert!(is_held_by_another(LEASES, "52:54:00:00:00:09,10.0.0.9,[fd00::1]\n"));
    }

    #[test]
    fn only_leases_of_guests_that_are_there_are_kept() {
        let host = "52:54:00:00:00:01,10.0.0.1,[fd00::1],a\n";
        let kept = keep(LEASES, &[host], &[]);
        assert_eq!(kept, "1 52:54:00:00:00:01 10.0.0.1 a 01:52\nduid 00:01\n1 7 fd00::1 a 00:02\n");
        assert_eq!(keep(LEASES, &[], &[]), "duid 00:01\n");
        assert!(!keep(LEASES, &[host], &["10.0.0.1".parse().unwrap()]).contains("10.0.0.1"));
    }
}
