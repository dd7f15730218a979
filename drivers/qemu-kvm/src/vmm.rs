//! The VMM's process: how one is started so that there are never two, and how it is found again.
//!
//! Three things say that a VM has a VMM, each for another crash:
//!
//! 1. `RUN/UUID/vmm` names the process (boot, pid, start time). It is believed only when the process of that identity has
//!    the VM's UUID on its command line.
//! 2. `STATE/UUID/vmm.lock` is locked by an open file that the VMM inherited. It is taken before the start, so an agent
//!    killed between the start and the writing of (1) leaves a held lock behind, and the holder is looked for in `/proc`.
//! 3. QEMU's own locks on the disk images, which would refuse a second writer.

use std::{
    fs::File,
    io::{self, Write},
    os::{
        fd::OwnedFd,
        unix::{
            fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
            net::UnixListener,
        },
    },
    path::Path,
};

use drivers_api::{BootFiles, Error, ErrorKind, Exit, IfName, Result, VmId};
use host::{
    daemon::Daemon,
    fault,
    files::{self, FileError},
    process::{Identity, PidFd},
};

use crate::{
    argv::{self, Numbers},
    config::QemuConfig,
    console::journal::{self, Journal},
    error::label,
    ofd,
    paths::VmPaths,
    record::{self, Running},
    tap::{self, TapError},
};

/// A process that was found or started.
#[derive(Debug)]
pub(crate) struct Vmm {
    pub(crate) identity: Identity,
    pub(crate) pidfd: PidFd,
    /// The agent's side of the serial journal, of a VMM that was started here.
    pub(crate) journal: Option<Journal>,
}

/// What was found of a VM's VMM.
#[derive(Debug)]
pub(crate) enum Found {
    /// None.
    Nothing,
    /// A process.
    Process(Vmm),
    /// Somebody holds the lock who is no VMM: an agent that is about to start one.
    BeingStarted,
}

/// Looks for the VMM. Blocking.
pub(crate) fn find(paths: &VmPaths) -> io::Result<Found> {
    if let Some(vmm) = find_by_identity(paths)? {
        return Ok(Found::Process(vmm));
    }
    let lock = match File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(paths.vmm_lock())
    {
        Ok(lock) => lock,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(error) => return Err(error),
    };
    if !ofd::is_held(&lock)? {
        return Ok(Found::Nothing);
    }
    let Some(vmm) = find_holder(&lock, paths.id)? else { return Ok(Found::BeingStarted) };
    tracing::info!(vm = %paths.id, pid = vmm.identity.pid(), "found a VMM by its lock");
    // Next time it is found at once. The run directory may be gone.
    if paths.run.is_dir()
        && let Err(error) =
            files::write_atomic(&paths.identity(), vmm.identity.to_string().as_bytes())
    {
        tracing::warn!(vm = %paths.id, %error, "the identity of a VMM is not kept");
    }
    Ok(Found::Process(vmm))
}

fn find_by_identity(paths: &VmPaths) -> io::Result<Option<Vmm>> {
    // One that is damaged, a link or anything but a small file names nothing.
    let Ok(Some(bytes)) = files::read_bounded(&paths.identity(), 256) else { return Ok(None) };
    let Some(identity) =
        std::str::from_utf8(&bytes).ok().and_then(|text| text.parse::<Identity>().ok())
    else {
        return Ok(None);
    };
    let Some(pidfd) = identity.open()? else { return Ok(None) };
    Ok(is_vmm_of(identity.pid(), paths.id).then_some(Vmm { identity, pidfd, journal: None }))
}

/// Whether the process was started with `-uuid UUID`.
fn is_vmm_of(pid: u32, vm: VmId) -> bool {
    let Ok(line) = std::fs::read(format!("/proc/{pid}/cmdline")) else { return false };
    let mut args = line.split(|byte| *byte == 0);
    args.any(|arg| arg == b"-uuid") && args.next() == Some(vm.to_string().as_bytes())
}

/// The VMM that has the lock file open: the file of that inode, not only of that name.
fn find_holder(lock: &File, vm: VmId) -> io::Result<Option<Vmm>> {
    let wanted = lock.metadata()?;
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if !is_vmm_of(pid, vm) {
            continue;
        }
        let Some(identity) = Identity::of(pid) else { continue };
        let Some(pidfd) = identity.open()? else { continue };
        let Ok(fds) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        let holds = fds.flatten().any(|fd| {
            std::fs::metadata(fd.path())
                .is_ok_and(|found| found.dev() == wanted.dev() && found.ino() == wanted.ino())
        });
        if holds && !pidfd.has_ended() {
            return Ok(Some(Vmm { identity, pidfd, journal: None }));
        }
    }
    Ok(None)
}

