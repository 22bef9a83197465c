//! Time for pins with a time to live.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Where a tree reads the time: the system's monotonic clock, or a hand that a test turns.
#[derive(Debug, Clone)]
pub struct Clock(Source);

#[derive(Debug, Clone)]
enum Source {
    Monotonic(Instant),
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// The system's monotonic clock, from now on.
    pub fn monotonic() -> Self {
        Self(Source::Monotonic(Instant::now()))
    }

    /// A clock that stands still but for [`advance`](ManualClock::advance) on its hand.
    pub fn manual() -> (Self, ManualClock) {
        let nanoseconds = Arc::new(AtomicU64::new(0));
        (Self(Source::Manual(Arc::clone(&nanoseconds))), ManualClock(nanoseconds))
    }

    /// Time since the clock was made.
    pub fn now(&self) -> Duration {
        match &self.0 {
            Source::Monotonic(start) => start.elapsed(),
            Source::Manual(nanoseconds) => {
                Duration::from_nanos(nanoseconds.load(Ordering::Relaxed))
            }
        }
    }
}

/// The hand of a manual clock.
#[derive(Debug, Clone)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Moves the clock on.
    pub fn advance(&self, by: Duration) {
        let nanoseconds = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        self.0.fetch_add(nanoseconds, Ordering::Relaxed);
    }
}
