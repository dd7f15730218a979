//! What bcd-node costs, beside the same work done by hand in the same run.
//!
//! Absolute times of a shared machine say little, so each figure stands beside a peer's: `ip`, `nft`, `qemu-img` and `qemu`
//! from a shell script (`benches/by-hand`), or `skopeo`. Everything happens in a network namespace of its own and in
//! temporary directories.

#![expect(clippy::expect_used, reason = "a bench that cannot set up its parts has nothing to say")]

use clap::Parser;

mod figures;
mod idle;
mod instance;
mod many;
mod pull;
mod rig;
mod vmm_clock;

/// Measures what bcd-node costs beside the same work done by hand.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// Only the parts whose name holds this text: instance, many, resync, idle, pull.
    #[arg(default_value = "")]
    filter: String,
    /// A tenth of the work: to see that the bench works, not to quote.
    #[arg(long)]
    quick: bool,
    /// Also writes the figures as JSON to this file.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// The `bcd-node` binary whose idle cost is measured.
    #[arg(long, default_value = "target/release/bcd-node")]
    binary: std::path::PathBuf,
}

fn main() -> std::process::ExitCode {
    // Started as the VMM: notes the time and becomes QEMU.
    if let Some(code) = vmm_clock::run_if_vmm() {
        return code;
    }
    let options = Options::parse();
    let mut figures = figures::Figures::default();
    for (name, part) in PARTS {
        if name.contains(&options.filter) {
            figures.extend(part(&options));
        }
    }
    figures.print();
    if let Some(path) = &options.json
        && let Err(error) = std::fs::write(path, figures.to_json().to_string())
    {
        figures::say(&format!("cannot write {}: {error}", path.display()));
        return std::process::ExitCode::FAILURE;
    }
    std::process::ExitCode::SUCCESS
}

type Part = fn(&Options) -> figures::Figures;

const PARTS: [(&str, Part); 5] = [
    ("instance", instance::measure),
    ("many", many::measure_many),
    ("resync", many::measure_resync),
    ("idle", idle::measure),
    ("pull", pull::measure),
];
