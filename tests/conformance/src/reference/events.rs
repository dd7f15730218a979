//! Events of the reference host.

use drivers_api::{BoxFuture, EventStream, HostEvent, HostEvents};
use tokio::sync::broadcast::{self, error::RecvError};

/// How many events a subscriber may fall behind.
const BACKLOG: usize = 1024;

/// Where the host publishes.
pub(super) struct Hub(broadcast::Sender<HostEvent>);

impl Default for Hub {
    fn default() -> Self {
        Self(broadcast::Sender::new(BACKLOG))
    }
}

impl Hub {
    /// Gives an event to all subscribers.
    pub(super) fn publish(&self, event: HostEvent) {
        // The only error is that nobody listens.
        drop(self.0.send(event));
    }
}

/// A subscription from now on.
pub(super) fn subscribe(hub: &Hub) -> EventStream {
    Box::new(Subscription(hub.0.subscribe()))
}

struct Subscription(broadcast::Receiver<HostEvent>);

impl HostEvents for Subscription {
    fn next(&mut self) -> BoxFuture<'_, Option<HostEvent>> {
        Box::pin(async move {
            match self.0.recv().await {
                Ok(event) => Some(event),
                Err(RecvError::Lagged(missed)) => {
                    Some(HostEvent::resync(format!("{missed} events were missed")))
                }
                Err(RecvError::Closed) => None,
            }
        })
    }
}
