//! How long a failed object waits.

use std::{
    hash::{BuildHasher, Hasher},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::settings::Backoff;

/// A source of chance for jitter. Not for secrets.
#[derive(Debug)]
pub(crate) struct Dice(AtomicU64);

impl Dice {
    /// With a seed; without one, seeded by the process's hash keys.
    pub(crate) fn new(seed: Option<u64>) -> Self {
        let chance = || std::collections::hash_map::RandomState::new().build_hasher().finish();
        Self(AtomicU64::new(seed.unwrap_or_else(chance)))
    }

    /// A number from 0 to 1. `SplitMix64` (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
    fn roll(&self) -> f64 {
        const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut z = self.0.fetch_add(GAMMA, Ordering::Relaxed).wrapping_add(GAMMA);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let high = u32::try_from((z ^ (z >> 31)) >> 32).unwrap_or_default();
        f64::from(high) / f64::from(u32::MAX)
    }
}

/// The wait after the `attempt`th failure in a row, from 1.
pub(crate) fn delay(settings: &Backoff, attempt: u32, dice: &Dice) -> Duration {
    let doublings = attempt.saturating_sub(1).min(31);
    let ceiling = settings.first.saturating_mul(1_u32 << doublings).min(settings.most);
    let off = (settings.jitter.clamp(0.0, 1.0) * dice.roll()).min(0.9);
    ceiling.mul_f64(1.0 - off)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_cap_and_jitter_leaves_a_tenth() {
        let (settings, dice) = (Backoff::default(), Dice::new(None));
        for attempt in 1..200 {
            let ceiling = f64::from(1_u32 << (attempt - 1_u32).min(6)).min(60.0);
            for _ in 0..50 {
                let wait = delay(&settings, attempt, &dice).as_secs_f64();
                assert!(wait <= ceiling + 1e-6, "{attempt}: {wait} > {ceiling}");
                assert!(wait >= ceiling * 0.1 - 1e-6, "{attempt}: {wait} < a tenth of {ceiling}");
            }
        }
    }

    #[test]
    fn without_jitter_the_waits_are_exact() {
        let settings = Backoff { jitter: 0.0, ..Backoff::default() };
        let waits: Vec<u64> =
            (1..=8).map(|n| delay(&settings, n, &Dice::new(None)).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
    }
}
