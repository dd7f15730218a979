//! The stories in which the agent is killed: a start, what is asked of the agent, and what it leads to.

use crate::census::Detail;

/// A command of the command line with what it reads.
#[derive(Clone, Debug)]
pub(crate) struct Command {
    pub(crate) args: Vec<String>,
    pub(crate) stdin: String,
}

impl Command {
    fn new(args: &[&str], stdin: String) -> Self {
        Self { args: args.iter().map(|arg| (*arg).to_owned()).collect(), stdin }
    }

    fn apply(documents: String) -> Self {
        Self::new(&["apply", "-f", "-"], documents)
    }

    fn delete(documents: String) -> Self {
        Self::new(&["delete", "-f", "-"], documents)
    }
}

/// How many VMMs there are and whether they are the ones of before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vmm {
    /// None.
    None,
    /// One; there was none before, or the story restarts it.
    Any,
    /// The one that ran before.
    Same,
}

/// A story.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// For people.
    pub(crate) what: &'static str,
    /// Brings the node to the start; nothing for a node on which no agent ever ran.
    before: fn(&Names<'_>) -> Vec<Command>,
    /// What is asked of the agent while the fault is armed; nothing when its start is the story.
    asked: fn(&Names<'_>) -> Vec<Command>,
    pub(crate) after: Vmm,
    /// Whether the volumes are on another file system than the cache of images.
    pub(crate) apart: bool,
}

/// What the manifests depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names<'a> {
    /// `HOST:PORT`.
    pub(crate) registry: &'a str,
}

impl Scenario {
    pub(crate) fn before(&self, registry: &str) -> Vec<Command> {
        (self.before)(&Names { registry })
    }

    pub(crate) fn asked(&self, registry: &str) -> Vec<Command> {
        (self.asked)(&Names { registry })
    }

    /// How closely its end is compared. After a deletion the cache of images may keep what its collector removes.
    pub(crate) fn detail(&self) -> Detail {
        if self.name == "delete" { Detail::Left } else { Detail::Whole }
    }

    /// The command that removes whatever a story can have made.
    pub(crate) fn removal(registry: &str) -> Command {
        let names = Names { registry };
        Command::delete([base(&names), more(), vm(&PLAIN)].join("---\n"))
    }
}

/// All stories.
pub(crate) const ALL: &[Scenario] = &[
    Scenario {
        name: "first start",
        what: "the agent starts on a host where none ever ran",
        before: |_| Vec::new(),
        asked: |_| Vec::new(),
        after: Vmm::None,
        apart: false,
    },
    Scenario {
        name: "create",
        what: "images, a network, volumes (blank, clone, converted) and a running VM are made from nothing",
        before: |_| Vec::new(),
        asked: |names| vec![Command::apply(whole(names, &PLAIN))],
        after: Vmm::Any,
        apart: false,
    },
    Scenario {
        name: "change",
        what: "volumes grow, in use and not; the running VM gets one more disk and NIC; the network's settings change",
        before: |names| vec![Command::apply(whole(names, &PLAIN))],
        asked: |names| vec![Command::apply(changed(names))],
        after: Vmm::Same,
        apart: false,
    },
    Scenario {
        name: "take away",
        what: "the running VM loses a disk and a NIC; their volume and network are deleted",
        before: |names| vec![Command::apply(whole(names, &PLAIN)), Command::apply(changed(names))],
        asked: |_| vec![Command::apply(vm(&PLAIN)), Command::delete(more())],
        after: Vmm::Same,
        apart: false,
    },
    Scenario {
        name: "stop",
        what: "the running VM is stopped by its power button",
        before: |names| vec![Command::apply(whole(names, &PLAIN))],
        asked: |_| vec![Command::new(&["stop", "vm"], String::new())],
        after: Vmm::None,
        apart: false,
    },
    Scenario {
        name: "forced stop",
        what: "the running VM does not obey its power button and is ended after the grace",
        before: |names| vec![Command::apply(whole(names, &DEAF))],
        asked: |_| vec![Command::new(&["stop", "vm"], String::new())],
        after: Vmm::None,
        apart: false,
    },
    Scenario {
        name: "clone",
        what: "volumes are made from an image that is on another file system, so that a base is copied first",
        before: |names| vec![Command::apply(image(names, "disk", "13"))],
        asked: |_| {
            let root = volume("root", "42", "size_gib: 1, format: qcow2, source: {image: disk}");
            vec![Command::apply(root)]
        },
        after: Vmm::None,
        apart: true,
    },
    Scenario {
        name: "start",
        what: "the stopped VM is started",
        before: |names| vec![Command::apply(whole(names, &STOPPED))],
        asked: |_| vec![Command::new(&["start", "vm"], String::new())],
        after: Vmm::Any,
        apart: false,
    },
    Scenario {
        name: "edit",
        what: "the stopped VM gets another kernel and more memory, and is started",
        before: |names| vec![Command::apply(whole(names, &STOPPED))],
        asked: |_| vec![Command::apply(vm(&EDITED))],
        after: Vmm::Any,
        apart: false,
    },
    Scenario {
        name: "reboot",
        what: "the running VM is rebooted",
        before: |names| vec![Command::apply(whole(names, &PLAIN))],
        asked: |_| vec![Command::new(&["reboot", "vm"], String::new())],
        after: Vmm::Any,
        apart: false,
    },
    Scenario {
        name: "restart",
        what: "the running VM's memory is changed, and it is rebooted to have it",
        before: |names| vec![Command::apply(whole(names, &PLAIN)), Command::apply(vm(&EDITED))],
        asked: |_| vec![Command::new(&["reboot", "vm"], String::new())],
        after: Vmm::Any,
        apart: false,
    },
    Scenario {
        name: "delete",
        what: "everything is deleted at once, the VM running",
        before: |names| vec![Command::apply(whole(names, &PLAIN))],
        asked: |names| vec![Command::delete(whole(names, &PLAIN))],
        after: Vmm::None,
        apart: false,
    },
    Scenario {
        name: "store write",
        what: "a change of labels alone: nothing but the store is written",
        before: |names| vec![Command::apply(whole(names, &PLAIN))],
        asked: |_| {
            let spare = volume("spare", "44", "size_gib: 1, format: qcow2");
            vec![Command::apply(spare.replace("spec:", "labels: {tier: front}\nspec:"))]
        },
        after: Vmm::Same,
        apart: false,
    },
];

