//! Start, stop and reboot.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use drivers_api::{Change, Context, Error, ErrorKind, Exit, Result};
use host::{bound::bounded, fault};
use rustix::process::Signal;
use tokio::time::{Instant, sleep, timeout};

use super::{COMMAND, Known, monitor, need, qmp_error};
use crate::{
    accel, argv, boot,
    driver::{Held, Op},
    error::{label, silent},
    live::Live,
    qmp::RunState,
    record::Running,
    scope, vmm,
};

/// Between two presses of the power button: one that comes before the guest listens is lost.
const PRESS_AGAIN: Duration = Duration::from_secs(3);
/// How long a VMM may take to quit. An idle one takes 5 ms; one that writes back its caches takes longer.
const QUIT: Duration = Duration::from_secs(2);
/// How long the kernel may take to end a process that was killed.
const KILL: Duration = Duration::from_secs(5);
/// How long the end of a VMM whose monitor is closed is waited for.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long QEMU may take to greet, where the context allows more.
const GREETING: Duration = Duration::from_secs(30);

/// Boots the VM, or lets a halted one go on.
pub(crate) async fn start(op: &Op, cx: &Context) -> Result<Change> {
    let Known { record, live } = need(op, "start").await?;
    if let Some((live, _)) = live {
        return resume(op, cx, &live).await;
    }
    let accel =
        accel::decide(&op.inner, cx).await.map_err(|e| e.during("start", label(op.id())))?;
    let highest = record.devices.ports().max().map_or(0, |port| port.saturating_add(1));
    let ports = highest.saturating_add(op.inner.config.spare_ports).min(argv::MAX_PORTS);
    let running =
        Running { spec: record.spec, devices: record.devices, ports, accel, journal_fd: -1 };
    let started = op.blocking("start", move |op| {
        vmm::clear_ended(op.paths())?;
        if !boot::is_complete(op.paths(), &running.spec) {
            boot::place(&op.inner.config, op.paths(), &running.spec)?;
        }
        let launched = op.launch(running);
        if launched.is_err() && matches!(op.hold("start"), Ok(Held::Nothing)) {
            // Nothing runs, so nothing is left in the run directory either.
            vmm::clear_ended(op.paths())?;
        }
        launched
    });
    let live = started.await?;
    fault::point("qemu.start.launched")?;
    resume(op, cx, &live).await.map(|_| Change::Changed)
}

/// Makes the guest of a VMM run.
async fn resume(op: &Op, cx: &Context, live: &Arc<Live>) -> Result<Change> {
    // Here and not at the launch: no guest runs its first instruction outside, whoever died between.
    let confined = scope::confine(&op.inner.config, op.id(), live.identity.pid());
    match bounded(cx, "start", label(op.id()), confined).await {
        Err(error) if live.pidfd.has_ended() => return ended_meanwhile(op, live, error).await,
        answer => answer?,
    }
    fault::point("qemu.start.confined")?;
    let Ok(client) = live.client(GREETING).await else {
        host::bound::check(cx, "start", label(op.id()))?;
        let silent = silent("start", op.id(), live.identity.pid());
        return ended_meanwhile(op, live, silent).await;
    };
    let fail = |error| qmp_error(op, "start", error);
    let work = async {
        let state = client.query_status(COMMAND).await.map_err(fail)?;
        match state {
            RunState::Running | RunState::Suspended => return Ok(Change::Unchanged),
            RunState::InternalError | RunState::GuestPanicked | RunState::Shutdown => {
                client.reset(COMMAND).await.map_err(fail)?;
            }
            RunState::Prelaunch
            | RunState::Inmigrate
            | RunState::Paused
            | RunState::IoError
            | RunState::Watchdog
            | RunState::Other => {}
        }
        live.console.prepare().await?;
        fault::point("qemu.start.ready")?;
        client.cont(COMMAND).await.map_err(fail)?;
        fault::point("qemu.start.continued")?;
        let state = client.query_status(COMMAND).await.map_err(fail)?;
        if matches!(state, RunState::Running | RunState::Suspended | RunState::Shutdown) {
            return Ok(Change::Changed);
        }
        let reason = format!("the guest was told to run and is {state:?}");
        Err(Error::new(ErrorKind::Unavailable, "start", label(op.id()), reason))
    };
    match bounded(cx, "start", label(op.id()), work).await {
        Err(error) if error.kind() == ErrorKind::UnknownOutcome => {
            ended_meanwhile(op, live, error).await
        }
        answer => answer,
    }
}

/// What became of a start whose monitor closed its connection: mostly, the VMM ended.
async fn ended_meanwhile(op: &Op, live: &Live, error: Error) -> Result<Change> {
    match timeout(LAST_WORDS, live.ended()).await {
        // The guest ran, and is through already.
        Ok(Exit::GuestShutdown) => Ok(Change::Changed),
        Ok(exit) => Err(vmm::startup_error(op.paths(), Some(exit))),
        Err(_) => Err(error),
    }
}

