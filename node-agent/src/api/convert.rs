//! Between the node's types and the wire's.

use drivers_api::ErrorKind;
use prost::Message;
use reconciler::wanted::{Key, Kind};
use serde_json::{Value, json};
use tonic::{Code, Status};

use super::proto;
use crate::{
    accept::{Accepted, Deletion},
    events::Event,
    fault::{Fault, Faults},
    manifest::Document,
    node::{Node, Object},
};

/// `google.rpc.Status`, of which only this is needed (<https://cloud.google.com/apis/design/errors>).
#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

const DETAIL_TYPE: &str = "type.googleapis.com/bcd.node.v1.ErrorDetail";

/// The code of an error's kind.
const fn code(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::InvalidSpec => Code::InvalidArgument,
        ErrorKind::Conflict | ErrorKind::NotApplicable => Code::FailedPrecondition,
        ErrorKind::Unsupported => Code::Unimplemented,
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::Denied => Code::PermissionDenied,
        ErrorKind::Exhausted => Code::ResourceExhausted,
        ErrorKind::Unavailable => Code::Unavailable,
        ErrorKind::Deadline => Code::DeadlineExceeded,
        ErrorKind::Cancelled => Code::Cancelled,
        ErrorKind::UnknownOutcome => Code::Unknown,
        ErrorKind::Internal | _ => Code::Internal,
    }
}

/// A refusal as the wire has it: the text for people, and every problem in the details.
#[must_use]
pub fn status_of(faults: &Faults) -> Status {
    let code = code(faults.kind());
    let details = faults.list().iter().map(|fault| prost_types::Any {
        type_url: DETAIL_TYPE.to_owned(),
        value: detail(fault).encode_to_vec(),
    });
    // Details go in a header, whose size is bounded: the first problems are enough for a program.
    let details = details.take(20).collect();
    let message: String = faults.to_string().chars().take(4000).collect();
    let status = RpcStatus { code: i32::from(code), message: message.clone(), details };
    Status::with_details(code, message, status.encode_to_vec().into())
}

/// The problems that a refusal carries; empty when it carries none.
#[must_use]
pub fn details(status: &Status) -> Vec<proto::ErrorDetail> {
    let decoded = RpcStatus::decode(status.details()).unwrap_or_default();
    let ours = decoded.details.iter().filter(|any| any.type_url == DETAIL_TYPE);
    ours.filter_map(|any| proto::ErrorDetail::decode(any.value.as_slice()).ok()).collect()
}

/// For `map_err`.
#[must_use]
pub fn faults_of(faults: impl Into<Faults>) -> Status {
    status_of(&faults.into())
}

fn detail(fault: &Fault) -> proto::ErrorDetail {
    let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    proto::ErrorDetail {
        kind: fault.kind.code().to_owned(),
        operation: fault.operation.clone(),
        object: fault.object.clone(),
        field: fault.field.clone(),
        reason: fault.reason.clone(),
        remedy: fault.remedy.clone().unwrap_or_default(),
        document: number(fault.document),
        line: number(fault.line.unwrap_or_default()),
    }
}

pub(super) fn key(key: &Key) -> proto::Key {
    proto::Key { kind: key.kind.to_string(), name: key.name.to_string() }
}

pub(super) fn invalid(field: &str, reason: impl std::fmt::Display) -> Status {
    faults_of(drivers_api::Error::invalid(field, reason))
}

/// A key of the wire, checked.
pub(super) fn read_key(key: Option<&proto::Key>) -> Result<Key, Status> {
    let key = key.ok_or_else(|| invalid("key", "the field is required"))?;
    let kind: Kind = key.kind.parse().map_err(|error| invalid("key.kind", error))?;
    let name = key.name.parse().map_err(|error| invalid("key.name", error))?;
    Ok(Key::new(kind, name))
}

pub(super) fn accepted(accepted: &Accepted) -> proto::Accepted {
    proto::Accepted {
        key: Some(key(&accepted.key)),
        uuid: accepted.uuid.to_string(),
        generation: accepted.generation,
        change: accepted.change.as_str().to_owned(),
    }
}

pub(super) fn deleted((which, deletion): &(Key, Deletion)) -> proto::Deleted {
    let (uuid, outcome) = match deletion {
        Deletion::Deleting(uuid) => (uuid.to_string(), "deleting"),
        Deletion::NotFound => (String::new(), "not-found"),
    };
    proto::Deleted { key: Some(key(which)), uuid, outcome: outcome.to_owned() }
}

/// An object with its status; what is not known yet is said as such.
pub(super) fn object(node: &Node, object: &Object) -> Result<proto::Object, Status> {
    let internal = |error: serde_json::Error| Status::internal(error.to_string());
    let wanted = &object.wanted;
    let document = Document::of(wanted)
        .and_then(|document| serde_json::to_string(&document))
        .map_err(internal)?;
    let mut status = match (&object.status, node.trouble()) {
        (Some(status), _) => serde_json::to_value(status).map_err(internal)?,
        (None, Some(trouble)) => json!({"phase": "Unknown", "message": trouble.to_string()}),
        (None, None) => json!({"phase": "Pending", "message": "not looked at yet"}),
    };
    if let Value::Object(map) = &mut status {
        map.remove("key");
        map.remove("uuid");
        map.retain(|_, value| !value.is_null());
        map.insert("generation".to_owned(), wanted.generation.into());
        if wanted.deleting {
            map.insert("deleting".to_owned(), true.into());
        }
        if wanted.successor.is_some() {
            let text = "another object of this name takes its place when it is gone";
            map.insert("successor".to_owned(), text.into());
        }
    }
    Ok(proto::Object {
        key: Some(key(&wanted.key())),
        uuid: wanted.uuid.to_string(),
        generation: wanted.generation,
        deleting: wanted.deleting,
        document,
        status: status.to_string(),
        pending_requests: wanted.reboots.saturating_sub(wanted.reboots_done)
            + wanted.starts.saturating_sub(wanted.starts_done),
    })
}

pub(super) fn event(event: &Event) -> proto::Event {
    proto::Event {
        sequence: event.sequence,
        time_ms: event.time_ms,
        kind: event.kind.to_owned(),
        key: event.key.as_ref().map(key),
        message: event.message.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::parse;

    #[test]
    fn a_refusal_carries_every_problem_over_the_wire() {
        let text = "api_version: bcd/v1\nkind: Volume\nname: a\nspec: {size_gb: 1}\n---\nkind: x";
        let status = faults_of(parse(text).unwrap_err());
        assert_eq!(status.code(), Code::InvalidArgument);
        let found = details(&status);
        assert_eq!(found.len(), 2);
        assert_eq!(
            (found[0].field.as_str(), found[0].document, found[0].line),
            ("spec.size_gb", 1, 4)
        );
        assert_eq!(found[0].remedy, "did you mean \"size_gib\"?");
        assert!(status.message().lines().count() == 2, "{}", status.message());
    }

    #[test]
    fn every_kind_has_a_code_of_its_own_sort() {
        for kind in ErrorKind::ALL {
            let error = drivers_api::Error::new(kind, "try", "it", "why");
            let status = faults_of(error);
            assert_eq!(details(&status)[0].kind, kind.code());
            assert_ne!(status.code(), Code::Ok);
        }
    }
}
