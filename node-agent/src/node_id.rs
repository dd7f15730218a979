//! The node's identity: derived from the machine's, never the machine id itself.
//!
//! `machine-id(5)` asks that the id is not told to others as it is, and that an application derives its own from it.

use std::path::Path;

use drivers_api::{HostId, Uuid};

/// The namespace of node identities (RFC 9562 section 5.5): a random UUID of this project, never changed.
const NAMESPACE: uuid::Uuid = uuid::Uuid::from_u128(0x6b1d_8f4e_2c57_4d0a_9e3b_71a4_c05d_8e26);
/// Where the machine's id is.
const MACHINE_ID: &str = "/etc/machine-id";

/// Why the node has no identity.
#[derive(Debug, thiserror::Error)]
pub enum NodeIdError {
    /// The file cannot be read.
    #[error(
        "the node has no identity: {MACHINE_ID} cannot be read: set node_id in the configuration"
    )]
    Read(#[source] host::files::FileError),
    /// The file holds no id: 32 hexadecimal digits, not all zero.
    #[error(
        "the node has no identity: {MACHINE_ID} holds no machine id (it is empty until the first boot): set node_id in the configuration, or run systemd-machine-id-setup"
    )]
    Empty,
}

/// The identity of this machine's node.
///
/// # Errors
/// When the machine has no id of its own.
pub fn of_this_machine() -> Result<HostId, NodeIdError> {
    let bytes =
        host::files::read_bounded(Path::new(MACHINE_ID), 4096).map_err(NodeIdError::Read)?;
    derive(&String::from_utf8_lossy(&bytes.unwrap_or_default())).ok_or(NodeIdError::Empty)
}

fn derive(machine_id: &str) -> Option<HostId> {
    let id = machine_id.trim();
    let good = id.len() == 32
        && id.bytes().all(|byte| byte.is_ascii_hexdigit())
        && id.bytes().any(|byte| byte != b'0');
    let derived = uuid::Uuid::new_v5(&NAMESPACE, id.to_ascii_lowercase().as_bytes());
    Uuid::from_bytes(*derived.as_bytes()).filter(|_| good).map(HostId::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_machine_has_the_same_identity_and_it_is_not_the_machine_id() {
        let machine = "0123456789abcdef0123456789abcdef";
        let node = derive(machine).unwrap();
        assert_eq!(node, derive(&format!("{machine}\n")).unwrap());
        assert_ne!(node, derive("1123456789abcdef0123456789abcdef").unwrap());
        assert_ne!(node.to_string().replace('-', ""), machine);
    }

    #[test]
    fn a_machine_without_an_id_has_no_identity() {
        for text in ["", "uninitialized\n", "00000000000000000000000000000000", "0123"] {
            assert!(derive(text).is_none(), "{text:?}");
        }
    }
}
