//! Names and addresses of the link and network layer.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use crate::{
    PortId, PortNumber, Uuid,
    uuid::{ParseError, serde_as_text},
};

/// FNV-1a, 64 bit (<http://www.isthe.com/chongo/tech/comp/fnv/>): spreads every byte of an identifier over the short
/// names that the kernel allows. Not a cryptographic hash; who uses it checks for a collision.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// A unicast 48-bit MAC address, printed in lower case with colons.
///
/// Refused: multicast and broadcast, all zeros, and a first octet of `0xFE`, which libvirt reserves for the host's side
/// of a tap (a bridge takes the lowest MAC of its ports as its own).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MacAddr([u8; 6]);

impl MacAddr {
    /// Checks that the address can be a guest's.
    ///
    /// # Errors
    /// For a multicast, zero or reserved address.
    pub fn new(bytes: [u8; 6]) -> Result<Self, ParseError> {
        let refuse = |reason| Err(ParseError::new("MAC address", reason, &Self(bytes).to_string()));
        let [first, ..] = bytes;
        if bytes == [0; 6] {
            return refuse("all zeros names no interface");
        }
        if first & 1 == 1 {
            return refuse("the multicast bit is set");
        }
        if first == 0xfe {
            return refuse("a first octet of fe is reserved for the host's side of a tap");
        }
        Ok(Self(bytes))
    }

    /// The address generated for a port: locally administered, unicast, the same for the same port for ever.
    #[must_use]
    pub fn derived(port: PortId) -> Self {
        let [_, _, first, rest @ ..] = fnv1a(port.uuid().as_bytes()).to_be_bytes();
        let [a, b, c, d, e] = rest;
        // Second bit set: locally administered; first clear: unicast (IEEE 802-2014 section 8.2). 0xfe is reserved.
        let first = match (first & 0xfc) | 0x02 {
            0xfe => 0x02,
            other => other,
        };
        Self([first, a, b, c, d, e])
    }

    /// The six octets.
    #[must_use]
    pub const fn octets(self) -> [u8; 6] {
        self.0
    }
}

impl FromStr for MacAddr {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let refuse = || {
            ParseError::new(
                "MAC address",
                "wanted six hexadecimal octets separated by colons",
                text,
            )
        };
        if text.len() != 17 {
            return Err(refuse());
        }
        let mut bytes = [0_u8; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2).ok_or_else(refuse)?;
            if !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(refuse());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| refuse())?;
        }
        if parts.next().is_some() { Err(refuse()) } else { Self::new(bytes) }
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

serde_as_text!(MacAddr);

/// The name of a network interface as the kernel takes it.
///
/// 1 to 15 bytes (`IFNAMSIZ` is 16 with the final NUL, `include/uapi/linux/if.h`), of `A-Z a-z 0-9 . _ -`, not
/// starting with a hyphen, not `.`, `..` or `lo`. The kernel takes more; nobody needs it, and `,` or `=` would split a
/// VMM's option.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IfName(String);

impl IfName {
    /// The most bytes of a name.
    pub const MAX_BYTES: usize = 15;

    /// A name made of a prefix (at most 4 bytes) and eleven characters that an identifier gives: the same identifier
    /// gives the same name for ever, and identifiers that share a prefix or a suffix do not share a name. 55 bits
    /// can collide: the owner of the link checks the full identifier in its alias.
    ///
    /// # Errors
    /// When the prefix is empty, too long, or no part of an interface name.
    pub fn derived(prefix: &str, id: Uuid) -> Result<Self, ParseError> {
        const DIGITS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
        if prefix.is_empty() || prefix.len() > 4 {
            return Err(ParseError::new("interface name prefix", "wanted 1 to 4 bytes", prefix));
        }
        let hash = fnv1a(id.as_bytes());
        let digits = (0..11).map(|at| {
            let index = usize::try_from((hash >> (at * 5)) & 31).unwrap_or_default();
            char::from(DIGITS.get(index).copied().unwrap_or(b'a'))
        });
        prefix.chars().chain(digits).collect::<String>().parse()
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for IfName {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let refuse = |reason| Err(ParseError::new("interface name", reason, text));
        if text.is_empty() || text.len() > Self::MAX_BYTES {
            return refuse("wanted 1 to 15 bytes");
        }
        if !text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
            return refuse("wanted letters, digits, dot, underscore and hyphen");
        }
        if text.starts_with('-') || matches!(text, "." | ".." | "lo") {
            return refuse("the name is reserved or looks like an option");
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for IfName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for IfName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

serde_as_text!(IfName);

/// An IP prefix without host bits, of a range that guests may have.
///
/// Refused: host bits, prefix length 0, loopback, link-local, multicast and v4-mapped ranges, zone identifiers, and
/// octets with leading zeros (which some parsers read as octal).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IpCidr {
    address: IpAddr,
    prefix_len: u8,
}

impl IpCidr {
    /// Checks the prefix.
    ///
    /// # Errors
    /// See the type.
    pub fn new(address: IpAddr, prefix_len: u8) -> Result<Self, ParseError> {
        let this = Self { address, prefix_len };
        let refuse = |reason| Err(ParseError::new("CIDR", reason, &this.to_string()));
        if prefix_len == 0 || prefix_len > this.width() {
            return refuse("the prefix length is out of range");
        }
        if this.bits(address) & this.host_mask() != 0 {
            return refuse("the address has bits beyond the prefix length");
        }
        let special = match address {
            IpAddr::V4(v4) => {
                v4.is_loopback()
                    || v4.is_link_local()
                    || v4.octets().first().is_some_and(|first| *first >= 224 || *first == 0)
            }
            IpAddr::V6(v6) => {
                v6.is_loopback()
                    || v6.is_multicast()
                    || v6.is_unicast_link_local()
                    || v6.to_ipv4_mapped().is_some()
            }
        };
        if special {
            refuse("the range is loopback, link-local, multicast or reserved")
        } else {
            Ok(this)
        }
    }

    const fn width(&self) -> u8 {
        match self.address {
            IpAddr::V4(_) => 32,
            IpAddr::V6(_) => 128,
        }
    }

    fn bits(&self, address: IpAddr) -> u128 {
        match address {
            IpAddr::V4(v4) => v4.to_bits().into(),
            IpAddr::V6(v6) => v6.to_bits(),
        }
    }

    fn host_mask(&self) -> u128 {
        match u32::from(self.width() - self.prefix_len) {
            0 => 0,
            host_bits => u128::MAX >> (128 - host_bits),
        }
    }

    /// The network's address: the first of the range.
    #[must_use]
    pub const fn address(&self) -> IpAddr {
        self.address
    }

    /// How many leading bits are the network's.
    #[must_use]
    pub const fn prefix_len(&self) -> u8 {
        self.prefix_len
    }

    /// Whether it is an IPv6 prefix.
    #[must_use]
    pub const fn is_v6(&self) -> bool {
        self.address.is_ipv6()
    }

    /// Whether the address lies in the range (of the same family).
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.address.is_ipv4()
            && self.bits(address) & !self.host_mask() == self.bits(self.address)
    }

    /// Whether the two ranges share an address.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.contains(other.address) || other.contains(self.address)
    }

