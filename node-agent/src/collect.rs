//! Keeps image caches within their limit: what nobody wants goes, least recently used first, once there is too much of it.
//!
//! A cache is looked at from time to time, after an object is gone, and when a pull found no room: then everything that
//! nobody wants goes. What an `Image` of the wanted state names is kept, also while it is being deleted; the drivers keep
//! what somebody reads.

use std::time::Duration;

use drivers_api::{Context, ErrorKind, ImageCollect, ImageRef};
use reconciler::{
    plan::Action,
    status::StatusEvent,
    store::WantedStore,
    wanted::{Kind, Wanted, WantedSet, WantedSpec},
};
use tokio::{
    sync::broadcast::{self, error::RecvError},
    time::{Instant, MissedTickBehavior},
};

use crate::node::Node;

/// How long a driver may take.
const LIMIT: Duration = Duration::from_secs(60);
/// How long other deletions are waited for, so that many of them are one look.
const GATHER: Duration = Duration::from_secs(1);

/// The references that the wanted state names.
fn wanted(set: &WantedSet) -> Vec<ImageRef> {
    let of = |object: &Wanted| {
        let WantedSpec::Image(spec) = &object.spec else { return None };
        Some(spec.r#ref.clone())
    };
    set.of_kind(Kind::Image)
        .flat_map(|object| of(object).into_iter().chain(object.successor.as_deref().and_then(of)))
        .collect()
}

/// Collects from each cache down to `limit` bytes. Failures are told, not answered: the next look tries again.
pub(crate) async fn collect(node: &Node, limit: u64) {
    let keep = wanted(&node.store().snapshot());
    for (id, driver) in node.drivers().images() {
        if let Some(driver) = driver.collect() {
            collect_from(node, id, driver, limit, &keep).await;
        }
    }
}

async fn collect_from(
    node: &Node,
    id: &str,
    driver: &dyn ImageCollect,
    limit: u64,
    keep: &[ImageRef],
) {
    let cx = Context::new().with_deadline((Instant::now() + LIMIT).into_std());
    // The bound holds for a driver that ignores its deadline too.
    let asked = driver.collect(&cx, limit, keep);
    match tokio::time::timeout(LIMIT + Duration::from_secs(1), asked).await {
        Ok(Ok(report)) if report.removed.is_empty() && report.freed_bytes == 0 => {}
        Ok(Ok(report)) => {
            let names: Vec<_> = report.removed.iter().take(10).map(ImageRef::as_str).collect();
            let message = format!(
                "{id}: {} images that nobody wants went, {} bytes are free: {}",
                report.removed.len(),
                report.freed_bytes,
                names.join(", ")
            );
            tracing::info!(
                driver = id,
                removed = report.removed.len(),
                freed = report.freed_bytes,
                "images collected"
            );
            node.events().add("collect", None, message);
        }
        Ok(Err(error)) => tracing::warn!(driver = id, %error, "images are not collected"),
        Err(_) => {
            tracing::warn!(driver = id, "images are not collected: the driver does not answer");
        }
    }
}

/// The most bytes of a cache as configured.
pub(crate) fn limit(node: &Node) -> u64 {
    match node.config().images.max_cache_bytes {
        0 => u64::MAX,
        bytes => bytes,
    }
}

/// What calls for a look at the caches.
enum Cause {
    /// Time, or something that is gone.
    Look,
    /// A pull found no room.
    Full,
}

/// Collects until the reconciler ends, whose events these are.
pub(crate) async fn run(node: Node, mut events: broadcast::Receiver<StatusEvent>) {
    let every = Duration::from_secs(node.config().images.collect_seconds.into());
    let mut timer = tokio::time::interval(every);
    timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let cause = tokio::select! {
            // Both are cancel-safe: an event that is not taken now is taken in the next round.
            _ = timer.tick() => Some(Cause::Look),
            event = events.recv() => match event {
                Ok(event) => cause(&event),
                // What was missed may have been a deletion.
                Err(RecvError::Lagged(_)) => Some(Cause::Look),
                Err(RecvError::Closed) => return,
            },
        };
        let Some(mut cause) = cause else { continue };
        tokio::time::sleep(GATHER).await;
        loop {
            match events.try_recv() {
                Ok(event) => {
                    if let Some(Cause::Full) = self::cause(&event) {
                        cause = Cause::Full;
                    }
                }
                Err(broadcast::error::TryRecvError::Lagged(_)) => {}
                Err(_) => break,
            }
        }
        let limit = match cause {
            Cause::Look => limit(&node),
            Cause::Full => 0,
        };
        collect(&node, limit).await;
        timer.reset();
    }
}

fn cause(event: &StatusEvent) -> Option<Cause> {
    // Anything that goes may have kept an image in use.
    if matches!(event, StatusEvent::Gone { .. }) {
        return Some(Cause::Look);
    }
    let StatusEvent::Failed(failure) = event else { return None };
    let full = failure.step.action == Action::Pull && failure.kind == ErrorKind::Exhausted;
    full.then_some(Cause::Full)
}
