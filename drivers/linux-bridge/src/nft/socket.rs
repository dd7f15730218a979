//! The kernel's own word on the ruleset: its generation, and who changed which tables.
//!
//! Each commit to the ruleset, whoever makes it, raises its generation by one. If the generation is the one after our last
//! commit, nothing can have changed, and nothing needs to be listed. Notifications (`NFNLGRP_NFTABLES`) say which tables a
//! commit touched.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};

/// `NFNL_SUBSYS_NFTABLES << 8` (`include/uapi/linux/netfilter/nfnetlink.h`).
const SUBSYSTEM: u16 = 10 << 8;
/// `NFT_MSG_NEWGEN`, `NFT_MSG_GETGEN` (`include/uapi/linux/netfilter/nf_tables.h`).
const NEWGEN: u16 = SUBSYSTEM | 15;
const GETGEN: u16 = SUBSYSTEM | 16;
/// `NFNLGRP_NFTABLES`.
const GROUP: u32 = 7;
/// `NLMSG_ERROR`, `NLM_F_REQUEST`.
const ERROR: u16 = 2;
const REQUEST: u16 = 1;
/// How many bytes of notifications may wait. What is beyond is lost, and costs a listing.
const BUFFER: usize = 64 << 20;
/// `struct nlmsghdr`, `struct nfgenmsg`.
const HEADER: usize = 16;
const FAMILY: usize = 4;

/// A commit that somebody made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Commit {
    /// The generation after it.
    pub(super) generation: u32,
    /// Whether it touched a table of our name.
    pub(super) touched: bool,
    /// Whether tables or chains came or went: a foreign policy may be another.
    pub(super) chains: bool,
    /// The process that made it.
    pub(super) process: String,
}

/// A look at what was notified.
#[derive(Debug, Default)]
pub(super) struct Notified {
    pub(super) commits: Vec<Commit>,
    /// Whether notifications were lost.
    pub(super) lost: bool,
}

/// Asks for the generation.
pub(super) struct GenerationSocket(Socket);

impl GenerationSocket {
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self(socket))
    }

    /// The generation now. The kernel answers within the call.
    pub(super) fn generation(&self) -> io::Result<u32> {
        let mut request = Vec::with_capacity(HEADER + FAMILY);
        request.extend(20_u32.to_ne_bytes());
        request.extend(GETGEN.to_ne_bytes());
        request.extend(REQUEST.to_ne_bytes());
        // Sequence number and port.
        request.extend([0; 8]);
        request.extend([0; FAMILY]);
        self.0.send(&request, 0)?;
        let (answer, _) = self.0.recv_from_full()?;
        for message in messages(&answer) {
            if message.kind == ERROR {
                let code =
                    message.payload.first_chunk::<4>().map_or(0, |code| i32::from_ne_bytes(*code));
                return Err(io::Error::from_raw_os_error(code.abs()));
            }
            if message.kind == NEWGEN
                && let Some(generation) = message.attribute(1).and_then(be32)
            {
                return Ok(generation);
            }
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "no generation in the kernel's answer"))
    }
}

/// Listens for commits.
pub(super) struct MonitorSocket {
    socket: Socket,
    /// The commit whose messages are being read: its end may come with the next datagram.
    open: Commit,
}

const fn empty() -> Commit {
    Commit { generation: 0, touched: false, chains: false, process: String::new() }
}

impl MonitorSocket {
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        socket.add_membership(GROUP)?;
        socket.set_non_blocking(true)?;
        let this = Self { socket, open: empty() };
        // A commit of a thousand ports notifies of some forty thousand objects, some 2 KiB of buffer each. As root this is
        // not bounded by rmem_max, and the memory is taken only while messages wait.
        rustix::net::sockopt::set_socket_recv_buffer_size_force(this.fd(), BUFFER)?;
        Ok(this)
    }

    /// Waits until there is something to read. Cancel-safe.
    pub(super) async fn readable(&self) -> io::Result<()> {
        host::readiness::readable(self.fd()).await
    }

    #[expect(unsafe_code, reason = "the socket type gives its descriptor as a number only")]
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the socket owns the descriptor and lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(self.socket.as_raw_fd()) }
    }

    /// Reads all that is there, without waiting.
    pub(super) fn drain(&mut self, own_table: &str) -> Notified {
        let mut notified = Notified::default();
        loop {
            match self.socket.recv_from_full() {
                Ok((bytes, _)) => self.take(&bytes, own_table, &mut notified),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return notified,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // ENOBUFS: the kernel could not keep up with us.
                    tracing::debug!(%error, "notifications of nftables were lost");
                    notified.lost = true;
                    self.open = empty();
                    if error.raw_os_error() != Some(libc::ENOBUFS) {
                        return notified;
                    }
                }
            }
        }
    }

    fn take(&mut self, bytes: &[u8], own_table: &str, notified: &mut Notified) {
        for message in messages(bytes) {
            if message.kind == NEWGEN {
                let mut commit = std::mem::replace(&mut self.open, empty());
                commit.generation = message.attribute(1).and_then(be32).unwrap_or_default();
                commit.process = message.attribute(3).map(text).unwrap_or_default();
                notified.commits.push(commit);
            } else if message.kind & 0xff00 == SUBSYSTEM {
                // The first attribute of every object is the table's name.
                if message.attribute(1).map(text).as_deref() == Some(own_table) {
                    self.open.touched = true;
                }
                // NEWTABLE, DELTABLE, NEWCHAIN, DELCHAIN.
                self.open.chains |= matches!(message.kind & 0xff, 0 | 2 | 3 | 5);
            }
        }
    }
}

struct Message<'a> {
    kind: u16,
    payload: &'a [u8],
}

impl Message<'_> {
    /// The bytes of an attribute (`struct nlattr`), after `struct nfgenmsg`.
    fn attribute(&self, wanted: u16) -> Option<&[u8]> {
        let mut rest = self.payload.get(FAMILY..)?;
        loop {
            let length = usize::from(u16::from_ne_bytes(*rest.first_chunk()?));
            let kind = u16::from_ne_bytes(*rest.get(2..)?.first_chunk()?) & 0x3fff;
            let value = rest.get(4..length)?;
            if kind == wanted {
                return Some(value);
            }
            rest = rest.get(length.next_multiple_of(4)..)?;
        }
    }
}

fn be32(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
}

fn messages(mut bytes: &[u8]) -> Vec<Message<'_>> {
    let mut found = Vec::new();
    while let Some(length) = bytes.first_chunk::<4>() {
        let length = usize::try_from(u32::from_ne_bytes(*length)).unwrap_or(usize::MAX);
        let (Some(kind), Some(payload)) =
            (bytes.get(4..).and_then(|rest| rest.first_chunk::<2>()), bytes.get(HEADER..length))
        else {
            break;
        };
        found.push(Message { kind: u16::from_ne_bytes(*kind), payload });
        match bytes.get(length.next_multiple_of(4)..) {
            Some(rest) => bytes = rest,
            None => break,
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cut_and_odd_messages_are_not_read_beyond_their_end() {
        for length in 0..40_u32 {
            let mut bytes = length.to_ne_bytes().to_vec();
            bytes.extend([0xff; 20]);
            for message in messages(&bytes) {
                assert_eq!(message.attribute(1), None);
            }
        }
    }
}
