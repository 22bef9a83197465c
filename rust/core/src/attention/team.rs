//! One piece of work done by the calling thread together with those threads of a pool that come in
//! time.
//!
//! The caller starts at once and waits only for helpers that have begun: a helper that wakes when
//! the work is done (a busy machine, a forked process without the pool's threads) finds the gate
//! closed and leaves. Waiting for every spawned task, as a scope does, would wait for its waking.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Thread;

use super::lobby::Lobby;

/// Set in [`Gate::state`] once no more helpers may begin; the rest counts those inside.
const CLOSED: usize = 1 << (usize::BITS - 1);
/// How often the caller looks for the last helper before it sleeps.
const SPINS: usize = 2000;

/// A pool of threads, and where they wait between calls.
#[derive(Debug)]
pub(super) struct Team {
    pool: rayon::ThreadPool,
    lobby: Arc<Lobby<Arc<Gate>>>,
}

/// The work of a call, with its lifetime erased: it is reachable through an open gate only.
#[derive(Debug)]
struct Work(*const (dyn Fn() + Sync));

// SAFETY: the work may be called from any thread, being `Sync`.
unsafe impl Send for Work {}
// SAFETY: as above.
unsafe impl Sync for Work {}

#[derive(Debug)]
struct Gate {
    state: AtomicUsize,
    panicked: AtomicBool,
    caller: Thread,
    work: Work,
}

impl Gate {
    /// Does a helper's share, if the gate is open.
    fn help(&self) {
        let entered = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
            (state & CLOSED == 0).then_some(state + 1)
        });
        if entered.is_err() {
            return;
        }
        // SAFETY: the caller keeps the work alive until it has closed the gate and all helpers
        // that entered, as this one has, are out.
        let work = unsafe { &*self.work.0 };
        if catch_unwind(AssertUnwindSafe(work)).is_err() {
            self.panicked.store(true, Ordering::Release);
        }
        if self.state.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1 {
            self.caller.unpark();
        }
    }
}

/// Closes the gate when the caller is done, or unwinds.
struct Closing<'a>(&'a Gate);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_or(CLOSED, Ordering::AcqRel);
        let mut spins = 0;
        while self.0.state.load(Ordering::Acquire) != CLOSED {
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                std::thread::park();
            }
        }
    }
}

impl Team {
    pub(super) fn new(pool: rayon::ThreadPool) -> Self {
        Self { pool, lobby: Arc::new(Lobby::new()) }
    }

    /// Calls `work` on this thread and on up to `helpers` threads of the pool at the same time,
    /// and returns when all calls that have begun have ended.
    ///
    /// # Panics
    /// When a call panics.
    pub(super) fn run(&self, helpers: usize, work: &(dyn Fn() + Sync)) {
        if helpers == 0 {
            return work();
        }
        // SAFETY: a reference and a pointer to the same trait object differ in the lifetime alone,
        // which `Closing` upholds.
        let erased = unsafe {
            std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync + 'static)>(
                std::ptr::from_ref(work),
            )
        };
        let gate = Arc::new(Gate {
            state: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            caller: std::thread::current(),
            work: Work(erased),
        });
        {
            let _closing = Closing(&gate);
            let awake = self.lobby.hand_out(helpers, &gate);
            for _ in awake..helpers {
                let (gate, lobby) = (Arc::clone(&gate), Arc::clone(&self.lobby));
                self.pool.spawn(move || {
                    gate.help();
                    drop(gate);
                    while let Some(gate) = lobby.wait() {
                        gate.help();
                    }
                });
            }
            work();
        }
        assert!(!gate.panicked.load(Ordering::Acquire), "a helper panicked");
    }
}
