//! A network: made, changed, and mended where a part of it is gone.

use super::{Action, Drafter, Op, Plan, Verdict, World, of_another_node};
use crate::{
    resolve::{Hold, network_driver, network_spec},
    seen::Look,
    wanted::{NetworkSpec, Wanted},
};

pub(super) fn plan(world: &World<'_>, object: &Wanted, spec: &NetworkSpec) -> Plan {
    let found = network_driver(world, spec)
        .and_then(|driver| network_spec(object, spec).map(|network| (driver, network)));
    let (driver, network) = match found {
        Ok(found) => found,
        Err(error) => return Hold::from(error).into(),
    };
    let reason = match world.seen.network(driver, &network.uuid) {
        Look::There(status) if status.mark.node != world.settings.host => {
            return of_another_node(&object.key(), status.mark).into();
        }
        Look::There(status) => match &status.spec {
            None => "half made".to_owned(),
            Some(applied) if *applied != network => "differs".to_owned(),
            Some(_) if !status.healthy => format!("drifted: {}", status.messages.join("; ")),
            // Notes on a healthy network, such as a foreign firewall that drops its traffic.
            Some(_) if status.messages.is_empty() => return Plan::satisfied(),
            Some(_) => {
                return Plan::only(Verdict::Satisfied(Some(status.messages.join("; "))));
            }
        },
        Look::Absent => "missing".to_owned(),
        Look::Foreign(error) => return Hold::Stuck(error).into(),
        Look::Unknown(error) => return Hold::Unknown(error).into(),
    };
    let draft = Drafter { key: object.key() };
    let target = format!("network {} ({:?})", object.name, spec.r#type).to_lowercase();
    let call = (Action::EnsureNetwork, Op::EnsureNetwork(network));
    Plan::new(vec![draft.step(driver, call, target, reason)], Verdict::Satisfied(None))
}