/// Clears what an ended VMM left in the run directory and keeps how it ended, where nobody did so yet. Blocking; only
/// while the VM is locked and no VMM was found.
pub(crate) fn clear_ended(paths: &VmPaths) -> Result<()> {
    let fail = |error: FileError| error.into_error("clear after", label(paths.id));
    if paths.identity().exists() {
        let exit = if paths.requested().exists() { Exit::Requested } else { Exit::Unseen };
        if let Err(error) = record::store_exit(paths, exit) {
            // A full disk must not keep a VM from being stopped or deleted.
            tracing::warn!(vm = %paths.id, %error, "how a VMM ended is not kept");
        }
    }
    for path in [paths.running(), paths.requested(), paths.qemu_log(), paths.identity()] {
        files::remove_file(&path).map_err(fail)?;
    }
    for path in paths.qmp().iter().chain([&paths.serial()]) {
        remove_socket(path, paths.id, "clear after")?;
    }
    match std::fs::remove_dir(&paths.run) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(fail(FileError::of("remove", &paths.run)(error))),
    }
}

/// Removes a socket that nobody listens on; what is no socket is left alone.
fn remove_socket(path: &Path, vm: VmId, operation: &'static str) -> Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(FileError::of("look at", path)(error).into_error(operation, label(vm))),
        Ok(found) if found.file_type().is_socket() => files::remove_file(path)
            .map(drop)
            .map_err(|error| error.into_error(operation, label(vm))),
        Ok(_) => {
            let reason = format!("{} is there and is no socket", path.display());
            Err(Error::new(ErrorKind::Conflict, operation, label(vm), reason)
                .with_remedy("move it away; nothing of it was touched"))
        }
    }
}

/// Starts the VMM, stopped before its first instruction. Blocking; only while the VM is locked and no VMM was found.
pub(crate) fn launch(config: &QemuConfig, paths: &VmPaths, mut running: Running) -> Result<Vmm> {
    let vm = paths.id;
    let file_error = |error: FileError| error.into_error("start", label(vm));
    files::private_dir(&paths.run).map_err(file_error)?;
    let lock = take_lock(paths)?;
    let mut daemon = Daemon::new(&config.qemu);
    let mut numbers = Numbers::default();
    for (number, socket) in numbers.qmp.iter_mut().zip(paths.qmp()) {
        *number = daemon.pass(listen(&socket, vm)?);
    }
    numbers.serial = daemon.pass(listen(&paths.serial(), vm)?);
    let (journal, fd) = Journal::create(journal::CAPACITY)
        .map_err(|error| io_error(vm, "cannot make the serial journal", error))?;
    // QEMU closes the number that `-add-fd` names. A later agent takes the journal by this one, which QEMU does not know.
    let kept = rustix::io::fcntl_dupfd_cloexec(&fd, 3)
        .map_err(|error| io_error(vm, "cannot make the serial journal", error.into()))?;
    numbers.journal = daemon.pass(fd);
    running.journal_fd = daemon.pass(kept);
    // Kept open by the VMM until it ends, and so locked.
    daemon.pass(lock.into());
    pass_files(&mut daemon, &mut numbers, paths, &running)?;
    for entry in &running.devices.nics {
        let (tap, vhost) = open_tap(&entry.nic.device, vm, "start")?;
        let vhost = vhost.map(|vhost| daemon.pass(vhost.into()));
        numbers.taps.push((daemon.pass(tap.into()), vhost));
    }
    let code = utf8(&config.firmware_code, "firmware_code")?;
    let args = argv::build(vm, &running, code, &numbers)?;
    let log = log_file(&paths.qemu_log()).map_err(file_error)?;
    daemon = daemon.args(args).log(log);
    if let Some(uids) = config.uids {
        let uid = uids.uid_of(vm);
        daemon = daemon.user(uid, uid);
    }
    // Before the start, so that whoever finds the VMM knows what it is; and an end that nobody sees is one.
    let as_error = |error: record::RecordError| error.into_error("start", vm);
    record::store_exit(paths, Exit::Unseen).map_err(as_error)?;
    running.store(paths).map_err(as_error)?;
    fault::point("qemu.start.prepared")?;
    let started = daemon
        .start()
        .map_err(|error| io_error(vm, &format!("cannot start {}", config.qemu.display()), error))?;
    fault::point("qemu.start.spawned")?;
    files::write_atomic(&paths.identity(), started.identity.to_string().as_bytes())
        .map_err(file_error)?;
    Ok(Vmm { identity: started.identity, pidfd: started.pidfd, journal: Some(journal) })
}

fn take_lock(paths: &VmPaths) -> Result<File> {
    let vm = paths.id;
    let lock = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(paths.vmm_lock())
        .map_err(|error| {
            FileError::of("open", &paths.vmm_lock())(error).into_error("start", label(vm))
        })?;
    match ofd::try_hold(&lock) {
        Ok(true) => Ok(lock),
        Ok(false) => Err(being_started("start", vm)),
        Err(error) => Err(io_error(vm, "cannot lock the VM for its VMM", error)),
    }
}

/// Another agent is about to start the VMM.
pub(crate) fn being_started(operation: &'static str, vm: VmId) -> Error {
    Error::new(ErrorKind::Unavailable, operation, label(vm), "another process is starting its VMM")
}

