//! Opens a tap by name, as a VMM does.

use std::{io, os::fd::OwnedFd};

use rustix::fs::{Mode, OFlags};

/// `struct ifreq` as far as `TUNSETIFF` uses it (`include/uapi/linux/if.h`): the name and the flags.
#[repr(C)]
struct IfReq {
    name: [u8; libc::IFNAMSIZ],
    flags: libc::c_short,
    rest: [u8; 22],
}

/// `IFF_TAP | IFF_NO_PI` (`include/uapi/linux/if_tun.h`): whole frames, without a header before them.
const TAP: libc::c_short = 0x1002;

/// Opens the tap of this name in the calling thread's namespace, and makes it when it is not there. The descriptor does
/// not block.
///
/// # Errors
/// When another program has it open, or the name is too long.
#[expect(unsafe_code, reason = "TUNSETIFF has no safe wrapper")]
pub(super) fn open(name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let fd = rustix::fs::open("/dev/net/tun", flags, Mode::empty())?;
    let mut request = IfReq { name: [0; libc::IFNAMSIZ], flags: TAP, rest: [0; 22] };
    if name.len() >= request.name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.name.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    let raw = std::os::fd::AsRawFd::as_raw_fd(&fd);
    // SAFETY: the descriptor is open, and `request` has the size and layout of `struct ifreq` (40 bytes), which the kernel
    // reads and writes within this call only.
    if unsafe { libc::ioctl(raw, libc::TUNSETIFF as libc::Ioctl, &raw mut request) } == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}
