//! One connection to a monitor.

use std::{
    collections::{HashMap, HashSet},
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncReadExt, Interest},
    net::{UnixStream, unix::OwnedWriteHalf},
    sync::{broadcast, mpsc, oneshot, watch},
    task::{AbortHandle, JoinSet},
};

use super::types::{
    BlockDevice, BlockNode, Event, Message, QmpError, QomEntry, Refusal, RunState, StatusReply,
};

/// The greatest message that is taken: the answers to our commands have a few KiB per device.
const MAX_MESSAGE: usize = 4 << 20;
/// How many commands may wait for their answers.
const MAX_PENDING: usize = 64;
/// How many events a waiter may fall behind.
const EVENT_BACKLOG: usize = 256;

/// How much later than a monitor the next one is tried. An idle one greets within a millisecond.
const STAGGER: Duration = Duration::from_millis(30);

type Pending = Arc<Mutex<HashMap<u64, oneshot::Sender<Result<Value, Refusal>>>>>;

struct Outgoing {
    bytes: Vec<u8>,
    fd: Option<OwnedFd>,
}

/// A monitor that has greeted us. The connection ends when the client is dropped.
#[derive(Debug)]
pub(crate) struct Client {
    out: mpsc::Sender<Outgoing>,
    pending: Pending,
    next: AtomicU64,
    events: broadcast::Sender<Event>,
    closed: watch::Receiver<bool>,
    tasks: [AbortHandle; 2],
}

impl Drop for Client {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// Forgets a command whose caller has gone.
struct Forget<'a>(&'a Pending, u64);

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.1);
    }
}

impl Client {
    /// Connects, waits for the greeting as long as it takes, and negotiates.
    pub(crate) async fn connect(
        path: &Path,
        events: broadcast::Sender<Event>,
    ) -> Result<Self, QmpError> {
        let stream = UnixStream::connect(path)
            .await
            .map_err(|source| QmpError::Io { doing: "connect", source })?;
        Self::negotiate(stream, events).await
    }

    /// As [`Client::connect`], by the first of several monitors that greets. One that talks to somebody else does not; the
    /// next is tried beside it after a moment.
    pub(crate) async fn connect_any(
        paths: &[PathBuf],
        events: &broadcast::Sender<Event>,
    ) -> Result<Self, QmpError> {
        let mut attempts = JoinSet::new();
        let mut later = Duration::ZERO;
        for path in paths {
            let (path, events, wait) = (path.clone(), events.clone(), later);
            attempts.spawn(async move {
                tokio::time::sleep(wait).await;
                Self::connect(&path, events).await
            });
            later += STAGGER;
        }
        let mut last = QmpError::Closed;
        while let Some(attempt) = attempts.join_next().await {
            match attempt {
                Ok(Ok(client)) => return Ok(client),
                Ok(Err(error)) => last = error,
                // The runtime ends.
                Err(_) => {}
            }
        }
        Err(last)
    }

    async fn negotiate(
        stream: UnixStream,
        events: broadcast::Sender<Event>,
    ) -> Result<Self, QmpError> {
        let (read, write) = stream.into_split();
        let pending = Pending::default();
        let (greeted, greeting) = oneshot::channel();
        let (closing, closed) = watch::channel(false);
        let reader = {
            let (pending, events) = (Arc::clone(&pending), events.clone());
            tokio::spawn(async move {
                if let Err(error) = read_all(read, &pending, &events, greeted).await {
                    tracing::warn!(%error, "a monitor's connection is given up");
                }
                // Whoever waits learns at once: their senders are dropped.
                pending.lock().unwrap_or_else(PoisonError::into_inner).clear();
                closing.send_replace(true);
            })
        };
        let (out, queue) = mpsc::channel(MAX_PENDING);
        let writer = tokio::spawn(write_all(write, queue));
        let tasks = [reader.abort_handle(), writer.abort_handle()];
        let client = Self { out, pending, next: AtomicU64::new(1), events, closed, tasks };
        greeting.await.map_err(|_| QmpError::Closed)?;
        // QEMU has greeted, so it answers; the limit is for one that stops in between.
        client.call::<Value>("qmp_capabilities", json!({}), Duration::from_secs(30)).await?;
        Ok(client)
    }

    /// The events from now on, of this connection and of later ones.
    pub(crate) fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// A channel of events for [`Client::connect`].
    pub(crate) fn event_channel() -> broadcast::Sender<Event> {
        broadcast::Sender::new(EVENT_BACKLOG)
    }

