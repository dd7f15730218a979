//! One gate a host: when it says "too many requests", all who want something of it wait together.
//!
//! At most two requests of a host wait for the beginning of their answers at a time, so that a refusal finds few under way.
//! A host that was not asked lately is asked by one first; the others wait for that answer. After a refusal the gate is
//! shut for as long as the host says, and then again one goes first.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use tokio::{
    sync::{Mutex as AsyncMutex, MutexGuard, Semaphore, SemaphorePermit},
    time::Instant,
};

/// The longest time that a host can make us wait.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(300);
/// The first wait when the host names none.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// After so long without a request nothing is known about a host.
const MEMORY: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
enum State {
    #[default]
    Unknown,
    Open(Instant),
    Shut {
        until: Instant,
        strikes: u32,
    },
}

/// How many requests of one host may wait for their answers.
const ABREAST: usize = 2;

/// The gate of one host.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<State>,
    first: AsyncMutex<()>,
    abreast: Semaphore,
}

impl Default for Gate {
    fn default() -> Self {
        let abreast = Semaphore::new(ABREAST);
        Self { state: Mutex::default(), first: AsyncMutex::default(), abreast }
    }
}

/// Leave to send one request; held until its answer is known.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    _first: Option<MutexGuard<'a, ()>>,
    /// `None` only if the semaphore were closed, which nobody does.
    _place: Option<SemaphorePermit<'a>>,
}

impl Gate {
    /// Waits for leave to send. Cancel-safe.
    pub(crate) async fn enter(&self) -> Pass<'_> {
        loop {
            if self.is_open() {
                let place = self.abreast.acquire().await.ok();
                // It may have been shut while we waited for a place.
                if self.is_open() {
                    return Pass { _first: None, _place: place };
                }
                continue;
            }
            let first = self.first.lock().await;
            if self.is_open() {
                continue;
            }
            if let Some(until) = self.shut_until() {
                tokio::time::sleep_until(until).await;
            }
            return Pass { _first: Some(first), _place: self.abreast.acquire().await.ok() };
        }
    }

    fn is_open(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(&*state, State::Open(since) if since.elapsed() < MEMORY)
    }

    fn shut_until(&self) -> Option<Instant> {
        match &*self.state.lock().unwrap_or_else(PoisonError::into_inner) {
            State::Shut { until, .. } => Some(*until),
            State::Unknown | State::Open(_) => None,
        }
    }

    /// The host answered.
    pub(crate) fn open(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // A late answer to a request of before does not lift a refusal that still holds.
        if !matches!(&*state, State::Shut { until, .. } if *until > Instant::now()) {
            *state = State::Open(Instant::now());
        }
    }

    /// The host refused, with this `Retry-After`; answers how long the gate is shut.
    pub(crate) fn refuse(&self, said: Option<&str>, now: SystemTime) -> Duration {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let strikes = match &*state {
            State::Shut { strikes, .. } => strikes.saturating_add(1),
            State::Unknown | State::Open(_) => 0,
        };
        let wait = jittered(wait_for(said, now, strikes));
        *state = State::Shut { until: Instant::now() + wait, strikes };
        wait
    }
}

/// How long to wait after the refusal of that number (from 0), clamped to [`MAX_WAIT`].
///
/// `Retry-After` is seconds or a date (RFC 9110 section 10.2.3). Anything else counts as not said.
fn wait_for(said: Option<&str>, now: SystemTime, strikes: u32) -> Duration {
    let said = said.map(str::trim);
    let seconds = said.filter(|text| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()));
    if let Some(seconds) = seconds {
        // More digits than fit are more than the clamp.
        return seconds.parse().map_or(MAX_WAIT, Duration::from_secs).min(MAX_WAIT);
    }
    let date = said.and_then(|text| httpdate::parse_http_date(text).ok());
    if let Some(date) = date {
        // A date that has passed asks for no wait, but never for a hammer.
        return date.duration_since(now).unwrap_or(FIRST_WAIT).clamp(FIRST_WAIT, MAX_WAIT);
    }
    FIRST_WAIT.saturating_mul(2_u32.saturating_pow(strikes.min(10))).min(MAX_WAIT)
}

/// The wait and up to a third more, so that many agents do not come back in one instant.
pub(crate) fn jittered(wait: Duration) -> Duration {
    let random = RandomState::new().hash_one(0_u8) % 1000;
    let more = u32::try_from(random).unwrap_or_default();
    wait + wait / 3000 * more
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn res_04_retry_after_is_honoured_and_clamped() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let in_three = httpdate::fmt_http_date(now + Duration::from_secs(3));
        let past = httpdate::fmt_http_date(now - Duration::from_secs(3));
        let far = httpdate::fmt_http_date(now + Duration::from_secs(86_400));
        for (said, strikes, wanted) in [
            (Some("2"), 0, 2),
            (Some(in_three.as_str()), 0, 3),
            (Some(past.as_str()), 0, 1),
            (Some(far.as_str()), 0, 300),
            (Some("99999999999"), 0, 300),
            (Some("99999999999999999999999999999999"), 0, 300),
            (Some("-5"), 0, 1),
            (Some("soon"), 2, 4),
            (Some(""), 1, 2),
            (None, 0, 1),
            (None, 3, 8),
            (None, 60, 300),
        ] {
            let got = wait_for(said, now, strikes);
            assert_eq!(got, Duration::from_secs(wanted), "{said:?} at strike {strikes}");
        }
        for _ in 0..200 {
            let wait = jittered(Duration::from_secs(2));
            assert!(wait >= Duration::from_secs(2) && wait < Duration::from_secs(3), "{wait:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn res_04_one_goes_first_and_the_others_wait_for_its_answer() {
        let gate = std::sync::Arc::new(Gate::default());
        let first = gate.enter().await;
        let other = tokio::spawn({
            let gate = std::sync::Arc::clone(&gate);
            async move {
                drop(gate.enter().await);
                Instant::now()
            }
        });
        let begun = Instant::now();
        let wait = gate.refuse(Some("7"), SystemTime::now());
        drop(first);
        let went = other.await.unwrap();
        assert!(went - begun >= wait, "the other waited as long as the host said");
        gate.open();
        drop(gate.enter().await);
    }
}