/// Shuts the guest down, and ends the VMM after the grace.
pub(crate) async fn stop(op: &Op, cx: &Context, grace: Duration) -> Result<Change> {
    let Some(live) = running(op, "stop").await? else { return Ok(Change::Unchanged) };
    live.stopping.store(true, Ordering::SeqCst);
    let stopping = Stopping(Arc::clone(&live));
    if !grace.is_zero() {
        bounded(cx, "stop", label(op.id()), press(op, &live, grace)).await?;
    }
    if live.exit().is_none() {
        if !grace.is_zero() {
            tracing::warn!(vm = %op.id(), ?grace, "the guest did not shut down: the stop is forced");
        }
        end(op, cx, "stop", &live).await?;
    }
    drop(stopping);
    op.blocking("stop", |op| vmm::clear_ended(op.paths())).await?;
    Ok(Change::Changed)
}

/// Takes back the sign of a stop when the caller gives up on it.
struct Stopping(Arc<Live>);

impl Drop for Stopping {
    fn drop(&mut self) {
        self.0.stopping.store(false, Ordering::SeqCst);
    }
}

/// The VMM of a VM that may not be there; what an ended one left is cleared.
async fn running(op: &Op, operation: &'static str) -> Result<Option<Arc<Live>>> {
    op.blocking(operation, move |op| {
        if !op.is_there(operation)? {
            return Ok(None);
        }
        match op.hold(operation)? {
            Held::Nothing | Held::Ending(_) => {
                vmm::clear_ended(op.paths())?;
                Ok(None)
            }
            Held::BeingStarted => Err(vmm::being_started(operation, op.id())),
            Held::Live(live) => Ok(Some(live)),
        }
    })
    .await
}

/// Presses the power button until the VMM has ended or the grace is over.
async fn press(op: &Op, live: &Live, grace: Duration) -> Result<()> {
    let over = Instant::now() + grace;
    let presses = async {
        loop {
            let left = over.saturating_duration_since(Instant::now());
            let limit = left.min(PRESS_AGAIN);
            match live.client(limit).await {
                Ok(client) => {
                    if let Err(error) = client.powerdown(limit).await {
                        tracing::debug!(vm = %op.id(), %error, "the power button is not pressed");
                    }
                }
                Err(error) => tracing::debug!(vm = %op.id(), %error, "no power button"),
            }
            sleep(PRESS_AGAIN).await;
        }
    };
    tokio::select! {
        biased;
        _ = live.ended() => {}
        () = presses => {}
        () = tokio::time::sleep_until(over) => {}
    }
    Ok(())
}

/// Ends the VMM: asks it to quit, then kills it. Returns when the process is gone.
pub(crate) async fn end(
    op: &Op,
    cx: &Context,
    operation: &'static str,
    live: &Arc<Live>,
) -> Result<()> {
    let marked = Arc::clone(live);
    op.blocking(operation, move |op| {
        marked.request_end(op.paths());
        Ok(())
    })
    .await?;
    let quit = async {
        let client = live.client(QUIT).await?;
        client.quit(QUIT).await
    };
    // Asked first, since it writes its caches back; one that is stopped or hangs does not answer.
    let quitting = async {
        if let Err(error) = quit.await {
            tracing::debug!(vm = %op.id(), %error, "the VMM does not quit");
        }
        live.ended().await;
    };
    let answering = async { timeout(QUIT, quitting).await };
    if answering.await.is_err() {
        let pid = live.identity.pid();
        tracing::warn!(vm = %op.id(), pid, "the VMM does not quit: it is killed");
        live.pidfd.signal(Signal::KILL).map_err(|error| {
            let reason = format!("its VMM, process {pid}, cannot be killed");
            Error::new(ErrorKind::Denied, operation, label(op.id()), reason).with_source(error)
        })?;
        let stuck = timeout(KILL, live.ended()).await.is_err();
        if stuck {
            host::bound::check(cx, operation, label(op.id()))?;
            let reason = format!(
                "its VMM, process {pid}, was killed and does not end: it hangs in the kernel"
            );
            return Err(Error::new(ErrorKind::UnknownOutcome, operation, label(op.id()), reason)
                .with_remedy("look at the storage that it waits for"));
        }
    }
    fault::point("qemu.stop.ended")
}

/// Restarts the guest.
pub(crate) async fn reboot(op: &Op, cx: &Context, grace: Duration) -> Result<Change> {
    let Known { live, .. } = need(op, "reboot").await?;
    let Some((live, _)) = live else { return start(op, cx).await };
    if !grace.is_zero() {
        bounded(cx, "reboot", label(op.id()), press(op, &live, grace)).await?;
    }
    if live.exit().is_some() {
        // The guest shut down in order; a new VMM takes a changed spec along.
        return start(op, cx).await.map(|_| Change::Changed);
    }
    let client = monitor(op, "reboot", &live).await?;
    client.reset(COMMAND).await.map_err(|error| qmp_error(op, "reboot", error))?;
    resume(op, cx, &live).await.map(|_| Change::Changed)
}
