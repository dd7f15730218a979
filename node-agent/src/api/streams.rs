//! The calls that answer more than once.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use drivers_api::{
    CancelFlag, ConsoleStream, Context, Error, ErrorKind, Image, ImageRef, ImageStatus, Outcome,
    Progress, ProgressSink, Uuid,
};
use futures_util::{Stream, StreamExt, stream};
use reconciler::{
    status::StatusEvent,
    store::WantedStore,
    wanted::{Key, Kind, ObjectName},
};
use tokio::{
    sync::{
        broadcast::{self, error::RecvError},
        mpsc,
    },
    time::Instant,
};
use tokio_stream::wrappers::BroadcastStream;
use tonic::{Status, Streaming};

use super::{
    convert::{self, faults_of, invalid, read_key},
    proto,
};
use crate::node::{Node, not_found};

/// How many answers wait for a slow reader.
const QUEUE: usize = 64;
/// The most of a console's earlier output, in bytes.
const MAX_HISTORY: u32 = 1 << 20;
/// How long a driver may take to open a console, to read a log or to take typed bytes.
const CONSOLE: Duration = Duration::from_secs(10);

type Sender<T> = mpsc::Sender<Result<T, Status>>;
type Receiver<T> = mpsc::Receiver<Result<T, Status>>;

pub(super) fn json_lines<T: serde::Serialize>(items: &[T]) -> Result<Vec<String>, Status> {
    let lines = items.iter().map(serde_json::to_string).collect::<Result<_, _>>();
    lines.map_err(|error| Status::internal(error.to_string()))
}

/// What is watched: a key and the identity that it must have.
struct Watch {
    key: Key,
    uuid: Uuid,
    last: Option<proto::WatchUpdate>,
}

/// The present state of objects, then each change.
pub(super) fn watch(
    node: &Node,
    objects: &[proto::Watched],
) -> Result<Receiver<proto::WatchUpdate>, Status> {
    let mut watched = Vec::new();
    for object in objects {
        let key = read_key(object.key.as_ref())?;
        let uuid = object.uuid.parse().map_err(|error| invalid("uuid", error))?;
        watched.push(Watch { key, uuid, last: None });
    }
    let (sender, receiver) = mpsc::channel(QUEUE);
    let node = node.clone();
    tokio::spawn(async move {
        if let Err(status) = follow(&node, watched, &sender).await {
            // The only error is that the reader is gone.
            drop(sender.send(Err(status)).await);
        }
    });
    Ok(receiver)
}

async fn follow(
    node: &Node,
    mut watched: Vec<Watch>,
    sender: &Sender<proto::WatchUpdate>,
) -> Result<(), Status> {
    let mut revision = node.store().revision();
    // Subscribed before the first look, so that no change falls between.
    let mut events = node.reconciler().map(reconciler::Reconciler::subscribe);
    // `None`: all of them.
    let mut look: Option<BTreeSet<Key>> = None;
    loop {
        for watch in &mut watched {
            if look.as_ref().is_some_and(|keys| !keys.contains(&watch.key)) {
                continue;
            }
            let update = update_of(node, watch)?;
            if watch.last.as_ref() != Some(&update) {
                watch.last = Some(update.clone());
                if sender.send(Ok(update)).await.is_err() {
                    return Ok(());
                }
            }
        }
        watched.retain(|watch| watch.last.as_ref().is_none_or(|last| !last.gone));
        if watched.is_empty() {
            return Ok(());
        }
        look = tokio::select! {
            // Both are cancel-safe: a change that is not taken now is taken in the next round.
            changed = revision.changed() => match changed {
                Ok(()) => None,
                Err(_) => return Ok(()),
            },
            keys = changed_keys(events.as_mut()) => match keys {
                Some(keys) => keys,
                None => return Ok(()),
            },
            () = sender.closed() => return Ok(()),
        };
    }
}

/// The keys of the next events, with all that wait already; `Some(None)` for "any", `None` at the end.
async fn changed_keys(
    events: Option<&mut broadcast::Receiver<StatusEvent>>,
) -> Option<Option<BTreeSet<Key>>> {
    let Some(events) = events else { return std::future::pending().await };
    let mut keys = BTreeSet::new();
    let mut next = Some(events.recv().await);
    while let Some(event) = next {
        match event {
            Ok(StatusEvent::Changed(status)) => drop(keys.insert(status.key)),
            Ok(StatusEvent::Gone { key, .. }) => drop(keys.insert(key)),
            Ok(_) => {}
            Err(RecvError::Lagged(_)) => return Some(None),
            Err(RecvError::Closed) => return None,
        }
        next = events.try_recv().ok().map(Ok);
    }
    Some(Some(keys))
}

