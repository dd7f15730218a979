//! Links, addresses and routes by rtnetlink.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use drivers_api::IpCidr;
use futures_util::{TryStream, TryStreamExt};
use netlink_packet_core::Nla;
use netlink_packet_route::{
    AddressFamily,
    address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope},
    link::{InfoBridge, InfoData, InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteType},
};
use rtnetlink::{Handle, LinkBridge, LinkMessageBuilder, LinkUnspec};
use tokio::sync::Mutex;

pub(crate) mod tap;

/// `IFLA_TUN_OWNER` (`include/uapi/linux/if_link.h`).
const IFLA_TUN_OWNER: u16 = 1;

/// What the kernel refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetlinkError {
    #[error("the kernel's link interface (rtnetlink) cannot be opened")]
    Open {
        #[source]
        source: std::io::Error,
    },
    #[error("the kernel refused to {operation} {link}")]
    Request {
        operation: &'static str,
        link: String,
        #[source]
        source: std::io::Error,
    },
    #[error("the kernel's answer to {operation} {link} was not understood: {what}")]
    Lost { operation: &'static str, link: String, what: String },
    #[error("cannot {operation} the tap {link}")]
    Tap {
        operation: &'static str,
        link: String,
        #[source]
        source: std::io::Error,
    },
}

/// What a link is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LinkKind {
    Bridge {
        /// Whether its frames pass the inet hooks even where the sysctl is off.
        nf_call: bool,
        vlan_filtering: bool,
    },
    Tun {
        owner: Option<u32>,
    },
    Other,
}

/// A link as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) alias: Option<String>,
    pub(crate) mac: Option<[u8; 6]>,
    pub(crate) mtu: u32,
    pub(crate) up: bool,
    pub(crate) controller: Option<u32>,
    pub(crate) kind: LinkKind,
}

/// An address of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) index: u32,
    pub(crate) address: IpAddr,
    pub(crate) prefix_len: u8,
    pub(crate) link_local: bool,
}

/// A route that a range could overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) to: IpCidr,
    pub(crate) output: Option<u32>,
}

/// What to change of a link, in one request.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinkChange {
    pub(crate) alias: Option<String>,
    pub(crate) mac: Option<[u8; 6]>,
    pub(crate) mtu: Option<u32>,
    pub(crate) controller: Option<u32>,
    pub(crate) up: bool,
}

/// A connection to rtnetlink; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Netlink {
    handle: Handle,
    /// The kernel makes one dump of a socket at a time (`netlink_dump_start`).
    dumps: Arc<Mutex<()>>,
}

impl Netlink {
    pub(crate) fn new(handle: Handle) -> Self {
        Self { handle, dumps: Arc::default() }
    }

    /// Reads a whole dump, after those that were asked for earlier.
    ///
    /// The reading is a task of its own: the rest of a dump whose reader went away would be in the next one's way
    /// (`EBUSY`).
    async fn dump<S>(
        &self,
        ask: impl FnOnce(Handle) -> S + Send + 'static,
    ) -> Result<Vec<S::Ok>, rtnetlink::Error>
    where
        S: TryStream<Error = rtnetlink::Error> + Send + 'static,
        S::Ok: Send + 'static,
    {
        let (dumps, handle) = (Arc::clone(&self.dumps), self.handle.clone());
        let reader = tokio::spawn(async move {
            let _turn = dumps.lock_owned().await;
            ask(handle).try_collect().await
        });
        reader.await.unwrap_or(Err(rtnetlink::Error::RequestFailed))
    }

    /// All links, in one dump.
    pub(crate) async fn links(&self) -> Result<Vec<Link>, NetlinkError> {
        let found: Vec<LinkMessage> = self
            .dump(|handle| handle.link().get().execute())
            .await
            .map_err(failed("list", "all links"))?;
        Ok(found.iter().map(link_of).collect())
    }

    /// The link of this name; `None` when it was seen not to be there.
    pub(crate) async fn link(&self, name: &str) -> Result<Option<Link>, NetlinkError> {
        let mut stream = std::pin::pin!(self.handle.link().get().match_name(name).execute());
        match stream.try_next().await {
            Ok(found) => Ok(found.as_ref().map(link_of)),
            Err(rtnetlink::Error::NetlinkError(error)) if error.raw_code() == -libc::ENODEV => {
                Ok(None)
            }
            Err(error) => Err(failed("look at", name)(error)),
        }
    }

    /// Makes a bridge that is down, with its MAC address and, where wanted, with its frames passing the inet hooks.
    pub(crate) async fn add_bridge(
        &self,
        name: &str,
        mac: [u8; 6],
        nf_call: bool,
    ) -> Result<(), NetlinkError> {
        // Without a forward delay a port works at once; there is no loop to find on a bridge of taps.
        let mut bridge = LinkBridge::new(name)
            .down()
            .address(mac.to_vec())
            .append_info_data(InfoBridge::ForwardDelay(0));
        if nf_call {
            bridge = bridge
                .append_info_data(InfoBridge::NfCallIpTables(true))
                .append_info_data(InfoBridge::NfCallIp6Tables(true));
        }
        self.handle
            .link()
            .add(bridge.build())
            .execute()
            .await
            .map_err(failed("make the bridge", name))
    }

