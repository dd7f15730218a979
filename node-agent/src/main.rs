//! The binary: see `bcd-node --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    node_agent::cli::main()
}