    /// The `index`th address of the range; 0 is the network's own. `None` beyond the range.
    #[must_use]
    pub fn nth(&self, index: u128) -> Option<IpAddr> {
        if index > self.host_mask() {
            return None;
        }
        let bits = self.bits(self.address) | index;
        Some(match self.address {
            IpAddr::V4(_) => Ipv4Addr::from_bits(u32::try_from(bits).ok()?).into(),
            IpAddr::V6(_) => Ipv6Addr::from_bits(bits).into(),
        })
    }

    /// The v4 broadcast address, where the prefix has one (up to /30).
    #[must_use]
    pub fn broadcast(&self) -> Option<Ipv4Addr> {
        match self.nth(self.host_mask()) {
            Some(IpAddr::V4(last)) if self.prefix_len <= 30 => Some(last),
            _ => None,
        }
    }

    /// Whether a guest or gateway may have the address: in the range, not the network's own, not the broadcast.
    #[must_use]
    pub fn is_host_address(&self, address: IpAddr) -> bool {
        self.contains(address)
            && address != self.address
            && self.broadcast().is_none_or(|broadcast| address != IpAddr::V4(broadcast))
    }

    /// How many addresses [`IpCidr::is_host_address`] accepts, saturating.
    #[must_use]
    pub fn host_addresses(&self) -> u128 {
        self.host_mask().saturating_sub(u128::from(self.broadcast().is_some()))
    }
}

impl FromStr for IpCidr {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let refuse = || {
            ParseError::new(
                "CIDR",
                "wanted ADDRESS/LENGTH, such as 10.77.0.0/24 or fd77::/64",
                text,
            )
        };
        let (address, length) = text.split_once('/').ok_or_else(refuse)?;
        if length.is_empty()
            || length.len() > 3
            || !length.bytes().all(|digit| digit.is_ascii_digit())
        {
            return Err(refuse());
        }
        let address = address.parse().map_err(|_| refuse())?;
        Self::new(address, length.parse().map_err(|_| refuse())?)
    }
}

impl fmt::Display for IpCidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_len)
    }
}

impl fmt::Debug for IpCidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

serde_as_text!(IpCidr);

/// A WireGuard public key: 32 bytes, as 44 characters of base64 with padding (`wg(8)`).
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WireguardPublicKey(String);

impl WireguardPublicKey {
    /// The key as base64.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for WireguardPublicKey {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let refuse =
            || ParseError::new("WireGuard public key", "wanted 44 characters of base64", text);
        let digits =
            text.strip_suffix('=').filter(|digits| digits.len() == 43).ok_or_else(refuse)?;
        if !digits.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'+' || byte == b'/')
        {
            return Err(refuse());
        }
        // 43 digits carry 258 bits, of which the last two must be zero for the text to be the key's only spelling.
        if !digits.ends_with(|last: char| "AEIMQUYcgkosw048".contains(last)) {
            return Err(refuse());
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for WireguardPublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for WireguardPublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

serde_as_text!(WireguardPublicKey);

/// Where a mesh peer is reached: an address and a UDP port, or a DNS name and a port.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    host: String,
    port: PortNumber,
}

impl Endpoint {
    /// The address or name, without brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The UDP port.
    #[must_use]
    pub const fn port(&self) -> PortNumber {
        self.port
    }
}

impl FromStr for Endpoint {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let refuse = || ParseError::new("endpoint", "wanted HOST:PORT or [IPV6]:PORT", text);
        let (host, port) = text.rsplit_once(':').ok_or_else(refuse)?;
        let port =
            port.parse().ok().and_then(|port| PortNumber::new(port).ok()).ok_or_else(refuse)?;
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(v6) => v6.parse::<Ipv6Addr>().map_err(|_| refuse())?.to_string(),
            None => host.to_owned(),
        };
        let is_name = !host.is_empty()
            && host.len() <= 253
            && !host.starts_with('-')
            && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-".contains(&byte));
        if is_name || host.parse::<Ipv6Addr>().is_ok() {
            Ok(Self { host, port })
        } else {
            Err(refuse())
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

serde_as_text!(Endpoint);
