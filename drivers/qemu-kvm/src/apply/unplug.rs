//! Waits for a guest to let go of a device.

use std::time::Duration;

use drivers_api::{Context, Error, ErrorKind, Result};
use host::bound::bounded;
use tokio::{sync::broadcast::error::RecvError, time::sleep};

use super::{COMMAND, qmp_error};
use crate::{
    driver::Op,
    error::label,
    live::Live,
    qmp::{Client, QmpError},
};

/// Between two requests: one that comes before the guest listens is lost.
const ASK_AGAIN: Duration = Duration::from_secs(5);
/// How long QEMU may take to let go of the node of a device that is gone.
const LETTING_GO: Duration = Duration::from_secs(5);
/// Between two attempts to close such a node, where no event comes.
const ASK_NODE_AGAIN: Duration = Duration::from_millis(20);
/// How long a guest may take where the context has no deadline.
const PATIENCE: Duration = Duration::from_secs(60);

/// How a wait for a guest ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unplugged {
    /// The device is gone, or the VMM is.
    Gone,
    /// The guest said no.
    Refused,
}

/// Asks the guest to let go of the device `id` until it has, says no, or the context ends.
pub(crate) async fn unplug(
    op: &Op,
    cx: &Context,
    operation: &'static str,
    live: &Live,
    client: &Client,
    id: &str,
) -> Result<Unplugged> {
    let wait = async {
        tokio::select! {
            // The VMM ended: so did the device.
            _ = live.ended() => Ok(Unplugged::Gone),
            answer = insist(client, id) => {
                answer.map_err(|error| qmp_error(op, operation, error))
            }
            () = sleep(PATIENCE), if cx.deadline().is_none() => {
                let reason = format!("the guest did not let go of {id} within {PATIENCE:?}");
                Err(Error::new(ErrorKind::Deadline, operation, label(op.id()), reason))
            }
        }
    };
    bounded(cx, operation, label(op.id()), wait).await.map_err(|error| {
        if error.kind() == ErrorKind::Deadline {
            error.with_remedy(
                "the removal is pending: it ends when the guest lets go or restarts; repeat to wait on",
            )
        } else {
            error
        }
    })
}

async fn insist(client: &Client, id: &str) -> std::result::Result<Unplugged, QmpError> {
    // Before the request, so that no answer is missed.
    let mut events = client.events();
    loop {
        match client.device_del(id, COMMAND).await {
            Ok(()) => {}
            Err(error) if error.is_absent() => return Ok(Unplugged::Gone),
            // "already in the process of unplug", or the guest is not ready: the events decide.
            Err(error @ QmpError::Refused { .. }) => {
                tracing::debug!(id, %error, "the removal is not asked for anew");
            }
            Err(error) => return Err(error),
        }
        // Cancel-safe: `recv` loses no event when it is dropped for the timer.
        let answer = tokio::time::timeout(ASK_AGAIN, async {
            loop {
                match events.recv().await {
                    Ok(event) if event.text("device") == Some(id) => match event.name.as_str() {
                        "DEVICE_DELETED" => return Ok(Unplugged::Gone),
                        "DEVICE_UNPLUG_GUEST_ERROR" => return Ok(Unplugged::Refused),
                        _ => {}
                    },
                    Ok(_) => {}
                    Err(RecvError::Lagged(_)) => {
                        if !client.device_ids(COMMAND).await?.contains(id) {
                            return Ok(Unplugged::Gone);
                        }
                    }
                    Err(RecvError::Closed) => return Err(QmpError::Closed),
                }
            }
        });
        if let Ok(answer) = answer.await {
            return answer;
        }
    }
}

/// Closes a block node whose device is gone or was never plugged. Not there: nothing.
///
/// QEMU takes a device out of its tree first and lets go of its node a little later, with the event; until then the node is
/// "in use". The event may have passed before, so a timer asks again too.
pub(crate) async fn close_node(
    client: &Client,
    device: &str,
    node: &str,
) -> std::result::Result<(), QmpError> {
    let mut events = client.events();
    let begun = tokio::time::Instant::now();
    loop {
        match client.blockdev_del(node, COMMAND).await {
            Ok(()) => return Ok(()),
            Err(error) if error.is_absent() => return Ok(()),
            Err(error) if error.is_in_use() && begun.elapsed() < LETTING_GO => {
                tracing::debug!(node, %error, "the node is let go of soon");
            }
            Err(error) => return Err(error),
        }
        let event = async {
            while let Ok(event) = events.recv().await {
                if event.name == "DEVICE_DELETED" && event.text("device") == Some(device) {
                    return;
                }
            }
        };
        drop(tokio::time::timeout(ASK_NODE_AGAIN, event).await);
    }
}
