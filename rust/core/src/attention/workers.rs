//! The threads that attention runs on, and the memory that they keep between calls.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::kernel::scratch::{AlignedBuf, Scratch};
use crate::error::{Error, Result};

/// A pool of threads with their working memory. Results do not depend on the number of threads.
#[derive(Debug)]
pub struct Workers {
    pool: Option<rayon::ThreadPool>,
    num_threads: usize,
    scratches: Mutex<Vec<Scratch>>,
    buffers: Mutex<Vec<AlignedBuf>>,
}

impl Workers {
    /// `num_threads` threads; with one, work runs on the calling thread.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for no threads, or more than the system gives.
    pub fn new(num_threads: usize) -> Result<Self> {
        if num_threads == 0 {
            return Err(Error::invalid("num_threads", num_threads, "1 or more"));
        }
        let pool = if num_threads == 1 {
            None
        } else {
            let builder = rayon::ThreadPoolBuilder::new()
                .num_threads(num_threads)
                .thread_name(|i| format!("chunkcache-{i}"));
            Some(builder.build().map_err(|error| {
                Error::invalid(
                    "num_threads",
                    num_threads,
                    format!("what the system gives: {error}"),
                )
            })?)
        };
        Ok(Self {
            pool,
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
        match &self.pool {
            Some(pool) if count > 1 => {
                pool.scope(|scope| {
                    for _ in 0..self.num_threads.min(count) {
                        scope.spawn(|_| take_all());
                    }
                });
            }
            _ => take_all(),
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
