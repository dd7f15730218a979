//! The whole agent on real parts: QEMU (TCG where KVM cannot run guests), nftables, bridges, dnsmasq, a registry and a
//! small Linux guest, in a network namespace per test. Each test drives the built binary by its command line, as an
//! operator does.

#![cfg(test)]

mod disturbed;
mod life;
mod live;
mod manifests;
mod node;
mod store;
