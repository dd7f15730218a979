//! Deserialization for people: unknown fields are refused with their path and the nearest known name, and a wrong type is
//! told as what was wanted and what was found.
//!
//! Serde's own messages name Rust types and lose the path. [`from_value`] walks a JSON value with an error type of its
//! own, so nothing is parsed out of a message.

use std::fmt;

use serde::{
    de::{self, DeserializeOwned, IntoDeserializer, Visitor, value::SeqDeserializer},
    forward_to_deserialize_any,
};
use serde_json::{Map, Value};

/// What is wrong with one field, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The path: `spec.disks[1].bus`. Empty for the document itself.
    pub path: String,
    /// What is wrong.
    pub reason: String,
    /// What a person can do.
    pub remedy: Option<String>,
}

impl Problem {
    /// A problem without a remedy.
    pub fn new(path: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { path: path.into(), reason: reason.into(), remedy: None }
    }

    /// With what a person can do.
    #[must_use]
    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    /// The same problem seen from one level further out: `prefix` and its path.
    #[must_use]
    pub fn under(mut self, prefix: &str) -> Self {
        self.path = match self.path.as_str() {
            "" => prefix.to_owned(),
            path if path.starts_with('[') => format!("{prefix}{path}"),
            path => format!("{prefix}.{path}"),
        };
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.reason)?;
        match &self.remedy {
            Some(remedy) => write!(f, " ({remedy})"),
            None => Ok(()),
        }
    }
}

/// Reads `value` as a `T`.
///
/// # Errors
/// The first problem, with its path.
pub fn from_value<T: DeserializeOwned>(value: Value) -> Result<T, Problem> {
    let mut track = serde_path_to_error::Track::new();
    let tracked = serde_path_to_error::Deserializer::new(Node(value), &mut track);
    T::deserialize(tracked).map_err(|StrictError { field, reason, remedy }| {
        let path = track.path().to_string();
        let path = if path == "." { String::new() } else { path };
        let problem = Problem { path, reason, remedy };
        match field {
            Some(field) => Problem { path: join(&problem.path, &field), ..problem },
            None => problem,
        }
    })
}

fn join(path: &str, field: &str) -> String {
    let field = escaped(field);
    if path.is_empty() { field } else { format!("{path}.{field}") }
}

/// At most 64 characters of a text from outside, with control characters escaped.
#[must_use]
pub fn escaped(text: &str) -> String {
    text.chars().flat_map(char::escape_debug).take(64).collect()
}

/// The known name that is nearest to `found`, if one is near enough to be meant.
#[must_use]
pub fn nearest<'a>(found: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let found: String = found.chars().take(64).collect::<String>().to_ascii_lowercase();
    let bound = (found.chars().count() / 3).max(1);
    known
        .into_iter()
        .map(|name| {
            (strsim::osa_distance(&found, &name.replace('-', "_").to_ascii_lowercase()), name)
        })
        .map(|(distance, name)| {
            // A part of a longer name is meant too: `memory` for `memory_mib`.
            let part = found.len() >= 3 && name.split('_').any(|part| part == found);
            (if part { distance.min(1) } else { distance }, name)
        })
        .filter(|(distance, _)| *distance <= bound)
        .min_by_key(|(distance, name)| (*distance, *name))
        .map(|(_, name)| name)
}

/// What to say about an unknown name.
#[must_use]
pub fn suggestion(found: &str, known: &[&str]) -> String {
    match nearest(found, known.iter().copied()) {
        Some(name) => format!("did you mean \"{name}\"?"),
        None if known.is_empty() => "no field is known here".to_owned(),
        None => format!("known: {}", known.join(", ")),
    }
}

#[derive(Debug)]
struct StrictError {
    /// The unknown or missing field, which the path does not hold yet.
    field: Option<String>,
    reason: String,
    remedy: Option<String>,
}

impl StrictError {
    fn plain(reason: String) -> Self {
        Self { field: None, reason, remedy: None }
    }

    fn unknown(field: &str, known: &[&str]) -> Self {
        Self {
            field: Some(field.to_owned()),
            reason: "unknown field".to_owned(),
            remedy: Some(suggestion(field, known)),
        }
    }
}

impl fmt::Display for StrictError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for StrictError {}