fn update_of(node: &Node, watch: &Watch) -> Result<proto::WatchUpdate, Status> {
    let key = Some(convert::key(&watch.key));
    let found = node.get(&watch.key).filter(|object| {
        let waiting = object.wanted.successor.as_ref().is_some_and(|next| next.uuid == watch.uuid);
        object.wanted.uuid == watch.uuid || waiting
    });
    Ok(match found {
        Some(object) => {
            let object = Some(convert::object(node, &object)?);
            proto::WatchUpdate { key, gone: false, object }
        }
        None => proto::WatchUpdate { key, gone: true, object: None },
    })
}

/// What happened lately, then what happens.
pub(super) fn events(
    node: &Node,
    request: &proto::EventsRequest,
) -> impl Stream<Item = Result<proto::Event, Status>> + Send + use<> {
    let most = match usize::try_from(request.history) {
        Ok(0) | Err(_) => usize::MAX,
        Ok(most) => most,
    };
    let (latest, live) = node.events().since(most, |_| true);
    let latest = stream::iter(latest).map(|event| Ok(convert::event(&event)));
    let follow = request.follow;
    let live = BroadcastStream::new(live).map(|event| {
        Ok(event.map_or_else(
            |missed| proto::Event {
                kind: "missed".to_owned(),
                message: missed.to_string(),
                ..Default::default()
            },
            |event| convert::event(&event),
        ))
    });
    latest.chain(live.take_while(move |_| std::future::ready(follow)).take_until(async move {
        if follow {
            std::future::pending::<()>().await;
        }
    }))
}

fn until(limit: Duration) -> Context {
    Context::new().with_deadline((Instant::now() + limit).into_std())
}

fn vm(
    node: &Node,
    name: &ObjectName,
) -> Result<(Arc<dyn drivers_api::Hypervisor>, drivers_api::VmId), Status> {
    let key = Key::new(Kind::Instance, name.clone());
    let working = node.reconciler().ok_or_else(|| {
        let reason = node.trouble().map(ToString::to_string).unwrap_or_default();
        faults_of(Error::new(ErrorKind::Unavailable, "reach", &key, reason))
    })?;
    working.vm(name).ok_or_else(|| faults_of(not_found(&key)))
}

/// Opens a console: the first input names the instance.
pub(super) async fn console(
    node: &Node,
    mut input: Streaming<proto::ConsoleInput>,
    uid: u32,
) -> Result<Receiver<proto::ConsoleOutput>, Status> {
    let first = tokio::time::timeout(CONSOLE, input.message());
    let first = first.await.map_err(|_| Status::deadline_exceeded("no instance was named"))??;
    let first = first.ok_or_else(|| invalid("name", "the field is required"))?;
    let name: ObjectName = first.name.parse().map_err(|error| invalid("name", error))?;
    let (driver, vm) = vm(node, &name)?;
    let console = driver.console().ok_or_else(|| {
        faults_of(Error::unsupported("open a console with", "the instance's driver"))
    })?;
    let history = usize::try_from(first.history.min(MAX_HISTORY)).unwrap_or_default();
    let stream = console.open_console(&until(CONSOLE), vm, history).await.map_err(faults_of)?;
    tracing::info!(uid, instance = %name, vm_id = %vm, "a console is opened");
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        if let Err(error) = relay(stream, first.data, input, &sender).await {
            // The only error is that the reader is gone.
            drop(sender.send(Err(error)).await);
        }
    });
    Ok(receiver)
}

enum Side {
    Guest(drivers_api::Result<Vec<u8>>),
    Person(Result<Option<proto::ConsoleInput>, Status>),
    Gone,
}