fn document(kind: &str, name: &str, uuid_end: &str, spec: &str) -> String {
    // The identity is given, so that two nodes name what they make alike.
    format!(
        "api_version: bcd/v1\nkind: {kind}\nname: {name}\nuuid: 3f2b8c1e-9a4d-4e6f-8b7a-0000000000{uuid_end}\nspec: {{{spec}}}\n"
    )
}

fn volume(name: &str, uuid_end: &str, spec: &str) -> String {
    document("Volume", name, uuid_end, spec)
}

fn image(names: &Names<'_>, name: &str, uuid_end: &str) -> String {
    document("Image", name, uuid_end, &format!("ref: \"{}/{name}:latest\"", names.registry))
}

/// Everything but the VM.
fn base(names: &Names<'_>) -> String {
    [
        image(names, "guest", "11"),
        image(names, "other", "12"),
        image(names, "disk", "13"),
        document("Network", "lan", "21", LAN),
        volume("data", "41", "size_gib: 1, format: qcow2"),
        volume("root", "42", "size_gib: 1, format: qcow2, source: {image: disk}"),
        volume("flat", "43", "size_gib: 1, format: raw, source: {image: disk}"),
        volume("spare", "44", "size_gib: 1, format: qcow2"),
    ]
    .join("---\n")
}

const LAN: &str = "type: nat, cidr: 10.77.0.0/24, gateway: 10.77.0.1, cidr6: \"fd77::/64\", gateway6: \"fd77::1\"";

/// What the VM gets in a change.
fn more() -> String {
    [
        document("Network", "side", "22", "type: isolated, cidr: 10.78.0.0/24"),
        volume("extra", "45", "size_gib: 1, format: raw"),
    ]
    .join("---\n")
}

/// What is different from VM to VM.
struct Shape {
    memory: u32,
    image: &'static str,
    power: &'static str,
    more: bool,
    mode: &'static str,
    grace: u32,
}

const PLAIN: Shape =
    Shape { memory: 64, image: "guest", power: "running", more: false, mode: "i", grace: 20 };
const DEAF: Shape = Shape { mode: "n", grace: 1, ..PLAIN };
const STOPPED: Shape = Shape { power: "stopped", ..PLAIN };
const EDITED: Shape = Shape { memory: 80, image: "other", ..PLAIN };

fn vm(shape: &Shape) -> String {
    let Shape { memory, image, power, more, mode, grace } = shape;
    let (disk, nic) = if *more {
        (", {name: extra, volume: extra}", ", {name: side, network: side}")
    } else {
        ("", "")
    };
    let spec = format!(
        "cpus: 1, memory_mib: {memory}, boot: {{kind: oci_image, ref: {image}, cmdline: mode={mode}}}, power: {power}, stop_grace_seconds: {grace}, \
         disks: [{{name: data, volume: data}}, {{name: root, volume: root}}{disk}], nics: [{{name: lan, network: \
         lan}}{nic}], user_data: \"#cloud-config\""
    );
    document("Instance", "vm", "31", &spec)
}

fn whole(names: &Names<'_>, shape: &Shape) -> String {
    [base(names), vm(shape)].join("---\n")
}

/// The state after the change: disks that grew, one more disk and NIC, other settings of the network.
fn changed(names: &Names<'_>) -> String {
    let grown = base(names).replace("size_gib: 1", "size_gib: 2");
    let network = format!("{LAN}, dns_servers: [10.77.0.1, 9.9.9.9]");
    [grown.replace(LAN, &network), more(), vm(&Shape { more: true, ..PLAIN })].join("---\n")
}
