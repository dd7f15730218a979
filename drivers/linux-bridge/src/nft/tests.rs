use drivers_api::{HostId, NetworkSpec, NetworkType, PortSpec, Uuid};
use serde_json::Value;

use super::{
    listing::{Content, Found},
    ruleset::{Builder, Wanted},
    transaction::Transaction,
    *,
};
use crate::records::{Entry, NetworkRecord, PortRecord, Records};

fn id(text: &str) -> Uuid {
    text.parse().unwrap()
}

fn node() -> HostId {
    HostId::new(id("77777777-0000-4000-8000-000000000001"))
}

/// A nat network with two ports.
fn records() -> Records {
    let mut records = Records::default();
    let uuid = NetworkId::new(id("11111111-2222-4333-8444-555555555555"));
    let mut network = NetworkSpec::new(uuid, "n".parse().unwrap(), NetworkType::Nat);
    network.cidr = Some("10.0.0.0/24".parse().unwrap());
    network.gateway = Some("10.0.0.1".parse().unwrap());
    let record = NetworkRecord::new(node(), 1, network);
    records.networks.insert(uuid, Entry::Good(Arc::new(record)));
    for n in 1..=2_u8 {
        let port = PortId::new(id(&format!("aaaaaaaa-bbbb-4ccc-8ddd-00000000000{n}")));
        let vm = drivers_api::VmId::new(id("3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b"));
        let mac = format!("52:54:00:00:00:0{n}").parse().unwrap();
        let mut spec = PortSpec::new(port, vm, uuid, "net0".parse().unwrap(), mac);
        spec.addresses.push(format!("10.0.0.1{n}").parse().unwrap());
        records.ports.insert(port, Entry::Good(Arc::new(PortRecord::new(node(), spec))));
    }
    records
}

fn wanted(mode: Mode, records: &Records, leaving: &Leaving) -> Wanted {
    let mut builder = Builder::new(Names::new(node(), "bcd"));
    builder.update(mode, records, leaving);
    builder.wanted
}

/// What is there after everything wanted was written.
fn after(wanted: &Wanted) -> Found {
    let mut found = Found::default();
    found.take_over(wanted, None);
    found
}

fn between(found: &Found, wanted: &Wanted) -> Transaction {
    Transaction::between("bcd", found, wanted, None)
}

fn commands(transaction: &Transaction) -> Vec<Value> {
    let document: Value = serde_json::from_str(&transaction.document()).unwrap();
    document["nftables"].as_array().unwrap().clone()
}

/// Where the first command of this verb and kind is whose text has this part.
fn at(commands: &[Value], verb: &str, kind: &str, part: &str) -> usize {
    let is = |command: &Value| {
        command
            .get(verb)
            .and_then(|object| object.get(kind))
            .is_some_and(|object| object.to_string().contains(part))
    };
    commands.iter().position(is).unwrap_or_else(|| panic!("no {verb} {kind} of {part}"))
}

#[test]
fn what_was_written_needs_nothing_more_in_any_mode() {
    for mode in [Mode::Native, Mode::Mark, Mode::Stateless] {
        let wanted = wanted(mode, &records(), &Leaving::default());
        let first = between(&Found::default(), &wanted);
        assert!(!first.is_empty());
        assert_eq!(first.parts.len(), 3, "{mode:?}: the base and two ports");
        let again = between(&after(&wanted), &wanted);
        assert!(again.is_empty() && again.parts.is_empty(), "{mode:?}: {:?}", again.faults);
    }
}

#[test]
fn nothing_leads_to_a_chain_before_it_is_made_or_when_it_is_removed() {
    let all = wanted(Mode::Mark, &records(), &Leaving::default());
    let first = commands(&between(&Found::default(), &all));
    let tap = all.maps["spoof"].keys().next().unwrap().clone();
    let made = at(&first, "add", "chain", &format!("{tap}.arp"));
    assert!(at(&first, "add", "table", "bridge") < made);
    assert!(made < at(&first, "add", "rule", &format!("{tap}.arp")));
    assert!(at(&first, "add", "map", "spoof") < at(&first, "add", "rule", "@spoof"));
    assert!(
        at(&first, "add", "rule", &format!("{tap}.spoof")) < at(&first, "add", "element", &tap)
    );
    let leaving =
        Leaving { ports: records().ports.keys().copied().collect(), ..Leaving::default() };
    let none = wanted(Mode::Mark, &records(), &leaving);
    let last = between(&after(&all), &none);
    assert!(last.parts.is_empty(), "what is left of a port that goes is nobody's fault");
    let last = commands(&last);
    assert!(at(&last, "delete", "element", &tap) < at(&last, "flush", "chain", &tap));
    assert!(
        at(&last, "flush", "chain", &format!("{tap}.spoof"))
            < at(&last, "delete", "chain", &format!("{tap}.arp"))
    );
}

