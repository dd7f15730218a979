//! Starts, finds and ends a dnsmasq.

use std::{
    ffi::OsStr,
    fs, io,
    net::IpAddr,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
    time::Duration,
};

use drivers_api::PortId;
use host::{
    bound,
    daemon::{Daemon, Started},
    files,
    lock::{FileLock, LockError},
    process::{Identity, PidFd},
};
use rustix::{fs::inotify, process::Signal};

use super::{
    DnsmasqError, GRACE, READY,
    access::{self, User},
    failed, leases,
};

/// What a start needs.
#[derive(Debug)]
pub(super) struct Launch {
    pub(super) program: PathBuf,
    pub(super) dir: PathBuf,
    pub(super) conf: String,
    pub(super) hash: String,
    pub(super) user: Option<User>,
    pub(super) hosts: Vec<(PortId, String)>,
    pub(super) forget: Vec<IpAddr>,
}

impl Launch {
    /// Ends what runs, starts anew, and waits until it is ready.
    pub(super) async fn run(self) -> Result<Identity, DnsmasqError> {
        let dir = self.dir.clone();
        blocking({
            let (dir, user) = (self.dir.clone(), self.user.clone());
            move || Ok(access::dir_for(&dir, user.as_ref())?)
        })
        .await?;
        // Held from before the look at what runs until the identity is written.
        let lock = lock(&dir.join("lock")).await?;
        end_all(&dir).await?;
        let (started, ready) = blocking(move || self.start()).await?;
        wait_ready(&dir, &started.pidfd, ready).await?;
        drop(lock);
        Ok(started.identity)
    }

    /// Writes the files and starts the process. Blocks.
    fn start(&self) -> Result<(Started, OwnedFd), DnsmasqError> {
        let hosts = self.dir.join("hosts");
        files::sweep_temporaries(&self.dir)?;
        files::remove_file(&self.dir.join("identity"))?;
        files::remove_file(&self.dir.join("pid"))?;
        files::remove_tree(&hosts)?;
        access::dir_for(&hosts, self.user.as_ref())?;
        for (port, line) in &self.hosts {
            access::write_for(&hosts.join(port.to_string()), line.as_bytes(), self.user.as_ref())?;
        }
        self.keep_leases()?;
        let conf = self.dir.join("dnsmasq.conf");
        access::write_for(&conf, self.conf.as_bytes(), self.user.as_ref())?;
        let log = self.dir.join("log");
        files::remove_file(&log)?;
        let log = files::create_new(&log)?;
        let ready = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)
            .map_err(|error| failed("watch", &self.dir)(error.into()))?;
        inotify::add_watch(&ready, &self.dir, inotify::WatchFlags::CLOSE_WRITE)
            .map_err(|error| failed("watch", &self.dir)(error.into()))?;
        let started = Daemon::new(&self.program)
            .arg(conf_argument(&self.dir))
            .log(log)
            .start()
            .map_err(failed("start", &self.program))?;
        pass("linux-bridge.dnsmasq.spawned", &self.dir)?;
        let identity = format!("{}\n{}\n", started.identity, self.hash);
        files::write_atomic(&self.dir.join("identity"), identity.as_bytes())?;
        pass("linux-bridge.dnsmasq.recorded", &self.dir)?;
        Ok((started, ready))
    }
}

impl Launch {
    /// Forgets the leases of guests that are gone. Blocks.
    fn keep_leases(&self) -> Result<(), DnsmasqError> {
        let before = leases::read(&self.dir)?;
        let hosts: Vec<&str> = self.hosts.iter().map(|(_, line)| line.as_str()).collect();
        let kept = leases::keep(&before, &hosts, &self.forget);
        if kept != before {
            access::write_for(&self.dir.join("leases"), kept.as_bytes(), None)?;
        }
        Ok(())
    }
}

fn pass(point: &'static str, dir: &Path) -> Result<(), DnsmasqError> {
    host::fault::point(point).map_err(|error| failed("start", dir)(io::Error::other(error)))
}

/// The argument that no other process has.
fn conf_argument(dir: &Path) -> std::ffi::OsString {
    let mut argument = std::ffi::OsString::from("--conf-file=");
    argument.push(dir.join("dnsmasq.conf"));
    argument
}

