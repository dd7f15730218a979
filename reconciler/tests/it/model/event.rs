//! What may happen to a node, and a plain seeded generator of it.

use conformance::reference::{Op, When};
use drivers_api::{ErrorKind, VmPower};
use reconciler::wanted::{Kind, RestartPolicy};

pub(super) const VMS: [&str; 4] = ["a", "b", "c", "d"];
pub(super) const VOLUMES: [&str; 4] = ["v0", "v1", "v2", "v3"];
pub(super) const NETWORKS: [&str; 2] = ["n0", "n1"];
pub(super) const IMAGES: [&str; 2] = ["kernel", "disk"];
pub(super) const NETWORK_PARTS: [&str; 3] = ["bridge", "rules", "dhcp"];
pub(super) const PORT_PARTS: [&str; 3] = ["tap", "rules", "lease"];

/// All kinds of error.
const KINDS: [ErrorKind; 12] = [
    ErrorKind::InvalidSpec,
    ErrorKind::Conflict,
    ErrorKind::Unsupported,
    ErrorKind::NotApplicable,
    ErrorKind::NotFound,
    ErrorKind::Denied,
    ErrorKind::Exhausted,
    ErrorKind::Unavailable,
    ErrorKind::Deadline,
    ErrorKind::Cancelled,
    ErrorKind::UnknownOutcome,
    ErrorKind::Internal,
];

/// One thing that happens.
#[derive(Clone, Debug)]
pub(super) enum Event {
    Instance {
        vm: &'static str,
        volumes: Vec<&'static str>,
        networks: Vec<&'static str>,
        cpus: u64,
        power: VmPower,
        policy: RestartPolicy,
    },
    Volume {
        volume: &'static str,
        size: u64,
        from_image: bool,
    },
    Network(&'static str),
    Image(&'static str),
    Delete(Kind, &'static str),
    /// A request to restart.
    Reboot(&'static str),
    /// A request to start what its policy left stopped.
    Start(&'static str),
    Kill(&'static str),
    PowerOff(&'static str),
    Crash(&'static str),
    /// The VMM does not answer, until the next rest.
    Freeze(&'static str),
    /// The guest holds on to devices, until the next rest.
    Cling(&'static str),
    /// The guest ignores requests to shut down, until the next rest.
    Deaf(&'static str),
    RemovePortPart {
        vm: &'static str,
        part: &'static str,
    },
    RemoveNetworkPart {
        network: &'static str,
        part: &'static str,
    },
    RemoveVm(&'static str),
    EvictImage(&'static str),
    Fault {
        op: Op,
        kind: ErrorKind,
        when: When,
        times: u64,
    },
    /// Calls hang until their deadline.
    Hang(Op),
    /// Calls never return.
    HangDeaf(Op),
    Release,
    /// The host answers none of its drivers, or does again.
    Down(bool),
    /// The agent is killed where it stands, and started again.
    RestartAgent,
    RestartHost,
    Wait(u64),
    /// All trouble ends, and once it is quiet all is checked. What follows then happens on a calm host, where the steps
    /// that are executed must be those that were planned.
    Rest(Option<Box<Event>>),
}

/// Chance. `SplitMix64` (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
pub(super) struct Chance(u64);

impl Chance {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    const fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn one_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }

    fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        let at = self.below(u64::try_from(all.len()).unwrap());
        all[usize::try_from(at).unwrap()]
    }

    fn some<T: Copy>(&mut self, all: &[T], most: usize) -> Vec<T> {
        let mut picked: Vec<T> = all.iter().copied().filter(|_| self.one_in(2)).collect();
        picked.truncate(most);
        picked
    }
}

/// The events of a world: `rests` times some that trouble it and a rest.
pub(super) fn events(chance: &mut Chance, rests: usize) -> Vec<Event> {
    let mut all = Vec::new();
    for _ in 0..rests {
        // Mostly long ones; short ones leave a failure with little around it.
        let length = if chance.one_in(4) { 1 + chance.below(8) } else { 20 + chance.below(40) };
        all.extend((0..length).map(|_| any(chance)));
        let then = chance.one_in(2).then(|| Box::new(wish(chance)));
        all.push(Event::Rest(then));
    }
    all
}

/// What a person may ask for.
fn wish(chance: &mut Chance) -> Event {
    match chance.below(18) {
        0..8 => Event::Instance {
            vm: chance.pick(&VMS),
            volumes: chance.some(&VOLUMES, 2),
            networks: chance.some(&NETWORKS, 2),
            cpus: 1 + chance.below(3),
            power: if chance.one_in(6) { VmPower::Stopped } else { VmPower::Running },
            policy: match chance.below(8) {
                0 => RestartPolicy::Never,
                1 => RestartPolicy::OnFailure,
                _ => RestartPolicy::Always,
            },
        },
        8..11 => Event::Volume {
            volume: chance.pick(&VOLUMES),
            size: 1 + chance.below(4),
            from_image: chance.one_in(2),
        },
        11 => Event::Network(chance.pick(&NETWORKS)),
        12 => Event::Image(chance.pick(&IMAGES)),
        13..15 => Event::Delete(Kind::Instance, chance.pick(&VMS)),
        15 => Event::Delete(Kind::Volume, chance.pick(&VOLUMES)),
        16 => Event::Delete(Kind::Network, chance.pick(&NETWORKS)),
        _ => Event::Delete(Kind::Image, chance.pick(&IMAGES)),
    }
}

fn any(chance: &mut Chance) -> Event {
    let vm = chance.pick(&VMS);
    match chance.below(50) {
        0..18 => wish(chance),
        18 => Event::Reboot(vm),
        19 => Event::Start(vm),
        20 => Event::Kill(vm),
        21 => Event::PowerOff(vm),
        22 => Event::Crash(vm),
        23 => Event::Freeze(vm),
        24 if chance.one_in(2) => Event::Cling(vm),
        24 => Event::Deaf(vm),
        25..27 => Event::RemovePortPart { vm, part: chance.pick(&PORT_PARTS) },
        27..29 => Event::RemoveNetworkPart {
            network: chance.pick(&NETWORKS),
            part: chance.pick(&NETWORK_PARTS),
        },
        29 if chance.one_in(2) => Event::RemoveVm(vm),
        29 => Event::EvictImage(chance.pick(&IMAGES)),
        30..35 => fault(chance),
        35 => Event::Hang(chance.pick(Op::ALL)),
        36 if chance.one_in(2) => Event::HangDeaf(chance.pick(Op::ALL)),
        36 => Event::Down(chance.one_in(2)),
        37..39 => Event::Release,
        39..41 => Event::RestartAgent,
        41 if chance.one_in(2) => Event::RestartHost,
        _ => Event::Wait(1 << chance.below(13)),
    }
}

fn fault(chance: &mut Chance) -> Event {
    let op = chance.pick(Op::ALL);
    let mut kind = chance.pick(&KINDS);
    // A look that answers "conflict" says that what is there is not ours: of that no driver may be wrong.
    if op.is_read() && kind == ErrorKind::Conflict {
        kind = ErrorKind::Unavailable;
    }
    let when = chance.pick(&[When::Before, When::HalfWay, When::After]);
    Event::Fault { op, kind, when, times: 1 + chance.below(3) }
}
