//! The threads that attention runs on, and the memory that they keep between calls.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::kernel::scratch::{AlignedBuf, Scratch};
use super::team::Team;
use crate::error::{Error, Result};

/// A pool of threads with their working memory. Results do not depend on the number of threads.
#[derive(Debug)]
pub struct Workers {
    team: Option<Team>,
    num_threads: usize,
    scratches: Mutex<Vec<Scratch>>,
    buffers: Mutex<Vec<AlignedBuf>>,
}

impl Workers {
    /// Threads at most: more than the cores of any machine, and few enough to start at once.
    pub const MAX_THREADS: usize = 1024;

    /// `num_threads` threads, the calling one among them.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for no threads, more than 1,024, or more than the system gives.
    pub fn new(num_threads: usize) -> Result<Self> {
        if !(1..=Self::MAX_THREADS).contains(&num_threads) {
            let allowed = format!("1 to {}", Self::MAX_THREADS);
            return Err(Error::invalid("num_threads", num_threads, allowed));
        }
        let team = if num_threads == 1 {
            None
        } else {
            let builder = rayon::ThreadPoolBuilder::new()
                .num_threads(num_threads - 1)
                .thread_name(|i| format!("chunkcache-{i}"));
            let pool = builder.build().map_err(|error| {
                Error::invalid(
                    "num_threads",
                    num_threads,
                    format!("what the system gives: {error}"),
                )
            })?;
            Some(Team::new(pool))
        };
        Ok(Self {
            team,
            num_threads,
            scratches: Mutex::new(Vec::new()),
            buffers: Mutex::new(Vec::new()),
        })
    }

    /// The number of threads.
    pub const fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// Calls `work` once for each of `0..count`, each thread taking the next index when it is free.
    pub(crate) fn for_each(&self, count: usize, work: impl Fn(usize, &mut Scratch) + Sync) {
        let next = AtomicUsize::new(0);
        let take_all = || {
            let mut scratch = pop(&self.scratches).unwrap_or(Scratch::new());
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count {
                    break;
                }
                work(index, &mut scratch);
            }
            push(&self.scratches, scratch);
        };
        match &self.team {
            Some(team) => team.run((self.num_threads - 1).min(count.max(1) - 1), &take_all),
            None => take_all(),
        }
    }

    /// A buffer from an earlier call, or a new one.
    pub(crate) fn take_buffer(&self) -> AlignedBuf {
        pop(&self.buffers).unwrap_or(AlignedBuf::new())
    }

    /// Keeps a buffer for a later call.
    pub(crate) fn give_buffer(&self, buffer: AlignedBuf) {
        push(&self.buffers, buffer);
    }
}

fn pop<T>(stack: &Mutex<Vec<T>>) -> Option<T> {
    // Memory that a panicking thread kept is lost, no more.
    stack.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop()
}

fn push<T>(stack: &Mutex<Vec<T>>, item: T) {
    stack.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(item);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_is_taken_once() {
        for num_threads in [1, 2, 5] {
            let workers = Workers::new(num_threads).unwrap();
            for count in [0, 1, 2, 1000] {
                let taken = (0..count).map(|_| AtomicUsize::new(0)).collect::<Vec<_>>();
                workers.for_each(count, |index, _| {
                    taken[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(taken.iter().all(|n| n.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn callers_may_share_the_threads() {
        let workers = Workers::new(3).unwrap();
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        workers.for_each(50, |index, _| {
                            sum.fetch_add(index, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 4 * 100 * (50 * 49 / 2));
    }

    #[test]
    fn a_panic_reaches_the_caller() {
        let workers = Workers::new(2).unwrap();
        let call = || workers.for_each(100, |index, _| assert!(index != 50, "index 50"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err());
        workers.for_each(10, |_, _| {});
    }

    #[test]
    fn no_threads_are_refused() {
        assert!(Workers::new(0).is_err());
    }
}
