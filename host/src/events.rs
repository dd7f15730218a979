//! Hands a driver's events to its subscribers.

use drivers_api::{BoxFuture, EventStream, HostEvent, HostEvents};
use tokio::sync::broadcast::{self, error::RecvError};

/// How many events a subscriber may fall behind before it is told to look at everything anew.
const BACKLOG: usize = 1024;

/// Where a driver publishes; cheap to clone.
#[derive(Clone, Debug)]
pub struct EventHub(broadcast::Sender<HostEvent>);

impl Default for EventHub {
    fn default() -> Self {
        Self::new()
    }
}

impl EventHub {
    /// A hub without subscribers.
    #[must_use]
    pub fn new() -> Self {
        Self(broadcast::Sender::new(BACKLOG))
    }

    /// Gives an event to all subscribers. Never blocks; without subscribers the event is gone.
    pub fn publish(&self, event: HostEvent) {
        // The only error is that nobody listens.
        drop(self.0.send(event));
    }

    /// A new subscription, from now on.
    #[must_use]
    pub fn subscribe(&self) -> EventStream {
        Box::new(Subscription(self.0.subscribe()))
    }
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