impl de::Error for StrictError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::plain(message.to_string())
    }

    fn invalid_type(found: de::Unexpected<'_>, wanted: &dyn de::Expected) -> Self {
        let mut error = Self::plain(format!(
            "wanted {}, found {}",
            in_words(&wanted.to_string()),
            found_in_words(&found)
        ));
        let wants_text = error.reason.starts_with("wanted text");
        if wants_text && matches!(found, de::Unexpected::Unsigned(_) | de::Unexpected::Bool(_)) {
            error.remedy = Some("put it in quotes".to_owned());
        }
        error
    }

    fn invalid_value(found: de::Unexpected<'_>, wanted: &dyn de::Expected) -> Self {
        Self::invalid_type(found, wanted)
    }

    fn invalid_length(length: usize, wanted: &dyn de::Expected) -> Self {
        Self::plain(format!("wanted {}, found {length} of them", in_words(&wanted.to_string())))
    }

    fn unknown_field(field: &str, known: &'static [&'static str]) -> Self {
        Self::unknown(field, known)
    }

    fn unknown_variant(found: &str, known: &'static [&'static str]) -> Self {
        Self {
            field: None,
            reason: format!("\"{}\" is not one of {}", escaped(found), known.join(", ")),
            remedy: nearest(found, known.iter().copied())
                .map(|name| format!("did you mean \"{name}\"?")),
        }
    }

    fn missing_field(field: &'static str) -> Self {
        Self {
            field: Some(field.to_owned()),
            reason: "the field is required".to_owned(),
            remedy: None,
        }
    }
}

/// Serde's names of types, as people say them.
fn in_words(wanted: &str) -> String {
    match wanted {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number that is not negative".to_owned(),
        "a nonzero u16" => "a whole number from 1 to 65535".to_owned(),
        "i8" | "i16" | "i32" | "i64" => "a whole number".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a string" | "borrowed string" | "string" => "text".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a map" => "a mapping".to_owned(),
        other if other.starts_with("struct ") => "a mapping".to_owned(),
        other if other.starts_with("enum ") || other == "variant identifier" => {
            "one word of a set".to_owned()
        }
        other => other.to_owned(),
    }
}

fn found_in_words(found: &de::Unexpected<'_>) -> String {
    match found {
        de::Unexpected::Bool(value) => format!("{value}"),
        de::Unexpected::Unsigned(value) => format!("the number {value}"),
        de::Unexpected::Signed(value) => format!("the number {value}"),
        de::Unexpected::Float(value) => format!("the number {value}"),
        de::Unexpected::Str(text) => format!("the text \"{}\"", escaped(text)),
        de::Unexpected::Unit | de::Unexpected::Option => "nothing".to_owned(),
        de::Unexpected::Seq => "a list".to_owned(),
        de::Unexpected::Map | de::Unexpected::StructVariant => "a mapping".to_owned(),
        other @ (de::Unexpected::Char(_)
        | de::Unexpected::Bytes(_)
        | de::Unexpected::NewtypeStruct
        | de::Unexpected::Enum
        | de::Unexpected::UnitVariant
        | de::Unexpected::NewtypeVariant
        | de::Unexpected::TupleVariant
        | de::Unexpected::Other(_)) => other.to_string(),
    }
}

/// A JSON value that is read with [`StrictError`].
struct Node(Value);

impl<'de> IntoDeserializer<'de, StrictError> for Node {
    type Deserializer = Self;
    fn into_deserializer(self) -> Self {
        self
    }
}

/// A mapping whose keys and values come one after the other.
struct Entries {
    entries: serde_json::map::IntoIter,
    value: Option<Value>,
}

impl<'de> de::MapAccess<'de> for Entries {
    type Error = StrictError;

    fn next_key_seed<K: de::DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, StrictError> {
        let Some((key, value)) = self.entries.next() else { return Ok(None) };
        self.value = Some(value);
        seed.deserialize(key.into_deserializer()).map(Some)
    }

    fn next_value_seed<V: de::DeserializeSeed<'de>>(
        &mut self,
        seed: V,
    ) -> Result<V::Value, StrictError> {
        seed.deserialize(Node(self.value.take().unwrap_or_default()))
    }
}

fn entries(map: Map<String, Value>) -> Entries {
    Entries { entries: map.into_iter(), value: None }
}

