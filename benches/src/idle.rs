//! What the agent costs while nothing happens.

use std::time::Duration;

use host::daemon::Daemon;
use rustix::process::Signal;
use testbed::netns::in_netns;
use tokio::net::UnixStream;

use crate::{Options, figures::Figures};

/// Starts the built agent with nothing to do, and looks at it.
pub(crate) fn measure(options: &Options) -> Figures {
    let seconds = if options.quick { 5 } else { 30 };
    let binary = std::path::absolute(&options.binary).expect("a path");
    let (cpu, rss) = in_netns(move || async move {
        let dir = tempfile::Builder::new().prefix("bcd-").tempdir_in("/tmp").expect("a directory");
        let at = dir.path().display();
        let config = dir.path().join("config.toml");
        let text = format!(
            "node_id = \"42424242-4242-4242-4242-424242424242\"\nsocket = \"{at}/sock\"\nstate_dir = \"{at}/state\"\nrun_dir = \
             \"{at}/run\"\n[qemu]\naccel = \"tcg\"\n[images]\ndir = \"{at}/images\"\n[volumes]\ndir = \"{at}/volumes\"\n"
        );
        std::fs::write(&config, text).expect("a configuration");
        let agent = Daemon::new(binary).args(["run", "--config"]).arg(&config).start();
        let agent =
            agent.expect("the agent starts: build it with cargo build --release -p node-agent");
        while UnixStream::connect(dir.path().join("sock")).await.is_err() {
            assert!(!agent.pidfd.has_ended(), "the agent ended");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        tokio::time::sleep(Duration::from_secs(3)).await;
        let pid = agent.identity.pid();
        let before = cpu_seconds(pid);
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let used = cpu_seconds(pid) - before;
        let rss = resident_mib(pid);
        agent.pidfd.signal(Signal::KILL).expect("the agent ends");
        (used / Duration::from_secs(seconds).as_secs_f64() * 100.0, rss)
    });
    let mut figures = Figures::default();
    figures.at_most("idle CPU of the agent", cpu, "%", 0.2, "");
    figures.at_most("idle resident memory of the agent", rss, "MiB", 12.0, "");
    figures
}

/// The CPU time of a process so far (`/proc/PID/stat`, fields 14 and 15 of proc(5), in ticks of 10 ms).
fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let ticks: f64 =
        fields.split(' ').skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
    ticks / 100.0
}

/// The resident memory of a process.
pub(crate) fn resident_mib(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|kib| kib.parse::<f64>().ok()).unwrap_or(f64::NAN)
        / 1024.0
}
