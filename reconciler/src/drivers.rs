//! The drivers that the reconciler works through, by kind and id.

use std::{collections::BTreeMap, fmt, sync::Arc};

use drivers_api::{Hypervisor, Image, Network, NetworkType, Volume};

/// The drivers of one kind. The first is the default unless another is named.
struct Shelf<T: ?Sized> {
    drivers: BTreeMap<String, Arc<T>>,
    default: Option<String>,
}

impl<T: ?Sized> Default for Shelf<T> {
    fn default() -> Self {
        Self { drivers: BTreeMap::new(), default: None }
    }
}

impl<T: ?Sized> Clone for Shelf<T> {
    fn clone(&self) -> Self {
        Self { drivers: self.drivers.clone(), default: self.default.clone() }
    }
}

impl<T: ?Sized> Shelf<T> {
    fn put(&mut self, id: String, driver: Arc<T>) {
        self.default.get_or_insert_with(|| id.clone());
        self.drivers.insert(id, driver);
    }

    fn find(&self, id: Option<&str>) -> Option<(&str, &Arc<T>)> {
        let id = id.or(self.default.as_deref())?;
        self.drivers.get_key_value(id).map(|(id, driver)| (id.as_str(), driver))
    }

    fn iter(&self) -> impl Iterator<Item = (&str, &Arc<T>)> {
        self.drivers.iter().map(|(id, driver)| (id.as_str(), driver))
    }
}

/// The drivers of a node.
///
/// An object that names no driver gets the default of its kind: the first that was added, or the one that `default_…`
/// names. A network that names none gets the first driver, the default before the others, that serves its type.
#[derive(Clone, Default)]
pub struct Drivers {
    hypervisors: Shelf<dyn Hypervisor>,
    networks: Shelf<dyn Network>,
    volumes: Shelf<dyn Volume>,
    images: Shelf<dyn Image>,
}

macro_rules! shelf {
    ($field:ident, $add:ident, $default:ident, $find:ident, $all:ident, $trait:ident, $what:literal) => {
        #[doc = concat!("With a ", $what, " under an id; one of the same id is replaced.")]
        #[must_use]
        pub fn $add(mut self, id: impl Into<String>, driver: Arc<dyn $trait>) -> Self {
            self.$field.put(id.into(), driver);
            self
        }

        #[doc = concat!("With another default ", $what, ". An id that is not there makes every look-up without an id fail.")]
        #[must_use]
        pub fn $default(mut self, id: impl Into<String>) -> Self {
            self.$field.default = Some(id.into());
            self
        }

        #[doc = concat!("The ", $what, " of an id, or the default one, with its id.")]
        #[must_use]
        pub fn $find(&self, id: Option<&str>) -> Option<(&str, &Arc<dyn $trait>)> {
            self.$field.find(id)
        }

        #[doc = concat!("Every ", $what, " with its id, by id.")]
        pub fn $all(&self) -> impl Iterator<Item = (&str, &Arc<dyn $trait>)> {
            self.$field.iter()
        }
    };
}

impl Drivers {
    /// No drivers.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    shelf!(
        hypervisors,
        hypervisor,
        default_hypervisor,
        find_hypervisor,
        hypervisors,
        Hypervisor,
        "hypervisor"
    );
    shelf!(networks, network, default_network, find_network, networks, Network, "network driver");
    shelf!(volumes, volume, default_volume, find_volume, volumes, Volume, "volume driver");
    shelf!(images, image, default_image, find_image, images, Image, "image driver");

    /// The network driver of an id, or without one the driver that serves the type.
    #[must_use]
    pub fn network_for(
        &self,
        id: Option<&str>,
        network_type: NetworkType,
    ) -> Option<(&str, &Arc<dyn Network>)> {
        let serves = |driver: &Arc<dyn Network>| driver.types().contains(&network_type);
        match id {
            Some(id) => self.find_network(Some(id)),
            None => self
                .find_network(None)
                .filter(|(_, driver)| serves(driver))
                .or_else(|| self.networks().find(|(_, driver)| serves(driver))),
        }
    }
}

impl fmt::Debug for Drivers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drivers")
            .field("hypervisors", &self.hypervisors.drivers.keys())
            .field("networks", &self.networks.drivers.keys())
            .field("volumes", &self.volumes.drivers.keys())
            .field("images", &self.images.drivers.keys())
            .finish()
    }
}
