//! Opens a tap that the network driver made, for the VMM to inherit: it then needs no privilege over the host's network.

use std::{fs::File, io, os::fd::AsRawFd};

use drivers_api::IfName;

/// Why a tap could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TapError {
    /// There is no such device.
    #[error("there is no tap {0}")]
    Absent(IfName),
    /// Another process has it.
    #[error("the tap {0} is in use by another process")]
    Busy(IfName),
    /// It is no persistent tap.
    #[error("the device {0} is no persistent tap")]
    NoTap(IfName),
    /// The kernel refused.
    #[error("cannot {doing} for the tap {device}")]
    Kernel {
        doing: &'static str,
        device: IfName,
        #[source]
        source: io::Error,
    },
}

/// Opens the tap. It must be there and persistent: none is made.
pub(crate) fn open(device: &IfName) -> Result<File, TapError> {
    let kernel = |doing| move |source| TapError::Kernel { doing, device: device.clone(), source };
    let tun = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .map_err(kernel("open /dev/net/tun"))?;
    // TUNSETIFF makes what is not there, so the name is looked up first.
    match rustix::net::netdevice::name_to_index(
        &tun_socket().map_err(kernel("open a socket"))?,
        device.as_str(),
    ) {
        Ok(_) => {}
        Err(rustix::io::Errno::NODEV) => return Err(TapError::Absent(device.clone())),
        Err(error) => return Err(kernel("look up the device")(error.into())),
    }
    match ioctl::take(&tun, device.as_str()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            return Err(TapError::Busy(device.clone()));
        }
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            return Err(TapError::NoTap(device.clone()));
        }
        Err(error) => return Err(kernel("take the device")(error)),
    }
    // One that vanished between look-up and take was made anew just now, and goes with this descriptor.
    if !ioctl::is_persistent(&tun).map_err(kernel("read the flags"))? {
        return Err(TapError::NoTap(device.clone()));
    }
    Ok(tun)
}

/// The in-kernel back-end for virtio queues, where the host has it.
pub(crate) fn open_vhost() -> Option<File> {
    File::options().read(true).write(true).open("/dev/vhost-net").ok()
}

fn tun_socket() -> io::Result<std::os::fd::OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    Ok(socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

#[expect(unsafe_code, reason = "no crate of ours wraps the ioctls of linux/if_tun.h")]
mod ioctl {
    use super::{AsRawFd, File, io};

    /// `IFF_PERSIST` of `linux/if_tun.h`.
    const IFF_PERSIST: libc::c_int = 0x0800;
    /// `TUNSETIFF` and `TUNGETIFF` of `linux/if_tun.h`: `_IOW('T', 202, int)` and `_IOR('T', 210, unsigned int)`.
    const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
    const TUNGETIFF: libc::Ioctl = 0x8004_54d2;

    fn request(name: &str, flags: libc::c_int) -> libc::ifreq {
        let mut ifr_name = [0; libc::IFNAMSIZ];
        for (to, from) in ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
            *to = libc::c_char::from_ne_bytes([from]);
        }
        let flags = libc::c_short::try_from(flags).unwrap_or_default();
        libc::ifreq { ifr_name, ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: flags } }
    }

    /// Binds the descriptor to the tap.
    pub(super) fn take(tun: &File, name: &str) -> io::Result<()> {
        let mut request = request(name, libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR);
        // SAFETY: the descriptor is open, and TUNSETIFF reads and writes one whole `ifreq`.
        let answer = unsafe { libc::ioctl(tun.as_raw_fd(), TUNSETIFF, &raw mut request) };
        if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Whether the tap outlives its descriptors.
    pub(super) fn is_persistent(tun: &File) -> io::Result<bool> {
        let mut request = request("", 0);
        // SAFETY: the descriptor is open, and TUNGETIFF writes one whole `ifreq`.
        let answer = unsafe { libc::ioctl(tun.as_raw_fd(), TUNGETIFF, &raw mut request) };
        if answer == -1 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: TUNGETIFF has set this member of the union.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        Ok(libc::c_int::from(flags) & IFF_PERSIST != 0)
    }
}
