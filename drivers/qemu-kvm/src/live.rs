//! A VMM that runs, as this process holds it: its descriptor, its monitor, its console, and the tasks that watch them.
//!
//! ```text
//! find or launch ──> Live ──┬── monitor task: connects, reconnects, passes events on
//!                           ├── console task
//!                           └── end task: waits for the process, keeps how it ended, clears the run directory
//! ```
//!
//! When the driver is dropped the tasks end and the VMM runs on.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use drivers_api::{EventKind, Exit, HostEvent, ObjectRef};
use host::{
    bound::blocking,
    events::EventHub,
    process::{Ended, Identity, PidFd},
};
use tokio::{
    sync::{broadcast, watch},
    task::AbortHandle,
};

use crate::{
    console::{Hub, journal::Journal, log::SerialLog},
    paths::VmPaths,
    qmp::{Client, Event, QmpError},
    record::{self, Accel, Running},
    vmm::Vmm,
};

/// Between two attempts to reach a monitor that closed its connection.
const RECONNECT: Duration = Duration::from_millis(200);
/// How long the last events of an ended VMM are waited for.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// How long the console may take to keep the last output.
const LAST_OUTPUT: Duration = Duration::from_secs(2);

/// A VMM that runs, or has just ended.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) identity: Identity,
    pub(crate) pidfd: Arc<PidFd>,
    pub(crate) console: Arc<Hub>,
    pub(crate) accel: Option<Accel>,
    /// A stop is under way.
    pub(crate) stopping: AtomicBool,
    /// The end was asked for.
    requested: Arc<AtomicBool>,
    monitor: watch::Receiver<Option<Arc<Client>>>,
    ended: watch::Receiver<Option<Exit>>,
    tasks: Vec<AbortHandle>,
}

impl Drop for Live {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Live {
    /// Takes hold of a VMM. Called on a thread of the runtime.
    pub(crate) fn new(vmm: Vmm, paths: &VmPaths, hub: &EventHub, log_limit: u64) -> Arc<Self> {
        let Vmm { identity, pidfd, journal } = vmm;
        let running = Running::load(paths).ok().flatten();
        let journal = journal.or_else(|| adopt_journal(&pidfd, running.as_ref(), paths));
        let log = SerialLog::new(paths.serial_log(), log_limit);
        let (console, inputs) = Hub::new(paths.id, paths.serial(), journal, log);
        let pidfd = Arc::new(pidfd);
        let requested = Arc::new(AtomicBool::new(paths.requested().exists()));
        let (set_monitor, monitor) = watch::channel(None);
        let (set_gone, gone) = watch::channel(false);
        let (set_ended, ended) = watch::channel(None);
        let shutdown = Arc::new(Mutex::new(None));
        let console_task = tokio::spawn(Arc::clone(&console).serve(inputs, gone));
        let watcher = MonitorTask {
            paths: paths.clone(),
            hub: hub.clone(),
            set: set_monitor,
            shutdown: Arc::clone(&shutdown),
        };
        let monitor_task = tokio::spawn(watcher.run());
        let mut tasks = vec![console_task.abort_handle(), monitor_task.abort_handle()];
        let end = EndTask {
            paths: paths.clone(),
            hub: hub.clone(),
            identity: identity.clone(),
            pidfd: Arc::clone(&pidfd),
            requested: Arc::clone(&requested),
            shutdown,
            monitor: monitor.clone(),
            set_gone,
            set_ended,
        };
        tasks.push(tokio::spawn(end.run(console_task, monitor_task.abort_handle())).abort_handle());
        let accel = running.map(|running| running.accel);
        Arc::new(Self {
            identity,
            pidfd,
            console,
            accel,
            stopping: AtomicBool::new(false),
            requested,
            monitor,
            ended,
            tasks,
        })
    }

    /// How it ended, once everything about the end is kept and cleared.
    pub(crate) fn exit(&self) -> Option<Exit> {
        *self.ended.borrow()
    }

    /// Waits for the end, and for what is to be kept of it.
    pub(crate) async fn ended(&self) -> Exit {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(exit) => exit.unwrap_or(Exit::Unseen),
            // The driver is being dropped.
            Err(_) => Exit::Unseen,
        }
    }

