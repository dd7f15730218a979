//! A node for a test: a registry with guests in it, a configuration, the agent as a process, and its command line.

use std::{
    net::IpAddr,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    sync::OnceLock,
    time::Duration,
};

use drivers_api::Context;
use host::{
    daemon::{Daemon, Started},
    run::{Output, Run},
};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use testbed::{
    netns::in_netns,
    registry::{Artifact, Blob, RealRegistry},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::Mutex,
    time::Instant,
};

/// The binary under test.
const BINARY: &str = env!("CARGO_BIN_EXE_bcd-node");
/// How long a guest may take to boot under TCG on a busy machine of two cores.
pub(crate) const BOOT: Duration = Duration::from_secs(120);

/// One test at a time: each boots guests, and two cores emulate them.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

/// The guest's files, made once per run of the suite from the distribution's kernel.
fn guest_dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guest");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/make-guest");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let run = Run::new(script).arg(&dir).arg("--all").limit(Duration::from_secs(300));
        runtime
            .block_on(run.success(&Context::new()))
            .expect("scripts/make-guest makes the guest's files");
        dir
    })
}

/// Runs a test body on a node of its own, in a fresh network namespace.
pub(crate) fn on_node<F: Future<Output = ()>>(body: impl FnOnce(Node) -> F + Send + 'static) {
    let guest = guest_dir();
    in_netns(move || async move {
        let _turn = ONE_AT_A_TIME.lock().await;
        body(Node::new(guest).await).await;
    });
}

/// A node: its directory, registry and agent. When it is dropped the agent is killed; the namespace ends the guests.
pub(crate) struct Node {
    dir: TempDir,
    registry: RealRegistry,
    agent: Option<Started>,
}

/// What a command of the command line answered.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The exit code; 128 and the signal's number when one ended it.
    pub(crate) code: i32,
    /// Standard output.
    pub(crate) out: String,
    /// Standard error.
    pub(crate) err: String,
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(agent) = &self.agent {
            // Failure means that it is gone already.
            drop(agent.pidfd.signal(Signal::KILL));
        }
    }
}

impl Node {
    async fn new(guest: &Path) -> Self {
        let registry = RealRegistry::start().await.expect("docker-registry starts");
        push_guests(&registry, guest).await;
        // Short, since a Unix socket's path has at most 107 bytes.
        let dir = tempfile::Builder::new().prefix("bcd-").tempdir_in("/tmp").unwrap();
        let mut node = Self { dir, registry, agent: None };
        node.write_config("");
        node.start_agent().await;
        node
    }

    /// A path below the node's directory.
    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    /// `HOST:PORT` of the registry.
    pub(crate) fn registry(&self) -> String {
        self.registry.host()
    }

    fn write_config(&self, more: &str) {
        let dir = self.dir.path().display();
        let registry = self.registry.host();
        let text = format!(
            "node_id = \"7d2f8f0e-6f0d-4a53-9d7c-0a7b8c1d2e3f\"\nsocket = \"{dir}/sock\"\nstate_dir = \"{dir}/state\"\nrun_dir = \
             \"{dir}/run\"\n{more}\n[qemu]\naccel = \"tcg\"\nallow_tcg = true\n[images]\ndir = \
             \"{dir}/images\"\ninsecure_registries = [\"{registry}\"]\n[volumes]\ndir = \"{dir}/volumes\"\n"
        );
        std::fs::write(self.path("config.toml"), text).unwrap();
    }

