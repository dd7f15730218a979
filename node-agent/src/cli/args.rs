//! What can be typed.

use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

use super::{CliError, Done, exit};

const AFTER: &str = "\
Exit codes:
  0    done (plan: nothing to do)
  1    refused, failed, or no agent answers
  2    plan: there is something to do
  3    run: another agent has the state directory or the socket
  4    run: stopped in order, but the store was only read (newer or damaged)
  5    --wait: it did not come about in time; standard error says what it waits for
  64   the command line is wrong
  130  interrupted

Examples:
  bcd-node run                                  the agent, in the foreground
  bcd-node plan -f web.yaml                     what would be done
  bcd-node apply -f web.yaml --wait             do it, and wait until it is so
  bcd-node get                                  all objects
  bcd-node console web                          the guest's serial console";

/// Keeps virtual machines, networks, volumes and images of this host as they are wanted.
///
/// `bcd-node run` is the agent. All other commands talk to it over its Unix socket.
#[derive(Debug, Parser)]
#[command(name = "bcd-node", version, after_help = AFTER, propagate_version = true)]
pub(crate) struct Cli {
    /// The agent's socket.
    #[arg(
        long,
        global = true,
        env = "BCD_NODE_SOCKET",
        default_value = "/run/bcd-node/bcd-node.sock",
        value_name = "PATH"
    )]
    pub(crate) socket: PathBuf,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Apply(Apply),
    Delete(Delete),
    Get(Get),
    Describe(Describe),
    Plan(Plan),
    /// Start an instance: `power: running`, and a start where its restart policy left it stopped.
    Start(Power),
    /// Stop an instance: `power: stopped`. The guest is asked, and ended after its grace.
    Stop(Power),
    /// Restart an instance's guest.
    Reboot(Power),
    Console(Console),
    Logs(Logs),
    Events(Events),
    /// Images in the host's cache.
    #[command(subcommand)]
    Images(Images),
    /// The agent's drivers.
    #[command(subcommand)]
    Drivers(Drivers),
    /// One driver.
    #[command(subcommand)]
    Driver(Driver),
    Doctor(Doctor),
    /// Print a completion script for a shell.
    ///
    /// Example: bcd-node completions bash > /usr/share/bash-completion/completions/bcd-node
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// Run the agent in the foreground.
///
/// It reads its configuration, takes the state directory for itself, adopts what runs, and keeps the host as wanted. On
/// SIGTERM or SIGINT it stops; virtual machines, networks and DHCP go on without it.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// The configuration file [default: /etc/bcd-node/config.toml, which may be absent].
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Print a configuration file with every key at its default, and end.
    #[arg(long)]
    pub(crate) print_default_config: bool,
    /// Drivers over a host in memory, for trying the agent itself.
    #[arg(long, hide = true, value_enum)]
    pub(crate) drivers: Option<DriverSet>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DriverSet {
    Reference,
}

/// In which form objects are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    #[default]
    Table,
    /// One JSON value.
    Json,
    /// YAML documents, which can be applied again.
    Yaml,
}

#[derive(Debug, Args)]
pub(crate) struct Output {
    /// The form of the output.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORM")]
    pub(crate) output: Format,
}

#[derive(Debug, Args)]
pub(crate) struct Wait {
    /// Wait until it is so, for at most so many seconds. Progress goes to standard error. Ctrl-C ends the wait only.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "300", value_name = "SECONDS")]
    pub(crate) wait: Option<u64>,
}

