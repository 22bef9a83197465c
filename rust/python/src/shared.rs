//! A tree with the K/V of its chunks behind one lock, as several Python objects hold it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use chunkcache::attention::Workers;
use chunkcache::error::Result;
use chunkcache::kv::HostKv;
use chunkcache::plan::{Limits, Plan, Planner};
use chunkcache::tree::{CopyChunk, PrefixTree, SeqHandle, StepId};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::args::IntoPython;

/// Operations on fewer tokens than this run without releasing the GIL: they take less time than
/// getting it back from a busy thread would.
pub const LONG: usize = 4096;

/// The K/V of the chunks, and the threads that work on it.
#[derive(Debug)]
pub struct Store {
    /// The K/V. Attention reads it; writes and copies change it.
    pub kv: RwLock<HostKv>,
    /// The threads.
    pub workers: Workers,
}

/// What the lock guards.
#[derive(Debug)]
pub struct State {
    /// The tree.
    pub tree: PrefixTree,
    /// Tables of closed plans, to be brought up to date for the next ones.
    planners: Vec<Planner>,
    store: Option<Arc<Store>>,
}

impl State {
    /// Makes the copies that an operation of the tree has asked for, if the K/V is ours.
    pub fn copy(&self, copies: &[CopyChunk]) -> Result<()> {
        let Some(store) = self.store.as_ref().filter(|_| !copies.is_empty()) else { return Ok(()) };
        let mut kv = store.kv.write().unwrap_or_else(PoisonError::into_inner);
        for copy in copies {
            // A step may be committed without ever writing; its K/V is anything then.
            if kv.has_memory(copy.src) {
                kv.copy_chunk_head(copy.src, copy.dst, copy.num_tokens)?;
            }
        }
        Ok(())
    }

    /// Begins a step, with tables of its own: the ones of an earlier step if that is closed, so that
    /// only what differs is written.
    pub fn begin_plan(
        &mut self,
        batch: &[Option<SeqHandle>],
        qo_indptr: Option<&[u32]>,
    ) -> Result<(Plan, Planner)> {
        let fits = |planner: &Planner| {
            planner.image().layout().limits.max_sequences as usize >= batch.len()
        };
        let mut planner = match self.planners.pop().filter(fits) {
            Some(planner) => planner,
            None => Planner::new(self.tree.chunk_size() as u32, self.limits(batch.len()))?,
        };
        let plan = planner.plan(&mut self.tree, batch, qo_indptr);
        match plan {
            Ok(plan) => Ok((plan, planner)),
            Err(error) => {
                self.planners.push(planner);
                Err(error)
            }
        }
    }

    /// The usual capacities of tables, or larger ones for a larger batch.
    fn limits(&self, num_sequences: usize) -> Limits {
        let page_size = self.tree.chunk_size() as u32;
        // The tables of one step name far fewer chunks than a pool of this many has.
        let num_chunks = self.tree.stats().capacity.min(1 << 26) as u32;
        let usual = Planner::default_limits(page_size, num_chunks);
        if num_sequences <= usual.max_sequences as usize {
            return usual;
        }
        let max_sequences = u32::try_from(num_sequences.next_power_of_two()).unwrap_or(u32::MAX);
        let ids = Planner::block_len(page_size).saturating_mul(2).saturating_mul(max_sequences);
        Limits {
            max_sequences,
            max_segments: usual.max_segments.saturating_add(max_sequences.saturating_mul(2)),
            max_page_ids: usual.max_page_ids.saturating_add(ids),
        }
    }

    /// Keeps the tables of a closed plan.
    pub fn keep_planner(&mut self, planner: Planner) {
        self.planners.push(planner);
    }

    /// Aborts the step of a plan that was dropped open. That it was closed, or a copy failed, has
    /// no one left to be told.
    pub fn abandon(&mut self, step: StepId) {
        if let Ok(closed) = self.tree.abort_step(step) {
            self.copy(&closed.copies).unwrap_or_default();
        }
    }
}

/// A tree that Python objects share: a tree, its cache, and their plans.
#[derive(Debug)]
pub struct Shared {
    state: Mutex<State>,
    /// Whether operations copy K/V, and so may have to wait until attention has read it.
    has_store: bool,
}

impl Shared {
    /// A tree, with the K/V of its chunks or without.
    pub fn new(tree: PrefixTree, store: Option<Arc<Store>>) -> Arc<Self> {
        let has_store = store.is_some();
        Arc::new(Self { state: Mutex::new(State { tree, planners: Vec::new(), store }), has_store })
    }

    /// Runs an operation on the tree. `is_long` says whether it may take long enough for other
    /// Python threads to go on meanwhile; they also do where another thread has the lock.
    pub fn with<T: Send>(
        &self,
        py: Python<'_>,
        is_long: bool,
        operation: impl FnOnce(&mut State) -> Result<T> + Send,
    ) -> PyResult<T> {
        if !is_long && let Ok(mut state) = self.state.try_lock() {
            return operation(&mut state).into_python(py);
        }
        py.detach(|| self.lock().map(|mut state| operation(&mut state)))?.into_python(py)
    }

    /// As [`Self::with`], for an operation that may copy K/V.
    pub fn with_copies<T: Send>(
        &self,
        py: Python<'_>,
        is_long: bool,
        operation: impl FnOnce(&mut State) -> Result<T> + Send,
    ) -> PyResult<T> {
        self.with(py, is_long || self.has_store, operation)
    }

    fn lock(&self) -> PyResult<MutexGuard<'_, State>> {
        self.state.lock().map_err(|_| {
            PyRuntimeError::new_err("the tree is unusable since an internal error in another call")
        })
    }

    /// Runs an operation where errors have nowhere to go: when Python drops an object. Waits with
    /// the GIL, which the thread that has the lock does not need to give it back.
    pub fn with_on_drop(&self, operation: impl FnOnce(&mut State)) {
        if let Ok(mut state) = self.state.lock() {
            operation(&mut state);
        }
    }
}
