//! Network namespaces: a test's own network, its processes, and guests behind taps.
//!
//! [`in_netns`] runs an async test body on a thread of its own in a fresh network namespace. What the body starts there
//! (blocking threads of its runtime, child processes) is in the same namespace. At the end, and also when the body panics,
//! every process that is still in the namespace is killed; the kernel then removes the namespace with all its links and
//! rules.
//!
//! Traps: `/proc/net` and `/proc/self/net` are the main thread's namespace; read `/proc/thread-self/net`. `/proc/sys/net` is
//! the calling thread's. `/sys` is mounted anew, so `/sys/class/net` is the namespace's own.

use std::{
    fs::File,
    future::Future,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    panic::resume_unwind,
    process::Output,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    mount::{MountFlags, MountPropagationFlags, mount, mount_change},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space},
};

mod tap;

/// How long a test body may take before it fails.
const LIMIT: Duration = Duration::from_secs(300);

/// Runs an async test body in a fresh network namespace with loopback up, on a current-thread runtime.
///
/// The runtime is not paused, and its IO and time drivers are on. The mount namespace is the thread's own too.
///
/// # Panics
/// When the body panics or takes longer than five minutes, and when the namespace cannot be made (root is needed).
pub fn in_netns<T, B, F>(body: B) -> T
where
    T: Send + 'static,
    B: FnOnce() -> F + Send + 'static,
    F: Future<Output = T>,
{
    let ns = must("make a network namespace (root is needed)", Netns::new());
    ns.run(move || run_body(body))
}

fn run_body<T, B, F>(body: B) -> T
where
    B: FnOnce() -> F,
    F: Future<Output = T>,
{
    let runtime =
        must("make a runtime", tokio::runtime::Builder::new_current_thread().enable_all().build());
    let answer = runtime.block_on(async { tokio::time::timeout(LIMIT, body()).await });
    // A blocking thread that hangs would hold the namespace; it must not hold the test.
    runtime.shutdown_timeout(Duration::from_secs(5));
    must("end the test body in five minutes", answer)
}

/// The panics of this module: a test that lacks a part of its host fails, with the part's name.
#[expect(
    clippy::panic,
    reason = "this crate is for tests only: a missing host part fails the test"
)]
fn must<T, E: std::fmt::Display>(what: &str, answer: Result<T, E>) -> T {
    match answer {
        Ok(value) => value,
        Err(error) => panic!("cannot {what}: {error}"),
    }
}

/// A network namespace. Clones name the same one. When the last clone of one that was made here is dropped, the processes
/// left in it are killed.
#[derive(Clone, Debug)]
pub struct Netns(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    /// Whether this program made it and so ends what is in it.
    made: bool,
}

impl Netns {
    /// Makes a namespace with loopback up.
    ///
    /// # Errors
    /// When the kernel refuses: root is needed.
    pub fn new() -> io::Result<Self> {
        on_thread(|| {
            enter::fresh()?;
            let file = File::open("/proc/thread-self/ns/net")?;
            tool(&["ip", "link", "set", "lo", "up"]);
            Ok(Self(Arc::new(Inner { file, made: true })))
        })
    }

