//! What reaches QEMU, for values that try to be more than one value (case VAL-05).

use drivers_api::{
    Backing, BootFiles, BootKind, BootSpec, CpuCount, DiskFormat, DiskSpec, MemoryMib, NicHandle,
    VmSpec,
};

use super::*;
use crate::record::{Accel, Devices, DiskEntry, NicEntry};

const VM: &str = "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b";

fn spec(name: &str, files: Option<BootFiles>) -> VmSpec {
    let kind = match files {
        None => BootKind::Firmware,
        Some(_) => BootKind::OciImage,
    };
    let mut boot = BootSpec::new(kind, "x".to_owned(), files);
    boot.cmdline = Some("console=ttyS0 a,b=c -device evil".to_owned());
    VmSpec::new(
        VM.parse().unwrap(),
        name.parse().unwrap(),
        CpuCount::new(2).unwrap(),
        MemoryMib::new(256).unwrap(),
        boot,
    )
}

fn running(name: &str, path: &str, files: Option<BootFiles>) -> Running {
    let backing = Backing::File { path: path.parse().unwrap(), format: DiskFormat::Qcow2 };
    let volume = "11111111-2222-3333-4444-555555555555".parse().unwrap();
    let disk = DiskSpec::new("root".parse().unwrap(), volume, backing);
    let nic = NicHandle::new(
        "eth0".parse().unwrap(),
        "21111111-2222-3333-4444-555555555555".parse().unwrap(),
        "tap0".parse().unwrap(),
        "02:00:00:00:00:01".parse().unwrap(),
    );
    Running {
        spec: spec(name, files),
        devices: Devices {
            disks: vec![DiskEntry { disk, port: 0, detaching: false }],
            nics: vec![NicEntry { nic, port: 1, detaching: false }],
        },
        ports: 10,
        accel: Accel::Tcg,
        journal_fd: 5,
    }
}

fn argv(running: &Running) -> Vec<String> {
    let numbers = Numbers {
        qmp: [3, 13, 14, 15],
        serial: 4,
        journal: 5,
        kernel: running.spec.boot.files.is_some().then_some(6),
        taps: vec![(7, None)],
        nvram: Some(8),
        seed: Some(9),
        ..Numbers::default()
    };
    build(VM.parse().unwrap(), running, "/usr/share/OVMF/OVMF_CODE_4M.fd", &numbers).unwrap()
}

fn count(argv: &[String], option: &str) -> usize {
    argv.iter().filter(|arg| *arg == option).count()
}

fn kernel() -> Option<BootFiles> {
    Some(BootFiles::Kernel { kernel: "/boot/k".parse().unwrap(), initrd: None })
}

#[test]
fn no_name_and_no_path_adds_or_changes_an_option() {
    let plain = argv(&running("web-1", "/vol/d.qcow2", kernel()));
    let names = [
        "a</name><devices><disk type='file'><source file='/etc/shadow'/></disk></devices><name>b",
        "x' model='evil",
        "&lol;",
        "]]>",
        "../../etc/x",
        "[glob*{a,b}",
        "\u{202e}gnp.exe",
        "a,b,,c=d -device evil",
        "--help",
    ];
    for name in names {
        assert_eq!(argv(&running(name, "/vol/d.qcow2", kernel())), plain, "{name}");
    }
    let path = "/var/lib/agent/vol/d.qcow2,readonly=off,file=/etc/shadow";
    let evil = argv(&running("web-1", path, kernel()));
    assert_eq!(evil.len(), plain.len());
    let changed: Vec<_> = evil.iter().zip(&plain).filter(|(new, old)| new != old).collect();
    assert_eq!(changed.len(), 1, "{changed:?}");
    let node: Value = serde_json::from_str(changed[0].0).unwrap();
    assert_eq!(node["file"]["filename"], path);
}