    /// Has the frames of a bridge pass the inet hooks.
    pub(crate) async fn set_nf_call(&self, name: &str) -> Result<(), NetlinkError> {
        let bridge = LinkMessageBuilder::<LinkBridge>::new(name)
            .append_info_data(InfoBridge::NfCallIpTables(true))
            .append_info_data(InfoBridge::NfCallIp6Tables(true));
        self.handle
            .link()
            .set(bridge.build())
            .execute()
            .await
            .map_err(failed("set the netfilter options of", name))
    }

    pub(crate) async fn change(
        &self,
        index: u32,
        name: &str,
        change: LinkChange,
    ) -> Result<(), NetlinkError> {
        let mut message = LinkUnspec::new_with_index(index);
        if let Some(mac) = change.mac {
            message = message.address(mac.to_vec());
        }
        if let Some(mtu) = change.mtu {
            message = message.mtu(mtu);
        }
        if let Some(alias) = change.alias {
            message = message.alias(alias);
        }
        if let Some(controller) = change.controller {
            message = message.controller(controller);
        }
        if change.up {
            message = message.up();
        }
        self.handle.link().set(message.build()).execute().await.map_err(failed("change", name))
    }

    /// Removes a link; answers whether it was there.
    pub(crate) async fn delete(&self, index: u32, name: &str) -> Result<bool, NetlinkError> {
        match self.handle.link().del(index).execute().await {
            Ok(()) => Ok(true),
            Err(rtnetlink::Error::NetlinkError(error)) if error.raw_code() == -libc::ENODEV => {
                Ok(false)
            }
            Err(error) => Err(failed("remove", name)(error)),
        }
    }

    /// All addresses of all links, in one dump.
    pub(crate) async fn addresses(&self) -> Result<Vec<Address>, NetlinkError> {
        let found: Vec<AddressMessage> = self
            .dump(|handle| handle.address().get().execute())
            .await
            .map_err(failed("list the addresses of", "all links"))?;
        Ok(found.iter().filter_map(address_of).collect())
    }

    /// Adds an address, usable at once: the host alone gives addresses on its bridges, so there is nothing to detect.
    pub(crate) async fn add_address(
        &self,
        index: u32,
        name: &str,
        address: (IpAddr, u8),
    ) -> Result<(), NetlinkError> {
        let mut request = self.handle.address().add(index, address.0, address.1);
        if address.0.is_ipv6() {
            request.message_mut().header.flags |= AddressHeaderFlags::Nodad;
        }
        match request.execute().await {
            Ok(()) => Ok(()),
            Err(rtnetlink::Error::NetlinkError(error)) if error.raw_code() == -libc::EEXIST => {
                Ok(())
            }
            Err(error) => Err(failed("add an address to", name)(error)),
        }
    }

    pub(crate) async fn remove_address(
        &self,
        name: &str,
        address: Address,
    ) -> Result<(), NetlinkError> {
        let mut message = AddressMessage::default();
        message.header.index = address.index;
        message.header.prefix_len = address.prefix_len;
        message.header.family =
            if address.address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        message.attributes.push(AddressAttribute::Local(address.address));
        message.attributes.push(AddressAttribute::Address(address.address));
        match self.handle.address().del(message).execute().await {
            Ok(()) => Ok(()),
            Err(rtnetlink::Error::NetlinkError(error))
                if error.raw_code() == -libc::EADDRNOTAVAIL =>
            {
                Ok(())
            }
            Err(error) => Err(failed("remove an address from", name)(error)),
        }
    }

    /// The host's own unicast routes and addresses, without default routes and what every host has.
    pub(crate) async fn routes(&self) -> Result<Vec<Route>, NetlinkError> {
        let mut routes = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut message = RouteMessage::default();
            message.header.address_family = family;
            let found: Vec<RouteMessage> = self
                .dump(move |handle| handle.route().get(message).execute())
                .await
                .map_err(failed("list the routes of", "the host"))?;
            routes.extend(found.iter().filter_map(route_of));
        }
        Ok(routes)
    }
}

fn failed<'a>(
    operation: &'static str,
    link: &'a str,
) -> impl Fn(rtnetlink::Error) -> NetlinkError + 'a {
    move |error| {
        #[expect(
            clippy::wildcard_enum_match_arm,
            reason = "a foreign enumeration; only one has a kernel's code"
        )]
        match error {
            rtnetlink::Error::NetlinkError(message) => NetlinkError::Request {
                operation,
                link: link.to_owned(),
                source: std::io::Error::from_raw_os_error(message.raw_code().abs()),
            },
            other => {
                NetlinkError::Lost { operation, link: link.to_owned(), what: other.to_string() }
            }
        }
    }
}

