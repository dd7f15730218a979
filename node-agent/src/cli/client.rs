//! The connection to the agent.

use std::{io, path::Path, time::Duration};

use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};

use super::{CliError, exit};
use crate::api::{MAX_MESSAGE, proto::node_client::NodeClient};

/// A client of the agent's API.
pub(crate) type Client = NodeClient<Channel>;

/// Connects to the agent's socket.
pub(crate) async fn connect(socket: &Path) -> Result<Client, CliError> {
    let shown = socket.display();
    let endpoint = Endpoint::try_from(format!("unix://{shown}"))
        .map_err(|error| CliError::chain(exit::ERROR, &error))?
        .connect_timeout(Duration::from_secs(5));
    match endpoint.connect().await {
        Ok(channel) => Ok(NodeClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE)),
        Err(error) => Err(CliError::new(match io_kind(&error) {
            Some(io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => format!(
                "no agent answers at {shown}: start one with \"bcd-node run\", or name its socket with --socket or BCD_NODE_SOCKET"
            ),
            Some(io::ErrorKind::PermissionDenied) => format!(
                "the socket {shown} may not be opened: ask as root, or as a member of the group that write_group names"
            ),
            _ => format!("no connection to {shown}: {}", chain(&error)),
        })),
    }
}

fn io_kind(error: &dyn std::error::Error) -> Option<io::ErrorKind> {
    let mut cause = error.source();
    while let Some(next) = cause {
        if let Some(io) = next.downcast_ref::<io::Error>() {
            return Some(io.kind());
        }
        cause = next.source();
    }
    None
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text
}

/// A refusal of the agent, as people read it.
pub(crate) fn refused(status: &Status) -> CliError {
    CliError::new(match (status.code(), status.message()) {
        (Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled, message)
            if status.details().is_empty() =>
        {
            format!("the connection to the agent broke: {message}")
        }
        (code, "") => format!("the agent answers {code}"),
        (_, message) => message.to_owned(),
    })
}
