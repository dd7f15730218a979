//! Commands on drivers and on the host.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{
    CliError, Done,
    args::{self, Format},
    bench,
    client::{connect, refused},
    exit,
    output::{Out, note, table},
};
use crate::{api::proto, config::Config, doctor as checks};

fn failed(error: impl std::fmt::Display) -> CliError {
    CliError::new(error.to_string())
}

fn print(format: Format, value: &Value) -> Result<(), CliError> {
    let text = match format {
        Format::Yaml => serde_yaml_ng::to_string(value).map_err(failed)?,
        Format::Json | Format::Table => format!("{value:#}\n"),
    };
    Out::new().bytes(text.as_bytes()).map_err(failed)
}

pub(crate) async fn list(socket: &Path, args: args::DriversList) -> Done {
    let mut client = connect(socket).await?;
    let request = proto::ListDriversRequest { kind: args.kind.unwrap_or_default() };
    let answer = client.list_drivers(request).await.map_err(|status| refused(&status))?;
    let drivers = answer.into_inner().drivers;
    match args.output.output {
        Format::Table => {
            let rows: Vec<Vec<String>> = drivers
                .into_iter()
                .map(|driver| {
                    let default = if driver.is_default { "yes" } else { "no" };
                    let state =
                        if driver.error.is_empty() { "answers".to_owned() } else { driver.error };
                    let backend =
                        if driver.backend.is_empty() { "-".to_owned() } else { driver.backend };
                    vec![driver.kind, driver.id, default.to_owned(), backend, state]
                })
                .collect();
            let head = ["KIND", "ID", "DEFAULT", "BACKEND", "STATE"];
            Out::new().bytes(table(&head, &rows).as_bytes()).map_err(failed)?;
        }
        format @ (Format::Json | Format::Yaml) => {
            let values: Vec<_> = drivers
                .into_iter()
                .map(|driver| {
                    let abilities: Value =
                        serde_json::from_str(&driver.abilities).unwrap_or_default();
                    json!({
                        "kind": driver.kind, "id": driver.id, "default": driver.is_default,
                        "backend": driver.backend, "abilities": abilities, "error": driver.error,
                    })
                })
                .collect();
            print(format, &values.into())?;
        }
    }
    Ok(exit::OK)
}

pub(crate) async fn test(args: args::DriverTest) -> Done {
    let dir = scratch()?;
    let benches = bench::of(&args.driver, dir.0.clone())
        .ok_or_else(|| CliError::chain(exit::ERROR, &bench::unknown(&args.driver)))?;
    let mut reports = Vec::new();
    for bench in &benches {
        reports.push(conformance::check(bench, &conformance::Options::default()).await);
    }
    let passed = reports.iter().all(conformance::Report::passed);
    match args.output.output {
        Format::Table => {
            for report in &reports {
                Out::new().bytes(format!("{report}\n").as_bytes()).map_err(failed)?;
            }
        }
        format @ (Format::Json | Format::Yaml) => {
            let values: Vec<_> = reports.iter().map(report_value).collect();
            print(format, &values.into())?;
        }
    }
    Ok(if passed { exit::OK } else { exit::ERROR })
}

fn report_value(report: &conformance::Report) -> Value {
    let cases: Vec<_> = report
        .cases
        .iter()
        .map(|case| {
            json!({
                "name": case.name, "rule": case.sentence, "verdict": case.verdict.as_str(),
                "detail": case.verdict.detail(), "seconds": case.took.as_secs_f64(),
            })
        })
        .collect();
    json!({"kind": report.kind.as_str(), "driver": report.driver, "backend": report.backend, "cases": cases})
}

/// A private directory that is removed at the end.
struct Scratch(PathBuf);

fn scratch() -> Result<Scratch, CliError> {
    let dir = std::env::temp_dir().join(format!("bcd-node-driver-test-{}", std::process::id()));
    host::files::private_dir(&dir).map_err(|error| CliError::chain(exit::ERROR, &error))?;
    Ok(Scratch(dir))
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = host::files::remove_tree(&self.0) {
            super::output::complain(&error.to_string());
        }
    }
}

/// A line of the doctor, from the agent or from here.
struct Line {
    name: String,
    verdict: String,
    found: String,
    remedy: String,
}

pub(crate) async fn doctor(socket: &Path, args: args::Doctor) -> Done {
    let lines = match connect(socket).await {
        Ok(mut client) => {
            let answer = client.doctor(proto::DoctorRequest {}).await;
            let checks = answer.map_err(|status| refused(&status))?.into_inner().checks;
            let line = |check: proto::Check| Line {
                name: check.name,
                verdict: check.verdict,
                found: check.found,
                remedy: check.remedy,
            };
            checks.into_iter().map(line).collect()
        }
        Err(error) => {
            note(&format!("{error}; looking at the host from here"));
            let config = Config::load(args.config.as_deref())
                .map_err(|error| CliError::chain(exit::ERROR, &error))?;
            let checks = checks::of_config(&config).await;
            let line = |check: checks::Check| Line {
                name: check.name,
                verdict: check.verdict.as_str().to_owned(),
                found: check.found,
                remedy: check.remedy,
            };
            checks.into_iter().map(line).collect::<Vec<_>>()
        }
    };
    match args.output.output {
        Format::Table => {
            let mut out = Out::new();
            for line in &lines {
                let text = format!("{:<8} {:<18} {}", line.verdict, line.name, line.found);
                out.line(&text).map_err(failed)?;
                if !line.remedy.is_empty() {
                    out.line(&format!("{:<27} what to do: {}", "", line.remedy)).map_err(failed)?;
                }
            }
        }
        format @ (Format::Json | Format::Yaml) => {
            let values: Vec<_> = lines
                .iter()
                .map(|line| {
                    json!({"name": line.name, "verdict": line.verdict, "found": line.found, "remedy": line.remedy})
                })
                .collect();
            print(format, &values.into())?;
        }
    }
    let missing = lines.iter().any(|line| line.verdict == "missing");
    Ok(if missing { exit::ERROR } else { exit::OK })
}
