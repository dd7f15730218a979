//! The main job on real parts: QEMU, nftables, bridges and dnsmasq in a network namespace, a real registry.
