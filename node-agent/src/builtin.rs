//! The drivers that the agent has without an embedder's doing.

use std::{path::PathBuf, sync::Arc};

use driver_file_volume::{FileVolume, FileVolumeConfig};
use driver_linux_bridge::{BridgeConfig, LinuxBridge};
use driver_oci_image::{OciImage, OciImageConfig, RegistryCredentials};
use driver_qemu_kvm::{AccelChoice, QemuConfig, QemuKvm, UidRange};
use drivers_api::{HostId, Result};
use reconciler::Drivers;

use crate::{
    config::{Accel, Config, Registry},
    doctor,
};

/// Which drivers an agent opens by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum BuiltIn {
    /// Those for a real host.
    #[default]
    Real,
    /// Reference drivers over a host in memory, for trying the agent itself.
    Reference,
    /// None.
    None,
}

/// The ids of the drivers for a real host.
pub(crate) const HYPERVISOR: &str = "qemu-kvm";
pub(crate) const NETWORK: &str = "linux-bridge";
pub(crate) const VOLUME: &str = "file-volume";
pub(crate) const IMAGE: &str = "oci-image";

/// Adds them to `drivers`; one that is there under the same id stays, and what is there stays the default.
pub(crate) async fn open(
    which: BuiltIn,
    config: &Config,
    id: HostId,
    hostname: &str,
    drivers: Drivers,
) -> Result<Drivers> {
    match which {
        BuiltIn::None => Ok(drivers),
        BuiltIn::Real => real(config, id, hostname, drivers).await,
        BuiltIn::Reference => {
            let host = conformance::reference::Host::with_node(id);
            Ok(drivers
                .hypervisor("reference", host.hypervisor())
                .network("reference", host.network())
                .volume("reference", host.volume())
                .image("reference", host.image()))
        }
    }
}

async fn real(
    config: &Config,
    id: HostId,
    hostname: &str,
    mut drivers: Drivers,
) -> Result<Drivers> {
    if drivers.find_hypervisor(Some(HYPERVISOR)).is_none() {
        let opened = QemuKvm::open(qemu(config, id, hostname)).await?;
        drivers = drivers.hypervisor(HYPERVISOR, Arc::new(opened));
    }
    if drivers.find_network(Some(NETWORK)).is_none() {
        let bridge = bridge(config, id, hostname);
        let opened = blocking(move || LinuxBridge::open(bridge)).await?;
        drivers = drivers.network(NETWORK, Arc::new(opened));
    }
    if drivers.find_volume(Some(VOLUME)).is_none() {
        let volume = FileVolumeConfig::new(id, hostname, config.volumes_dir());
        let opened = blocking(move || FileVolume::open(volume)).await?;
        drivers = drivers.volume(VOLUME, Arc::new(opened));
    }
    if drivers.find_image(Some(IMAGE)).is_none() {
        let image = image(config, id, hostname);
        let opened = blocking(move || OciImage::open(image)).await?;
        drivers = drivers.image(IMAGE, Arc::new(opened));
    }
    Ok(drivers)
}

async fn blocking<T: Send + 'static>(
    open: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    host::bound::blocking("open a driver on", open).await
}

fn qemu(config: &Config, id: HostId, hostname: &str) -> QemuConfig {
    let state: PathBuf = config.state_dir.join("qemu");
    let mut qemu = QemuConfig::new(id, hostname, state, config.run_dir.join("qemu"));
    qemu.az.clone_from(&config.az);
    if let Some(path) = doctor::find(&config.qemu.binary) {
        qemu.qemu = path;
    } else {
        // The driver tells of it when a VM is to start; until then the rest of the agent works.
        qemu.qemu.clone_from(&config.qemu.binary);
    }
    if let Some((code, vars)) = doctor::firmware(config) {
        qemu.firmware_code = code;
        qemu.firmware_vars = vars;
    }
    qemu.accel = match config.qemu.accel {
        Accel::Auto => AccelChoice::Auto,
        Accel::Kvm => AccelChoice::Kvm,
        Accel::Tcg => AccelChoice::Tcg,
    };
    qemu.allow_tcg = config.qemu.allow_tcg;
    let range = UidRange { base: config.qemu.uid_base, count: config.qemu.uid_count };
    // Only root can start a process as somebody else.
    qemu.uids = (range.base != 0 && rustix::process::geteuid().is_root()).then_some(range);
    qemu.slice = Some(config.qemu.slice.clone()).filter(|slice| !slice.is_empty());
    qemu
}

fn bridge(config: &Config, id: HostId, hostname: &str) -> BridgeConfig {
    let state: PathBuf = config.state_dir.join("network");
    let mut bridge = BridgeConfig::new(id, hostname, state, config.run_dir.join("network"));
    bridge.dnsmasq.clone_from(&config.network.dnsmasq);
    bridge.dnsmasq_user.clone_from(&config.network.dnsmasq_user);
    bridge.nft.clone_from(&config.network.nft);
    bridge.prefix.clone_from(&config.network.prefix);
    bridge
}

fn image(config: &Config, id: HostId, hostname: &str) -> OciImageConfig {
    let images = &config.images;
    let mut image = OciImageConfig::new(id, hostname, config.images_dir());
    image.insecure.clone_from(&images.insecure_registries);
    image.max_image_bytes = images.max_bytes;
    image.max_cache_bytes = Some(images.max_cache_bytes).filter(|bytes| *bytes > 0);
    image.reserve_bytes = images.reserve_bytes;
    image.concurrency = usize::try_from(images.concurrency).unwrap_or(1);
    image.extra_roots.clone_from(&images.extra_roots);
    image.file_roots.clone_from(&images.file_roots);
    image.token_hosts.clone_from(&images.token_hosts);
    let user =
        |one: &Registry| RegistryCredentials::new(&one.host, &one.username, one.password.clone());
    image.credentials = images.registry.iter().map(user).collect();
    image
}