impl<'de> de::Deserializer<'de> for Node {
    type Error = StrictError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, StrictError> {
        match self.0 {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(value),
            Value::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
                (Some(value), ..) => visitor.visit_u64(value),
                (None, Some(value), _) => visitor.visit_i64(value),
                (None, None, value) => visitor.visit_f64(value.unwrap_or(f64::NAN)),
            },
            Value::String(text) => visitor.visit_string(text),
            Value::Array(items) => {
                visitor.visit_seq(SeqDeserializer::new(items.into_iter().map(Node)))
            }
            Value::Object(map) => visitor.visit_map(entries(map)),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, StrictError> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, StrictError> {
        visitor.visit_newtype_struct(self)
    }

    /// Refuses unknown fields whether the type does so itself or not.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, StrictError> {
        // Serde would read a list as the fields in their order.
        if let Value::Array(_) = &self.0 {
            return Err(de::Error::invalid_type(de::Unexpected::Seq, &"a mapping"));
        }
        if let Value::Object(map) = &self.0
            && let Some(unknown) = map.keys().find(|key| !fields.contains(&key.as_str()))
        {
            return Err(StrictError::unknown(unknown, fields));
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, StrictError> {
        match self.0 {
            Value::String(text) => visitor.visit_enum(text.into_deserializer()),
            Value::Object(map) => {
                visitor.visit_enum(de::value::MapAccessDeserializer::new(entries(map)))
            }
            other @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_)) => {
                let wanted = format!("one of {}", known.join(", "));
                Err(de::Error::invalid_type(unexpected(&other), &wanted.as_str()))
            }
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq
        tuple tuple_struct map identifier ignored_any
    }
}

fn unexpected(value: &Value) -> de::Unexpected<'_> {
    match value {
        Value::Null => de::Unexpected::Unit,
        Value::Bool(value) => de::Unexpected::Bool(*value),
        Value::Number(number) => number.as_u64().map_or_else(
            || de::Unexpected::Float(number.as_f64().unwrap_or(f64::NAN)),
            de::Unexpected::Unsigned,
        ),
        Value::String(text) => de::Unexpected::Str(text),
        Value::Array(_) => de::Unexpected::Seq,
        Value::Object(_) => de::Unexpected::Map,
    }
}

#[cfg(test)]
mod tests {
    use reconciler::wanted::{InstanceSpec, NetworkSpec};
    use serde_json::json;

    use super::*;

    fn instance(change: impl FnOnce(&mut Value)) -> Result<InstanceSpec, Problem> {
        let mut spec = json!({
            "cpus": 1, "memory_mib": 256, "boot": {"kind": "oci_image", "ref": "hello"},
            "disks": [{"name": "root", "volume": "root"}, {"name": "data", "volume": "data"}],
        });
        change(&mut spec);
        from_value(spec)
    }

    #[test]
    fn a_good_spec_is_read() {
        assert_eq!(instance(|_| ()).unwrap().disks.len(), 2);
    }

    #[test]
    fn a_problem_is_told_with_its_path_and_the_nearest_name() {
        type Edit = fn(&mut Value);
        let cases: [(Edit, &str); 12] = [
            (
                |spec| spec["disks"][1]["buss"] = json!("scsi"),
                "disks[1].buss: unknown field (did you mean \"bus\"?)",
            ),
            (
                |spec| spec["memory"] = json!(5),
                "memory: unknown field (did you mean \"memory_mib\"?)",
            ),
            (
                |spec| spec["cpus"] = json!("two"),
                "cpus: wanted a whole number that is not negative, found the text \"two\"",
            ),
            (
                |spec| spec["cpus"] = json!(-1),
                "cpus: wanted a whole number that is not negative, found the number -1",
            ),
            (
                |spec| spec["cpus"] = json!(0),
                "cpus: \"0\" is not a valid CPU count: wanted 1 to 255",
            ),
            (|spec| spec["boot"] = json!([]), "boot: wanted a mapping, found a list"),
            (|spec| spec["disks"] = json!({}), "disks: wanted a list, found a mapping"),
            (
                |spec| spec["disks"][0]["bus"] = json!("virtoi"),
                "disks[0].bus: \"virtoi\" is not one of virtio, scsi, nvme (did you mean \"virtio\"?)",
            ),
            (
                |spec| spec["power"] = json!(true),
                "power: wanted one of running, stopped, found true",
            ),
            (
                |spec| spec["user_data"] = json!(7),
                "user_data: wanted text, found the number 7 (put it in quotes)",
            ),
            (
                |spec| {
                    spec["disks"][1].as_object_mut().unwrap().remove("volume");
                },
                "disks[1].volume: the field is required",
            ),
            (
                |spec| spec["\u{1b}[31m"] = json!(1),
                "\\u{1b}[31m: unknown field (known: driver, cpus, memory_mib, boot, disks, nics, user_data, power, restart_policy, start_order, stop_grace_seconds)",
            ),
        ];
        for (edit, wanted) in cases {
            assert_eq!(instance(edit).unwrap_err().to_string(), wanted);
        }
    }

    #[test]
    fn a_type_that_allows_unknown_fields_is_read_strictly_too() {
        let spec = json!({"type": "mesh", "mesh_peers": [{
            "public_key": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=", "allowed_ips": [], "end_point": "a:1",
        }]});
        let problem = from_value::<NetworkSpec>(spec).unwrap_err().to_string();
        assert_eq!(problem, "mesh_peers[0].end_point: unknown field (did you mean \"endpoint\"?)");
    }

    #[test]
    fn a_name_that_is_near_nothing_has_no_suggestion() {
        assert_eq!(nearest("zzzz", ["bus", "name"]), None);
        assert_eq!(nearest("nmae", ["bus", "name"]), Some("name"));
    }
}
