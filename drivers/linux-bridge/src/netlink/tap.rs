//! Makes a tap by `ioctl`: rtnetlink cannot (`EOPNOTSUPP` for a link of kind `tun`).
//!
//! A tap lives as long as its descriptor until it is made persistent. So it gets its mark first and is made persistent
//! last: a crash between leaves nothing.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use rustix::fs::{Mode, OFlags};

use super::NetlinkError;

/// `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR` (`include/uapi/linux/if_tun.h`).
const TAP: u16 = 0x0002 | 0x1000 | 0x4000;
/// `IFF_TUN_EXCL`: fail when a link of this name is there.
const EXCLUSIVE: u16 = 0x8000;

/// `struct ifreq` (`include/uapi/linux/if.h`), as `TUNSETIFF` uses it.
#[repr(C)]
struct IfReq {
    name: [u8; libc::IFNAMSIZ],
    flags: u16,
    rest: [u8; 22],
}

/// A tap that this process holds open.
#[derive(Debug)]
pub(crate) struct Tap {
    fd: OwnedFd,
    name: String,
}

impl Tap {
    /// Makes a tap that is gone when it is dropped. Blocks.
    pub(crate) fn make(name: &str) -> Result<Self, NetlinkError> {
        Self::open(name, TAP | EXCLUSIVE, "make")
    }

    /// Opens the tap that is there. Blocks.
    pub(crate) fn attach(name: &str) -> Result<Self, NetlinkError> {
        Self::open(name, TAP, "open")
    }

    fn open(name: &str, flags: u16, operation: &'static str) -> Result<Self, NetlinkError> {
        let fail =
            |source: io::Error| NetlinkError::Tap { operation, link: name.to_owned(), source };
        let fd = rustix::fs::open("/dev/net/tun", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| fail(error.into()))?;
        let mut request = IfReq { name: [0; libc::IFNAMSIZ], flags, rest: [0; 22] };
        if name.len() >= request.name.len() {
            return Err(fail(io::ErrorKind::InvalidInput.into()));
        }
        for (to, from) in request.name.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        call::set_interface(&fd, &mut request).map_err(fail)?;
        Ok(Self { fd, name: name.to_owned() })
    }

    /// Lets a user open the tap. Blocks.
    pub(crate) fn set_owner(&self, uid: u32) -> Result<(), NetlinkError> {
        call::set_value(&self.fd, libc::TUNSETOWNER, uid.into())
            .map_err(self.fail("give to its user"))
    }

    /// Keeps the tap when it is dropped. Blocks.
    pub(crate) fn persist(&self) -> Result<(), NetlinkError> {
        call::set_value(&self.fd, libc::TUNSETPERSIST, 1).map_err(self.fail("keep"))
    }

    fn fail(&self, operation: &'static str) -> impl FnOnce(io::Error) -> NetlinkError + '_ {
        move |source| NetlinkError::Tap { operation, link: self.name.clone(), source }
    }
}

#[expect(unsafe_code, reason = "the tun driver's ioctls have no safe wrapper")]
mod call {
    use super::{AsRawFd, IfReq, OwnedFd, io};

    pub(super) fn set_interface(fd: &OwnedFd, request: &mut IfReq) -> io::Result<()> {
        // SAFETY: the descriptor is open. `IfReq` has the size (40 bytes) and layout of `struct ifreq`, which the kernel
        // reads and writes within this call only.
        let answer =
            unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, std::ptr::from_mut(request)) };
        if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// For `TUNSETOWNER` and `TUNSETPERSIST`, whose argument is a number and no pointer (`drivers/net/tun.c`).
    pub(super) fn set_value(
        fd: &OwnedFd,
        request: libc::Ioctl,
        value: libc::c_ulong,
    ) -> io::Result<()> {
        // SAFETY: the descriptor is open, and the kernel takes the argument as a number.
        let answer = unsafe { libc::ioctl(fd.as_raw_fd(), request, value) };
        if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