    /// The calling thread's namespace.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn current() -> io::Result<Self> {
        let file = File::open("/proc/thread-self/ns/net")?;
        Ok(Self(Arc::new(Inner { file, made: false })))
    }

    /// Runs work on a new thread in this namespace, and waits for it. A panic of the work is passed on.
    ///
    /// # Panics
    /// When the namespace cannot be entered, and when the work does.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let ns = self.clone();
        on_thread(move || {
            must("enter a network namespace", enter::existing(&ns.0.file));
            work()
        })
    }

    /// Runs an async body on a new thread with a runtime of its own in this namespace. The calling executor goes on.
    ///
    /// # Panics
    /// When the namespace cannot be entered, and when the body does.
    pub async fn within<T, B, F>(&self, body: B) -> T
    where
        T: Send + 'static,
        B: FnOnce() -> F + Send + 'static,
        F: Future<Output = T>,
    {
        let ns = self.clone();
        let (done, answer) = tokio::sync::oneshot::channel();
        let thread = thread::spawn(move || {
            must("enter a network namespace", enter::existing(&ns.0.file));
            // The receiver is gone when the caller's future was dropped.
            drop(done.send(run_body(body)));
        });
        match answer.await {
            Ok(value) => value,
            Err(_) => match thread.join() {
                Err(panic) => resume_unwind(panic),
                Ok(()) => unreachable!("the thread sends its answer or panics"),
            },
        }
    }

    /// Runs a program in this namespace to its end. See [`tool`].
    ///
    /// # Panics
    /// When it cannot be started or fails.
    pub fn tool(&self, argv: &[&str]) -> String {
        let argv: Vec<String> = argv.iter().map(|arg| (*arg).to_owned()).collect();
        self.run(move || tool(&argv.iter().map(String::as_str).collect::<Vec<_>>()))
    }

    /// Runs a program in this namespace to its end, whatever it answers. See [`try_tool`].
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn try_tool(&self, argv: &[&str]) -> Output {
        let argv: Vec<String> = argv.iter().map(|arg| (*arg).to_owned()).collect();
        self.run(move || try_tool(&argv.iter().map(String::as_str).collect::<Vec<_>>()))
    }

    /// What names the namespace in `/proc/PID/ns/net`.
    ///
    /// # Errors
    /// When the descriptor cannot be read.
    pub fn inode(&self) -> io::Result<u64> {
        Ok(self.0.file.metadata()?.ino())
    }

    /// The pids of all other processes whose main thread is in this namespace.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn pids(&self) -> io::Result<Vec<i32>> {
        pids_in(self.inode()?)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.made
            && let Ok(inode) = self.file.metadata().map(|found| found.ino())
        {
            // Again until none is left: a process may have forked meanwhile.
            for _ in 0..10 {
                let left = pids_in(inode).unwrap_or_default();
                if left.is_empty() {
                    break;
                }
                for pid in left {
                    kill_in(pid, inode);
                }
            }
        }
    }
}

fn pids_in(inode: u64) -> io::Result<Vec<i32>> {
    let own = rustix::process::getpid().as_raw_pid();
    let mut pids = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok())
        else {
            continue;
        };
        if pid != own && net_inode(pid) == Some(inode) {
            pids.push(pid);
        }
    }
    Ok(pids)
}

/// `None` for a process that is gone or a zombie: the latter has no namespaces.
fn net_inode(pid: i32) -> Option<u64> {
    std::fs::metadata(format!("/proc/{pid}/ns/net")).ok().map(|found| found.ino())
}

/// Kills a process if it is in the namespace, and waits until it is gone, at most a second.
fn kill_in(pid: i32, inode: u64) {
    let Some(fd) = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
    else {
        return;
    };
    // Checked with the descriptor open: the number can no longer become another process's.
    if net_inode(pid) == Some(inode) && pidfd_send_signal(&fd, Signal::KILL).is_ok() {
        let limit = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
        // Whether it ended in time is seen by the caller's next look at `/proc`.
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).ok();
    }
}

/// Runs a program in the calling thread's namespace to its end and answers its standard output. Blocks the thread.
///
/// # Panics
/// When it cannot be started or fails: the text has its arguments and what it wrote.
pub fn tool(argv: &[&str]) -> String {
    let output = try_tool(argv);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{argv:?} failed with {}: {error}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a program in the calling thread's namespace to its end, whatever it answers. Blocks the thread.
///
/// # Panics
/// When it cannot be started.
#[expect(clippy::disallowed_methods, reason = "a test's own tools need no command runner")]
pub fn try_tool(argv: &[&str]) -> Output {
    let mut words = argv.iter();
    let program = words.next().copied().unwrap_or_default();
    let output = std::process::Command::new(program)
        .args(words)
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(std::process::Stdio::null())
        .output();
    must(&format!("run {program} (is it installed?)"), output)
}

fn on_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match thread::spawn(work).join() {
        Ok(value) => value,
        Err(panic) => resume_unwind(panic),
    }
}

