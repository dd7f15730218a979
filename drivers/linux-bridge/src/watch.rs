//! Tells of links and addresses of ours that changed or went.
//!
//! Which link is ours is in its alias, which the kernel's message has. A link that comes up as wanted tells nothing, so
//! that our own work causes no more than a hint at its start and end.

use drivers_api::{EventKind, HostEvent, HostId, NetworkId, ObjectRef, PortId};
use futures_util::StreamExt;
use host::events::EventHub;
use netlink_packet_core::NetlinkPayload;
use netlink_packet_route::RouteNetlinkMessage;
use rtnetlink::MulticastGroup;
use tokio::task::AbortHandle;

use crate::{
    names::{Kind, LinkMark},
    netlink::{Link, Netlink, NetlinkError, link_of},
};

/// Starts to watch the links of this node.
pub(crate) fn start(node: HostId, hub: &EventHub) -> Result<Vec<AbortHandle>, NetlinkError> {
    let groups = [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
    let (connection, handle, mut messages) = rtnetlink::new_multicast_connection(&groups)
        .map_err(|source| NetlinkError::Open { source })?;
    let reader = tokio::spawn(connection).abort_handle();
    let hub = hub.clone();
    let teller = tokio::spawn(async move {
        let mut bridges = Bridges { node, known: std::collections::HashMap::new() };
        match Netlink::new(handle).links().await {
            Ok(links) => links.iter().for_each(|link| bridges.learn(link)),
            Err(error) => {
                tracing::warn!(%error, "lost addresses of bridges that are there will not be seen at once");
            }
        }
        while let Some((message, _)) = messages.next().await {
            #[expect(clippy::wildcard_enum_match_arm, reason = "a foreign enumeration")]
            match message.payload {
                NetlinkPayload::InnerMessage(inner) => {
                    if let Some(event) = bridges.event_of(&inner) {
                        hub.publish(event);
                    }
                }
                NetlinkPayload::Overrun(_) => {
                    hub.publish(HostEvent::resync("notifications of links were lost"));
                }
                _ => {}
            }
        }
    });
    Ok(vec![reader, teller.abort_handle()])
}

/// Our bridges by index: an address's message names its link by index only.
#[derive(Debug)]
struct Bridges {
    node: HostId,
    known: std::collections::HashMap<u32, NetworkId>,
}

impl Bridges {
    /// The object of a link of ours.
    fn object_of(&self, link: &Link) -> Option<ObjectRef> {
        let mark = LinkMark::parse(link.alias.as_deref()?).filter(|mark| mark.node == self.node)?;
        Some(match mark.kind {
            Kind::Network => ObjectRef::Network(NetworkId::new(mark.object)),
            Kind::Port => ObjectRef::Port(PortId::new(mark.object)),
        })
    }

    fn learn(&mut self, link: &Link) {
        if let Some(ObjectRef::Network(network)) = self.object_of(link) {
            self.known.insert(link.index, network);
        }
    }

    fn event_of(&mut self, message: &RouteNetlinkMessage) -> Option<HostEvent> {
        #[expect(clippy::wildcard_enum_match_arm, reason = "a foreign enumeration of dozens")]
        match message {
            RouteNetlinkMessage::NewLink(message) => {
                let link = link_of(message);
                let object = self.object_of(&link)?;
                self.learn(&link);
                let is_loose = matches!(object, ObjectRef::Port(_)) && link.controller.is_none();
                (!link.up || is_loose).then(|| {
                    HostEvent::new(
                        object,
                        EventKind::Changed,
                        format!("the link {} is down or not in its bridge", link.name),
                    )
                })
            }
            RouteNetlinkMessage::DelLink(message) => {
                let link = link_of(message);
                self.known.remove(&link.index);
                Some(HostEvent::new(
                    self.object_of(&link)?,
                    EventKind::Gone,
                    format!("the link {} is gone", link.name),
                ))
            }
            RouteNetlinkMessage::DelAddress(message) => {
                let network = *self.known.get(&message.header.index)?;
                let text = "an address of the network's bridge is gone";
                Some(HostEvent::new(ObjectRef::Network(network), EventKind::Changed, text))
            }
            _ => None,
        }
    }
}
