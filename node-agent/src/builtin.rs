//! The drivers that the agent has without an embedder's doing.

use drivers_api::HostId;
use reconciler::Drivers;

use crate::config::Config;

/// Which drivers an agent opens by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum BuiltIn {
    /// Those for a real host.
    #[default]
    Real,
    /// Reference drivers over a host in memory, for trying the agent itself.
    Reference,
    /// None.
    None,
}

/// Adds them to `drivers`; one that is there under the same id stays.
pub(crate) fn open(
    which: BuiltIn,
    _config: &Config,
    id: HostId,
    _hostname: &str,
    drivers: Drivers,
) -> drivers_api::Result<Drivers> {
    match which {
        BuiltIn::None | BuiltIn::Real => Ok(drivers),
        BuiltIn::Reference => {
            let host = conformance::reference::Host::with_node(id);
            Ok(drivers
                .hypervisor("reference", host.hypervisor())
                .network("reference", host.network())
                .volume("reference", host.volume())
                .image("reference", host.image()))
        }
    }
}
