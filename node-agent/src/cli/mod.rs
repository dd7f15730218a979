//! The command line: a client of the agent's socket, and the way to run the agent.

mod args;
mod bench;
mod client;
mod daemon;
mod drivers;
mod objects;
mod output;
mod streams;
mod terminal;
mod wait;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

/// The documented exit codes.
pub mod exit {
    /// Done. For `plan`: nothing to do.
    pub const OK: u8 = 0;
    /// Refused, failed, or no agent answers.
    pub const ERROR: u8 = 1;
    /// For `plan`: there is something to do.
    pub const CHANGES: u8 = 2;
    /// For `run`: another agent has the state directory or the socket.
    pub const IN_USE: u8 = 3;
    /// For `run`: stopped in order, but the store was only read (newer or damaged).
    pub const READ_ONLY: u8 = 4;
    /// For `--wait`: what was asked for did not come about in time.
    pub const NOT_REACHED: u8 = 5;
    /// The command line is wrong.
    pub const USAGE: u8 = 64;
    /// Interrupted by the user.
    pub const INTERRUPTED: u8 = 130;
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct CliError {
    /// The exit code.
    pub code: u8,
    /// What people read on standard error. Escaped for a terminal.
    pub text: String,
}

impl CliError {
    fn new(text: impl AsRef<str>) -> Self {
        Self::with_code(exit::ERROR, text)
    }

    fn with_code(code: u8, text: impl AsRef<str>) -> Self {
        let lines = text.as_ref().lines().map(crate::logging::for_terminal);
        Self { code, text: lines.collect::<Vec<_>>().join("\n") }
    }

    /// An error with its causes.
    fn chain(code: u8, error: &dyn std::error::Error) -> Self {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(next) = cause {
            text = format!("{text}: {next}");
            cause = next.source();
        }
        Self::with_code(code, text)
    }
}

/// What a command leaves: its exit code.
type Done = Result<u8, CliError>;

/// The whole program: reads the process's arguments and answers its exit code.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let code = if error.use_stderr() { exit::USAGE } else { exit::OK };
            // The text is for people; when it cannot be written there is nobody to tell.
            drop(error.print());
            return code.into();
        }
    };
    let runtime = match runtime(&cli.command) {
        Ok(runtime) => runtime,
        Err(error) => {
            output::complain(&format!("no runtime: {error}"));
            return exit::ERROR.into();
        }
    };
    let done = runtime.block_on(dispatch(cli));
    // A thread may still wait for standard input.
    runtime.shutdown_background();
    match done {
        Ok(code) => code.into(),
        Err(error) => {
            if !error.text.is_empty() {
                output::complain(&error.text);
            }
            error.code.into()
        }
    }
}

fn runtime(command: &Command) -> std::io::Result<tokio::runtime::Runtime> {
    if matches!(command, Command::Run(_) | Command::Driver(_)) {
        // Two threads: a driver that computes for a moment does not hold up the API.
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()
    } else {
        tokio::runtime::Builder::new_current_thread().enable_all().build()
    }
}

async fn dispatch(cli: Cli) -> Done {
    let socket = cli.socket;
    match cli.command {
        Command::Run(run) => daemon::run(run).await,
        Command::Apply(apply) => objects::apply(&socket, apply).await,
        Command::Delete(delete) => objects::delete(&socket, delete).await,
        Command::Get(get) => objects::get(&socket, get).await,
        Command::Describe(describe) => objects::describe(&socket, describe).await,
        Command::Plan(plan) => objects::plan(&socket, plan).await,
        Command::Start(power) => objects::power(&socket, power, objects::Power::Start).await,
        Command::Stop(power) => objects::power(&socket, power, objects::Power::Stop).await,
        Command::Reboot(power) => objects::power(&socket, power, objects::Power::Reboot).await,
        Command::Console(console) => streams::console(&socket, console).await,
        Command::Logs(logs) => streams::logs(&socket, logs).await,
        Command::Events(events) => streams::events(&socket, events).await,
        Command::Images(args::Images::Pull(pull)) => streams::pull(&socket, pull).await,
        Command::Drivers(args::Drivers::List(list)) => drivers::list(&socket, list).await,
        Command::Driver(args::Driver::Test(test)) => drivers::test(test).await,
        Command::Doctor(doctor) => drivers::doctor(&socket, doctor).await,
        Command::Completions { shell } => args::completions(shell),
    }
}