fn listen(path: &Path, vm: VmId) -> Result<OwnedFd> {
    remove_socket(path, vm, "start")?;
    let listener = UnixListener::bind(path)
        .map_err(|error| FileError::of("listen on", path)(error).into_error("start", label(vm)))?;
    Ok(listener.into())
}

fn pass_files(
    daemon: &mut Daemon,
    numbers: &mut Numbers,
    paths: &VmPaths,
    running: &Running,
) -> Result<()> {
    let open = |path: &Path, write: bool| {
        File::options().read(true).write(write).custom_flags(libc::O_NOFOLLOW).open(path).map_err(
            |error| FileError::of("open", path)(error).into_error("start", label(paths.id)),
        )
    };
    match &running.spec.boot.files {
        Some(BootFiles::Kernel { initrd, .. }) => {
            numbers.kernel = Some(daemon.pass(open(&paths.boot("kernel"), false)?.into()));
            if initrd.is_some() {
                numbers.initrd = Some(daemon.pass(open(&paths.boot("initrd"), false)?.into()));
            }
        }
        Some(BootFiles::Uki { .. }) => {
            numbers.kernel = Some(daemon.pass(open(&paths.boot("uki"), false)?.into()));
        }
        _ => {}
    }
    if argv::needs_firmware(running.spec.boot.files.as_ref()) {
        numbers.nvram = Some(daemon.pass(open(&paths.nvram(), true)?.into()));
    }
    if running.spec.cloud_init.is_some() {
        numbers.seed = Some(daemon.pass(open(&paths.seed(), false)?.into()));
    }
    Ok(())
}

/// Opens a tap and, where the host has it, the in-kernel back-end for it.
pub(crate) fn open_tap(
    device: &IfName,
    vm: VmId,
    operation: &'static str,
) -> Result<(File, Option<File>)> {
    let tap = tap::open(device).map_err(|error| {
        let (kind, remedy) = match &error {
            TapError::Absent(_) => {
                (ErrorKind::Unavailable, "make the port with the network driver")
            }
            TapError::Busy(_) => (ErrorKind::Conflict, "detach it from the VM that has it"),
            TapError::NoTap(_) => (ErrorKind::Conflict, "give a tap that the network driver made"),
            TapError::Kernel { .. } => {
                (ErrorKind::Unavailable, "load the module tun, and run as root")
            }
        };
        let reason = error.to_string();
        Error::new(kind, operation, label(vm), reason).with_remedy(remedy).with_source(error)
    })?;
    Ok((tap, tap::open_vhost()))
}

fn log_file(path: &Path) -> std::result::Result<File, FileError> {
    files::remove_file(path)?;
    files::create_new(path)?;
    File::options().append(true).open(path).map_err(FileError::of("open", path))
}

fn utf8<'a>(path: &'a Path, field: &'static str) -> Result<&'a str> {
    path.to_str().ok_or_else(|| Error::invalid(field, "wanted a path in UTF-8"))
}

fn io_error(vm: VmId, reason: &str, error: io::Error) -> Error {
    #[expect(clippy::wildcard_enum_match_arm, reason = "a foreign enumeration of dozens")]
    let kind = match error.kind() {
        io::ErrorKind::OutOfMemory | io::ErrorKind::StorageFull => ErrorKind::Exhausted,
        io::ErrorKind::PermissionDenied => ErrorKind::Denied,
        _ => ErrorKind::Unavailable,
    };
    Error::new(kind, "start", label(vm), reason).with_source(error)
}

/// Marks that the end of the VMM is asked for, so that who sees it ended knows why.
pub(crate) fn mark_requested(paths: &VmPaths) {
    let marked = File::options().create(true).append(true).mode(0o600).open(paths.requested());
    if let Err(error) = marked.and_then(|mut file| file.flush()) {
        // A full disk must not keep a VM running; the reason of its end is then less exact.
        tracing::debug!(vm = %paths.id, %error, "the request to end a VMM is not marked");
    }
}

/// Why QEMU ended before it ran: the error of its last words.
pub(crate) fn startup_error(paths: &VmPaths, exit: Option<Exit>) -> Error {
    let words = files::read_bounded(&paths.qemu_log(), 1 << 20).ok().flatten().unwrap_or_default();
    let words = host::run::escaped_tail(&words, 600);
    let (kind, remedy) = if words.contains("Failed to get \"write\" lock")
        || words.contains("Failed to get shared \"write\" lock")
    {
        (ErrorKind::Conflict, "another process has a disk of the VM open: end it")
    } else if words.contains("Cannot allocate memory") || words.contains("No space left") {
        (ErrorKind::Exhausted, "free memory or space on the host")
    } else {
        (ErrorKind::Unavailable, "mend what QEMU complains about")
    };
    let how = match exit {
        Some(Exit::Code(code)) => format!("QEMU ended with exit code {code}"),
        Some(Exit::Signal(signal)) => format!("QEMU was ended by signal {signal}"),
        Some(_) | None => "QEMU ended".to_owned(),
    };
    let reason = format!("{how} before the guest ran: {words}");
    Error::new(kind, "start", label(paths.id), reason).with_remedy(remedy)
}