/// Takes the lock. A child of ours that was forked for something else holds a copy until its exec, so it is tried again
/// for a moment.
async fn lock(path: &Path) -> Result<FileLock, DnsmasqError> {
    for _ in 0..50 {
        let at = path.to_owned();
        let taken = tokio::task::spawn_blocking(move || FileLock::try_exclusive(&at)).await;
        match taken {
            Ok(Ok(lock)) => return Ok(lock),
            Ok(Err(LockError::Held { .. })) => tokio::time::sleep(Duration::from_millis(10)).await,
            Ok(Err(LockError::File(error))) => return Err(error.into()),
            Err(error) => return Err(failed("lock", path)(io::Error::other(error))),
        }
    }
    Err(DnsmasqError::Busy { path: path.to_owned() })
}

/// Waits until dnsmasq has written its pid file, which it does when all its ports are bound.
async fn wait_ready(dir: &Path, process: &PidFd, events: OwnedFd) -> Result<(), DnsmasqError> {
    use std::os::fd::AsFd;
    let pid = dir.join("pid");
    let written = async {
        loop {
            // Looked at before the wait too: the file may be there already. An empty one is still being written.
            if fs::metadata(&pid).is_ok_and(|found| found.len() > 0) {
                return Ok(());
            }
            host::readiness::readable(events.as_fd()).await.map_err(failed("watch", dir))?;
            let mut buffer = [0; 1024];
            match rustix::io::read(&events, &mut buffer) {
                Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
                Err(error) => return Err(failed("watch", dir)(error.into())),
            }
        }
    };
    tokio::select! {
        biased;
        written = written => written,
        ended = process.ended() => {
            ended.map_err(failed("wait for the process of", dir))?;
            let log = files::read_bounded(&dir.join("log"), 1 << 20)?.unwrap_or_default();
            Err(DnsmasqError::Ended { log: host::run::escaped_tail(&log, 400) })
        }
        () = tokio::time::sleep(READY) => Err(DnsmasqError::NotReady),
    }
}

/// The process that was recorded, and the hash of what it was started with. Blocks.
pub(super) fn recorded(dir: &Path) -> Result<Option<(Identity, String)>, DnsmasqError> {
    let Some(bytes) = files::read_bounded(&dir.join("identity"), 4096)? else { return Ok(None) };
    let text = String::from_utf8_lossy(&bytes);
    let mut lines = text.lines();
    // A file that does not parse names nobody: the search by arguments finds the process.
    let identity = lines.next().and_then(|line| line.parse().ok());
    Ok(identity.zip(lines.next().map(str::to_owned)))
}

/// Ends every process with this directory's configuration; answers whether there was one.
pub(super) async fn end_all(dir: &Path) -> Result<bool, DnsmasqError> {
    let owned = dir.to_owned();
    let found = blocking(move || find(&owned)).await?;
    let any = !found.is_empty();
    for process in found {
        process.signal(Signal::TERM).map_err(failed("end the process of", dir))?;
        if process
            .ended_within(GRACE)
            .await
            .map_err(failed("wait for the process of", dir))?
            .is_none()
        {
            process.signal(Signal::KILL).map_err(failed("kill the process of", dir))?;
            process.ended_within(GRACE).await.map_err(failed("wait for the process of", dir))?;
        }
    }
    Ok(any)
}

/// All processes with this directory's configuration. Blocks.
fn find(dir: &Path) -> Result<Vec<PidFd>, DnsmasqError> {
    let argument = conf_argument(dir);
    let mut found = Vec::new();
    let proc = Path::new("/proc");
    for entry in fs::read_dir(proc).map_err(failed("list", proc))? {
        let name = entry.map_err(failed("list", proc))?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        if !has_argument(pid, &argument) {
            continue;
        }
        let Some(identity) = Identity::of(pid) else { continue };
        // Read again with the process held: the number may have become another's between.
        if let Some(process) = identity.open().map_err(failed("open a process of", dir))?
            && has_argument(pid, &argument)
        {
            found.push(process);
        }
    }
    Ok(found)
}

fn has_argument(pid: u32, argument: &OsStr) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|arguments| {
        arguments.split(|byte| *byte == 0).skip(1).any(|one| one == argument.as_bytes())
    })
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DnsmasqError> + Send + 'static,
) -> Result<T, DnsmasqError> {
    // The outer result is for the worker thread, the inner one for the work.
    match bound::blocking("run dnsmasq", move || Ok(work())).await {
        Ok(answer) => answer,
        Err(error) => Err(failed("run", Path::new("dnsmasq"))(io::Error::other(error))),
    }
}
