//! The driver's own state: which VMs this process holds, and how one of them is locked.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use drivers_api::{Context, Error, ErrorKind, Result, VmId};
use host::{
    bound::{blocking, bounded},
    events::EventHub,
    lock::{FileLock, LockError},
};
use tokio::sync::{OnceCell, OwnedMutexGuard};

use crate::{
    config::QemuConfig,
    error::{foreign, label},
    live::Live,
    paths::VmPaths,
    record::{self, Accel, Ownership},
    vmm::{self, Found},
};

/// How long another agent's work on a VM is waited for.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// What all calls share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) config: QemuConfig,
    pub(crate) version: String,
    pub(crate) hub: EventHub,
    pub(crate) accel: OnceCell<Accel>,
    vms: Mutex<HashMap<VmId, Arc<Vm>>>,
}

/// What this process holds of one VM.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) paths: VmPaths,
    /// One change at a time.
    gate: Arc<tokio::sync::Mutex<()>>,
    /// Held while a VMM is looked for or started, so that one process is held once. Threads for blocking work only.
    live: Mutex<Option<Arc<Live>>>,
}

/// The right to change a VM. Clones go into blocking work, so that the right outlives a dropped future.
#[derive(Clone, Debug)]
pub(crate) struct Op {
    pub(crate) inner: Arc<Inner>,
    pub(crate) vm: Arc<Vm>,
    _right: Arc<Right>,
}

#[derive(Debug)]
struct Right {
    vm: Arc<Vm>,
    inner: Arc<Inner>,
    lock: Option<FileLock>,
    _turn: OwnedMutexGuard<()>,
}

impl Drop for Right {
    fn drop(&mut self) {
        // Nothing is done under the lock any more. Who opened the file before sees that it is gone, and opens it anew.
        if let Err(error) = host::files::remove_file(&self.vm.paths.gate) {
            tracing::debug!(vm = %self.vm.paths.id, %error, "a lock file stays");
        }
        self.lock = None;
        if !self.vm.paths.dir.exists() {
            self.inner.forget(&self.vm);
        }
    }
}

/// What holds a VM's VMM.
#[derive(Debug)]
pub(crate) enum Held {
    /// There is none.
    Nothing,
    /// This process holds it.
    Live(Arc<Live>),
    /// Its process has ended, and what is to be kept of that is being written.
    Ending(Arc<Live>),
    /// Another process is starting it.
    BeingStarted,
}

impl Inner {
    pub(crate) fn new(config: QemuConfig, version: String) -> Arc<Self> {
        Arc::new(Self {
            config,
            version,
            hub: EventHub::new(),
            accel: OnceCell::new(),
            vms: Mutex::default(),
        })
    }

    /// What is held of a VM, made when there is nothing yet.
    pub(crate) fn vm(&self, id: VmId) -> Arc<Vm> {
        let mut vms = self.vms.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(vms.entry(id).or_insert_with(|| {
            Arc::new(Vm {
                paths: VmPaths::new(&self.config.state_dir, &self.config.run_dir, id),
                gate: Arc::default(),
                live: Mutex::default(),
            })
        }))
    }

    /// Forgets a VM that is not there, unless another call waits for it.
    fn forget(&self, vm: &Arc<Vm>) {
        let mut vms = self.vms.lock().unwrap_or_else(PoisonError::into_inner);
        // One in the map, and one of the right that ends: no other call has it.
        if Arc::strong_count(vm) <= 2 {
            vms.remove(&vm.paths.id);
        }
    }

    /// Forgets a VM that was looked for and is not there.
    pub(crate) fn forget_absent(&self, vm: &Arc<Vm>) {
        self.forget(vm);
    }

    /// Waits for the right to change a VM.
    pub(crate) async fn op(
        self: &Arc<Self>,
        cx: &Context,
        operation: &'static str,
        id: VmId,
    ) -> Result<Op> {
        let vm = self.vm(id);
        let work = async {
            let turn = Arc::clone(&vm.gate).lock_owned().await;
            let lock = lock(&vm.paths, operation).await?;
            let (inner, held) = (Arc::clone(self), Arc::clone(&vm));
            let right = Right { vm: held, inner, lock: Some(lock), _turn: turn };
            let op = Op { inner: Arc::clone(self), vm: Arc::clone(&vm), _right: Arc::new(right) };
            // An end that is being written down is waited for, so that no call works on a VMM that is no more.
            if let Held::Ending(live) = op.blocking(operation, move |op| op.hold(operation)).await?
            {
                live.ended().await;
            }
            Ok(op)
        };
        bounded(cx, operation, label(id), work).await
    }

