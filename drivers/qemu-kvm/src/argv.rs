//! The command line of a VMM: pure, from what is to run and the numbers of the descriptors that it inherits.

use drivers_api::{BootFiles, VmId};
use serde_json::{Value, json};

use crate::{devices, paths::MONITORS, record::Running};

/// How many PCI Express ports share a slot: the functions of one.
const PORTS_PER_SLOT: u16 = 8;
/// The slot of the first PCI Express ports; 0 is the host bridge, 1 the random number generator.
const FIRST_SLOT: u16 = 2;
/// The slot of the seed; 31 is the south bridge.
const SEED_SLOT: u16 = 0x1d;
/// The most PCI Express ports: the slots between.
pub(crate) const MAX_PORTS: u16 = (SEED_SLOT - FIRST_SLOT) * PORTS_PER_SLOT;

/// The numbers of the descriptors that a VMM inherits.
#[derive(Clone, Debug, Default)]
pub(crate) struct Numbers {
    pub(crate) qmp: [i32; MONITORS],
    pub(crate) serial: i32,
    pub(crate) journal: i32,
    /// The kernel or the unified kernel image.
    pub(crate) kernel: Option<i32>,
    pub(crate) initrd: Option<i32>,
    pub(crate) nvram: Option<i32>,
    pub(crate) seed: Option<i32>,
    /// For each NIC, in order: its tap, and the in-kernel back-end where there is one.
    pub(crate) taps: Vec<(i32, Option<i32>)>,
}

/// Whether the VM boots through UEFI firmware.
pub(crate) const fn needs_firmware(files: Option<&BootFiles>) -> bool {
    !matches!(files, Some(BootFiles::Kernel { .. }))
}

#[derive(Default)]
struct Args(Vec<String>);

impl Args {
    fn flag(&mut self, name: &str) {
        self.0.push(name.to_owned());
    }
    fn option(&mut self, name: &str, value: impl Into<String>) {
        self.0.push(name.to_owned());
        self.0.push(value.into());
    }
    fn json(&mut self, name: &str, value: &Value) {
        self.option(name, value.to_string());
    }
}

/// The arguments after the program's name.
pub(crate) fn build(
    vm: VmId,
    running: &Running,
    firmware_code: &str,
    numbers: &Numbers,
) -> drivers_api::Result<Vec<String>> {
    let mut args = Args::default();
    machine(&mut args, vm, running);
    channels(&mut args, numbers);
    boot(&mut args, running, firmware_code, numbers);
    for port in 0..running.ports {
        args.json("-device", &root_port(port));
    }
    for entry in &running.devices.disks {
        args.json("-blockdev", &devices::blockdev(&entry.disk)?);
        for device in devices::disk_devices(entry) {
            args.json("-device", &device);
        }
    }
    for (entry, (tap, vhost)) in running.devices.nics.iter().zip(&numbers.taps) {
        let vhost = vhost.map(|fd| fd.to_string());
        args.json("-netdev", &devices::netdev(&entry.nic, &tap.to_string(), vhost.as_deref()));
        args.json("-device", &devices::nic_device(entry));
    }
    Ok(args.0)
}

fn machine(args: &mut Args, vm: VmId, running: &Running) {
    // The VM's name is free text and stays out: people find the process by its UUID.
    args.option("-name", format!("bcd-{vm}"));
    args.option("-uuid", vm.to_string());
    for flag in ["-nodefaults", "-no-user-config", "-S"] {
        args.flag(flag);
    }
    args.option("-display", "none");
    args.option(
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    );
    let mut machine = "q35,vmport=off,smm=off,dump-guest-core=off".to_owned();
    if needs_firmware(running.spec.boot.files.as_ref()) {
        machine.push_str(",pflash0=firmware-code,pflash1=firmware-vars");
    }
    args.option("-machine", machine);
    let (accel, cpu) = match running.accel {
        crate::record::Accel::Kvm => ("kvm", "host"),
        crate::record::Accel::Tcg => ("tcg,thread=multi", "max"),
    };
    args.option("-accel", accel);
    args.option("-cpu", cpu);
    args.option("-smp", format!("cpus={}", running.spec.cpu_count));
    args.option("-m", format!("size={}M", running.spec.memory_mib));
    args.option("-rtc", "base=utc");
    args.option("-object", "rng-builtin,id=rng");
    args.json(
        "-device",
        &json!({"driver": "virtio-rng-pci", "rng": "rng", "bus": "pcie.0", "addr": "0x1"}),
    );
}