    /// Waits until the connection is closed.
    pub(crate) async fn closed(&self) {
        let mut closed = self.closed.clone();
        // An error means that the reader is gone, which is the same.
        drop(closed.wait_for(|closed| *closed).await);
    }

    /// Whether the connection is closed.
    pub(crate) fn is_closed(&self) -> bool {
        *self.closed.borrow()
    }

    async fn call<T: DeserializeOwned>(
        &self,
        command: &'static str,
        arguments: Value,
        limit: Duration,
    ) -> Result<T, QmpError> {
        self.call_with(command, arguments, None, limit).await
    }

    async fn call_with<T: DeserializeOwned>(
        &self,
        command: &'static str,
        arguments: Value,
        fd: Option<OwnedFd>,
        limit: Duration,
    ) -> Result<T, QmpError> {
        let malformed = |source| QmpError::Malformed { command, source };
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let message = json!({"execute": command, "arguments": arguments, "id": id});
        let mut bytes = serde_json::to_vec(&message).map_err(malformed)?;
        bytes.push(b'\n');
        let (tell, answer) = oneshot::channel();
        {
            let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
            if pending.len() >= MAX_PENDING {
                return Err(QmpError::Silent { command, limit: Duration::ZERO });
            }
            pending.insert(id, tell);
        }
        let _forget = Forget(&self.pending, id);
        let exchange = async {
            if self.is_closed() {
                return Err(QmpError::Closed);
            }
            self.out.send(Outgoing { bytes, fd }).await.map_err(|_| QmpError::Closed)?;
            answer.await.map_err(|_| QmpError::Closed)
        };
        let answer = tokio::time::timeout(limit, exchange)
            .await
            .map_err(|_| QmpError::Silent { command, limit })??;
        let value = answer.map_err(|refusal| QmpError::Refused {
            command,
            class: refusal.class,
            description: host::run::escaped_tail(refusal.description.as_bytes(), 400),
        })?;
        serde_json::from_value(value).map_err(malformed)
    }

    async fn order(
        &self,
        command: &'static str,
        arguments: Value,
        limit: Duration,
    ) -> Result<(), QmpError> {
        self.call::<Value>(command, arguments, limit).await.map(drop)
    }

    /// What the guest does.
    pub(crate) async fn query_status(&self, limit: Duration) -> Result<RunState, QmpError> {
        self.call::<StatusReply>("query-status", json!({}), limit).await.map(|reply| reply.status)
    }

    /// The ids of all devices that were given one.
    pub(crate) async fn device_ids(&self, limit: Duration) -> Result<HashSet<String>, QmpError> {
        let path = json!({"path": "/machine/peripheral"});
        let entries: Vec<QomEntry> = self.call("qom-list", path, limit).await?;
        let child = |entry: QomEntry| entry.kind.starts_with("child<").then_some(entry.name);
        Ok(entries.into_iter().filter_map(child).collect())
    }

    /// Whether a disk has failed for lack of space on the host.
    pub(crate) async fn is_out_of_space(&self, limit: Duration) -> Result<bool, QmpError> {
        let devices: Vec<BlockDevice> = self.call("query-block", json!({}), limit).await?;
        Ok(devices.iter().any(|device| device.io_status.as_deref() == Some("nospace")))
    }

    /// Lets the guest run.
    pub(crate) async fn cont(&self, limit: Duration) -> Result<(), QmpError> {
        self.order("cont", json!({}), limit).await
    }

    /// Presses the power button.
    pub(crate) async fn powerdown(&self, limit: Duration) -> Result<(), QmpError> {
        self.order("system_powerdown", json!({}), limit).await
    }

    /// Presses the reset button.
    pub(crate) async fn reset(&self, limit: Duration) -> Result<(), QmpError> {
        self.order("system_reset", json!({}), limit).await
    }

    /// Ends the VMM.
    pub(crate) async fn quit(&self, limit: Duration) -> Result<(), QmpError> {
        self.order("quit", json!({}), limit).await
    }

    /// Opens a block node.
    pub(crate) async fn blockdev_add(&self, node: Value, limit: Duration) -> Result<(), QmpError> {
        self.order("blockdev-add", node, limit).await
    }

    /// Closes a block node.
    pub(crate) async fn blockdev_del(&self, node: &str, limit: Duration) -> Result<(), QmpError> {
        self.order("blockdev-del", json!({"node-name": node}), limit).await
    }

    /// The named block nodes.
    pub(crate) async fn block_nodes(&self, limit: Duration) -> Result<Vec<BlockNode>, QmpError> {
        self.call("query-named-block-nodes", json!({"flat": true}), limit).await
    }

