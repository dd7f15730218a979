//! A node for one round: a directory, a registry with guests, the agent as a process, and its command line.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use drivers_api::Context;
use host::{
    daemon::{Daemon, Started},
    run::Run,
};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use testbed::{
    netns::{tool, try_tool},
    registry::{Artifact, Blob, RealRegistry},
};
use tokio::time::Instant;

use crate::{
    AS_AGENT,
    failure::{During, Failure, Result},
};

/// How long an agent may take until it answers, on a machine that is busy with other things.
const ANSWERS: Duration = Duration::from_secs(20);
/// Between two looks at what tells nobody that it changed.
const PAUSE: Duration = Duration::from_millis(50);

/// What the guests are made of; built once for all rounds.
#[derive(Clone, Debug)]
pub(crate) struct Guests {
    kernel: Vec<u8>,
    disk: Vec<u8>,
}

impl Guests {
    /// Builds them in a directory of their own.
    pub(crate) async fn make() -> Result<Self> {
        let dir = tempfile::tempdir().during("make a directory")?;
        let kernel = testbed::guest::tiny(dir.path()).during("build the tiny guest")?;
        let disk = dir.path().join("disk.qcow2");
        let image = Run::new("qemu-img").args(["create", "-q", "-f", "qcow2"]);
        image.arg(&disk).arg("16M").success(&Context::new()).await.during("make a disk image")?;
        Ok(Self {
            kernel: std::fs::read(kernel).during("read the tiny guest")?,
            disk: std::fs::read(disk).during("read the disk image")?,
        })
    }

    async fn push(&self, registry: &RealRegistry) -> Result<()> {
        let kernel = |note: &str| {
            let blob = Blob::new("application/vnd.bcd.kernel.v1", self.kernel.clone());
            let mut artifact = Artifact::new(vec![blob]);
            let line = format!("mode=i {note}");
            artifact.annotations.insert("vnd.bcd.kernel.cmdline".to_owned(), line);
            artifact
        };
        let disk = Blob::new("application/vnd.bcd.disk.qcow2.v1", self.disk.clone());
        let mut other = kernel("other");
        // Other bytes, so that it is another file.
        if let Some(layer) = other.layers.first_mut() {
            layer.bytes.extend_from_slice(&[0; 64]);
        }
        let artifacts =
            [("guest", kernel("first")), ("other", other), ("disk", Artifact::new(vec![disk]))];
        for (name, artifact) in artifacts {
            registry.push(name, "latest", &artifact).await.during("push a guest")?;
        }
        Ok(())
    }
}

/// What a command of the command line answered.
#[derive(Debug)]
pub(crate) struct Answer {
    /// Whether it ended with status 0.
    pub(crate) ok: bool,
    /// Standard output.
    pub(crate) out: String,
    /// Standard error.
    pub(crate) err: String,
}

/// A node. When it is dropped the agent is killed; the end of the namespace ends the rest.
pub(crate) struct Node {
    dir: TempDir,
    registry: RealRegistry,
    agent: Option<Started>,
    program: PathBuf,
    /// Whether the volumes are on a file system of their own.
    apart: bool,
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(agent) = &self.agent {
            // Failure means that it is gone already.
            drop(agent.pidfd.signal(Signal::KILL));
        }
        if self.apart {
            // VMMs may have files open there: it goes when they end.
            drop(try_tool(&["umount", "-l", &self.path("volumes").to_string_lossy()]));
        }
    }
}

impl Node {
    /// A node without an agent in the calling thread's namespaces of network and mounts.
    pub(crate) async fn new(guests: &Guests, apart: bool) -> Result<Self> {
        let registry = RealRegistry::start().await.during("start docker-registry")?;
        guests.push(&registry).await?;
        // Short, since a Unix socket's path has at most 107 bytes.
        let dir = tempfile::Builder::new().prefix("bcd-").tempdir_in("/tmp");
        let dir = dir.during("make a directory")?;
        let program = std::env::current_exe().during("find this program")?;
        let node = Self { dir, registry, agent: None, program, apart };
        if apart {
            let volumes = node.path("volumes");
            std::fs::create_dir(&volumes).during("make a directory")?;
            tool(&["mount", "-t", "tmpfs", "none", &volumes.to_string_lossy()]);
        }
        let (at, host) = (node.dir().display(), node.registry());
        let text = format!(
            "node_id = \"7d2f8f0e-6f0d-4a53-9d7c-0a7b8c1d2e3f\"\nhostname = \"crash\"\nsocket = \"{at}/sock\"\nstate_dir = \
             \"{at}/state\"\nrun_dir = \"{at}/run\"\n[qemu]\naccel = \"tcg\"\nallow_tcg = true\n[images]\ndir = \
             \"{at}/images\"\ninsecure_registries = [\"{host}\"]\n[volumes]\ndir = \"{at}/volumes\"\n"
        );
        std::fs::write(node.path("config.toml"), text).during("write the configuration")?;
        Ok(node)
    }

