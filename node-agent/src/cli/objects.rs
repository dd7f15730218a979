//! Commands on objects.

use std::{io::Read, path::Path};

use reconciler::wanted::Kind;
use serde_json::{Value, json};

use super::{
    CliError, Done,
    args::{self, Format},
    client::{Client, connect, refused},
    exit,
    output::{Out, table},
    wait::{Awaited, Goal, wait},
};
use crate::{api::proto, manifest};

fn failed(error: impl std::fmt::Display) -> CliError {
    CliError::new(error.to_string())
}

/// A manifest file, or standard input for `-`.
fn read_manifests(path: &Path) -> Result<String, CliError> {
    let limit = u64::try_from(manifest::MAX_TEXT_BYTES).unwrap_or(u64::MAX).saturating_add(1);
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().lock().take(limit).read_to_string(&mut text)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(limit).read_to_string(&mut text))
    };
    read.map_err(|error| CliError::new(format!("cannot read {}: {error}", path.display())))?;
    Ok(text)
}

fn read_kind(text: &str) -> Result<Kind, CliError> {
    text.parse().map_err(|error| CliError::with_code(exit::USAGE, format!("{error}")))
}

fn key_of(kind: Kind, name: &str) -> proto::Key {
    proto::Key { kind: kind.to_string(), name: name.to_owned() }
}

fn shown(key: Option<&proto::Key>) -> String {
    key.map_or_else(|| "?".to_owned(), |key| format!("{} {}", key.kind, key.name))
}

/// Prints values in a form for programs.
fn print_values(format: Format, values: &[Value], one: bool) -> Result<(), CliError> {
    let text = match (format, values) {
        (Format::Yaml, values) => {
            let documents = values.iter().map(yaml_of).collect::<Result<Vec<_>, _>>();
            documents.map_err(failed)?.join("---\n")
        }
        (Format::Json | Format::Table, [value]) if one => {
            serde_json::to_string_pretty(value).map_err(failed)? + "\n"
        }
        (Format::Json | Format::Table, values) => {
            serde_json::to_string_pretty(values).map_err(failed)? + "\n"
        }
    };
    Out::new().bytes(text.as_bytes()).map_err(failed)
}

fn accepted_value(one: &proto::Accepted) -> Value {
    let key = one.key.clone().unwrap_or_default();
    json!({"kind": key.kind, "name": key.name, "uuid": one.uuid, "generation": one.generation, "change": one.change})
}

pub(crate) async fn apply(socket: &Path, args: args::Apply) -> Done {
    let manifests = read_manifests(&args.file)?;
    let mut client = connect(socket).await?;
    let request = proto::ApplyRequest { manifests };
    let answer = client.apply(request).await.map_err(|status| refused(&status))?.into_inner();
    match args.output.output {
        Format::Table => {
            let mut out = Out::new();
            for one in &answer.objects {
                out.line(&format!("{} {}", shown(one.key.as_ref()), one.change)).map_err(failed)?;
            }
        }
        format @ (Format::Json | Format::Yaml) => {
            let values: Vec<_> = answer.objects.iter().map(accepted_value).collect();
            print_values(format, &values, false)?;
        }
    }
    match args.wait.wait {
        Some(seconds) => {
            let awaited = answer.objects.into_iter().map(converged).collect();
            wait(&mut client, awaited, seconds).await
        }
        None => Ok(exit::OK),
    }
}

fn converged(one: proto::Accepted) -> Awaited {
    Awaited::new(one.key.unwrap_or_default(), one.uuid, one.generation, Goal::Converged)
}