#[test]
fn one_damaged_chain_is_filled_again_and_no_other_is_touched() {
    let wanted = wanted(Mode::Native, &records(), &Leaving::default());
    let mut found = after(&wanted);
    let key = wanted.chains.keys().find(|(_, name)| name.ends_with(".ip4")).unwrap();
    found.chains.get_mut(key).unwrap().content = Content::Damaged;
    let mend = between(&found, &wanted);
    assert_eq!(mend.parts.len(), 1);
    for command in commands(&mend) {
        assert!(command.to_string().contains(&key.1), "{command}");
    }
    assert_eq!(at(&commands(&mend), "flush", "chain", &key.1), 0);
}

#[test]
fn without_networks_our_tables_go_and_nothing_else() {
    let all = wanted(Mode::Mark, &records(), &Leaving::default());
    let leaving =
        Leaving { networks: records().networks.keys().copied().collect(), ..Leaving::default() };
    let none = wanted(Mode::Mark, &records(), &leaving);
    let last = commands(&between(&after(&all), &none));
    assert_eq!(last.len(), 2);
    at(&last, "delete", "table", "bridge");
    at(&last, "delete", "table", "inet");
    assert!(between(&Found::default(), &none).is_empty());
}

#[test]
fn only_native_and_mark_know_connections_on_a_bridge() {
    let text = |mode| {
        let wanted = wanted(mode, &records(), &Leaving::default());
        between(&Found::default(), &wanted).document()
    };
    assert!(text(Mode::Native).contains("ibrname") && !text(Mode::Native).contains("pre-mark"));
    assert!(text(Mode::Mark).contains("pre-mark") && !text(Mode::Mark).contains("ibrname"));
    assert!(!text(Mode::Stateless).contains("zone"));
}

#[test]
fn looking_at_what_was_touched_alone_finds_the_same_as_looking_at_everything() {
    let mut builder = Builder::new(Names::new(node(), "bcd"));
    let mut found = Found::default();
    let mut records = records();
    let ports: Vec<PortId> = records.ports.keys().copied().collect();
    let mut leaving = Leaving::default();
    // Each step changes the records or what is leaving.
    type Step = fn(&mut Records, &mut Leaving, &[PortId]);
    let steps: [Step; 6] = [
        |_, _, _| {},
        |_, leaving, ports| {
            leaving.ports.insert(ports[0]);
        },
        |records, _, ports| {
            records.ports.remove(&ports[0]);
        },
        |records, _, ports| {
            let mut port = PortRecord::clone(records.port(ports[1]).unwrap());
            port.spec.addresses = vec!["10.0.0.99".parse().unwrap()];
            records.ports.insert(ports[1], Entry::Good(Arc::new(port)));
        },
        |records, _, _| {
            let id = NetworkId::new(id("99999999-2222-4333-8444-555555555555"));
            let mut network = NetworkRecord::clone(records.good_networks().next().unwrap());
            network.spec.uuid = id;
            network.zone = 2;
            records.networks.insert(id, Entry::Good(Arc::new(network)));
        },
        |records, _, _| records.networks.clear(),
    ];
    for (at, step) in steps.iter().enumerate() {
        step(&mut records, &mut leaving, &ports);
        builder.update(Mode::Mark, &records, &leaving);
        let only = (at > 0).then_some(&builder.touched);
        let part = Transaction::between("bcd", &found, &builder.wanted, only);
        let whole = between(&found, &builder.wanted);
        assert_eq!(part.document(), whole.document(), "step {at}");
        assert!(at == 2 || !part.is_empty(), "step {at}");
        found.take_over(&builder.wanted, only);
        builder.touched = super::ruleset::Touched::default();
        assert_eq!(found, after(&builder.wanted), "step {at}");
        assert!(between(&found, &builder.wanted).is_empty(), "step {at}");
    }
}