    /// The node's directory.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    /// `HOST:PORT` of the registry.
    pub(crate) fn registry(&self) -> String {
        self.registry.host()
    }

    /// Starts the agent, with a fault armed or none, and waits until it answers or is dead.
    pub(crate) async fn start(&mut self, fault: Option<&str>) -> Result<()> {
        let log = std::fs::OpenOptions::new().append(true).create(true).open(self.path("log"));
        let mut daemon = Daemon::new(&self.program)
            .args(["run", "--config"])
            .arg(self.path("config.toml"))
            .env(AS_AGENT, "1")
            .env("BCD_FAULT_TRACE", self.path("trace"))
            .log(log.during("open the log")?);
        if let Some(fault) = fault {
            daemon = daemon.env("BCD_FAULT", fault);
        }
        self.agent = Some(daemon.start().during("start the agent")?);
        let begun = Instant::now();
        while !self.bcd(&["get"], "").await?.ok {
            if self.is_dead() {
                return if fault.is_some() { Ok(()) } else { Err(self.failed("the agent ended")) };
            }
            if begun.elapsed() > ANSWERS {
                return Err(self.failed("the agent does not answer"));
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Whether no agent runs.
    pub(crate) fn is_dead(&self) -> bool {
        self.agent.as_ref().is_none_or(|agent| agent.pidfd.has_ended())
    }

    /// Waits until the agent has died by itself, at most so long.
    pub(crate) async fn dies(&mut self, limit: Duration) -> Result<bool> {
        let Some(agent) = &self.agent else { return Ok(true) };
        let ended = agent.pidfd.ended_within(limit).await.during("wait for the agent")?;
        match ended {
            None => Ok(false),
            Some(host::process::Ended::Signal(9)) => {
                self.agent = None;
                Ok(true)
            }
            Some(other) => Err(self.failed(&format!("the agent ended with {other:?}"))),
        }
    }

    /// Ends the agent in order.
    pub(crate) async fn stop(&mut self) -> Result<()> {
        let Some(agent) = self.agent.take() else { return Ok(()) };
        agent.pidfd.signal(Signal::TERM).during("end the agent")?;
        match agent.pidfd.ended_within(ANSWERS).await.during("wait for the agent")? {
            Some(host::process::Ended::Code(0)) => Ok(()),
            other => Err(self.failed(&format!("the agent was to end in order: {other:?}"))),
        }
    }

    /// The points that the agents of this node passed so far, in order.
    pub(crate) fn trace(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.path("trace")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// What the agents of this node logged.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// A failure with the last lines of the log.
    pub(crate) fn failed(&self, what: &str) -> Failure {
        let log = self.log();
        let last: Vec<&str> = log.lines().rev().take(5).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        Failure(format!("{what}\n    log: {}", last.join("\n    log: ")))
    }

    /// Runs a command of the command line.
    pub(crate) async fn bcd(&self, args: &[&str], stdin: &str) -> Result<Answer> {
        let run = Run::new(&self.program)
            .args(args)
            .env(AS_AGENT, "1")
            .env("BCD_NODE_SOCKET", self.path("sock"))
            .stdin(stdin)
            .limit(Duration::from_secs(90));
        let output = run.output(&Context::new()).await.during(format!("run bcd-node {args:?}"))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let ok = output.status.success();
        Ok(Answer { ok, out: text(&output.stdout), err: text(&output.stderr) })
    }

    /// Runs a command that must succeed.
    pub(crate) async fn ok(&self, args: &[&str], stdin: &str) -> Result<String> {
        let answer = self.bcd(args, stdin).await?;
        if answer.ok {
            return Ok(answer.out);
        }
        Err(self.failed(&format!("bcd-node {args:?} failed: {}", answer.err.trim())))
    }

    /// All objects.
    pub(crate) async fn objects(&self) -> Result<Vec<Value>> {
        let text = self.ok(&["get", "-o", "json"], "").await?;
        // One object is printed alone, several as a list.
        match serde_json::from_str(&text).during("read the objects")? {
            Value::Array(objects) => Ok(objects),
            Value::Null => Ok(Vec::new()),
            one @ (Value::Object(_) | Value::Bool(_) | Value::Number(_) | Value::String(_)) => {
                Ok(vec![one])
            }
        }
    }

    /// The pids of the VMMs of this node.
    pub(crate) fn vmms(&self) -> Vec<u32> {
        testbed::guest::vmms_below(self.dir())
    }
}
