//! The serial console: one task per VM reads what the guest wrote, keeps it on disk and hands it to all who watch.
//!
//! The bytes come from the [journal]; the socket to QEMU's serial port carries input, and its output is only the sign that
//! the journal has something new.

pub(crate) mod journal;
pub(crate) mod log;

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use drivers_api::{BoxFuture, ConsoleStream, Error, ErrorKind, Result, VmId};
use host::bound::blocking;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    sync::{broadcast, mpsc, watch},
};

use self::{journal::Journal, log::SerialLog};

/// How many chunks a watcher may fall behind before it is told that it missed some.
const BACKLOG: usize = 256;
/// How many inputs may wait for the guest to read.
const INPUTS: usize = 16;
/// What a watcher and the log see where output is missing.
const GAP: &[u8] = b"\r\n[bcd-node: output was dropped here]\r\n";
/// How long the log file may lag behind the socket: QEMU writes the journal right after the socket.
const LAG: Duration = Duration::from_millis(20);
/// Between two attempts to reach a serial socket that was closed.
const RECONNECT: Duration = Duration::from_millis(500);

/// The console of one VMM.
#[derive(Debug)]
pub(crate) struct Hub {
    vm: VmId,
    socket: PathBuf,
    /// Locked on threads for blocking work only.
    state: Arc<Mutex<State>>,
    input: mpsc::Sender<Vec<u8>>,
}

#[derive(Debug)]
struct State {
    vm: VmId,
    /// `None` when it could not be adopted: the console is then dumb.
    journal: Option<Journal>,
    log: SerialLog,
    /// `None` once the VMM has ended.
    out: Option<broadcast::Sender<Arc<[u8]>>>,
}

impl Hub {
    /// A hub and the queue of inputs for [`Hub::serve`].
    pub(crate) fn new(
        vm: VmId,
        socket: PathBuf,
        journal: Option<Journal>,
        log: SerialLog,
    ) -> (Arc<Self>, mpsc::Receiver<Vec<u8>>) {
        let (input, inputs) = mpsc::channel(INPUTS);
        let out = Some(broadcast::Sender::new(BACKLOG));
        let state = Arc::new(Mutex::new(State { vm, journal, log, out }));
        (Arc::new(Self { vm, socket, state, input }), inputs)
    }

    /// Does something with the state on a thread for blocking work. It is done to its end even when the caller's future
    /// is dropped, so nothing that was drained is lost.
    async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut State) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let state = Arc::clone(&self.state);
        blocking("use the console of", move || {
            work(&mut state.lock().unwrap_or_else(PoisonError::into_inner))
        })
        .await
    }

    /// Has QEMU write where the journal is read, before the guest runs.
    pub(crate) async fn prepare(&self) -> Result<()> {
        let object = crate::error::label(self.vm);
        self.with(move |state| match &state.journal {
            Some(journal) => journal.stop_appending().map_err(|error| {
                let reason = "its serial journal cannot be set up";
                Error::new(ErrorKind::Internal, "start", object, reason).with_source(error)
            }),
            None => Ok(()),
        })
        .await
    }

    /// Moves bytes both ways until `ended` says that the VMM has ended, then takes the rest.
    pub(crate) async fn serve(
        self: Arc<Self>,
        mut inputs: mpsc::Receiver<Vec<u8>>,
        mut ended: watch::Receiver<bool>,
    ) {
        let work = async {
            loop {
                match UnixStream::connect(&self.socket).await {
                    Ok(stream) => self.talk(stream, &mut inputs).await,
                    Err(error) => tracing::debug!(vm = %self.vm, %error, "no serial socket"),
                }
                tokio::time::sleep(RECONNECT).await;
            }
        };
        tokio::select! {
            () = work => {}
            // Either the VMM or the driver has ended.
            _ = ended.wait_for(|ended| *ended) => {}
        }
        self.drain().await;
        let close = |state: &mut State| {
            state.out = None;
            Ok(())
        };
        if let Err(error) = self.with(close).await {
            tracing::debug!(vm = %self.vm, %error, "a console is not closed");
        }
    }

    async fn talk(&self, stream: UnixStream, inputs: &mut mpsc::Receiver<Vec<u8>>) {
        // What came while nobody was connected.
        self.drain().await;
        let (mut read, mut write) = stream.into_split();
        let reading = async {
            let mut buffer = [0; 4096];
            loop {
                match read.read(&mut buffer).await {
                    Ok(0) | Err(_) => return,
                    Ok(count) => self.catch_up(count).await,
                }
            }
        };
        let writing = async {
            while let Some(bytes) = inputs.recv().await {
                if write.write_all(&bytes).await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            () = reading => {}
            () = writing => {}
        }
    }

    /// Drains until as much as the socket has shown is there, or the lag has passed.
    async fn catch_up(&self, count: usize) {
        let mut seen = self.drain().await;
        let begun = tokio::time::Instant::now();
        while seen < count && begun.elapsed() < LAG {
            tokio::time::sleep(Duration::from_millis(1)).await;
            seen += self.drain().await;
        }
    }

    /// Moves what is new from the journal to the log and the watchers; answers how much it was.
    async fn drain(&self) -> usize {
        self.with(|state| Ok(state.drain())).await.unwrap_or(0)
    }

    /// A watcher: the last `history` bytes, then what comes.
    pub(crate) async fn open(&self, history: usize) -> Result<Box<dyn ConsoleStream>> {
        let object = crate::error::label(self.vm);
        let opened = self.with(move |state| {
            state.drain();
            // Under the lock: nothing comes between the history and the first live bytes.
            let live = state.out.as_ref().map(broadcast::Sender::subscribe).ok_or_else(|| {
                let reason = "the VM does not run";
                Error::new(ErrorKind::Unavailable, "open console of", &object, reason)
            })?;
            let past = state.log.tail(history);
            Ok((live, past.map_err(|error| error.into_error("open console of", object))?))
        });
        let (live, past) = opened.await?;
        let past = (!past.is_empty()).then_some(past);
        Ok(Box::new(Watcher { vm: self.vm, past, live, input: self.input.clone() }))
    }
}

