//! Statements and expressions of nftables as JSON (libnftables-json(5)).

use std::net::IpAddr;

use drivers_api::IpCidr;
use serde_json::{Value, json};

pub(super) fn meta(key: &str) -> Value {
    json!({ "meta": { "key": key } })
}

pub(super) fn payload(protocol: &str, field: &str) -> Value {
    json!({ "payload": { "protocol": protocol, "field": field } })
}

pub(super) fn is(left: Value, right: impl Into<Value>) -> Value {
    compare("==", left, right.into())
}

pub(super) fn is_not(left: Value, right: impl Into<Value>) -> Value {
    compare("!=", left, right.into())
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "the macro borrows what it puts in; callers have nothing else to do with it"
)]
fn compare(op: &str, left: Value, right: Value) -> Value {
    json!({ "match": { "op": op, "left": left, "right": right } })
}

/// Whether the packet belongs to a connection in one of these states.
pub(super) fn ct_state(states: &[&str]) -> Value {
    json!({ "match": { "op": "in", "left": { "ct": { "key": "state" } }, "right": states } })
}

/// Whether the packet mark has this bit.
pub(super) fn mark_bit(bit: u32) -> Value {
    let masked = json!({ "&": [meta("mark"), bit] });
    is(masked, bit)
}

pub(super) fn set_mark_bit(bit: u32) -> Value {
    json!({ "mangle": { "key": meta("mark"), "value": { "|": [meta("mark"), bit] } } })
}

pub(super) fn keep_mark_bits(mask: u32) -> Value {
    json!({ "mangle": { "key": meta("mark"), "value": { "&": [meta("mark"), mask] } } })
}

/// Puts the connection's original direction into a zone; replies are found from outside it.
pub(super) fn set_zone(zone: u16) -> Value {
    json!({ "mangle": { "key": { "ct": { "key": "zone", "dir": "original" } }, "value": zone } })
}

/// Whether the connection was begun from one of these zones; 0 is that of the host itself.
///
/// Needed beside the state: a zone that holds for one direction keeps apart what begins, but a forged reply on another
/// network would still be found to belong to the connection.
pub(super) fn began_in(zones: impl IntoIterator<Item = u16>) -> Value {
    is(json!({ "ct": { "key": "zone", "dir": "original" } }), any_of(zones))
}

/// An anonymous set, or the one element itself.
pub(super) fn any_of<T: Into<Value>>(elements: impl IntoIterator<Item = T>) -> Value {
    let mut elements: Vec<Value> = elements.into_iter().map(Into::into).collect();
    match elements.pop() {
        Some(only) if elements.is_empty() => only,
        Some(last) => {
            elements.push(last);
            json!({ "set": elements })
        }
        None => json!({ "set": [] }),
    }
}

pub(super) fn prefix(range: IpCidr) -> Value {
    json!({ "prefix": { "addr": range.address().to_string(), "len": range.prefix_len() } })
}

/// An address as the hexadecimal number that a raw payload expression is compared with: nft takes no other form for 128
/// bits in JSON.
pub(super) fn hex(address: std::net::Ipv6Addr) -> Value {
    format!("0x{:032x}", address.to_bits()).into()
}

/// The protocol name of an address's family in payload expressions.
pub(super) const fn family(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "ip" } else { "ip6" }
}

pub(super) fn accept() -> Value {
    json!({ "accept": null })
}

pub(super) fn drop() -> Value {
    json!({ "drop": null })
}

pub(super) fn counter() -> Value {
    json!({ "counter": null })
}

/// Keeps the packet out of connection tracking.
pub(super) fn notrack() -> Value {
    json!({ "notrack": null })
}

pub(super) fn masquerade() -> Value {
    json!({ "masquerade": null })
}

pub(super) fn jump(chain: &str) -> Value {
    json!({ "jump": { "target": chain } })
}

pub(super) fn goto(chain: &str) -> Value {
    json!({ "goto": { "target": chain } })
}

/// Looks a key up in a named verdict map.
pub(super) fn vmap(key: &Value, map: &str) -> Value {
    json!({ "vmap": { "key": key, "data": format!("@{map}") } })
}

/// Looks a key up in an anonymous verdict map.
pub(super) fn vmap_of(key: &Value, pairs: Vec<(&str, Value)>) -> Value {
    let pairs: Vec<Value> = pairs.into_iter().map(|(key, verdict)| json!([key, verdict])).collect();
    json!({ "vmap": { "key": key, "data": { "set": pairs } } })
}