/// A link as a message describes it.
pub(crate) fn link_of(message: &LinkMessage) -> Link {
    let mut link = Link {
        index: message.header.index,
        name: String::new(),
        alias: None,
        mac: None,
        mtu: 0,
        up: message.header.flags.contains(LinkFlags::Up),
        controller: None,
        kind: LinkKind::Other,
    };
    for attribute in &message.attributes {
        #[expect(clippy::wildcard_enum_match_arm, reason = "a foreign enumeration of dozens")]
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::IfAlias(alias) => link.alias = Some(alias.clone()),
            LinkAttribute::Address(bytes) => link.mac = bytes.as_slice().try_into().ok(),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::Controller(index) => {
                link.controller = Some(*index).filter(|index| *index != 0);
            }
            LinkAttribute::LinkInfo(infos) => link.kind = kind_of(infos),
            _ => {}
        }
    }
    link
}

fn kind_of(infos: &[LinkInfo]) -> LinkKind {
    let is = |wanted: &InfoKind| {
        infos.iter().any(|info| matches!(info, LinkInfo::Kind(kind) if kind == wanted))
    };
    let data = infos
        .iter()
        .find_map(|info| if let LinkInfo::Data(data) = info { Some(data) } else { None });
    if is(&InfoKind::Bridge) {
        let options =
            if let Some(InfoData::Bridge(options)) = data { options.as_slice() } else { &[] };
        let v4 = options.iter().any(|option| matches!(option, InfoBridge::NfCallIpTables(true)));
        let v6 = options.iter().any(|option| matches!(option, InfoBridge::NfCallIp6Tables(true)));
        let vlan_filtering =
            options.iter().any(|option| matches!(option, InfoBridge::VlanFiltering(true)));
        LinkKind::Bridge { nf_call: v4 && v6, vlan_filtering }
    } else if is(&InfoKind::Tun) {
        let owner = if let Some(InfoData::Tun(values)) = data {
            values.iter().find(|value| value.kind() == IFLA_TUN_OWNER).and_then(|value| {
                let mut bytes = [0_u8; 4];
                (value.value_len() == bytes.len()).then(|| {
                    value.emit_value(&mut bytes);
                    u32::from_ne_bytes(bytes)
                })
            })
        } else {
            None
        };
        LinkKind::Tun { owner }
    } else {
        LinkKind::Other
    }
}

fn address_of(message: &AddressMessage) -> Option<Address> {
    let find = |local: bool| {
        message.attributes.iter().find_map(|attribute| {
            #[expect(clippy::wildcard_enum_match_arm, reason = "a foreign enumeration")]
            match attribute {
                AddressAttribute::Local(address) if local => Some(*address),
                AddressAttribute::Address(address) if !local => Some(*address),
                _ => None,
            }
        })
    };
    Some(Address {
        index: message.header.index,
        address: find(true).or_else(|| find(false))?,
        prefix_len: message.header.prefix_len,
        link_local: message.header.scope == AddressScope::Link,
    })
}

fn route_of(message: &RouteMessage) -> Option<Route> {
    if !matches!(message.header.kind, RouteType::Unicast | RouteType::Local) {
        return None;
    }
    let mut to = None;
    let mut output = None;
    for attribute in &message.attributes {
        #[expect(clippy::wildcard_enum_match_arm, reason = "a foreign enumeration")]
        match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(address)) => {
                to = Some(IpAddr::from(*address));
            }
            RouteAttribute::Destination(RouteAddress::Inet6(address)) => {
                to = Some(IpAddr::from(*address));
            }
            RouteAttribute::Oif(index) => output = Some(*index),
            _ => {}
        }
    }
    // A default route has no destination; loopback and link-local ranges are no `IpCidr`.
    let to = IpCidr::new(to?, message.header.destination_prefix_length).ok()?;
    Some(Route { to, output })
}

/// The helper address of a network without a gateway: the DHCP server needs one on its link. Of the IPv4 link-local range,
/// in its upper quarter (RFC 3927 keeps only the first and last 256 addresses back), one a zone, as a /32.
pub(crate) const fn helper_address(zone: u16) -> Ipv4Addr {
    let [high, low] = zone.to_be_bytes();
    Ipv4Addr::new(169, 254, 192 | (high & 0x1f), low)
}

/// The link-local address that a guest makes of its MAC address (RFC 4291 appendix A).
pub(crate) fn link_local_of(mac: [u8; 6]) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac;
    let word = |high: u8, low: u8| u16::from_be_bytes([high, low]);
    Ipv6Addr::new(0xfe80, 0, 0, 0, word(a ^ 2, b), word(c, 0xff), word(0xfe, d), word(e, f))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guests_link_local_address_is_made_of_its_mac() {
        let address = link_local_of([0x02, 0, 0, 0, 0x09, 0x01]);
        assert_eq!(address, "fe80::ff:fe00:901".parse::<Ipv6Addr>().unwrap());
    }
}
