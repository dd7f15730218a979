//! Manifests: YAML or JSON, several documents a text, each one wanted object.
//!
//! Parsing has no effect: all documents are checked and all problems are collected before anything is done. The format is
//! described in `docs/manifests.md`.

mod value;

use std::{collections::BTreeMap, fmt};

use drivers_api::{ProjectId, Uuid};
use reconciler::wanted::{
    ImageSpec, InstanceSpec, Key, Kind, NetworkSpec, ObjectName, VolumeSpec, Wanted, WantedSpec,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::strict::{self, Problem};

/// The version that this agent reads and writes.
pub const API_VERSION: &str = "bcd/v1";
/// The most bytes of a manifest text.
pub const MAX_TEXT_BYTES: usize = 8 << 20;
/// The most labels of an object.
const MAX_LABELS: usize = 64;

/// One document: an object as an operator wants it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Which document of the text it was, from 1.
    pub document: usize,
    /// The identity, where the operator gave one.
    pub uuid: Option<Uuid>,
    /// The name.
    pub name: ObjectName,
    /// The project.
    pub project: Option<ProjectId>,
    /// The labels.
    pub labels: BTreeMap<String, String>,
    /// What is wanted.
    pub spec: WantedSpec,
}

impl Manifest {
    /// The object's key.
    #[must_use]
    pub fn key(&self) -> Key {
        Key::new(self.spec.kind(), self.name.clone())
    }
}

/// What is wrong with a manifest text, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestError {
    /// Which document of the text, from 1; 0 for the text as a whole.
    pub document: usize,
    /// The line in the text, from 1, where it is known.
    pub line: Option<usize>,
    /// The object as far as it is known: `Instance web`.
    pub object: String,
    /// What is wrong.
    pub problem: Problem,
}

impl ManifestError {
    fn text(problem: Problem) -> Self {
        Self { document: 0, line: None, object: String::new(), problem }
    }
}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut place = Vec::new();
        if self.document > 0 {
            place.push(format!("document {}", self.document));
        }
        if let Some(line) = self.line {
            place.push(format!("line {line}"));
        }
        if !self.object.is_empty() {
            place.push(self.object.clone());
        }
        if !place.is_empty() {
            write!(f, "{}: ", place.join(", "))?;
        }
        fmt::Display::fmt(&self.problem, f)
    }
}

impl std::error::Error for ManifestError {}

/// Reads all documents of a text.
///
/// # Errors
/// All problems, one for each faulty document, in their order.
pub fn parse(text: &str) -> Result<Vec<Manifest>, Vec<ManifestError>> {
    if text.len() > MAX_TEXT_BYTES {
        let reason = format!("the text has {} bytes, of at most {MAX_TEXT_BYTES}", text.len());
        let remedy = "apply it in several parts";
        return Err(vec![ManifestError::text(Problem::new("", reason).with_remedy(remedy))]);
    }
    let documents = value::documents(text).map_err(|syntax| {
        vec![ManifestError {
            document: syntax.document,
            line: syntax.line,
            object: String::new(),
            problem: Problem::new("", syntax.reason),
        }]
    })?;
    if documents.list.is_empty() {
        return Err(vec![ManifestError::text(Problem::new("", "the text holds no document"))]);
    }
    let (mut manifests, mut errors) = (Vec::<Manifest>::new(), Vec::new());
    let lines = if documents.json { None } else { Some(text) };
    for (number, value) in documents.list {
        match read_document(lines, number, value) {
            Ok(manifest) => match repeats(&manifests, &manifest) {
                Some(error) => errors.push(error),
                None => manifests.push(manifest),
            },
            Err(error) => errors.push(*error),
        }
    }
    if errors.is_empty() { Ok(manifests) } else { Err(errors) }
}

fn repeats(earlier: &[Manifest], manifest: &Manifest) -> Option<ManifestError> {
    let same = earlier.iter().find_map(|other| {
        if other.key() == manifest.key() {
            Some((other, "name"))
        } else if other.uuid.is_some() && other.uuid == manifest.uuid {
            Some((other, "uuid"))
        } else {
            None
        }
    });
    same.map(|(other, path)| ManifestError {
        document: manifest.document,
        line: None,
        object: manifest.key().to_string(),
        problem: Problem::new(path, format!("document {} has it too", other.document)),
    })
}

/// A document as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<S> {
    #[serde(rename = "api_version")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    name: ObjectName,
    #[serde(default)]
    uuid: Option<Uuid>,
    #[serde(default)]
    project: Option<ProjectId>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    spec: S,
    /// Read and left aside, so that what `get -o yaml` prints can be applied.
    #[serde(default, rename = "status")]
    _status: Option<Value>,
}

fn read_document(
    text: Option<&str>,
    number: usize,
    value: Value,
) -> Result<Manifest, Box<ManifestError>> {
    let kind_text = value.get("kind").and_then(Value::as_str).unwrap_or_default();
    let name_text = value.get("name").and_then(Value::as_str).unwrap_or_default();
    let mut object = strict::escaped(kind_text);
    if !name_text.is_empty() {
        object = format!("{object} {}", strict::escaped(name_text)).trim().to_owned();
    }
    let fail = |problem: Problem, line| {
        Box::new(ManifestError { document: number, line, object: object.clone(), problem })
    };
    let kind = check_head(&value).map_err(|problem| fail(problem, None))?;
    let read = match kind {
        Kind::Image => read::<ImageSpec>(text, number, value, WantedSpec::Image),
        Kind::Volume => read::<VolumeSpec>(text, number, value, WantedSpec::Volume),
        Kind::Network => read::<NetworkSpec>(text, number, value, WantedSpec::Network),
        Kind::Instance => read::<InstanceSpec>(text, number, value, WantedSpec::Instance),
        other => Err((Problem::new("kind", format!("{other} is not served yet")), None)),
    };
    let manifest = read.map_err(|(problem, line)| fail(problem, line))?;
    check_labels(&manifest.labels).map_err(|problem| fail(problem, None))?;
    Ok(manifest)
}

