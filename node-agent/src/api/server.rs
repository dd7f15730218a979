//! The socket: made, checked, served, removed.

use std::{
    fs::Permissions,
    io,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use futures_util::StreamExt;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic_health::ServingStatus;

use super::{DESCRIPTORS, MAX_MESSAGE, peer::PeerStream, proto, service::Service};
use crate::node::Node;

/// How long running calls may take to end when the agent stops. Streams are told to end at once.
const LINGER: Duration = Duration::from_secs(3);

/// Why the API is not served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Another agent serves the socket.
    #[error("another agent serves {}: stop it first, or use another socket", .0.display())]
    InUse(PathBuf),
    /// Something that is no socket is there.
    #[error("{} is there and is no socket: move it away, or use another socket", .0.display())]
    NoSocket(PathBuf),
    /// The socket cannot be made.
    #[error("cannot {operation} the socket {}", path.display())]
    Socket {
        /// What was tried.
        operation: &'static str,
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The group is not there.
    #[error("write_group: there is no group \"{0}\" in /etc/group: make it, or give its number")]
    Group(String),
    /// The server failed.
    #[error("the API server failed")]
    Server(#[source] tonic::transport::Error),
}

/// A socket that listens.
#[derive(Debug)]
pub struct Bound {
    listener: UnixListener,
    path: PathBuf,
    inode: (u64, u64),
    group: Option<u32>,
}

impl Bound {
    /// Makes the socket. One that a dead agent left is replaced.
    ///
    /// # Errors
    /// When something else is there, or it cannot be made.
    pub async fn bind(path: &Path, mode: u32, group: &str) -> Result<Self, ServeError> {
        let fail = |operation| {
            let path = path.to_owned();
            move |source| ServeError::Socket { operation, path, source }
        };
        let group = group_id(group)?;
        if let Some(parent) = path.parent() {
            // Not private: members of the group must reach the socket, whose own mode decides.
            std::fs::create_dir_all(parent).map_err(fail("make the directory of"))?;
        }
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(ServeError::NoSocket(path.to_owned()));
            }
            Ok(_) => {
                if UnixStream::connect(path).await.is_ok() {
                    return Err(ServeError::InUse(path.to_owned()));
                }
                std::fs::remove_file(path).map_err(fail("replace"))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(fail("look at")(error)),
        }
        // A socket without write permission cannot be connected to: the usual umask keeps others out until the mode is set.
        let listener = UnixListener::bind(path).map_err(fail("bind"))?;
        if group.is_some() {
            std::os::unix::fs::chown(path, None, group).map_err(fail("give the group to"))?;
        }
        std::fs::set_permissions(path, Permissions::from_mode(mode))
            .map_err(fail("set the mode of"))?;
        let made = std::fs::metadata(path).map_err(fail("look at"))?;
        Ok(Self { listener, path: path.to_owned(), inode: (made.dev(), made.ino()), group })
    }

    /// Serves the node until `stop` is told, then lets running calls end for a short time.
    ///
    /// # Errors
    /// When the server fails.
    pub async fn serve(
        self,
        node: Node,
        mut stop: tokio::sync::watch::Receiver<bool>,
    ) -> Result<(), ServeError> {
        let (health, health_service) = tonic_health::server::health_reporter();
        let state = match node.trouble() {
            None => ServingStatus::Serving,
            Some(_) => ServingStatus::NotServing,
        };
        health.set_service_status("bcd.node.v1.Node", state).await;
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .build_v1()
            .map_err(|error| {
                let source = io::Error::other(error);
                ServeError::Socket { operation: "describe", path: self.path.clone(), source }
            })?;
        let service = proto::node_server::NodeServer::new(Service::new(node, stop.clone()))
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        let group = self.group;
        let connections = UnixListenerStream::new(self.listener).filter_map(move |accepted| {
            let stream = accepted.and_then(|stream| PeerStream::new(stream, group));
            let stream = stream.inspect_err(|error| tracing::warn!(%error, "a connection failed"));
            // One that failed is left out; the listener goes on.
            std::future::ready(stream.ok().map(Ok::<_, io::Error>))
        });
        let mut told = stop.clone();
        let server = Server::builder()
            .concurrency_limit_per_connection(64)
            .add_service(service)
            .add_service(health_service)
            .add_service(reflection)
            .serve_with_incoming_shutdown(connections, async move {
                // An error: the agent itself is gone, which ends the server as well.
                drop(told.wait_for(|stop| *stop).await);
            });
        let lingered = async {
            drop(stop.wait_for(|stop| *stop).await);
            tokio::time::sleep(LINGER).await;
        };
        let ended = tokio::select! {
            ended = server => ended.map_err(ServeError::Server),
            () = lingered => Ok(()),
        };
        remove_own(&self.path, self.inode);
        ended
    }
}

/// Removes the socket unless another agent has put its own there.
fn remove_own(path: &Path, inode: (u64, u64)) {
    let ours =
        std::fs::symlink_metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == inode);
    if ours && let Err(error) = std::fs::remove_file(path) {
        tracing::warn!(%error, path = %path.display(), "the socket was not removed");
    }
}

/// The number of a group; `None` for no group.
fn group_id(group: &str) -> Result<Option<u32>, ServeError> {
    if group.is_empty() {
        return Ok(None);
    }
    if let Ok(number) = group.parse() {
        return Ok(Some(number));
    }
    // group(5): NAME:PASSWORD:GID:MEMBERS
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let number = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let number = fields.nth(1)?.parse().ok()?;
        (name == group).then_some(number)
    });
    number.map(Some).ok_or_else(|| ServeError::Group(crate::strict::escaped(group)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dead_agents_socket_is_replaced_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let first = Bound::bind(&path, 0o660, "").await.unwrap();
        assert!(matches!(Bound::bind(&path, 0o660, "").await, Err(ServeError::InUse(_))));
        drop(first);
        assert!(path.exists(), "a crash leaves the socket");
        let again = Bound::bind(&path, 0o600, "0").await.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        drop(again);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "mine").unwrap();
        assert!(matches!(Bound::bind(&path, 0o660, "").await, Err(ServeError::NoSocket(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
    }

    #[test]
    fn a_group_is_found_by_name_and_by_number() {
        assert_eq!(group_id("").unwrap(), None);
        assert_eq!(group_id("root").unwrap(), Some(0));
        assert_eq!(group_id("17").unwrap(), Some(17));
        assert!(group_id("no-such-group-here").is_err());
    }
}