pub(crate) async fn delete(socket: &Path, args: args::Delete) -> Done {
    let keys = match (args.file, args.kind) {
        (Some(file), _) => keys_of_file(&file)?,
        (None, Some(kind)) => {
            let kind = read_kind(&kind)?;
            args.names.iter().map(|name| key_of(kind, name)).collect()
        }
        (None, None) => return Err(CliError::with_code(exit::USAGE, "name a kind and a name")),
    };
    let mut client = connect(socket).await?;
    let request = proto::DeleteRequest { keys };
    let answer = client.delete(request).await.map_err(|status| refused(&status))?.into_inner();
    match args.output.output {
        Format::Table => {
            let mut out = Out::new();
            for one in &answer.objects {
                let outcome = match one.outcome.as_str() {
                    "not-found" => "not found, nothing to do",
                    other => other,
                };
                out.line(&format!("{} {outcome}", shown(one.key.as_ref()))).map_err(failed)?;
            }
        }
        format @ (Format::Json | Format::Yaml) => {
            let values: Vec<_> = answer
                .objects
                .iter()
                .map(|one| {
                    let key = one.key.clone().unwrap_or_default();
                    json!({"kind": key.kind, "name": key.name, "uuid": one.uuid, "outcome": one.outcome})
                })
                .collect();
            print_values(format, &values, false)?;
        }
    }
    let Some(seconds) = args.wait.wait else { return Ok(exit::OK) };
    let going = answer.objects.into_iter().filter(|one| one.outcome == "deleting");
    let awaited: Vec<_> = going
        .map(|one| Awaited::new(one.key.unwrap_or_default(), one.uuid, 0, Goal::Gone))
        .collect();
    if awaited.is_empty() {
        return Ok(exit::OK);
    }
    wait(&mut client, awaited, seconds).await
}

/// The objects of a manifest file, the last one first: what uses something goes before it.
fn keys_of_file(file: &Path) -> Result<Vec<proto::Key>, CliError> {
    let manifests = manifest::parse(&read_manifests(file)?).map_err(|errors| {
        let lines: Vec<_> = errors.iter().map(ToString::to_string).collect();
        CliError::new(lines.join("\n"))
    })?;
    let mut keys: Vec<_> = manifests.iter().map(manifest::Manifest::key).collect();
    keys.sort();
    keys.reverse();
    Ok(keys.iter().map(|key| key_of(key.kind, key.name.as_str())).collect())
}

/// An object as programs read it: the manifest with its status.
fn value_of(object: &proto::Object) -> Value {
    let mut value: Value = serde_json::from_str(&object.document).unwrap_or_default();
    let status: Value = serde_json::from_str(&object.status).unwrap_or_default();
    if let Value::Object(map) = &mut value {
        map.insert("status".to_owned(), status);
    }
    value
}

/// An object's parts in the order in which people write them; the rest follows.
fn yaml_of(value: &Value) -> Result<String, serde_yaml_ng::Error> {
    const ORDER: [&str; 8] =
        ["api_version", "kind", "name", "uuid", "project", "labels", "spec", "status"];
    let Value::Object(map) = value else { return serde_yaml_ng::to_string(value) };
    let mut ordered = serde_yaml_ng::Mapping::new();
    let known = ORDER.into_iter().filter_map(|key| map.get_key_value(key));
    let others = map.iter().filter(|(key, _)| !ORDER.contains(&key.as_str()));
    for (key, value) in known.chain(others) {
        ordered.insert(key.as_str().into(), serde_yaml_ng::to_value(value)?);
    }
    serde_yaml_ng::to_string(&ordered)
}

async fn list(client: &mut Client, kind: Option<Kind>) -> Result<Vec<Value>, CliError> {
    let kind = kind.map(|kind| kind.to_string()).unwrap_or_default();
    let request = proto::ListRequest { kind };
    let mut stream = client.list(request).await.map_err(|status| refused(&status))?.into_inner();
    let mut values = Vec::new();
    while let Some(object) = stream.message().await.map_err(|status| refused(&status))? {
        values.push(value_of(&object));
    }
    Ok(values)
}

pub(crate) async fn get(socket: &Path, args: args::Get) -> Done {
    let kind = args.kind.as_deref().map(read_kind).transpose()?;
    let mut client = connect(socket).await?;
    let values = match (kind, &args.name) {
        (Some(kind), Some(name)) => {
            let request = proto::GetRequest { key: Some(key_of(kind, name)) };
            let object = client.get(request).await.map_err(|status| refused(&status))?.into_inner();
            vec![value_of(&object)]
        }
        (kind, _) => list(&mut client, kind).await?,
    };
    match args.output.output {
        Format::Table => Out::new().bytes(table_of(kind, &values).as_bytes()).map_err(failed)?,
        format @ (Format::Json | Format::Yaml) => {
            print_values(format, &values, args.name.is_some())?;
        }
    }
    Ok(exit::OK)
}

/// What stands at a path of a value, as a cell.
fn cell(value: &Value, path: &str) -> String {
    match value.pointer(path) {
        None | Some(Value::Null) => "-".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(items)) => {
            let texts: Vec<_> = items
                .iter()
                .map(|item| item.as_str().map_or_else(|| item.to_string(), str::to_owned))
                .collect();
            if texts.is_empty() { "-".to_owned() } else { texts.join(",") }
        }
        Some(other @ (Value::Bool(_) | Value::Number(_) | Value::Object(_))) => other.to_string(),
    }
}

