//! What is there: from the VM's directory, the process and the monitor, never from memory.

use std::{collections::HashSet, sync::Arc, sync::atomic::Ordering, time::Duration};

use drivers_api::{
    Context, DeviceName, DiskSpec, Error, ErrorKind, Exit, NicHandle, Result, VmId, VmState,
    VmStatus,
};
use host::bound::{blocking, bounded};
use tokio::task::JoinSet;

use crate::{
    devices,
    driver::{Held, Inner, Vm},
    error::{foreign, label},
    live::Live,
    paths::VmPaths,
    qmp::{QmpError, RunState},
    record::{self, Devices, Ownership, RecordError, Running, VmRecord},
};

/// The moment for which a VMM that does not answer may delay a list.
const MOMENT: Duration = Duration::from_millis(250);

/// What the host's files say about a VM.
#[derive(Debug)]
pub(crate) struct OnDisk {
    pub(crate) record: Option<VmRecord>,
    pub(crate) running: Option<Running>,
    last_exit: Option<Exit>,
    message: Option<String>,
}

impl OnDisk {
    /// Reads them; what is damaged is missing and named. Blocking.
    pub(crate) fn read(paths: &VmPaths) -> Self {
        let mut message = None;
        let record = note(VmRecord::load(paths), &mut message);
        let running = note(Running::load(paths), &mut message);
        let last_exit = if paths.identity().exists() {
            // Nobody has cleared after the VMM yet.
            Some(if paths.requested().exists() { Exit::Requested } else { Exit::Unseen })
        } else {
            note(record::load_exit(paths), &mut message)
        };
        if record.is_none() && message.is_none() {
            message = Some("half made: it has no spec yet".to_owned());
        }
        Self { record, running, last_exit, message }
    }
}

fn note<T>(
    read: std::result::Result<Option<T>, RecordError>,
    message: &mut Option<String>,
) -> Option<T> {
    read.unwrap_or_else(|error| {
        *message = Some(error.to_string());
        None
    })
}

/// All our VMs.
pub(crate) async fn list(inner: &Arc<Inner>, cx: &Context) -> Result<Vec<VmStatus>> {
    let listing = Arc::clone(inner);
    let work = async {
        let ids = blocking("list", move || ids(&listing)).await?;
        let mut tasks = JoinSet::new();
        for id in ids {
            let (inner, cx) = (Arc::clone(inner), cx.clone());
            tasks.spawn(async move { status(&inner, &cx, id, Foreign::Skip).await });
        }
        let mut all = Vec::new();
        while let Some(answer) = tasks.join_next().await {
            let answer = answer.map_err(|join| {
                Error::new(ErrorKind::Internal, "list", "VMs", "a task failed").with_source(join)
            })?;
            all.extend(answer?);
        }
        all.sort_by_key(|status: &VmStatus| status.uuid);
        Ok(all)
    };
    bounded(cx, "list", "VMs", work).await
}

/// The UUIDs for which there is a directory. Blocking.
fn ids(inner: &Inner) -> Result<Vec<VmId>> {
    let dir = &inner.config.state_dir;
    let fail = |error| host::files::FileError::of("read", dir)(error).into_error("list", "VMs");
    let mut ids = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(fail)? {
        let name = entry.map_err(fail)?.file_name();
        let Some(name) = name.to_str() else { continue };
        // Only the spelling that we write: another one is not ours.
        if let Ok(id) = name.parse::<VmId>()
            && id.to_string() == name
        {
            ids.push(id);
        }
    }
    Ok(ids)
}

/// What to do with a directory that is not ours.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Foreign {
    Skip,
    Refuse,
}