/// Version and kind decide how the rest is read, so they are looked at first.
fn check_head(value: &Value) -> Result<Kind, Problem> {
    let Value::Object(map) = value else {
        return Err(Problem::new("", "wanted a mapping with api_version, kind, name and spec"));
    };
    match map.get("api_version") {
        Some(Value::String(version)) if version == API_VERSION => {}
        Some(Value::String(version)) => {
            let reason = format!("\"{}\" is not known", strict::escaped(version));
            let remedy = format!("this agent reads {API_VERSION}");
            return Err(Problem::new("api_version", reason).with_remedy(remedy));
        }
        Some(_) | None => {
            return Err(Problem::new("api_version", "the field is required")
                .with_remedy(format!("write api_version: {API_VERSION}")));
        }
    }
    let Some(Value::String(kind)) = map.get("kind") else {
        return Err(Problem::new("kind", "the field is required")
            .with_remedy("Instance, Network, Volume or Image"));
    };
    Kind::ALL.into_iter().find(|known| known.as_str() == kind).ok_or_else(|| {
        let known = Kind::ALL.map(Kind::as_str);
        Problem::new("kind", format!("\"{}\" is no kind", strict::escaped(kind))).with_remedy(
            Kind::ALL
                .into_iter()
                .map(Kind::as_str)
                .find(|known| known.eq_ignore_ascii_case(kind))
                .map_or_else(
                    || strict::suggestion(kind, &known),
                    |known| format!("did you mean \"{known}\"?"),
                ),
        )
    })
}

fn read<S: DeserializeOwned>(
    text: Option<&str>,
    number: usize,
    value: Value,
    wrap: fn(S) -> WantedSpec,
) -> Result<Manifest, (Problem, Option<usize>)> {
    let envelope = strict::from_value::<Envelope<S>>(value)
        .map_err(|problem| (problem, text.and_then(|text| line_of_problem::<S>(text, number))))?;
    let Envelope { name, uuid, project, labels, spec, .. } = envelope;
    Ok(Manifest { document: number, uuid, name, project, labels, spec: wrap(spec) })
}

/// The line at which a YAML document stops being an `Envelope<S>`. The values that [`strict`] reads have no lines, so the
/// text is read once more by the parser that knows them.
fn line_of_problem<S: DeserializeOwned>(text: &str, number: usize) -> Option<usize> {
    let document = serde_yaml_ng::Deserializer::from_str(text).nth(number.checked_sub(1)?)?;
    let error = Envelope::<S>::deserialize(document).err()?;
    error.location().map(|location| location.line())
}

fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), Problem> {
    if labels.len() > MAX_LABELS {
        return Err(Problem::new("labels", format!("wanted at most {MAX_LABELS} labels")));
    }
    for (key, value) in labels {
        let key_ok = (1..=63).contains(&key.len()) && key.chars().all(|c| c.is_ascii_graphic());
        let value_ok = value.len() <= 255 && !value.chars().any(char::is_control);
        if !key_ok {
            let reason = format!(
                "\"{}\" is no label's key: wanted 1 to 63 printable ASCII characters without space",
                strict::escaped(key)
            );
            return Err(Problem::new("labels", reason));
        }
        if !value_ok {
            let path = format!("labels.{key}");
            let reason = "wanted at most 255 bytes without control characters";
            return Err(Problem::new(path, reason));
        }
    }
    Ok(())
}

/// An object as `get -o yaml` and `-o json` print it: a manifest that can be applied again, with its status.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Document {
    /// [`API_VERSION`].
    pub api_version: String,
    /// The kind.
    pub kind: String,
    /// The name.
    pub name: String,
    /// The identity on the host.
    pub uuid: Uuid,
    /// The project.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<ProjectId>,
    /// The labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// What is wanted.
    pub spec: Value,
}

impl Document {
    /// Of a wanted object.
    ///
    /// # Errors
    /// When a spec cannot be written as JSON, which no spec's types allow.
    pub fn of(wanted: &Wanted) -> Result<Self, serde_json::Error> {
        let spec = match &wanted.spec {
            WantedSpec::Image(spec) => serde_json::to_value(spec),
            WantedSpec::Volume(spec) => serde_json::to_value(spec),
            WantedSpec::Network(spec) => serde_json::to_value(spec),
            WantedSpec::Instance(spec) => serde_json::to_value(spec),
            other => serde_json::to_value(other),
        }?;
        Ok(Self {
            api_version: API_VERSION.to_owned(),
            kind: wanted.spec.kind().to_string(),
            name: wanted.name.to_string(),
            uuid: wanted.uuid,
            project: wanted.project,
            labels: wanted.labels.clone(),
            spec,
        })
    }
}

#[cfg(test)]
mod tests;