type Column = (&'static str, &'static str);

const KIND: Column = ("KIND", "/kind");
const NAME: Column = ("NAME", "/name");
const PHASE: Column = ("PHASE", "/status/phase");
const MESSAGE: Column = ("MESSAGE", "/status/message");

fn columns(kind: Option<Kind>) -> Vec<Column> {
    match kind {
        Some(Kind::Instance) => vec![
            NAME,
            PHASE,
            ("STATE", "/status/observed/state"),
            ("ACCEL", "/status/observed/accel"),
            ("CPUS", "/spec/cpus"),
            ("MIB", "/spec/memory_mib"),
            ("ADDRESSES", "/status/observed/addresses"),
            MESSAGE,
        ],
        Some(Kind::Network) => vec![
            NAME,
            PHASE,
            ("TYPE", "/spec/type"),
            ("CIDR", "/spec/cidr"),
            ("CIDR6", "/spec/cidr6"),
            ("DEVICE", "/status/observed/device"),
            MESSAGE,
        ],
        Some(Kind::Volume) => vec![
            NAME,
            PHASE,
            ("GIB", "/spec/size_gib"),
            ("FORMAT", "/spec/format"),
            ("ATTACHED", "/status/observed/attached_to"),
            MESSAGE,
        ],
        Some(Kind::Image) => vec![
            NAME,
            PHASE,
            ("REF", "/spec/ref"),
            ("BYTES", "/status/observed/size_bytes"),
            MESSAGE,
        ],
        Some(_) | None => vec![KIND, NAME, PHASE, MESSAGE],
    }
}

fn table_of(kind: Option<Kind>, values: &[Value]) -> String {
    let columns = columns(kind);
    let head: Vec<_> = columns.iter().map(|(title, _)| *title).collect();
    let rows: Vec<Vec<String>> = values
        .iter()
        .map(|value| columns.iter().map(|(_, path)| cell(value, path)).collect())
        .collect();
    table(&head, &rows)
}

pub(crate) async fn describe(socket: &Path, args: args::Describe) -> Done {
    let kind = read_kind(&args.kind)?;
    let mut client = connect(socket).await?;
    let request = proto::GetRequest { key: Some(key_of(kind, &args.name)) };
    let answer = client.describe(request).await.map_err(|status| refused(&status))?.into_inner();
    let value = value_of(&answer.object.unwrap_or_default());
    let mut out = Out::new();
    let mut lines = vec![
        format!("{} {}", cell(&value, "/kind"), cell(&value, "/name")),
        format!("  uuid        {}", cell(&value, "/uuid")),
        format!("  phase       {}", cell(&value, "/status/phase")),
        format!("  message     {}", cell(&value, "/status/message")),
        format!(
            "  generation  {} of {}",
            cell(&value, "/status/observed_generation"),
            cell(&value, "/status/generation")
        ),
    ];
    lines.extend(section("wanted", value.get("spec")));
    lines.extend(section("observed", value.pointer("/status/observed")));
    if let Some(failure) = value.pointer("/status/failure") {
        lines.push("failed".to_owned());
        lines.push(format!("  step        {}", step_line(failure.get("step"))));
        lines.push(format!("  kind        {}", cell(failure, "/kind")));
        lines.push(format!("  why         {}", cell(failure, "/message")));
        lines.push(format!("  what to do  {}", cell(failure, "/remedy")));
        lines.push(format!("  attempt     {}", cell(failure, "/attempt")));
        lines.push(format!("  next try    in {} s", cell(failure, "/next_try_s")));
    }
    if let Some(executed) = value.pointer("/status/executed").and_then(Value::as_array)
        && !executed.is_empty()
    {
        lines.push("done in the last pass that changed something".to_owned());
        lines.extend(executed.iter().map(|done| format!("  {}", executed_line(done))));
    }
    match answer.plan_error.as_str() {
        "" if answer.steps.is_empty() => lines.push("nothing is to be done".to_owned()),
        "" => {
            lines.push("to be done".to_owned());
            let steps = answer.steps.iter().filter_map(|text| serde_json::from_str(text).ok());
            lines.extend(steps.map(|step: Value| format!("  {}", step_line(Some(&step)))));
        }
        error => lines.push(format!("what is to be done is not known: {error}")),
    }
    if !answer.events.is_empty() {
        lines.push("events".to_owned());
        lines.extend(
            answer.events.iter().map(|event| format!("  {}", super::streams::event_line(event))),
        );
    }
    for line in lines {
        out.line(&line).map_err(failed)?;
    }
    Ok(exit::OK)
}

