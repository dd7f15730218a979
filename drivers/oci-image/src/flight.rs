//! One piece of work for any number of callers.
//!
//! Each caller has a [`Seat`]: it sees the progress and the outcome, and leaves when it likes. The work ends early when the
//! last seat is empty.

use std::{
    collections::HashMap,
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use drivers_api::Progress;
use tokio::sync::{Notify, watch};

use crate::error::{ImageError, Result};

type Outcome<T> = std::result::Result<T, Arc<ImageError>>;

/// Work under way, by key.
#[derive(Debug)]
pub(crate) struct Flights<T>(Mutex<HashMap<String, Flight<T>>>);

#[derive(Debug)]
struct Flight<T> {
    seats: usize,
    /// Tells two flights of one key apart.
    stop: Arc<Notify>,
    outcome: watch::Receiver<Option<Outcome<T>>>,
    progress: watch::Receiver<Progress>,
}

/// Where work reports to.
#[derive(Clone, Debug)]
pub(crate) struct Reporter(Arc<watch::Sender<Progress>>);

impl Reporter {
    pub(crate) fn report(&self, progress: Progress) {
        self.0.send_replace(progress);
    }
}

/// A caller's place.
#[derive(Debug)]
pub(crate) struct Seat<T: Clone + Send + Sync + 'static> {
    flights: Arc<Flights<T>>,
    key: String,
    stop: Arc<Notify>,
    outcome: watch::Receiver<Option<Outcome<T>>>,
    progress: watch::Receiver<Progress>,
}

impl<T: Clone + Send + Sync + 'static> Flights<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::default()))
    }

    fn map(&self) -> MutexGuard<'_, HashMap<String, Flight<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether work of that key is under way.
    pub(crate) fn is_flying(&self, key: &str) -> bool {
        self.map().contains_key(key)
    }

    /// The keys of all work under way.
    pub(crate) fn flying(&self) -> Vec<String> {
        self.map().keys().cloned().collect()
    }

    /// Takes a seat in the work of that key; it is begun when there is none.
    pub(crate) fn board<F>(self: &Arc<Self>, key: &str, work: impl FnOnce(Reporter) -> F) -> Seat<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let mut map = self.map();
        let flight = map.entry(key.to_owned()).or_insert_with(|| self.begin(key, work));
        flight.seats += 1;
        Seat {
            flights: Arc::clone(self),
            key: key.to_owned(),
            stop: Arc::clone(&flight.stop),
            outcome: flight.outcome.clone(),
            progress: flight.progress.clone(),
        }
    }

    fn begin<F>(self: &Arc<Self>, key: &str, work: impl FnOnce(Reporter) -> F) -> Flight<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let stop = Arc::new(Notify::new());
        let (send_progress, progress) = watch::channel(Progress::new("resolve", ""));
        let (send_outcome, outcome) = watch::channel(None);
        let work = work(Reporter(Arc::new(send_progress)));
        let (flights, key, stopped) = (Arc::clone(self), key.to_owned(), Arc::clone(&stop));
        tokio::spawn(async move {
            let answer = tokio::select! {
                biased;
                answer = work => answer,
                // The work's future is dropped; each of its awaits is safe as the last one.
                () = stopped.notified() => Err(ImageError::Abandoned),
            };
            // First out of the map: whoever boards from now on begins anew.
            flights.remove(&key, &stopped);
            send_outcome.send_replace(Some(answer.map_err(Arc::new)));
        });
        Flight { seats: 0, stop, outcome, progress }
    }

    fn remove(&self, key: &str, stop: &Arc<Notify>) {
        let mut map = self.map();
        if map.get(key).is_some_and(|flight| Arc::ptr_eq(&flight.stop, stop)) {
            map.remove(key);
        }
    }
}

impl<T: Clone + Send + Sync + 'static> Seat<T> {
    /// Waits for the outcome. Cancel-safe: who stops waiting leaves the seat.
    pub(crate) async fn wait(mut self, mut on_progress: impl FnMut(&Progress)) -> Outcome<T> {
        let gone = || Arc::new(ImageError::Internal("the pull ended without an answer".to_owned()));
        let mut outcome = self.outcome.clone();
        loop {
            tokio::select! {
                biased;
                answer = outcome.wait_for(Option::is_some) => {
                    return answer.ok().and_then(|answer| answer.clone()).unwrap_or_else(|| Err(gone()));
                }
                Ok(()) = self.progress.changed() => {
                    let progress = self.progress.borrow_and_update().clone();
                    on_progress(&progress);
                }
            }
        }
    }
}

impl<T: Clone + Send + Sync + 'static> Drop for Seat<T> {
    fn drop(&mut self) {
        let mut map = self.flights.map();
        let Some(flight) = map.get_mut(&self.key) else { return };
        if !Arc::ptr_eq(&flight.stop, &self.stop) {
            return;
        }
        flight.seats = flight.seats.saturating_sub(1);
        if flight.seats == 0 {
            map.remove(&self.key);
            self.stop.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn many_callers_share_one_work_and_one_that_leaves_harms_nobody() {
        let flights: Arc<Flights<u32>> = Flights::new();
        let begun = Arc::new(AtomicUsize::new(0));
        let go = Arc::new(Notify::new());
        let board = || {
            let (begun, go) = (Arc::clone(&begun), Arc::clone(&go));
            flights.board("k", |_| async move {
                begun.fetch_add(1, Ordering::SeqCst);
                go.notified().await;
                Ok(7)
            })
        };
        let (first, second, third) = (board(), board(), board());
        drop(first);
        go.notify_one();
        assert_eq!(second.wait(|_| ()).await.unwrap(), 7);
        assert_eq!(third.wait(|_| ()).await.unwrap(), 7);
        assert_eq!(begun.load(Ordering::SeqCst), 1);
        assert!(!flights.is_flying("k"));
    }

    #[tokio::test]
    async fn the_work_ends_when_the_last_caller_leaves() {
        struct Ends(Arc<Notify>);
        impl Drop for Ends {
            fn drop(&mut self) {
                self.0.notify_one();
            }
        }
        let flights: Arc<Flights<u32>> = Flights::new();
        let ended = Arc::new(Notify::new());
        let ends = Ends(Arc::clone(&ended));
        let seat = flights.board("k", |_| async move {
            let _ends = ends;
            std::future::pending().await
        });
        tokio::task::yield_now().await;
        drop(seat);
        assert!(!flights.is_flying("k"));
        ended.notified().await;
    }

    #[tokio::test]
    async fn a_work_that_panics_answers_all() {
        let flights: Arc<Flights<u32>> = Flights::new();
        let seat = flights.board("k", |_| async { panic!("as wanted") });
        assert!(matches!(&*seat.wait(|_| ()).await.unwrap_err(), ImageError::Internal(_)));
    }
}
