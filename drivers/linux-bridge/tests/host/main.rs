//! The driver on a real kernel: every test has a network namespace of its own. Needs root, nft, dnsmasq, iproute2, ping and
//! busybox.

#![cfg(test)]

mod checks;
mod common;
mod dhcp;
mod drift;
mod firewall;
mod life;
mod traffic;
