//! Tells the service manager that the agent is ready (`sd_notify(3)`): one datagram to the socket of `NOTIFY_SOCKET`.

use std::{
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
    path::Path,
};

/// Sends `state`, such as `READY=1`, if a service manager asked for it.
pub(crate) fn notify(state: &str) {
    let Some(target) = std::env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(error) = send(&target, state) {
        tracing::warn!(%error, "the service manager was not told");
    }
}

fn send(target: &OsStr, state: &str) -> io::Result<()> {
    let address = match target.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(Path::new(target))?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_arrives_at_a_path_and_at_an_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        let name = format!("bcd-node-test-{}", std::process::id());
        let abstract_address = SocketAddr::from_abstract_name(name.as_bytes()).unwrap();
        let sockets = [
            (UnixDatagram::bind(&path).unwrap(), path.clone().into_os_string()),
            (UnixDatagram::bind_addr(&abstract_address).unwrap(), format!("@{name}").into()),
        ];
        for (socket, target) in sockets {
            send(&target, "READY=1").unwrap();
            let mut buffer = [0; 32];
            let read = socket.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..read], b"READY=1");
        }
    }
}
