//! Where helpers of one call wait, awake for a short while, for the next.
//!
//! A sleeping thread takes tens of microseconds to wake, as long as a whole decode step of a small
//! model: calls that follow each other closely (a layer's merge after its tasks, the next layer)
//! find the helpers of the last one still awake.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a helper stays awake without work.
const AWAKE: Duration = Duration::from_micros(100);
/// Looks for work between two looks at the clock.
const LOOKS: usize = 32;

/// Helpers that are awake, and the work that was handed to them.
#[derive(Debug)]
pub(super) struct Lobby<T> {
    /// Helpers that wait and that no caller counts on yet.
    free: AtomicUsize,
    /// Pieces of work in `work` that no helper has taken yet.
    pending: AtomicUsize,
    work: Mutex<VecDeque<T>>,
}

impl<T: Clone> Lobby<T> {
    pub(super) const fn new() -> Self {
        Self {
            free: AtomicUsize::new(0),
            pending: AtomicUsize::new(0),
            work: Mutex::new(VecDeque::new()),
        }
    }

    /// Hands `work` to as many waiting helpers as there are, at most `wanted`, and returns their
    /// number. Each of them will take it.
    pub(super) fn hand_out(&self, wanted: usize, work: &T) -> usize {
        let claim = |free: usize| (free > 0).then(|| free - free.min(wanted));
        let Ok(free) = self.free.fetch_update(Ordering::AcqRel, Ordering::Acquire, claim) else {
            return 0;
        };
        let count = free.min(wanted);
        self.queue().extend(std::iter::repeat_n(work, count).cloned());
        self.pending.fetch_add(count, Ordering::Release);
        count
    }

    /// Waits for work for a short while.
    pub(super) fn wait(&self) -> Option<T> {
        self.free.fetch_add(1, Ordering::AcqRel);
        let begin = Instant::now();
        loop {
            for _ in 0..LOOKS {
                if self.pending.load(Ordering::Acquire) > 0
                    && let Some(work) = self.take()
                {
                    return Some(work);
                }
                std::hint::spin_loop();
            }
            // Whoever else wants this processor, another library's threads say, goes first.
            std::thread::yield_now();
            // Without a free place to give up, a caller counts on this helper: its work is on the way.
            if begin.elapsed() > AWAKE
                && self
                    .free
                    .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1))
                    .is_ok()
            {
                return None;
            }
        }
    }

    fn take(&self) -> Option<T> {
        let work = self.queue().pop_front();
        if work.is_some() {
            self.pending.fetch_sub(1, Ordering::AcqRel);
        }
        work
    }

    fn queue(&self) -> std::sync::MutexGuard<'_, VecDeque<T>> {
        // The queue is whole at every unlock: a panic elsewhere leaves nothing half done.
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waiting_takes_nothing() {
        let lobby = Lobby::new();
        assert_eq!(lobby.hand_out(3, &()), 0);
        assert_eq!(lobby.wait(), None);
        assert_eq!(lobby.hand_out(3, &()), 0);
    }

    #[test]
    fn all_that_is_handed_out_is_taken() {
        let lobby = Lobby::new();
        let (given, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let done = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while given.load(Ordering::Acquire) < 200 {
                        given.fetch_add(lobby.hand_out(2, &()), Ordering::AcqRel);
                    }
                    done.fetch_add(1, Ordering::AcqRel);
                });
            }
            for _ in 0..3 {
                scope.spawn(|| {
                    while done.load(Ordering::Acquire) < 2 {
                        while lobby.wait().is_some() {
                            taken.fetch_add(1, Ordering::AcqRel);
                        }
                    }
                });
            }
        });
        assert_eq!(taken.into_inner(), given.into_inner());
        assert_eq!(lobby.free.into_inner(), 0);
        assert_eq!(lobby.pending.into_inner(), 0);
    }
}
