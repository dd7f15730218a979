//! Text to values, bounded: duplicate keys are refused, and what aliases expand to is counted.

use std::cell::Cell;

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};

/// What the values of one document may take in memory, roughly, in bytes. An alias that is used again and again makes a
/// small text large.
const DOCUMENT_COST: usize = 16 << 20;
/// What a value takes beside its text, roughly.
const VALUE_COST: usize = 72;

/// What is wrong with a text, and in which line.
#[derive(Debug)]
pub(super) struct Syntax {
    pub(super) document: usize,
    pub(super) line: Option<usize>,
    pub(super) reason: String,
}

/// The documents of a text, JSON or YAML. An empty document is left out; the number says which it was, from 1.
pub(super) struct Documents {
    /// Whether the text is JSON.
    pub(super) json: bool,
    /// The documents with their numbers.
    pub(super) list: Vec<(usize, Value)>,
}

/// Reads the documents of a text.
pub(super) fn documents(text: &str) -> Result<Documents, Syntax> {
    let looks_like_json = text.trim_start().starts_with('{');
    match looks_like_json.then(|| json(text)) {
        Some(Ok(list)) => Ok(Documents { json: true, list }),
        // A mapping in YAML's flow style begins like JSON: the YAML parser decides whether it is one.
        Some(Err(problem)) => {
            yaml(text).map(|list| Documents { json: false, list }).map_err(|_| problem)
        }
        None => yaml(text).map(|list| Documents { json: false, list }),
    }
}

fn yaml(text: &str) -> Result<Vec<(usize, Value)>, Syntax> {
    let mut documents = Vec::new();
    for (at, document) in serde_yaml_ng::Deserializer::from_str(text).enumerate() {
        let Whole(value) = Whole::deserialize(document).map_err(|error| {
            let line = error.location().map(|location| location.line());
            Syntax { document: at + 1, line, reason: without_place(&error.to_string()).to_owned() }
        })?;
        if !value.is_null() {
            documents.push((at + 1, value));
        }
    }
    Ok(documents)
}

fn json(text: &str) -> Result<Vec<(usize, Value)>, Syntax> {
    let documents = serde_json::Deserializer::from_str(text).into_iter::<Whole>();
    documents
        .zip(1..)
        .map(|(read, document)| match read {
            Ok(Whole(value)) => Ok((document, value)),
            Err(error) => Err(Syntax {
                document,
                line: Some(error.line()),
                reason: without_place(&error.to_string()).to_owned(),
            }),
        })
        .collect()
}

/// A document of bounded size.
struct Whole(Value);

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Bounded(&Cell::new(DOCUMENT_COST)).deserialize(deserializer).map(Self)
    }
}

/// The message without ` at line 3 column 4`, which is told as a number.
fn without_place(message: &str) -> &str {
    message.rsplit_once(" at line ").map_or(message, |(reason, _)| reason)
}

struct Bounded<'a>(&'a Cell<usize>);

impl Bounded<'_> {
    fn pay<E: serde::de::Error>(&self, text: usize) -> Result<(), E> {
        let left = self.0.get().checked_sub(VALUE_COST.saturating_add(text));
        self.0.set(left.ok_or_else(|| E::custom("the document is too large with its aliases"))?);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for Bounded<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Bounded<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a value without a tag")
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Value, E> {
        self.pay(0)?;
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Value, E> {
        self.pay(0)?;
        Ok(value.into())
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Value, E> {
        self.pay(0)?;
        Ok(value.into())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        self.pay(0)?;
        serde_json::Number::from_f64(value)
            .map(Value::Number)
            .ok_or_else(|| E::custom("wanted a finite number"))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Value, E> {
        self.pay(text.len())?;
        Ok(Value::String(text.to_owned()))
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Value, E> {
        self.pay(0)?;
        Ok(Value::Null)
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<Value, E> {
        self.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        self.pay(0)?;
        let mut values = Vec::new();
        while let Some(value) = items.next_element_seed(Bounded(self.0))? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        self.pay(0)?;
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            self.pay(key.len())?;
            let value = entries.next_value_seed(Bounded(self.0))?;
            if map.contains_key(&key) {
                let key = crate::strict::escaped(&key);
                return Err(A::Error::custom(format!("the key \"{key}\" is there twice")));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}
