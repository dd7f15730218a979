//! What a whole spec changes about the devices of a VM: pure.

use drivers_api::{DiskSpec, IfName, NicHandle, VolumeId};

use crate::record::{Devices, DiskEntry, NicEntry};

/// The devices that a VM is to have at its next start: those that stay keep their ports, so that the guest finds them in
/// the same place.
pub(crate) fn merge(
    had: &Devices,
    runs: Option<&Devices>,
    disks: &[DiskSpec],
    nics: &[NicHandle],
) -> Devices {
    let mut merged = Devices::default();
    let places = |devices: &Devices, disk: &DiskSpec| {
        devices
            .disks
            .iter()
            .find(|entry| entry.disk.volume_uuid == disk.volume_uuid)
            .map(|entry| entry.port)
    };
    let nic_places = |devices: &Devices, nic: &NicHandle| {
        devices.nics.iter().find(|entry| entry.nic.device == nic.device).map(|entry| entry.port)
    };
    let disk_ports: Vec<Option<u16>> = disks
        .iter()
        .map(|disk| runs.and_then(|runs| places(runs, disk)).or_else(|| places(had, disk)))
        .collect();
    let nic_ports: Vec<Option<u16>> = nics
        .iter()
        .map(|nic| runs.and_then(|runs| nic_places(runs, nic)).or_else(|| nic_places(had, nic)))
        .collect();
    let mut taken: Vec<u16> = disk_ports.iter().chain(&nic_ports).flatten().copied().collect();
    taken.extend(runs.into_iter().flat_map(Devices::ports));
    let mut place = |kept: Option<u16>| {
        let port = kept.unwrap_or_else(|| {
            (0..u16::MAX).find(|port| !taken.contains(port)).unwrap_or(u16::MAX)
        });
        taken.push(port);
        port
    };
    for (disk, kept) in disks.iter().zip(disk_ports) {
        let port = place(kept);
        merged.disks.push(DiskEntry { disk: disk.clone(), port, detaching: false });
    }
    for (nic, kept) in nics.iter().zip(nic_ports) {
        let port = place(kept);
        merged.nics.push(NicEntry { nic: nic.clone(), port, detaching: false });
    }
    merged
}

/// What is to be unplugged from and plugged into a running VM, in this order. A device that is there with other properties
/// stays as it is until the next start.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) detach_disks: Vec<VolumeId>,
    pub(crate) detach_nics: Vec<IfName>,
    pub(crate) attach_disks: Vec<DiskSpec>,
    pub(crate) attach_nics: Vec<NicHandle>,
}

/// Compares what runs with what is wanted.
pub(crate) fn live(runs: &Devices, disks: &[DiskSpec], nics: &[NicHandle]) -> Live {
    let wants_disk = |volume: VolumeId| disks.iter().any(|disk| disk.volume_uuid == volume);
    let wants_nic = |device: &IfName| nics.iter().any(|nic| nic.device == *device);
    let has_disk = |disk: &DiskSpec| {
        runs.disks.iter().any(|has| has.disk.volume_uuid == disk.volume_uuid && has.disk != *disk)
    };
    let has_nic = |nic: &NicHandle| {
        runs.nics.iter().any(|has| has.nic.device == nic.device && has.nic != *nic)
    };
    Live {
        detach_disks: runs
            .disks
            .iter()
            .map(|entry| entry.disk.volume_uuid)
            .filter(|volume| !wants_disk(*volume))
            .collect(),
        detach_nics: runs
            .nics
            .iter()
            .map(|entry| entry.nic.device.clone())
            .filter(|device| !wants_nic(device))
            .collect(),
        attach_disks: disks.iter().filter(|disk| !has_disk(disk)).cloned().collect(),
        attach_nics: nics.iter().filter(|nic| !has_nic(nic)).cloned().collect(),
    }
}

#[cfg(test)]
mod tests {
    use drivers_api::{Backing, DiskFormat};
    use proptest::prelude::*;

    use super::*;

    fn disk(number: u8, bus: bool) -> DiskSpec {
        let volume = format!("00000000-0000-0000-0000-0000000000{number:02x}").parse().unwrap();
        let backing = Backing::File { path: "/d".parse().unwrap(), format: DiskFormat::Raw };
        let mut disk = DiskSpec::new(format!("d{number}").parse().unwrap(), volume, backing);
        disk.read_only = bus;
        disk
    }

    fn nic(number: u8) -> NicHandle {
        NicHandle::new(
            format!("n{number}").parse().unwrap(),
            format!("10000000-0000-0000-0000-0000000000{number:02x}").parse().unwrap(),
            format!("tap{number}").parse().unwrap(),
            format!("02:00:00:00:00:{number:02x}").parse().unwrap(),
        )
    }

    #[test]
    fn a_device_that_stays_keeps_its_port_and_a_new_one_takes_a_free_one() {
        let first = merge(&Devices::default(), None, &[disk(1, false), disk(2, false)], &[nic(1)]);
        assert_eq!(first.ports().collect::<Vec<_>>(), [0, 1, 2]);
        let second = merge(&first, None, &[disk(2, false), disk(3, false)], &[nic(1)]);
        assert_eq!(second.ports().collect::<Vec<_>>(), [1, 0, 2]);
    }

    #[test]
    fn a_changed_disk_is_left_for_the_next_start() {
        let runs = merge(&Devices::default(), None, &[disk(1, false)], &[]);
        let plan = live(&runs, &[disk(1, true)], &[]);
        assert_eq!(plan, Live::default());
    }

    proptest! {
        #[test]
        fn ports_are_never_shared(had in prop::collection::btree_set(1_u8..20, 0..8),
                                  wanted in prop::collection::btree_set(1_u8..20, 0..8)) {
            let specs = |set: &std::collections::BTreeSet<u8>| -> (Vec<_>, Vec<_>) {
                (set.iter().map(|n| disk(*n, false)).collect(), set.iter().map(|n| nic(*n)).collect())
            };
            let ((disks, nics), (disks2, nics2)) = (specs(&had), specs(&wanted));
            let had = merge(&Devices::default(), None, &disks, &nics);
            let merged = merge(&had, Some(&had), &disks2, &nics2);
            let mut ports: Vec<_> = merged.ports().collect();
            ports.sort_unstable();
            ports.dedup();
            prop_assert_eq!(ports.len(), disks2.len() + nics2.len());
            let plan = live(&had, &disks2, &nics2);
            for volume in &plan.detach_disks {
                prop_assert!(!merged.disks.iter().any(|entry| entry.disk.volume_uuid == *volume));
            }
        }
    }
}
