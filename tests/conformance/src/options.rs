//! What a run may cost.

use std::time::Duration;

/// Bounds of a run. The defaults fit a local back-end; a slow one lowers [`Options::drop_points`] and raises the limits.
#[derive(Clone, Debug)]
pub struct Options {
    /// No single call takes longer: each call carries this as its deadline.
    pub call_limit: Duration,
    /// How long after its deadline or its cancellation a call may still take.
    pub prompt: Duration,
    /// The longest time for which one poll of a driver's future may hold its executor thread.
    pub poll_limit: Duration,
    /// At how many awaits of one call its future is dropped, at most.
    pub drop_points: usize,
    /// How many calls run at once where a case runs several.
    pub parallel: u32,
    /// The grace that a stop gives a guest.
    pub stop_grace: Duration,
    /// Whether the descriptors and child processes of this process are part of the census. Needs a test binary in which
    /// nothing else runs at the same time; runs of the kit itself wait for each other.
    pub process_census: bool,
    /// How long the census after the cases may take to become the one before them.
    pub settle: Duration,
    /// Only cases whose name holds one of these texts; empty: all.
    pub only: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            call_limit: Duration::from_secs(30),
            prompt: Duration::from_secs(2),
            poll_limit: Duration::from_millis(250),
            drop_points: 48,
            parallel: 8,
            stop_grace: Duration::from_secs(5),
            process_census: true,
            settle: Duration::from_secs(5),
            only: Vec::new(),
        }
    }
}
