//! Runs the built binary: as an agent in a directory of its own, and as its command line.

use std::{path::PathBuf, time::Duration};

use drivers_api::Context;
use host::{
    daemon::{Daemon, Started},
    process::Ended,
    run::Run,
};
use rustix::process::Signal;
use tempfile::TempDir;

/// The binary that is tested.
pub(crate) const BIN: &str = env!("CARGO_BIN_EXE_bcd-node");

/// What a command left.
#[derive(Debug)]
pub(crate) struct Left {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Left {
    /// Fails unless the command ended with `code`.
    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Runs a prepared command.
pub(crate) async fn run(run: Run) -> Left {
    let output = run.output(&Context::new()).await.unwrap();
    Left {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// The directory of an agent: its configuration, socket, state.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) dir: TempDir,
    pub(crate) drivers: Option<&'static str>,
}

impl Place {
    /// With the reference drivers and `more` lines of configuration.
    pub(crate) fn reference(more: &str) -> Self {
        Self::new(more, Some("reference"))
    }

    /// With the drivers for a real host. Only in a network namespace of its own.
    pub(crate) fn real(more: &str) -> Self {
        Self::new(more, None)
    }

    fn new(more: &str, drivers: Option<&'static str>) -> Self {
        let dir = tempfile::Builder::new().prefix("bcd").tempdir().unwrap();
        let at = dir.path().display();
        let text = format!(
            "node_id = \"0d9e8f7a-6b5c-4d3e-8f2a-1b0c9d8e7f6a\"\nsocket = \"{at}/s\"\nstate_dir = \"{at}/state\"\n\
             run_dir = \"{at}/run\"\n{more}\n"
        );
        std::fs::write(dir.path().join("config.toml"), text).unwrap();
        Self { dir, drivers }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).to_string_lossy().into_owned()
    }

    /// A command of the command line.
    pub(crate) fn command(&self, args: &[&str]) -> Run {
        Run::new(BIN).args(["--socket", &self.text("s")]).args(args)
    }

    pub(crate) async fn cli(&self, args: &[&str]) -> Left {
        run(self.command(args)).await
    }

    /// A command that reads `manifests` from its standard input.
    pub(crate) async fn feed(&self, args: &[&str], manifests: &str) -> Left {
        run(self.command(args).stdin(manifests)).await
    }

    fn daemon(&self) -> Daemon {
        let log =
            std::fs::OpenOptions::new().create(true).append(true).open(self.path("log")).unwrap();
        let daemon = Daemon::new(BIN).arg("run").arg("--config").arg(self.path("config.toml"));
        let daemon = match self.drivers {
            Some(drivers) => daemon.arg("--drivers").arg(drivers),
            None => daemon,
        };
        daemon.log(log)
    }

    /// Starts an agent and waits until it answers.
    pub(crate) async fn start(&self) -> Running {
        self.start_with(&[]).await
    }

    pub(crate) async fn start_with(&self, env: &[(&str, &str)]) -> Running {
        let mut daemon = self.daemon();
        for (name, value) in env {
            daemon = daemon.env(name, value);
        }
        let running = Running { started: daemon.start().unwrap() };
        for _ in 0..400 {
            if self.cli(&["get", "image"]).await.code == 0 {
                return running;
            }
            assert!(!running.started.pidfd.has_ended(), "the agent ended: {}", self.log());
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        panic!("the agent does not answer: {}", self.log());
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// An object as JSON.
    pub(crate) async fn object(&self, kind: &str, name: &str) -> serde_json::Value {
        self.cli(&["get", kind, name, "-o", "json"]).await.expect(0).json()
    }
}

/// An agent that runs; killed when dropped.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) started: Started,
}

impl Running {
    pub(crate) fn pid(&self) -> u32 {
        self.started.identity.pid()
    }

    /// Kills it as a crash does.
    pub(crate) async fn kill(self) {
        self.started.pidfd.signal(Signal::KILL).unwrap();
        self.started.pidfd.ended().await.unwrap();
    }

    /// Waits for its end by the signal that it sends itself.
    pub(crate) async fn died(self) {
        let ended = self.started.pidfd.ended_within(Duration::from_secs(10)).await.unwrap();
        assert_eq!(ended, Some(Ended::Signal(9)));
    }

    /// Asks it to stop; answers its exit code.
    pub(crate) async fn stop(self) -> i32 {
        self.started.pidfd.signal(Signal::TERM).unwrap();
        self.ended(Duration::from_secs(20)).await
    }

    /// Waits for its end by itself.
    pub(crate) async fn ended(&self, limit: Duration) -> i32 {
        match self.started.pidfd.ended_within(limit).await.unwrap() {
            Some(Ended::Code(code)) => code,
            other => panic!("the agent ended as {other:?}"),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.started.pidfd.has_ended() {
            drop(self.started.pidfd.signal(Signal::KILL));
        }
    }
}

/// A volume's manifest.
pub(crate) fn volume(name: &str, size_gib: u32) -> String {
    format!(
        "---\napi_version: bcd/v1\nkind: Volume\nname: {name}\nspec: {{size_gib: {size_gib}}}\n"
    )
}