    /// Starts the agent and waits until it answers.
    pub(crate) async fn start_agent(&mut self) {
        self.launch_agent();
        let begun = Instant::now();
        while self.bcd(&["get"]).await.code != 0 {
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "the agent does not answer: {}",
                self.agent_log()
            );
            assert!(!self.agent_ended(), "the agent ended: {}", self.agent_log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Starts the agent without waiting.
    pub(crate) fn launch_agent(&mut self) {
        let log =
            std::fs::OpenOptions::new().append(true).create(true).open(self.path("log")).unwrap();
        let daemon =
            Daemon::new(BINARY).args(["run", "--config"]).arg(self.path("config.toml")).log(log);
        self.agent = Some(daemon.start().expect("the agent starts"));
    }

    /// Whether the agent's process has ended.
    pub(crate) fn agent_ended(&self) -> bool {
        self.agent.as_ref().is_none_or(|agent| agent.pidfd.has_ended())
    }

    /// Ends the agent at once, as a crash would.
    pub(crate) async fn kill_agent(&mut self) {
        let agent = self.agent.take().expect("an agent runs");
        agent.pidfd.signal(Signal::KILL).unwrap();
        agent.pidfd.ended().await.unwrap();
    }

    /// What the agent logged.
    pub(crate) fn agent_log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Runs a command of the command line.
    pub(crate) async fn bcd(&self, args: &[&str]) -> Answer {
        self.bcd_with(args, "").await
    }

    /// Runs a command of the command line with text on its standard input.
    pub(crate) async fn bcd_with(&self, args: &[&str], stdin: &str) -> Answer {
        let run = Run::new(BINARY)
            .args(args)
            .env("BCD_NODE_SOCKET", self.path("sock"))
            .stdin(stdin)
            .limit(Duration::from_secs(240));
        let Output { status, stdout, stderr } = run.output(&Context::new()).await.unwrap();
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Answer { code, out: text(stdout), err: text(stderr) }
    }

    /// Runs a command that must succeed; answers its output.
    pub(crate) async fn ok(&self, args: &[&str]) -> String {
        let answer = self.bcd(args).await;
        assert_eq!(answer.code, 0, "bcd-node {args:?}: {answer:?}\n{}", self.agent_log());
        answer.out
    }

    /// Applies a manifest and waits until it has converged.
    pub(crate) async fn apply(&self, manifest: &str) {
        let answer = self.bcd_with(&["apply", "-f", "-", "--wait=180"], manifest).await;
        assert_eq!(answer.code, 0, "apply: {answer:?}\n{}", self.agent_log());
    }

    /// Applies a manifest without waiting.
    pub(crate) async fn submit(&self, manifest: &str) {
        let answer = self.bcd_with(&["apply", "-f", "-"], manifest).await;
        assert_eq!(answer.code, 0, "apply: {answer:?}");
    }

    /// An object as JSON.
    pub(crate) async fn get(&self, kind: &str, name: &str) -> Value {
        serde_json::from_str(&self.ok(&["get", kind, name, "-o", "json"]).await).unwrap()
    }

    /// What the host shows of an object.
    pub(crate) async fn observed(&self, kind: &str, name: &str) -> Value {
        let object = self.get(kind, name).await;
        find(&object, "observed").cloned().unwrap_or(Value::Null)
    }

    /// The object's phase.
    pub(crate) async fn phase(&self, kind: &str, name: &str) -> String {
        let object = self.get(kind, name).await;
        find(&object, "phase").and_then(Value::as_str).unwrap_or_default().to_owned()
    }

    /// The pid of an instance's VMM.
    pub(crate) async fn pid(&self, name: &str) -> u64 {
        let observed = self.observed("instance", name).await;
        observed
            .get("pid")
            .and_then(Value::as_u64)
            .unwrap_or_else(|| panic!("no pid in {observed}"))
    }

    /// The first v4 address of an instance.
    pub(crate) async fn address(&self, name: &str) -> IpAddr {
        let observed = self.observed("instance", name).await;
        find(&observed, "addresses")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(|address| address.as_str()?.parse().ok())
            .find(IpAddr::is_ipv4)
            .unwrap_or_else(|| panic!("no address in {observed}"))
    }

    /// What a guest says of itself over HTTP, once `wanted` holds for it.
    pub(crate) async fn guest(&self, address: IpAddr, wanted: impl Fn(&Value) -> bool) -> Value {
        let begun = Instant::now();
        let mut last = Value::Null;
        while begun.elapsed() < BOOT {
            if let Some(info) = ask(address).await {
                if wanted(&info) {
                    return info;
                }
                last = info;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        panic!("the guest at {address} never was as wanted; last: {last}\n{}", self.agent_log());
    }

    /// Waits until `holds` answers true.
    pub(crate) async fn until<F: Future<Output = bool>>(
        &self,
        what: &str,
        limit: Duration,
        holds: impl Fn() -> F,
    ) -> Duration {
        let begun = Instant::now();
        while !holds().await {
            assert!(begun.elapsed() < limit, "{what}: not within {limit:?}\n{}", self.agent_log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        begun.elapsed()
    }
}

/// The first value of a key, wherever it is.
pub(crate) fn find<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    match value {
        Value::Object(map) => {
            map.get(key).or_else(|| map.values().find_map(|inner| find(inner, key)))
        }
        Value::Array(items) => items.iter().find_map(|inner| find(inner, key)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
    }
}

/// Asks a guest's page once.
pub(crate) async fn ask(address: IpAddr) -> Option<Value> {
    let talk = async {
        let mut stream = TcpStream::connect((address, 80)).await.ok()?;
        stream.write_all(b"GET /cgi-bin/info HTTP/1.0\r\n\r\n").await.ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await.ok()?;
        serde_json::from_str(text.split_once("\r\n\r\n")?.1).ok()
    };
    tokio::time::timeout(Duration::from_secs(3), talk).await.ok().flatten()
}

async fn push_guests(registry: &RealRegistry, guest: &Path) {
    let read = |name: &str| std::fs::read(guest.join(name)).unwrap();
    let layer = |kind: &str, name: &str| {
        Blob::new(format!("application/vnd.bcd.{kind}"), read(name)).title(name)
    };
    let mut linux = Artifact::new(vec![layer("kernel.v1", "kernel"), layer("initrd.v1", "initrd")]);
    let cmdline = String::from_utf8(read("cmdline")).unwrap();
    linux.annotations.insert("vnd.bcd.kernel.cmdline".to_owned(), cmdline);
    let uki = Artifact::new(vec![layer("uki.v1", "guest.efi")]);
    let disk = Artifact::new(vec![layer("disk.qcow2.v1", "disk.qcow2")]);
    let boot = Artifact::new(vec![layer("disk.qcow2.v1", "boot.qcow2")]);
    for (name, artifact) in [("guest", linux), ("guest-uki", uki), ("disk", disk), ("boot", boot)] {
        registry.push(name, "latest", &artifact).await.expect("the registry takes the guest");
    }
}
