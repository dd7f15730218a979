//! Who calls: the kernel's word on the process at the other end of the socket.

use std::{
    io,
    os::fd::AsFd,
    pin::Pin,
    task::{Context, Poll},
};

use drivers_api::{Error, ErrorKind};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
};
use tonic::{Request, Status, transport::server::Connected};

use super::convert::faults_of;

/// A connected process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its user.
    pub uid: u32,
    /// Its process, for logs.
    pub pid: Option<i32>,
    /// Whether it may write: root, the agent's own user, or a member of the configured group.
    pub may_write: bool,
}

impl Peer {
    fn of(stream: &UnixStream, write_group: Option<u32>) -> io::Result<Self> {
        let cred = stream.peer_cred()?;
        let own = rustix::process::geteuid().as_raw();
        let mut may_write = cred.uid() == 0 || cred.uid() == own;
        if !may_write && let Some(group) = write_group {
            may_write = cred.gid() == group || groups::of_peer(stream.as_fd())?.contains(&group);
        }
        Ok(Self { uid: cred.uid(), pid: cred.pid(), may_write })
    }
}

/// The caller of a request, if it may write.
pub(super) fn writer<T>(request: &Request<T>, operation: &'static str) -> Result<Peer, Status> {
    let peer = request.extensions().get::<Peer>().cloned();
    match peer {
        Some(peer) if peer.may_write => Ok(peer),
        Some(Peer { uid, .. }) => Err(faults_of(
            Error::new(
                ErrorKind::Denied,
                operation,
                "the node",
                format!("user {uid} may read only"),
            )
            .with_remedy("ask as root, or as a member of the group that write_group names"),
        )),
        None => Err(Status::internal("the caller is not known")),
    }
}

/// A connection with its peer.
#[derive(Debug)]
pub(super) struct PeerStream {
    stream: UnixStream,
    peer: Peer,
}

impl PeerStream {
    pub(super) fn new(stream: UnixStream, write_group: Option<u32>) -> io::Result<Self> {
        let peer = Peer::of(&stream, write_group)?;
        Ok(Self { stream, peer })
    }
}

impl Connected for PeerStream {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// The supplementary groups of a socket's peer, as the kernel kept them at the connect.
#[expect(unsafe_code, reason = "no safe wrapper of SO_PEERGROUPS is known")]
mod groups {
    use std::{
        io,
        os::fd::{AsRawFd, BorrowedFd},
    };

    /// The most groups of a process (`NGROUPS_MAX` of `include/uapi/linux/limits.h`).
    const MOST: usize = 65_536;

    pub(super) fn of_peer(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
        let mut groups = vec![0_u32; 64];
        loop {
            let bytes = size_of_val(groups.as_slice());
            let mut length = libc::socklen_t::try_from(bytes).map_err(io::Error::other)?;
            // SAFETY: the descriptor is open for the borrow's lifetime; `groups` is writable for `length` bytes, of which
            // the kernel writes at most `length` (unix(7), SO_PEERGROUPS of socket(7)) as gid_t, which is u32.
            let answer = unsafe {
                libc::getsockopt(
                    socket.as_raw_fd(),
                    libc::SOL_SOCKET,
                    libc::SO_PEERGROUPS,
                    groups.as_mut_ptr().cast(),
                    &raw mut length,
                )
            };
            let count = usize::try_from(length).unwrap_or_default() / size_of::<u32>();
            if answer == 0 {
                groups.truncate(count);
                return Ok(groups);
            }
            let error = io::Error::last_os_error();
            // ERANGE: the kernel put the needed length into `length`.
            if error.raw_os_error() != Some(libc::ERANGE) || count > MOST || count <= groups.len() {
                return Err(error);
            }
            groups.resize(count, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_kernel_tells_user_and_groups_of_the_other_end() {
        let (one, _other) = UnixStream::pair().unwrap();
        let peer = Peer::of(&one, None).unwrap();
        assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
        assert!(peer.may_write, "the agent's own user may write");
        let mut own: Vec<u32> = rustix::process::getgroups()
            .unwrap()
            .into_iter()
            .map(rustix::process::Gid::as_raw)
            .collect();
        let mut told = groups::of_peer(one.as_fd()).unwrap();
        own.sort_unstable();
        told.sort_unstable();
        assert_eq!(own, told);
    }
}