/// One VM; `None` when it is not there.
pub(crate) async fn status(
    inner: &Arc<Inner>,
    cx: &Context,
    id: VmId,
    foreigners: Foreign,
) -> Result<Option<VmStatus>> {
    let vm = inner.vm(id);
    let again = Arc::clone(&vm);
    let looking = Arc::clone(inner);
    // Looking for a process may wait for one that is being started, or hang on one that hangs in the kernel; the task goes
    // on then, and finds it for the next call.
    let look =
        tokio::spawn(
            async move { blocking("look at", move || look(&looking, &vm, foreigners)).await },
        );
    let answer = tokio::time::timeout(MOMENT, look).await;
    let Ok(joined) = answer else { return slow(inner, id, foreigners).await };
    let seen = joined.map_err(|join| {
        Error::new(ErrorKind::Internal, "look at", label(id), "a task failed").with_source(join)
    })??;
    let Some((mut held, mut disk)) = seen else { return Ok(None) };
    if let Held::Ending(live) = &held {
        // A moment later it is known how it ended.
        drop(tokio::time::timeout(MOMENT, live.ended()).await);
        let looking = Arc::clone(inner);
        let seen = blocking("look at", move || self::look(&looking, &again, foreigners)).await?;
        let Some(found) = seen else { return Ok(None) };
        (held, disk) = found;
    }
    host::bound::check(cx, "look at", label(id))?;
    Ok(Some(match held {
        Held::Nothing | Held::Ending(_) => stopped(inner, id, disk),
        Held::BeingStarted => {
            let mut status = stopped(inner, id, disk);
            status.state = VmState::Starting;
            status.last_exit = None;
            status
        }
        Held::Live(live) => running(inner, id, disk, &live).await,
    }))
}

type Seen = Option<(Held, OnDisk)>;

fn look(inner: &Arc<Inner>, vm: &Arc<Vm>, foreigners: Foreign) -> Result<Seen> {
    if !is_ours(inner, &vm.paths, foreigners)? {
        inner.forget_absent(vm);
        return Ok(None);
    }
    let held = inner.hold(vm, "look at")?;
    Ok(Some((held, OnDisk::read(&vm.paths))))
}

fn is_ours(inner: &Inner, paths: &VmPaths, foreigners: Foreign) -> Result<bool> {
    let found = record::ownership(paths, inner.config.node)
        .map_err(|error| error.into_error("look at", paths.id))?;
    match (found, foreigners) {
        (Ownership::Ours, _) => Ok(true),
        (Ownership::Absent, _) | (Ownership::Foreign(_), Foreign::Skip) => Ok(false),
        (Ownership::Foreign(why), Foreign::Refuse) => {
            Err(foreign("look at", paths.id, &paths.dir, &why))
        }
    }
}

/// A VM whose process could not be looked at in time: it is being started or hangs.
async fn slow(inner: &Arc<Inner>, id: VmId, foreigners: Foreign) -> Result<Option<VmStatus>> {
    let paths = inner.vm(id).paths.clone();
    let looking = Arc::clone(inner);
    let disk = blocking("look at", move || {
        Ok(is_ours(&looking, &paths, foreigners)?.then(|| OnDisk::read(&paths)))
    });
    Ok(disk.await?.map(|disk| {
        let mut status = stopped(inner, id, disk);
        status.last_exit = None;
        status.state = VmState::Unknown;
        status.message = Some("its VMM is being looked for or started".to_owned());
        status
    }))
}

fn base(inner: &Inner, id: VmId, disk: &OnDisk, state: VmState) -> VmStatus {
    let spec = disk.record.as_ref().map(|record| record.spec.clone());
    let mut status = VmStatus::new(id, record::mark(inner.config.node, id), spec, state);
    status.message.clone_from(&disk.message);
    status
}

fn stopped(inner: &Inner, id: VmId, disk: OnDisk) -> VmStatus {
    let mut status = base(inner, id, &disk, VmState::Stopped);
    status.last_exit = disk.last_exit;
    if let Some(record) = disk.record {
        status.disks = record.devices.disks.into_iter().map(|entry| entry.disk).collect();
        status.nics = record.devices.nics.into_iter().map(|entry| entry.nic).collect();
    }
    status
}

async fn running(inner: &Inner, id: VmId, disk: OnDisk, live: &Live) -> VmStatus {
    let mut status = base(inner, id, &disk, VmState::Unknown);
    status.pid = Some(live.identity.pid());
    status.accel = live.accel.map(|accel| accel.as_str().to_owned());
    let asked = ask(live).await;
    let (present, had) = devices_of(&disk, asked.as_ref().ok().map(|answer| &answer.devices));
    status.restart_needed = restart_needed(&disk, &had);
    status.disks = present.disks;
    status.nics = present.nics;
    status.detaching = present.detaching;
    match asked {
        Ok(answer) => {
            status.state = state_of(answer.state, live.stopping.load(Ordering::SeqCst));
            let more = why(answer.state, answer.out_of_space);
            status.message = more.map(str::to_owned).or(status.message);
        }
        Err(_) if live.exit().is_some() => {
            // It ended while it was asked.
            status.state = VmState::Stopped;
            status.pid = None;
            status.accel = None;
            status.last_exit = live.exit();
        }
        Err(error) => status.message = Some(format!("its VMM does not answer: {error}")),
    }
    status
}

