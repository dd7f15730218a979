//! Disks and NICs as QEMU takes them: pure, and the same for the command line and the monitor.
//!
//! Everything is JSON, so no name or path can end one option and begin another. Ids are built from UUIDs alone.

use drivers_api::{Backing, DiskBus, DiskFormat, DiskSpec, Error, ErrorKind, NicHandle, VolumeId};
use serde_json::{Value, json};

use crate::record::{DiskEntry, NicEntry};

/// The id of the PCI device of a disk: the disk itself, or the controller of its own that a SCSI disk has.
pub(crate) fn disk_id(volume: VolumeId) -> String {
    format!("disk-{volume}")
}

/// The id of a NIC, of its back-end, and the name of its descriptor.
pub(crate) fn nic_id(nic: &NicHandle) -> String {
    format!("nic-{}", nic.port_uuid)
}

/// The id of the PCI Express port with a number.
pub(crate) fn port_id(port: u16) -> String {
    format!("port{port}")
}

/// The name of a volume's block node. QEMU takes 31 bytes (`BDS.node_name` of include/block/block_int-common.h), fewer
/// than a UUID has in hexadecimal, so it is in base 36.
pub(crate) fn node_name(volume: VolumeId) -> String {
    let mut rest = u128::from_be_bytes(*volume.uuid().as_bytes());
    let mut digits = Vec::with_capacity(25);
    while rest > 0 {
        let digit = u8::try_from(rest % 36).unwrap_or_default();
        digits.push(char::from(if digit < 10 { b'0' + digit } else { b'a' + digit - 10 }));
        rest /= 36;
    }
    std::iter::once('v').chain(digits.into_iter().rev()).collect()
}

/// The serial number by which a guest can tell disks apart: virtio takes 20 bytes (`VIRTIO_BLK_ID_BYTES` of
/// `linux/virtio_blk.h`).
fn serial(volume: VolumeId) -> String {
    volume.to_string().chars().take(20).collect()
}

/// The buses of disks.
pub(crate) const BUSES: [DiskBus; 3] = [DiskBus::Virtio, DiskBus::Scsi, DiskBus::Nvme];

/// Checks that this driver can have the disk.
pub(crate) fn check_disk(disk: &DiskSpec) -> drivers_api::Result<()> {
    disk.validate()?;
    if !BUSES.contains(&disk.bus) {
        let reason = "the driver has virtio, scsi and nvme";
        return Err(Error::new(ErrorKind::Unsupported, "check", "disk", reason).with_field("bus"));
    }
    match &disk.backing {
        Backing::File { .. } | Backing::BlockDevice { .. } => Ok(()),
        Backing::Rbd { .. } | _ => Err(unsupported_backing()),
    }
}

fn unsupported_backing() -> Error {
    Error::new(ErrorKind::Unsupported, "check", "disk", "the driver opens files and block devices")
        .with_field("backing")
}

/// The block node of a disk. The format is given, never probed.
pub(crate) fn blockdev(disk: &DiskSpec) -> drivers_api::Result<Value> {
    let (format, protocol, path) = match &disk.backing {
        Backing::File { path, format: DiskFormat::Raw } => ("raw", "file", path),
        Backing::File { path, format: DiskFormat::Qcow2 } => ("qcow2", "file", path),
        Backing::BlockDevice { path } => ("raw", "host_device", path),
        Backing::File { .. } | Backing::Rbd { .. } | _ => return Err(unsupported_backing()),
    };
    Ok(json!({
        "driver": format,
        "node-name": node_name(disk.volume_uuid),
        "read-only": disk.read_only,
        "discard": "unmap",
        "file": {
            "driver": protocol,
            "filename": path.as_str(),
            "read-only": disk.read_only,
            "discard": "unmap",
        },
    }))
}