/// A part of an object as indented YAML.
fn section(title: &str, value: Option<&Value>) -> Vec<String> {
    let Some(value) = value.filter(|value| value.as_object().is_some_and(|map| !map.is_empty()))
    else {
        return Vec::new();
    };
    let text = serde_yaml_ng::to_string(value).unwrap_or_else(|_| value.to_string());
    let lines = text.lines().map(|line| format!("  {line}"));
    std::iter::once(title.to_owned()).chain(lines).collect()
}

fn step_line(step: Option<&Value>) -> String {
    let Some(step) = step else { return "-".to_owned() };
    let part = |path| cell(step, path);
    format!("{} {} [{}]: {}", part("/action"), part("/target"), part("/driver"), part("/reason"))
}

fn executed_line(done: &Value) -> String {
    let seconds = done.pointer("/took/secs").and_then(Value::as_f64).unwrap_or_default();
    let nanos = done.pointer("/took/nanos").and_then(Value::as_f64).unwrap_or_default();
    let took = seconds * 1e3 + nanos / 1e6;
    format!("{took:>9.1} ms  {}", step_line(done.get("step")))
}

pub(crate) async fn plan(socket: &Path, args: args::Plan) -> Done {
    let manifests = read_manifests(&args.file)?;
    let mut client = connect(socket).await?;
    let request = proto::PlanRequest { manifests };
    let answer = client.plan(request).await.map_err(|status| refused(&status))?.into_inner();
    let steps: Vec<Value> = answer
        .steps
        .iter()
        .map(|text| serde_json::from_str(text))
        .collect::<Result<_, _>>()
        .map_err(failed)?;
    let changed: Vec<_> = answer.objects.iter().filter(|one| one.change != "unchanged").collect();
    match args.output.output {
        Format::Table => {
            let mut out = Out::new();
            for one in &changed {
                out.line(&format!("{} {}", shown(one.key.as_ref()), one.change)).map_err(failed)?;
            }
            let rows: Vec<Vec<String>> = steps
                .iter()
                .map(|step| {
                    let object =
                        format!("{} {}", cell(step, "/object/kind"), cell(step, "/object/name"));
                    vec![
                        object,
                        cell(step, "/action"),
                        cell(step, "/target"),
                        cell(step, "/driver"),
                        cell(step, "/reason"),
                    ]
                })
                .collect();
            if rows.is_empty() {
                out.line("nothing to do on the host").map_err(failed)?;
            } else {
                let head = ["OBJECT", "STEP", "TARGET", "DRIVER", "REASON"];
                out.bytes(table(&head, &rows).as_bytes()).map_err(failed)?;
            }
        }
        format @ (Format::Json | Format::Yaml) => {
            let objects: Vec<_> = answer.objects.iter().map(accepted_value).collect();
            print_values(format, &[json!({"objects": objects, "steps": steps})], true)?;
        }
    }
    Ok(if steps.is_empty() && changed.is_empty() { exit::OK } else { exit::CHANGES })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Power {
    Start,
    Stop,
    Reboot,
}

pub(crate) async fn power(socket: &Path, args: args::Power, power: Power) -> Done {
    let mut client = connect(socket).await?;
    let name = args.name;
    let answer = match power {
        Power::Start | Power::Stop => {
            let running = power == Power::Start;
            client.set_power(proto::SetPowerRequest { name, running }).await
        }
        Power::Reboot => client.reboot(proto::RebootRequest { name }).await,
    };
    let accepted = answer.map_err(|status| refused(&status))?.into_inner();
    let word = match power {
        Power::Start => "start",
        Power::Stop => "stop",
        Power::Reboot => "reboot",
    };
    let text = format!(
        "{} {word} {}",
        shown(accepted.key.as_ref()),
        if accepted.change == "unchanged" { "unchanged" } else { "accepted" }
    );
    Out::new().line(&text).map_err(failed)?;
    match args.wait.wait {
        Some(seconds) => wait(&mut client, vec![converged(accepted)], seconds).await,
        None => Ok(exit::OK),
    }
}