    /// Waits until no thread works for an ended call on a VM any more, for at most `limit`: the right to change it is given
    /// back by the last of them.
    pub(crate) async fn at_rest(&self, id: VmId, limit: Duration) {
        let vm = self.vm(id);
        if tokio::time::timeout(limit, vm.gate.lock()).await.is_err() {
            tracing::debug!(vm = %id, ?limit, "another call works on it");
        }
        if !vm.paths.dir.exists() {
            self.forget(&vm);
        }
    }

    /// The VMM of a VM as this process holds it; takes hold of one that is found. Blocking.
    pub(crate) fn hold(&self, vm: &Vm, operation: &'static str) -> Result<Held> {
        let mut live = vm.live.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = &*live {
            if found.exit().is_none() {
                let found = Arc::clone(found);
                let ended = found.pidfd.has_ended();
                return Ok(if ended { Held::Ending(found) } else { Held::Live(found) });
            }
            *live = None;
        }
        let found = vmm::find(&vm.paths).map_err(|error| {
            let reason = "its VMM cannot be looked for";
            Error::new(ErrorKind::Unavailable, operation, label(vm.paths.id), reason)
                .with_source(error)
        })?;
        match found {
            Found::Nothing => Ok(Held::Nothing),
            Found::BeingStarted => Ok(Held::BeingStarted),
            Found::Process(process) => {
                let limit = self.config.serial_log_bytes;
                let held = Live::new(process, &vm.paths, &self.hub, limit);
                *live = Some(Arc::clone(&held));
                Ok(Held::Live(held))
            }
        }
    }
}

/// Waits for the lock that keeps agents apart. The kernel tells nobody when a lock is free, so it is asked again after a
/// while: another agent is there only while one takes over from the other.
async fn lock(paths: &VmPaths, operation: &'static str) -> Result<FileLock> {
    let id = paths.id;
    let mut wait = Duration::from_millis(2);
    let mut waited = Duration::ZERO;
    loop {
        let gate = paths.gate.clone();
        let attempt = blocking(operation, move || match FileLock::try_exclusive(&gate) {
            Ok(lock) => Ok(Ok(lock)),
            Err(held @ LockError::Held { .. }) => Ok(Err(held)),
            Err(LockError::File(error)) => Err(error.into_error(operation, label(id))),
        });
        match attempt.await? {
            Ok(lock) => return Ok(lock),
            Err(held) if waited >= LOCK_PATIENCE => {
                let reason = held.to_string();
                return Err(Error::new(ErrorKind::Unavailable, operation, label(id), reason)
                    .with_remedy("another agent works on it: run one per host"));
            }
            Err(_) => {}
        }
        tokio::time::sleep(wait).await;
        waited += wait;
        wait = (wait * 2).min(Duration::from_millis(50));
    }
}

impl Op {
    pub(crate) fn id(&self) -> VmId {
        self.vm.paths.id
    }

    pub(crate) fn paths(&self) -> &VmPaths {
        &self.vm.paths
    }

    /// Does blocking work under the right, to its end even when the caller's future is dropped.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let op = self.clone();
        blocking(operation, move || work(&op)).await
    }

    /// Whether the VM is there and ours. Blocking.
    pub(crate) fn is_there(&self, operation: &'static str) -> Result<bool> {
        let paths = self.paths();
        let found = record::ownership(paths, self.inner.config.node)
            .map_err(|error| error.into_error(operation, paths.id))?;
        match found {
            Ownership::Absent => Ok(false),
            Ownership::Ours => Ok(true),
            Ownership::Foreign(why) => Err(foreign(operation, paths.id, &paths.dir, &why)),
        }
    }

    /// The VMM, looked for under the right; what an ended one left is cleared. Blocking.
    pub(crate) fn hold(&self, operation: &'static str) -> Result<Held> {
        self.inner.hold(&self.vm, operation)
    }

    /// Starts the VMM and takes hold of it. Blocking.
    pub(crate) fn launch(&self, running: record::Running) -> Result<Arc<Live>> {
        let mut live = self.vm.live.lock().unwrap_or_else(PoisonError::into_inner);
        let process = vmm::launch(&self.inner.config, self.paths(), running)?;
        let limit = self.inner.config.serial_log_bytes;
        let held = Live::new(process, self.paths(), &self.inner.hub, limit);
        *live = Some(Arc::clone(&held));
        Ok(held)
    }
}