/// The devices of a disk, in the order in which they are plugged. A host that cannot write stops the guest instead of
/// failing its file systems.
pub(crate) fn disk_devices(entry: &DiskEntry) -> Vec<Value> {
    let disk = &entry.disk;
    let (id, bus) = (disk_id(disk.volume_uuid), port_id(entry.port));
    let (drive, serial) = (node_name(disk.volume_uuid), serial(disk.volume_uuid));
    let mut devices = match disk.bus {
        DiskBus::Scsi => vec![
            json!({"driver": "virtio-scsi-pci", "id": id, "bus": bus}),
            json!({
                "driver": "scsi-hd", "id": format!("lun-{}", disk.volume_uuid), "bus": format!("{id}.0"),
                "drive": drive, "serial": serial, "werror": "stop", "rerror": "stop",
            }),
        ],
        DiskBus::Nvme => {
            vec![json!({"driver": "nvme", "id": id, "bus": bus, "drive": drive, "serial": serial})]
        }
        // A bus of a later version of the contract is refused by `check_disk`.
        DiskBus::Virtio | _ => vec![json!({
            "driver": "virtio-blk-pci", "id": id, "bus": bus,
            "drive": drive, "serial": serial, "werror": "stop", "rerror": "stop",
        })],
    };
    if disk.boot
        && let Some(Value::Object(last)) = devices.last_mut()
    {
        last.insert("bootindex".to_owned(), json!(1));
    }
    devices
}

/// The back-end of a NIC over the descriptor of its tap. On the command line a descriptor is a number, on the monitor the
/// name that it was handed over under.
pub(crate) fn netdev(nic: &NicHandle, fd: &str, vhost: Option<&str>) -> Value {
    let mut netdev = json!({"type": "tap", "id": nic_id(nic), "fd": fd, "vhost": vhost.is_some()});
    if let (Some(vhost), Value::Object(fields)) = (vhost, &mut netdev) {
        fields.insert("vhostfd".to_owned(), json!(vhost));
    }
    netdev
}

/// The device of a NIC. Without a boot ROM: nothing boots from the network.
pub(crate) fn nic_device(entry: &NicEntry) -> Value {
    let id = nic_id(&entry.nic);
    let mut device = json!({
        "driver": "virtio-net-pci", "id": id, "netdev": id, "bus": port_id(entry.port),
        "mac": entry.nic.mac.to_string(), "romfile": "",
    });
    if let (Some(mtu), Value::Object(fields)) = (entry.nic.mtu_bytes, &mut device) {
        fields.insert("host_mtu".to_owned(), json!(mtu.get()));
    }
    device
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(path: &str) -> DiskSpec {
        let backing = Backing::File { path: path.parse().unwrap(), format: DiskFormat::Qcow2 };
        DiskSpec::new(
            "root".parse().unwrap(),
            "ffffffff-ffff-ffff-ffff-ffffffffffff".parse().unwrap(),
            backing,
        )
    }

    #[test]
    fn a_node_name_fits_and_is_one_to_one() {
        let all: VolumeId = "ffffffff-ffff-ffff-ffff-ffffffffffff".parse().unwrap();
        let one: VolumeId = "00000000-0000-0000-0000-000000000001".parse().unwrap();
        assert_eq!(node_name(one), "v1");
        assert_eq!(node_name(all), "vf5lxx1zz5pnorynqglhzmsp33");
        assert!(node_name(all).len() <= 31);
    }

    #[test]
    fn a_path_with_commas_and_options_stays_one_path() {
        let path = "/var/lib/agent/vol/d.qcow2,readonly=off,file=/etc/shadow";
        let node = blockdev(&disk(path)).unwrap();
        assert_eq!(node["file"]["filename"], path);
        assert_eq!(node["driver"], "qcow2");
    }

    #[test]
    fn a_scsi_disk_has_a_controller_of_its_own_behind_its_port() {
        let mut disk = disk("/d");
        disk.bus = DiskBus::Scsi;
        disk.boot = true;
        let devices = disk_devices(&DiskEntry { disk, port: 3, detaching: false });
        assert_eq!(devices[0]["bus"], "port3");
        assert_eq!(devices[1]["bus"], "disk-ffffffff-ffff-ffff-ffff-ffffffffffff.0");
        assert_eq!(devices[1]["bootindex"], 1);
    }
}