    /// The monitor, as soon as it greets, within `limit`.
    pub(crate) async fn client(&self, limit: Duration) -> Result<Arc<Client>, QmpError> {
        let mut monitor = self.monitor.clone();
        let silent = || QmpError::Silent { command: "connect", limit };
        match tokio::time::timeout(limit, monitor.wait_for(Option::is_some)).await {
            Ok(Ok(client)) => client.clone().ok_or_else(silent),
            Ok(Err(_)) => Err(QmpError::Closed),
            Err(_) => Err(silent()),
        }
    }

    /// From now on an end is one that was asked for.
    pub(crate) fn request_end(&self, paths: &VmPaths) {
        self.requested.store(true, Ordering::SeqCst);
        crate::vmm::mark_requested(paths);
    }
}

fn adopt_journal(pidfd: &PidFd, running: Option<&Running>, paths: &VmPaths) -> Option<Journal> {
    match Journal::adopt(pidfd, running?.journal_fd) {
        Ok(journal) => Some(journal),
        Err(error) => {
            tracing::warn!(vm = %paths.id, %error, "the serial console cannot be adopted");
            None
        }
    }
}

/// Keeps a connection to the monitor for as long as the task runs.
struct MonitorTask {
    paths: VmPaths,
    hub: EventHub,
    set: watch::Sender<Option<Arc<Client>>>,
    shutdown: Arc<Mutex<Option<String>>>,
}

impl MonitorTask {
    async fn run(self) {
        // Kept over reconnections, so that who waits for an event goes on waiting.
        let events = Client::event_channel();
        loop {
            let mut seen = events.subscribe();
            match Client::connect_any(&self.paths.qmp(), &events).await {
                Ok(client) => {
                    let client = Arc::new(client);
                    self.set.send_replace(Some(Arc::clone(&client)));
                    self.pass_on(&client, &mut seen).await;
                    self.set.send_replace(None);
                }
                Err(error) => tracing::debug!(vm = %self.paths.id, %error, "no monitor"),
            }
            tokio::time::sleep(RECONNECT).await;
        }
    }

    async fn pass_on(&self, client: &Client, seen: &mut broadcast::Receiver<Event>) {
        let tell = |event: &Event| self.tell(event);
        let listen = async {
            loop {
                match seen.recv().await {
                    Ok(event) => tell(&event),
                    Err(broadcast::error::RecvError::Lagged(_)) => {
                        self.hub.publish(HostEvent::resync("monitor events were missed"));
                    }
                    Err(broadcast::error::RecvError::Closed) => return,
                }
            }
        };
        tokio::select! {
            () = listen => {}
            () = client.closed() => {}
        }
        // What came with the last bytes.
        while let Ok(event) = seen.try_recv() {
            tell(&event);
        }
    }

    fn tell(&self, event: &Event) {
        let object = ObjectRef::Vm(self.paths.id);
        let (kind, message) = match event.name.as_str() {
            "SHUTDOWN" => {
                let reason = event.text("reason").unwrap_or_default().to_owned();
                *self.shutdown.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason);
                (EventKind::Changed, "the guest is shutting down".to_owned())
            }
            "STOP" => (EventKind::Changed, "the guest is halted".to_owned()),
            "RESUME" => (EventKind::Changed, "the guest runs".to_owned()),
            "RESET" => (EventKind::Changed, "the guest was reset".to_owned()),
            "BLOCK_IO_ERROR" => (EventKind::Changed, "a disk of the guest fails".to_owned()),
            "GUEST_PANICKED" => (EventKind::Changed, "the guest panicked".to_owned()),
            "DEVICE_DELETED" => match event.text("device") {
                Some(device) => (EventKind::Changed, format!("the guest let go of {device}")),
                // A part of a device.
                None => return,
            },
            "DEVICE_UNPLUG_GUEST_ERROR" => {
                (EventKind::Changed, "the guest does not let go of a device".to_owned())
            }
            _ => return,
        };
        self.hub.publish(HostEvent::new(object, kind, message));
    }
}