/// A guest: a namespace of its own whose `eth0` is behind a device of the namespace that made it.
#[derive(Debug)]
pub struct Guest {
    ns: Netns,
    pump: Option<Pump>,
}

impl Guest {
    /// A guest behind a tap of the calling thread's namespace, as a VMM has it: the tap is opened by name, and its frames
    /// are carried to and from the guest's `eth0`. Dropping the guest closes the tap.
    ///
    /// # Errors
    /// When the tap cannot be opened: it is in use.
    pub fn on_tap(tap: &str, mac: &str) -> io::Result<Self> {
        let outer = Arc::new(tap::open(tap)?);
        let ns = Netns::new()?;
        let inner = ns.run(|| tap::open("eth0"))?;
        ns.tool(&["ip", "link", "set", "eth0", "address", mac, "up"]);
        let pump = Pump::start(outer, inner)?;
        Ok(Self { ns, pump: Some(pump) })
    }

    /// A guest at the far end of a new veth pair whose near end has this name in the calling thread's namespace.
    ///
    /// # Errors
    /// When the namespace cannot be made.
    pub fn on_veth(near: &str, mac: &str) -> io::Result<Self> {
        let here = Netns::current()?;
        let ns = Netns::new()?;
        // Made on the guest's side and sent here, so that no name of the far end is ever taken here.
        let far = ns.clone();
        let near = near.to_owned();
        far.run({
            let near = near.clone();
            move || tool(&["ip", "link", "add", "eth0", "type", "veth", "peer", "name", &near])
        });
        enter::send_link(&ns, &near, &here)?;
        tool(&["ip", "link", "set", &near, "up"]);
        ns.tool(&["ip", "link", "set", "eth0", "address", mac, "up"]);
        Ok(Self { ns, pump: None })
    }

    /// The guest's namespace.
    #[must_use]
    pub const fn ns(&self) -> &Netns {
        &self.ns
    }

    /// Gives `eth0` an address (`10.0.0.2/24`) and, where given, a default route.
    ///
    /// # Panics
    /// When the kernel refuses.
    pub fn address(&self, cidr: &str, gateway: Option<&str>) {
        let family = if cidr.contains(':') { "-6" } else { "-4" };
        let mut add = vec!["ip", family, "addr", "add", cidr, "dev", "eth0"];
        if family == "-6" {
            add.push("nodad");
        }
        self.ns.tool(&add);
        if let Some(gateway) = gateway {
            self.ns.tool(&[
                "ip", family, "route", "replace", "default", "via", gateway, "dev", "eth0",
            ]);
        }
    }

    /// Whether the address answers one echo request within a second.
    #[must_use]
    pub fn pings(&self, address: &str) -> bool {
        self.ns.try_tool(&["ping", "-n", "-c", "1", "-W", "1", address]).status.success()
    }

    /// Sends a frame as the VMM: no check of the guest's own network stack is before it.
    ///
    /// # Errors
    /// When the tap is gone or down, or the guest is not behind one.
    pub fn inject(&self, frame: &[u8]) -> io::Result<()> {
        let pump = self.pump.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        rustix::io::write(&*pump.outer, frame)?;
        Ok(())
    }

    /// How many frames the host sent to the guest so far; 0 for a veth.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.pump.as_ref().map_or(0, |pump| pump.received.load(Ordering::SeqCst))
    }
}