/// Accept manifests: all documents of a file, or none.
///
/// Every document is checked first; nothing is done when one is refused. What is applied again without a change stays as it
/// is. The agent then works until the host is as wanted; --wait waits for that.
///
/// Examples:
///   bcd-node apply -f web.yaml
///   cat *.yaml | bcd-node apply -f - --wait=60
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Apply {
    /// The file; - for standard input.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) wait: Wait,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Delete objects. What is not there is no error.
///
/// A deletion needs no successful creation before it and waits for no retry. A volume or network that an instance still
/// uses is deleted when the instance is gone.
///
/// Examples:
///   bcd-node delete instance web --wait
///   bcd-node delete -f web.yaml
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Delete {
    /// The kind: instance, network, volume or image.
    #[arg(required_unless_present = "file", conflicts_with = "file")]
    pub(crate) kind: Option<String>,
    /// The names.
    #[arg(required_unless_present = "file")]
    pub(crate) names: Vec<String>,
    /// All objects of a manifest file; - for standard input.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) wait: Wait,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Show objects: all of them, those of a kind, or one.
///
/// Examples:
///   bcd-node get
///   bcd-node get instances -o json
///   bcd-node get volume data -o yaml > data.yaml
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Get {
    /// The kind: instance, network, volume or image.
    pub(crate) kind: Option<String>,
    /// The name.
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Show one object with what was done, what failed and what is still to be done.
#[derive(Debug, Args)]
pub(crate) struct Describe {
    /// The kind: instance, network, volume or image.
    pub(crate) kind: String,
    /// The name.
    pub(crate) name: String,
}

/// Show the steps that applying a file would lead to. Changes nothing.
///
/// Ends with 0 when there is nothing to do, with 2 when there is, with 1 on an error.
#[derive(Debug, Args)]
pub(crate) struct Plan {
    /// The file; - for standard input.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct Power {
    /// The instance.
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) wait: Wait,
}

/// Open an instance's serial console.
///
/// Keys go to the guest as they are; Ctrl-] ends the session and restores the terminal. The guest's bytes reach your
/// terminal as they are: a hostile guest can send what your terminal obeys. When standard input is no terminal, the session
/// ends a second after the input does.
#[derive(Debug, Args)]
pub(crate) struct Console {
    /// The instance.
    pub(crate) name: String,
    /// How many bytes of earlier output come first.
    #[arg(long, default_value_t = 4096, value_name = "BYTES")]
    pub(crate) history: u32,
}

/// Print what an instance wrote to its serial console, of this run and earlier ones as far as kept.
///
/// On a terminal control characters are escaped; in a pipe the bytes are as the guest wrote them.
#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// The instance.
    pub(crate) name: String,
    /// How many of the last bytes.
    #[arg(long, default_value_t = 65_536, value_name = "BYTES")]
    pub(crate) bytes: u32,
    /// Do not escape control characters on a terminal.
    #[arg(long)]
    pub(crate) raw: bool,
}

/// Print what happened lately: requests, steps, failures, events of the host.
#[derive(Debug, Args)]
pub(crate) struct Events {
    /// Go on with what happens from now on.
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// How many of the latest events; 0 for all that are kept.
    #[arg(short = 'n', long, default_value_t = 100, value_name = "COUNT")]
    pub(crate) last: u32,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Images {
    Pull(Pull),
}

/// Pull an image into the host's cache now.
///
/// Ctrl-C ends the pull; what was downloaded is kept for the next try.
///
/// Examples:
///   bcd-node images pull registry.example.com/debian:12
///   bcd-node images pull registry.example.com/debian@sha256:0123…
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Pull {
    /// REGISTRY/REPOSITORY[:TAG][@sha256:…], or an https or file URL that ends with #sha256:….
    pub(crate) reference: String,
    /// The image driver's id.
    #[arg(long)]
    pub(crate) driver: Option<String>,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Drivers {
    /// List the agent's drivers and what they can do.
    List(DriversList),
}

#[derive(Debug, Args)]
pub(crate) struct DriversList {
    /// Only drivers of this kind: hypervisor, network, volume or image.
    #[arg(long)]
    pub(crate) kind: Option<String>,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Driver {
    Test(DriverTest),
}

/// Check a driver against the rules of the driver contract, on a back-end of its own.
///
/// Needs no agent and touches nothing of one: everything happens in a temporary directory. Each rule is a line: passed,
/// failed, or not tried with the reason.
#[derive(Debug, Args)]
pub(crate) struct DriverTest {
    /// The driver: reference, or file-volume.
    pub(crate) driver: String,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Check what the host and the agent need: each is ok, a warning or missing, with what to do.
///
/// Asks the running agent. Where none answers, looks at the host by itself. Ends with 1 when something is missing.
#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// The configuration file to look with when no agent answers.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: Output,
}

pub(crate) fn completions(shell: clap_complete::Shell) -> Done {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "bcd-node", &mut script);
    super::output::Out::new().bytes(&script).map_err(|error| CliError::new(error.to_string()))?;
    Ok(exit::OK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_every_command_is_explained() {
        Cli::command().debug_assert();
        fn explained(command: &clap::Command) {
            assert!(command.get_about().is_some(), "{} has no help", command.get_name());
            for argument in command.get_arguments() {
                assert!(
                    argument.get_help().is_some(),
                    "{} {}",
                    command.get_name(),
                    argument.get_id()
                );
            }
            command.get_subcommands().for_each(explained);
        }
        explained(&Cli::command());
    }
}