#[test]
fn values_that_are_no_plain_names_never_become_a_spec() {
    use drivers_api::{DisplayName, HostPath, IfName};
    assert!("a\0b".parse::<DisplayName>().is_err());
    assert!("n".repeat(256).parse::<DisplayName>().is_err());
    for path in [
        "/var/lib/agent/vol/../../../etc/shadow",
        "json:{\"driver\":\"file\",\"filename\":\"/etc/shadow\"}",
        "nbd://127.0.0.1/x",
        "fd:7",
    ] {
        assert!(path.parse::<HostPath>().is_err(), "{path}");
    }
    assert!("tap0,script=/x".parse::<IfName>().is_err());
    assert!(serde_json::from_str::<drivers_api::DiskBus>("\"virtio,serial=x\"").is_err());
}

#[test]
fn the_kernel_command_line_is_one_argument() {
    let argv = argv(&running("web-1", "/d", kernel()));
    let at = argv.iter().position(|arg| arg == "-append").unwrap();
    assert_eq!(argv[at + 1], "console=ttyS0 a,b=c -device evil");
    assert_eq!(argv[argv.iter().position(|arg| arg == "-kernel").unwrap() + 1], "/proc/self/fd/6");
}

#[test]
fn the_vmm_is_confined_and_opens_nothing_by_itself() {
    let argv = argv(&running("web-1", "/d", kernel()));
    for wanted in ["-nodefaults", "-no-user-config", "-S"] {
        assert_eq!(count(&argv, wanted), 1, "{wanted}");
    }
    let sandbox = argv.iter().position(|arg| arg == "-sandbox").unwrap();
    assert_eq!(
        argv[sandbox + 1],
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
    );
    let netdev: Value =
        serde_json::from_str(&argv[argv.iter().position(|arg| arg == "-netdev").unwrap() + 1])
            .unwrap();
    assert_eq!((&netdev["fd"], &netdev["vhost"]), (&json!("7"), &json!(false)));
    assert!(netdev.get("script").is_none() && netdev.get("ifname").is_none());
}

#[test]
fn firmware_is_there_for_uki_and_disk_boot_only() {
    let has_firmware = |files| {
        let argv = argv(&running("web-1", "/d", files));
        argv.iter().any(|arg| arg.contains("OVMF_CODE_4M.fd"))
            && argv.iter().any(|arg| arg.contains("pflash1=firmware-vars"))
    };
    assert!(!has_firmware(kernel()));
    assert!(has_firmware(Some(BootFiles::Uki { path: "/boot/u.efi".parse().unwrap() })));
    assert!(has_firmware(None));
}

#[test]
fn ports_have_places_of_their_own() {
    let mut running = running("web-1", "/d", kernel());
    running.ports = MAX_PORTS;
    let places: Vec<String> = argv(&running)
        .iter()
        .filter(|arg| arg.contains("pcie-root-port") && !arg.contains("seed-port"))
        .map(|arg| serde_json::from_str::<Value>(arg).unwrap()["addr"].to_string())
        .collect();
    assert_eq!(places.len(), usize::from(MAX_PORTS));
    let unique: std::collections::HashSet<_> = places.iter().collect();
    assert_eq!(unique.len(), places.len());
    assert!(!places.iter().any(|place| place.starts_with("\"0x1d")));
}

#[test]
fn the_seed_is_behind_the_last_port_so_that_vda_is_the_first_disk_of_the_operator() {
    let argv = argv(&running("web", "/var/lib/bcd/disk.qcow2", kernel()));
    let ports: Vec<Value> = argv
        .iter()
        .filter(|arg| arg.contains("pcie-root-port"))
        .map(|arg| serde_json::from_str(arg).unwrap())
        .collect();
    let slot = |port: &Value| {
        let addr = port["addr"]
            .as_str()
            .unwrap()
            .trim_start_matches("0x")
            .split('.')
            .next()
            .unwrap()
            .to_owned();
        u8::from_str_radix(&addr, 16).unwrap()
    };
    let last = ports.iter().max_by_key(|port| slot(port)).unwrap();
    assert_eq!(last["id"], "seed-port");
    assert!(
        argv.iter()
            .any(|arg| arg.contains("\"bus\":\"seed-port\"") && arg.contains("virtio-blk-pci"))
    );
}