/// Carries frames between two taps on a thread.
#[derive(Debug)]
struct Pump {
    outer: Arc<OwnedFd>,
    received: Arc<AtomicU64>,
    stop: Arc<OwnedFd>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Pump {
    fn start(outer: Arc<OwnedFd>, inner: OwnedFd) -> io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let received = Arc::new(AtomicU64::new(0));
        let thread = thread::spawn({
            let (outer, stop, received) =
                (Arc::clone(&outer), Arc::clone(&stop), Arc::clone(&received));
            move || carry(&outer, &inner, &stop, &received)
        });
        Ok(Self { outer, received, stop, thread: Some(thread) })
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        let written = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let (Ok(_), Some(thread)) = (written, self.thread.take()) {
            // A panic of the pump was printed by its own thread.
            drop(thread.join());
        }
    }
}

fn carry(outer: &OwnedFd, inner: &OwnedFd, stop: &OwnedFd, received: &AtomicU64) {
    let mut frame = vec![0_u8; 1 << 16];
    loop {
        let mut fds = [
            PollFd::new(stop, PollFlags::IN),
            PollFd::new(outer, PollFlags::IN),
            PollFd::new(inner, PollFlags::IN),
        ];
        if poll(&mut fds, None).is_err() {
            continue;
        }
        let [stopped, outer_ready, inner_ready] = fds.map(|fd| fd.revents());
        if !stopped.is_empty() {
            return;
        }
        // A tap that is down takes and gives nothing (EIO): frames are lost then, as on a wire. One that is gone reports
        // POLLERR without an end: there is nothing more to carry.
        if outer_ready.contains(PollFlags::ERR) && !outer_ready.contains(PollFlags::IN) {
            return;
        }
        if outer_ready.contains(PollFlags::IN) && copy(outer, inner, &mut frame) {
            received.fetch_add(1, Ordering::SeqCst);
        }
        if inner_ready.contains(PollFlags::IN) {
            copy(inner, outer, &mut frame);
        }
    }
}

fn copy(from: impl AsFd, to: impl AsFd, frame: &mut [u8]) -> bool {
    let Ok(read) = rustix::io::read(from, &mut *frame) else { return false };
    let whole = frame.get(..read).unwrap_or_default();
    // A far side that is down loses the frame, as a wire would; it came as far as here all the same.
    rustix::io::write(to, whole).ok();
    true
}

/// The system calls that move a thread between namespaces.
#[expect(
    unsafe_code,
    reason = "a thread that leaves the namespaces of its process must be a thread that nobody else relies on"
)]
mod enter {
    use super::{
        File, LinkNameSpaceType, MountFlags, MountPropagationFlags, Netns, UnshareFlags, io, mount,
        mount_change, move_into_link_name_space, tool,
    };

    /// Moves the calling thread to new network and mount namespaces.
    pub(super) fn fresh() -> io::Result<()> {
        // SAFETY: descriptors and memory stay shared (neither CLONE_FILES nor CLONE_VM). The thread was made for this and
        // ends with its work, so nothing else sees its file system view change.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS) }?;
        own_sys()
    }

    /// Moves the calling thread to a network namespace and a mount namespace that shows it.
    pub(super) fn existing(ns: &File) -> io::Result<()> {
        move_into_link_name_space(std::os::fd::AsFd::as_fd(ns), Some(LinkNameSpaceType::Network))?;
        // SAFETY: as in `fresh`.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
        own_sys()
    }

    /// Mounts a `/sys` that shows the thread's own links.
    fn own_sys() -> io::Result<()> {
        mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::DOWNSTREAM)?;
        match mount("sysfs", "/sys", "sysfs", MountFlags::empty(), None) {
            // EBUSY: the one that is there shows this namespace already.
            Ok(()) | Err(rustix::io::Errno::BUSY) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Moves a link from one namespace to another.
    pub(super) fn send_link(from: &Netns, name: &str, to: &Netns) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        // `ip` takes a namespace by path only; the descriptor's path is good while it is open.
        let path = format!("/proc/{}/fd/{}", std::process::id(), to.0.file.as_raw_fd());
        let name = name.to_owned();
        from.run(move || tool(&["ip", "link", "set", &name, "netns", &path]));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
