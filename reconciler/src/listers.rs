//! Keeps the lists of what is on the host: one task for each list of each driver, one call at a time;
//! one that never returns does not end listing, until several are out.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use drivers_api::Error;
use tokio::{
    sync::{Mutex, Notify},
    time::sleep,
};

use crate::{
    backoff::delay,
    call::Caller,
    drivers::Drivers,
    engine::Engine,
    note::MOST_ABANDONED,
    observe::{list, still_out},
    seen::{DriverId, Listing, Stamp},
};

/// How long a driver that asks for a list again and again waits between two.
const BREATH: Duration = Duration::from_millis(200);

/// One list of one driver.
#[derive(Debug)]
pub(crate) struct Lister {
    pub(crate) listing: Listing,
    pub(crate) driver: DriverId,
    /// Events may have been lost.
    pub(crate) ask: Notify,
    last: Mutex<Last>,
    /// Lists that were abandoned and have not ended.
    out: Arc<AtomicUsize>,
}

#[derive(Debug, Default)]
struct Last {
    began: Stamp,
    failure: Option<Arc<Error>>,
}

impl Lister {
    fn new(listing: Listing, driver: &str) -> Self {
        Self {
            listing,
            driver: driver.into(),
            ask: Notify::new(),
            last: Mutex::default(),
            out: Arc::default(),
        }
    }

    /// All lists of all drivers.
    pub(crate) fn all_of(drivers: &Drivers) -> Vec<Self> {
        let vms = drivers.hypervisors().map(|(id, _)| Self::new(Listing::Vms, id));
        let networks = drivers
            .networks()
            .flat_map(|(id, _)| [Self::new(Listing::Networks, id), Self::new(Listing::Ports, id)]);
        let volumes = drivers.volumes().map(|(id, _)| Self::new(Listing::Volumes, id));
        let images = drivers.images().map(|(id, _)| Self::new(Listing::Images, id));
        vms.chain(networks).chain(volumes).chain(images).collect()
    }

    /// Lists, unless that was done since `since`; who comes meanwhile shares the call.
    pub(crate) async fn refresh(&self, engine: &Arc<Engine>, since: Stamp) -> Option<Arc<Error>> {
        let mut last = self.last.lock().await;
        if last.began >= since {
            return last.failure.clone();
        }
        if self.out.load(Ordering::SeqCst) >= MOST_ABANDONED {
            return Some(still_out(self.listing, &self.driver));
        }
        let began = engine.stamp();
        let caller = Caller::for_list(Arc::clone(engine), Arc::clone(&self.out));
        let failure = list(&caller, self.listing, &self.driver).await;
        *last = Last { began, failure: failure.clone() };
        failure
    }
}

/// Keeps one list: at the start, at each resync, when the driver asks for it, and with back-off after a failure.
pub(crate) async fn keep(engine: Arc<Engine>, at: usize) {
    let mut attempt = 0;
    loop {
        let Some(lister) = engine.listers.get(at) else { return };
        engine.listing.send_modify(|running| *running += 1);
        let failure = lister.refresh(&engine, engine.stamp()).await;
        engine.listing.send_modify(|running| *running -= 1);
        engine.compare.notify_one();
        let wait = match failure {
            None => {
                attempt = 0;
                engine.settings.resync
            }
            Some(error) => {
                attempt += 1;
                tracing::warn!(driver = %lister.driver, %error, attempt, "cannot list");
                delay(&engine.settings.backoff, attempt, &engine.dice)
            }
        };
        // Both arms only wait.
        tokio::select! {
            () = sleep(wait) => {}
            () = lister.ask.notified() => sleep(BREATH).await,
        }
    }
}