struct Answer {
    state: RunState,
    devices: HashSet<String>,
    out_of_space: bool,
}

async fn ask(live: &Live) -> std::result::Result<Answer, QmpError> {
    let begun = tokio::time::Instant::now();
    let client = live.client(MOMENT).await?;
    let left = MOMENT.saturating_sub(begun.elapsed());
    let (state, devices) = tokio::join!(client.query_status(left), client.device_ids(left));
    let (state, devices) = (state?, devices?);
    let out_of_space = state == RunState::IoError && client.is_out_of_space(MOMENT).await?;
    Ok(Answer { state, devices, out_of_space })
}

/// The state of a VMM that answers.
pub(crate) const fn state_of(state: RunState, stopping: bool) -> VmState {
    match state {
        RunState::Prelaunch | RunState::Inmigrate => VmState::Starting,
        RunState::Running | RunState::Suspended if stopping => VmState::Stopping,
        RunState::Running | RunState::Suspended => VmState::Running,
        RunState::Shutdown => VmState::Stopping,
        RunState::Paused
        | RunState::IoError
        | RunState::InternalError
        | RunState::GuestPanicked
        | RunState::Watchdog
        | RunState::Other => VmState::Paused,
    }
}

const fn why(state: RunState, out_of_space: bool) -> Option<&'static str> {
    match state {
        RunState::IoError if out_of_space => Some(
            "paused: no space is left on the host for a disk of the VM; free some, then start the VM",
        ),
        RunState::IoError => Some("paused: a disk of the VM fails; mend it, then start the VM"),
        RunState::InternalError => Some("paused: QEMU cannot go on; stop and start the VM"),
        RunState::GuestPanicked => Some("paused: the guest's kernel panicked"),
        RunState::Paused => Some("paused by request"),
        RunState::Watchdog => Some("paused by its watchdog"),
        RunState::Running
        | RunState::Prelaunch
        | RunState::Inmigrate
        | RunState::Shutdown
        | RunState::Suspended
        | RunState::Other => None,
    }
}

#[derive(Default)]
struct Present {
    disks: Vec<DiskSpec>,
    nics: Vec<NicHandle>,
    detaching: Vec<DeviceName>,
}

/// The devices that the VMM has, and what it was to have. Without an answer of the monitor, what it was to have counts.
fn devices_of(disk: &OnDisk, ids: Option<&HashSet<String>>) -> (Present, Devices) {
    let record = disk.record.as_ref().map(|record| &record.devices);
    let had = disk.running.as_ref().map(|running| &running.devices).or(record);
    let had = had.cloned().unwrap_or_default();
    let there = |id: &str| ids.is_none_or(|ids| ids.contains(id));
    let mut present = Present::default();
    for entry in &had.disks {
        if there(&devices::disk_id(entry.disk.volume_uuid)) {
            present.disks.push(entry.disk.clone());
            if entry.detaching {
                present.detaching.push(entry.disk.name.clone());
            }
        }
    }
    for entry in &had.nics {
        if there(&devices::nic_id(&entry.nic)) {
            present.nics.push(entry.nic.clone());
            if entry.detaching {
                present.detaching.push(entry.nic.name.clone());
            }
        }
    }
    (present, had)
}

/// Whether what runs differs from the record in what only a restart applies: the static part except its names, and
/// devices that are there under the same identity with other properties.
fn restart_needed(disk: &OnDisk, had: &Devices) -> bool {
    let (Some(record), Some(running)) = (&disk.record, &disk.running) else { return false };
    let mut started = running.spec.clone();
    started.name = record.spec.name.clone();
    started.project_uuid = record.spec.project_uuid;
    let other_disk = record.devices.disks.iter().any(|wanted| {
        had.disks
            .iter()
            .any(|has| has.disk.volume_uuid == wanted.disk.volume_uuid && has.disk != wanted.disk)
    });
    let other_nic = record.devices.nics.iter().any(|wanted| {
        had.nics.iter().any(|has| has.nic.device == wanted.nic.device && has.nic != wanted.nic)
    });
    started != record.spec || other_disk || other_nic
}
