//! `bcd-crash`: kills the agent at every fault point of every story, and watches what the next one makes of it.
//!
//! The program is also the agent that it kills: with the variable [`AS_AGENT`] it is `bcd-node`.

use std::{
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};

mod census;
mod failure;
mod matrix;
mod node;
mod report;
mod round;
mod scenario;

use failure::{During, Failure, Result};

/// The variable that makes this program the agent.
const AS_AGENT: &str = "BCD_CRASH_AS_AGENT";

/// Kills the agent at every fault point, and watches what the next one makes of it.
#[derive(Debug, Parser)]
#[command(name = "bcd-crash")]
struct Args {
    /// Only rounds of which "STORY POINT" holds this text.
    #[arg(default_value = "")]
    filter: String,
    /// Only this story.
    #[arg(long, value_name = "NAME", conflicts_with = "today")]
    story: Option<String>,
    /// Only the day's part: another story each day, and other rounds of it first each time that its turn comes.
    #[arg(long)]
    today: bool,
    /// Begin no round after so many seconds.
    #[arg(long, value_name = "SECONDS")]
    budget: Option<u64>,
    /// How many rounds are played at once.
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Where the logs of failed rounds go.
    #[arg(long, default_value = "/tmp/bcd-crash-logs")]
    logs: PathBuf,
    /// Write the matrix to this file when the run is whole and everything held.
    #[arg(long, value_name = "FILE")]
    write_docs: Option<PathBuf>,
}

fn main() -> ExitCode {
    if std::env::var_os(AS_AGENT).is_some() {
        return node_agent::cli::main();
    }
    let args = Args::parse();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(failure) => {
            report::line(&format!("bcd-crash: {failure}"));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<bool> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let mut part = if args.today {
        matrix::Part::of_day(day())
    } else {
        matrix::Part { story: args.story.clone(), ..matrix::Part::default() }
    };
    part.filter.clone_from(&args.filter);
    part.budget = args.budget.map(Duration::from_secs);
    let guests = runtime.during("make a runtime")?.block_on(node::Guests::make())?;
    let stop = Arc::new(AtomicBool::new(false));
    stop_on_signals(Arc::clone(&stop));
    let matrix =
        matrix::play(&part, guests, args.workers.max(1), args.logs.clone(), Arc::clone(&stop))?;
    report::summary(&matrix);
    if let Some(path) = &args.write_docs {
        let whole = part.is_whole() && !stop.load(Ordering::SeqCst);
        if !whole || !matrix.holds() {
            let why = "the matrix is written from a whole run in which everything held";
            return Err(Failure(why.to_owned()));
        }
        std::fs::write(path, report::document(&matrix, &host())).during("write the matrix")?;
    }
    Ok(matrix.holds() && !stop.load(Ordering::SeqCst))
}

/// Has the rounds end in order on SIGINT and SIGTERM: what they started is in namespaces that only they clear.
fn stop_on_signals(stop: Arc<AtomicBool>) {
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let seen = runtime.and_then(|runtime| {
            runtime.block_on(async {
                let mut terminate = signal(SignalKind::terminate())?;
                let mut interrupt = signal(SignalKind::interrupt())?;
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                Ok(())
            })
        });
        match &seen {
            Ok(()) => report::line("asked to stop: no new round begins"),
            Err(error) => report::line(&format!("signals end this program at once: {error}")),
        }
        stop.store(seen.is_ok(), Ordering::SeqCst);
    });
}

/// The day, counted from 1970.
fn day() -> usize {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    usize::try_from(now.map_or(0, |since| since.as_secs() / 86400)).unwrap_or_default()
}

fn host() -> String {
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("Linux {} with {cpus} CPUs, QEMU under TCG", kernel.trim())
}