    /// Grows a block node and tells the guest.
    pub(crate) async fn block_resize(
        &self,
        node: &str,
        bytes: u64,
        limit: Duration,
    ) -> Result<(), QmpError> {
        self.order("block_resize", json!({"node-name": node, "size": bytes}), limit).await
    }

    /// Plugs a device.
    pub(crate) async fn device_add(&self, device: Value, limit: Duration) -> Result<(), QmpError> {
        self.order("device_add", device, limit).await
    }

    /// Asks the guest to let go of a device.
    pub(crate) async fn device_del(&self, id: &str, limit: Duration) -> Result<(), QmpError> {
        self.order("device_del", json!({"id": id}), limit).await
    }

    /// Hands a descriptor over under a name.
    pub(crate) async fn getfd(
        &self,
        name: &str,
        fd: OwnedFd,
        limit: Duration,
    ) -> Result<(), QmpError> {
        let arguments = json!({"fdname": name});
        self.call_with::<Value>("getfd", arguments, Some(fd), limit).await.map(drop)
    }

    /// Makes a network back-end.
    pub(crate) async fn netdev_add(&self, netdev: Value, limit: Duration) -> Result<(), QmpError> {
        self.order("netdev_add", netdev, limit).await
    }

    /// Removes a network back-end.
    pub(crate) async fn netdev_del(&self, id: &str, limit: Duration) -> Result<(), QmpError> {
        self.order("netdev_del", json!({"id": id}), limit).await
    }
}

/// Reads messages until the end of the connection.
async fn read_all(
    mut read: impl AsyncRead + Unpin,
    pending: &Pending,
    events: &broadcast::Sender<Event>,
    greeted: oneshot::Sender<()>,
) -> Result<(), QmpError> {
    let mut greeted = Some(greeted);
    let mut buffer = Vec::new();
    let io_error = |source| QmpError::Io { doing: "read", source };
    loop {
        let begin = buffer.len();
        if begin >= MAX_MESSAGE {
            let source = io::Error::new(io::ErrorKind::FileTooLarge, "a message without end");
            return Err(io_error(source));
        }
        if read.read_buf(&mut buffer).await.map_err(io_error)? == 0 {
            return Ok(());
        }
        // Only what is new can hold the end of a line.
        let fresh = buffer.get(begin..).unwrap_or_default();
        let Some(last) = fresh.iter().rposition(|byte| *byte == b'\n') else { continue };
        let rest = buffer.split_off(begin + last + 1);
        let lines = std::mem::replace(&mut buffer, rest);
        for line in lines.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty())
        {
            let message = Message::parse(line)
                .map_err(|source| QmpError::Malformed { command: "anything", source })?;
            match message {
                Some(Message::Greeting) => {
                    // The receiver is gone when the caller is: nothing to tell.
                    if let Some(greeted) = greeted.take() {
                        greeted.send(()).unwrap_or_default();
                    }
                }
                Some(Message::Event(event)) => drop(events.send(event)),
                Some(Message::Reply { id, answer }) => {
                    let waiter = pending.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
                    // Without a waiter the caller has given up on it.
                    if let Some(waiter) = waiter {
                        drop(waiter.send(answer));
                    }
                }
                None => {}
            }
        }
    }
}

/// Sends what is queued until the connection or the client ends.
async fn write_all(write: OwnedWriteHalf, mut queue: mpsc::Receiver<Outgoing>) {
    while let Some(outgoing) = queue.recv().await {
        if let Err(error) = send(write.as_ref(), outgoing).await {
            tracing::debug!(%error, "a monitor takes no more commands");
            return;
        }
    }
}

async fn send(stream: &UnixStream, outgoing: Outgoing) -> io::Result<()> {
    let mut rest = outgoing.bytes.as_slice();
    let mut fd = outgoing.fd;
    while !rest.is_empty() {
        stream.writable().await?;
        let sent = stream.try_io(Interest::WRITABLE, || send_some(stream, rest, fd.as_ref()));
        match sent {
            Ok(count) => {
                // The descriptor went with the first byte.
                fd = None;
                rest = rest.get(count..).unwrap_or_default();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn send_some(stream: &UnixStream, bytes: &[u8], fd: Option<&OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd.as_fd()]);
    if let Some(fds) = &fds
        && !control.push(SendAncillaryMessage::ScmRights(fds))
    {
        return Err(io::Error::other("no room for a descriptor"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(sendmsg(stream, &[IoSlice::new(bytes)], &mut control, flags)?)
}