fn channels(args: &mut Args, numbers: &Numbers) {
    for (monitor, fd) in numbers.qmp.iter().enumerate() {
        args.option("-chardev", format!("socket,id=qmp{monitor},server=on,wait=off,fd={fd}"));
        args.option("-mon", format!("chardev=qmp{monitor},mode=control"));
    }
    args.option("-add-fd", format!("fd={},set={}", numbers.journal, numbers.journal));
    args.option(
        "-chardev",
        format!(
            "socket,id=serial,server=on,wait=off,fd={},logfile=/dev/fdset/{},logappend=on",
            numbers.serial, numbers.journal
        ),
    );
    args.option("-serial", "chardev:serial");
}

fn boot(args: &mut Args, running: &Running, firmware_code: &str, numbers: &Numbers) {
    let boot = &running.spec.boot;
    if needs_firmware(boot.files.as_ref()) {
        args.json(
            "-blockdev",
            &json!({
                "driver": "raw", "node-name": "firmware-code", "read-only": true,
                "file": {"driver": "file", "filename": firmware_code, "read-only": true},
            }),
        );
        if let Some(nvram) = numbers.nvram {
            fdset_node(args, "firmware-vars", nvram, false);
        }
    }
    // Read by QEMU before it greets, from the inherited descriptor: no path and no permission of the VMM's uid.
    let inherited = |fd: i32| format!("/proc/self/fd/{fd}");
    if let Some(kernel) = numbers.kernel {
        args.option("-kernel", inherited(kernel));
    }
    if let Some(initrd) = numbers.initrd {
        args.option("-initrd", inherited(initrd));
    }
    if let Some(line) = &boot.cmdline {
        args.option("-append", line.clone());
    }
    if let Some(seed) = numbers.seed {
        fdset_node(args, "seed", seed, true);
        // Behind a port of its own, after all others: a guest numbers its disks by bus, and /dev/vda is the first of the
        // operator's. A device on the root bus would come before them.
        args.json(
            "-device",
            &json!({
                "driver": "pcie-root-port", "id": "seed-port", "bus": "pcie.0", "chassis": 255,
                "addr": format!("{SEED_SLOT:#x}"), "io-reserve": 0,
            }),
        );
        args.json(
            "-device",
            &json!({
                "driver": "virtio-blk-pci", "id": "seed", "drive": "seed", "serial": "CIDATA",
                "bus": "seed-port",
            }),
        );
    }
}

/// A raw block node over an inherited descriptor.
fn fdset_node(args: &mut Args, name: &str, fd: i32, read_only: bool) {
    args.option("-add-fd", format!("fd={fd},set={fd}"));
    let filename = format!("/dev/fdset/{fd}");
    args.json(
        "-blockdev",
        &json!({
            "driver": "raw", "node-name": name, "read-only": read_only,
            "file": {"driver": "file", "filename": filename, "read-only": read_only},
        }),
    );
}

/// A PCI Express port into which one device can be plugged while the VM runs. Virtio needs no I/O ports, of which there are too
/// few for all: none are reserved.
fn root_port(port: u16) -> Value {
    let (slot, function) = (FIRST_SLOT + port / PORTS_PER_SLOT, port % PORTS_PER_SLOT);
    json!({
        "driver": "pcie-root-port", "id": devices::port_id(port), "bus": "pcie.0",
        "chassis": port + 1, "addr": format!("{slot:#x}.{function:x}"),
        "multifunction": function == 0, "io-reserve": 0,
    })
}

#[cfg(test)]
mod tests;