impl State {
    fn drain(&mut self) -> usize {
        let Some(journal) = &mut self.journal else { return 0 };
        let drained = match journal.drain() {
            Ok(drained) => drained,
            Err(error) => {
                tracing::debug!(vm = %self.vm, %error, "the serial journal cannot be read");
                return 0;
            }
        };
        let count = drained.bytes.len();
        if count == 0 {
            return 0;
        }
        let kept = self
            .log
            .append(&drained.bytes)
            .and_then(|()| if drained.lost { self.log.append(GAP) } else { Ok(()) });
        if let Err(error) = kept {
            // A full disk must not end the live console; the log has a gap then.
            tracing::debug!(vm = %self.vm, %error, "serial output is not kept");
        }
        if let Err(error) = journal.commit() {
            tracing::debug!(vm = %self.vm, %error, "the serial journal is not committed");
        }
        if let Some(out) = &self.out {
            // An error means that nobody watches.
            drop(out.send(drained.bytes.into()));
            if drained.lost {
                drop(out.send(GAP.into()));
            }
        }
        count
    }
}

/// The last bytes of a log.
pub(crate) async fn read_tail(vm: VmId, log: SerialLog, most: usize) -> Result<Vec<u8>> {
    blocking("read console log of", move || {
        let object = crate::error::label(vm);
        log.tail(most).map_err(|error| error.into_error("read console log of", object))
    })
    .await
}

struct Watcher {
    vm: VmId,
    past: Option<Vec<u8>>,
    live: broadcast::Receiver<Arc<[u8]>>,
    input: mpsc::Sender<Vec<u8>>,
}

impl ConsoleStream for Watcher {
    fn read(&mut self) -> BoxFuture<'_, Result<Vec<u8>>> {
        Box::pin(async move {
            if let Some(past) = self.past.take() {
                return Ok(past);
            }
            match self.live.recv().await {
                Ok(bytes) => Ok(bytes.to_vec()),
                Err(broadcast::error::RecvError::Lagged(_)) => Ok(GAP.to_vec()),
                Err(broadcast::error::RecvError::Closed) => Ok(Vec::new()),
            }
        })
    }

    fn write<'a>(&'a mut self, bytes: &'a [u8]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.input.send(bytes.to_vec()).await.map_err(|_| {
                let object = crate::error::label(self.vm);
                Error::new(ErrorKind::Unavailable, "write to console of", object, "it is gone")
            })
        })
    }
}
