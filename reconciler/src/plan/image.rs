//! An image: pulled when it is not in the cache.

use super::{Action, Drafter, Op, Plan, Verdict, World};
use crate::{
    resolve::{Hold, image_driver},
    seen::Look,
    wanted::{ImageSpec, Wanted},
};

pub(super) fn plan(world: &World<'_>, object: &Wanted, spec: &ImageSpec) -> Plan {
    let driver = match image_driver(world, spec) {
        Ok(driver) => driver,
        Err(error) => return Hold::from(error).into(),
    };
    let reference = &spec.r#ref;
    match world.seen.image(driver, reference) {
        Look::There(_) => Plan::satisfied(),
        Look::Absent => {
            let draft = Drafter { key: object.key() };
            let call = (Action::Pull, Op::Pull(reference.clone()));
            let step = draft.step(driver, call, reference.as_str(), "missing");
            Plan::new(vec![step], Verdict::Satisfied(None))
        }
        Look::Foreign(error) => Hold::Stuck(error).into(),
        Look::Unknown(error) => Hold::Unknown(error).into(),
    }
}