async fn relay(
    mut stream: Box<dyn ConsoleStream>,
    first: Vec<u8>,
    mut input: Streaming<proto::ConsoleInput>,
    sender: &Sender<proto::ConsoleOutput>,
) -> Result<(), Status> {
    let mut typed = first;
    loop {
        if !typed.is_empty() {
            // A write is not cancel-safe, so it is waited for, with a bound: a guest that reads nothing ends the session.
            let written = tokio::time::timeout(CONSOLE, stream.write(&typed)).await;
            written
                .map_err(|_| Status::deadline_exceeded("the guest takes no input"))?
                .map_err(faults_of)?;
        }
        typed = Vec::new();
        let side = tokio::select! {
            // All are cancel-safe: `read` by its contract, a message is taken whole or not at all.
            bytes = stream.read() => Side::Guest(bytes),
            message = input.message() => Side::Person(message),
            () = sender.closed() => Side::Gone,
        };
        match side {
            Side::Guest(Ok(data)) if data.is_empty() => return Ok(()),
            Side::Guest(Ok(data)) => {
                if sender.send(Ok(proto::ConsoleOutput { data })).await.is_err() {
                    return Ok(());
                }
            }
            Side::Guest(Err(error)) => return Err(faults_of(error)),
            Side::Person(Ok(Some(message))) => typed = message.data,
            Side::Person(Ok(None) | Err(_)) | Side::Gone => return Ok(()),
        }
    }
}

/// The last bytes of a console's log.
pub(super) async fn logs(
    node: &Node,
    request: &proto::LogsRequest,
) -> Result<impl Stream<Item = Result<proto::Chunk, Status>> + Send + use<>, Status> {
    let name: ObjectName = request.name.parse().map_err(|error| invalid("name", error))?;
    let (driver, vm) = vm(node, &name)?;
    let console = driver.console().ok_or_else(|| {
        faults_of(Error::unsupported("read a console log with", "the instance's driver"))
    })?;
    let bytes = usize::try_from(request.bytes.min(16 << 20)).unwrap_or_default();
    let log = console.console_log(&until(CONSOLE), vm, bytes).await.map_err(faults_of)?;
    let chunks: Vec<_> =
        log.chunks(64 << 10).map(|data| Ok(proto::Chunk { data: data.to_vec() })).collect();
    Ok(stream::iter(chunks))
}

/// Gives a pull's progress to its caller. A slow caller misses some.
struct Reports(Sender<proto::PullUpdate>);

impl ProgressSink for Reports {
    fn report(&self, progress: &Progress) {
        let update = proto::PullUpdate {
            phase: progress.phase.clone(),
            message: progress.message.clone(),
            done: progress.done,
            total: progress.total.unwrap_or_default(),
            ..Default::default()
        };
        // Full or gone: the next report, or the end, tells more.
        drop(self.0.try_send(Ok(update)));
    }
}

/// Pulls an image; the pull ends when the caller goes.
pub(super) fn pull(
    node: &Node,
    request: &proto::PullImageRequest,
) -> Result<Receiver<proto::PullUpdate>, Status> {
    let reference: ImageRef =
        request.reference.parse().map_err(|error| invalid("reference", error))?;
    let id = Some(request.driver.as_str()).filter(|id| !id.is_empty());
    let (_, driver) = node.drivers().find_image(id).ok_or_else(|| {
        let id = id.unwrap_or("default image driver");
        faults_of(Error::not_found("find the driver", crate::strict::escaped(id)))
    })?;
    let driver = Arc::clone(driver);
    let limit = Duration::from_secs(node.config().reconcile.pull_timeout_seconds.into());
    let (sender, receiver) = mpsc::channel(QUEUE);
    let node = node.clone();
    tokio::spawn(async move {
        let cancel = CancelFlag::new();
        let cx = until(limit)
            .with_cancel(cancel.clone())
            .with_secrets(Arc::clone(node.secrets()))
            .with_progress(Arc::new(Reports(sender.clone())));
        let work = pull_with_room(&node, driver.as_ref(), &cx, &reference);
        tokio::pin!(work);
        let answer = tokio::select! {
            answer = &mut work => answer,
            () = sender.closed() => {
                cancel.cancel();
                work.await
            }
        };
        let last = answer.map_err(faults_of).and_then(|outcome| {
            let image = serde_json::to_string(&outcome.value)
                .map_err(|error| Status::internal(error.to_string()))?;
            let change = format!("{:?}", outcome.change).to_lowercase();
            let phase = "done".to_owned();
            Ok(proto::PullUpdate { phase, image, change, ..Default::default() })
        });
        // The only error is that the caller is gone.
        drop(sender.send(last).await);
    });
    Ok(receiver)
}

/// Pulls; where there is no room, once more after what nobody wants is gone.
async fn pull_with_room(
    node: &Node,
    driver: &dyn Image,
    cx: &Context,
    reference: &ImageRef,
) -> drivers_api::Result<Outcome<ImageStatus>> {
    match driver.pull(cx, reference).await {
        Err(error) if error.kind() == ErrorKind::Exhausted => {
            crate::collect::collect(node, 0).await;
            driver.pull(cx, reference).await
        }
        answer => answer,
    }
}