/// Waits for the end of the process.
struct EndTask {
    paths: VmPaths,
    hub: EventHub,
    identity: Identity,
    pidfd: Arc<PidFd>,
    requested: Arc<AtomicBool>,
    shutdown: Arc<Mutex<Option<String>>>,
    monitor: watch::Receiver<Option<Arc<Client>>>,
    set_gone: watch::Sender<bool>,
    set_ended: watch::Sender<Option<Exit>>,
}

impl EndTask {
    async fn run(self, console: tokio::task::JoinHandle<()>, monitor_task: AbortHandle) {
        let ended = match self.pidfd.ended().await {
            Ok(ended) => ended,
            Err(error) => {
                tracing::error!(vm = %self.paths.id, %error, "a VMM cannot be waited for");
                return;
            }
        };
        // The monitor's last events are in its socket already: they came before the end.
        let mut monitor = self.monitor.clone();
        let quiet = monitor.wait_for(Option::is_none);
        drop(tokio::time::timeout(LAST_WORDS, quiet).await);
        monitor_task.abort();
        self.set_gone.send_replace(true);
        drop(tokio::time::timeout(LAST_OUTPUT, console).await);
        let exit = self.classify(ended);
        let (paths, identity) = (self.paths.clone(), self.identity.clone());
        let cleared = blocking("clear after", move || {
            // `Unseen` is kept since the start, and another agent may have seen more.
            if exit != Exit::Unseen
                && let Err(error) = record::store_exit(&paths, exit)
            {
                tracing::warn!(vm = %paths.id, %error, "how a VMM ended is not kept");
            }
            keep_last_words(&paths, exit);
            // Only what belongs to this process: another agent may have started the next one.
            let own = host::files::read_bounded(&paths.identity(), 256).ok().flatten();
            if own.is_some_and(|text| text == identity.to_string().as_bytes()) {
                drop(std::fs::remove_file(paths.identity()));
            }
            Ok(())
        });
        if let Err(error) = cleared.await {
            tracing::warn!(vm = %self.paths.id, %error, "the end of a VMM is not cleared");
        }
        let message = describe(exit);
        tracing::info!(vm = %self.paths.id, pid = self.identity.pid(), message, "a VMM ended");
        self.set_ended.send_replace(Some(exit));
        let object = ObjectRef::Vm(self.paths.id);
        self.hub.publish(HostEvent::new(object, EventKind::Changed, message));
    }

    fn classify(&self, ended: Ended) -> Exit {
        let reason = self.shutdown.lock().unwrap_or_else(PoisonError::into_inner).take();
        // `ShutdownCause` of QEMU's qapi/run-state.json.
        let by_guest = reason.as_deref().is_some_and(|reason| reason.starts_with("guest-"));
        // Another agent may have asked for it.
        let requested = self.requested.load(Ordering::SeqCst) || self.paths.requested().exists();
        match ended {
            Ended::Code(0) | Ended::Unseen if by_guest => Exit::GuestShutdown,
            _ if requested => Exit::Requested,
            Ended::Code(code) => Exit::Code(code),
            Ended::Signal(signal) => Exit::Signal(signal),
            Ended::Unseen => Exit::Unseen,
        }
    }
}

/// Logs what QEMU said before an end that nobody asked for.
fn keep_last_words(paths: &VmPaths, exit: Exit) {
    if matches!(exit, Exit::Code(_) | Exit::Signal(_)) {
        let words = host::files::read_bounded(&paths.qemu_log(), 1 << 20).ok().flatten();
        let words = host::run::escaped_tail(&words.unwrap_or_default(), 600);
        tracing::warn!(vm = %paths.id, ?exit, words, "a VMM ended without being asked");
    }
}

fn describe(exit: Exit) -> String {
    match exit {
        Exit::GuestShutdown => "the guest shut down".to_owned(),
        Exit::Requested => "the VM was stopped".to_owned(),
        Exit::Code(code) => format!("qemu exited with code {code}"),
        Exit::Signal(signal) => format!("qemu was ended by signal {signal}"),
        Exit::Unseen | _ => "qemu is gone".to_owned(),
    }
}
