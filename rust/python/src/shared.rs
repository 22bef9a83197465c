//! A tree with the K/V of its chunks behind one lock, as several Python objects hold it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use chunkcache::attention::Workers;
use chunkcache::error::Result;
use chunkcache::kv::{HostKv, Reserve};
use chunkcache::plan::{Cutter, DeviceCosts, HeadShape, Limits, Plan, Planner, WorkLimits};
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

impl Store {
    /// The K/V, to read.
    pub fn reading(&self) -> RwLockReadGuard<'_, HostKv> {
        self.kv.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The K/V, to change.
    pub fn writing(&self) -> RwLockWriteGuard<'_, HostKv> {
        self.kv.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What plans for a device have beside their tables, and what is still to be done there.
#[derive(Debug)]
pub struct Device {
    /// The head shape that work items are cut for.
    pub shape: HeadShape,
    /// The device's constants.
    pub costs: DeviceCosts,
    /// The capacities of the work items' sections in new tables.
    pub work: WorkLimits,
    /// Copies of K/V that operations have asked for, in order.
    pub copies: Vec<CopyChunk>,
    /// Transfers of tables to the device so far, and their bytes.
    pub table_copies: u64,
    pub table_bytes_copied: u64,
}

impl Device {
    /// A cutter for the present head shape.
    ///
    /// # Errors
    /// As [`Cutter::new`].
    pub fn cutter(&self) -> Result<Cutter> {
        Cutter::new(self.shape, self.costs)
    }
}

/// Where the K/V of the chunks is.
#[derive(Debug)]
pub enum Backing {
    /// Not ours: a tree alone.
    None,
    /// In host memory.
    Host(Arc<Store>, Reserve),
    /// On a device, which the Python side works on.
    Device(Box<Device>),
}

/// What the lock guards.
#[derive(Debug)]
pub struct State {
    /// The tree.
    pub tree: PrefixTree,
    /// Tables of closed plans, to be brought up to date for the next ones.
    planners: Vec<Planner>,
    /// The K/V of the chunks.
    pub backing: Backing,
}

impl State {
    /// Makes sure that the chunk that an operation of the tree may copy to will have memory, if the
    /// K/V is in host memory: to be called before the tree changes. `may_copy` is only asked in need.
    pub fn make_room(&mut self, may_copy: impl FnOnce(&PrefixTree) -> bool) -> Result<()> {
        let Backing::Host(_, reserve) = &mut self.backing else { return Ok(()) };
        match reserve.fill() {
            Err(error) if may_copy(&self.tree) => Err(error),
            _ => Ok(()),
        }
    }

    /// Makes the copies that an operation of the tree has asked for, if the K/V is ours; on a device
    /// they are noted and made before anything else is done there.
    pub fn copy(&mut self, copies: &[CopyChunk]) -> Result<()> {
        match &mut self.backing {
            Backing::Host(store, reserve) if !copies.is_empty() => {
                let mut kv = store.writing();
                for copy in copies {
                    // A step may be committed without ever writing; its K/V is anything then.
                    if kv.has_memory(copy.src) {
                        kv.back(copy.dst, reserve)?;
                        kv.copy_chunk_head(copy.src, copy.dst, copy.num_tokens)?;
                    }
                }
            }
            Backing::Device(device) => device.copies.extend_from_slice(copies),
            Backing::Host(..) | Backing::None => {}
        }
        Ok(())
    }

    /// Takes memory for the last chunk of a sequence that waits for the commit that will copy to it.
    pub fn back_waiting(&mut self, seq: SeqHandle) -> Result<()> {
        let Backing::Host(store, reserve) = &mut self.backing else { return Ok(()) };
        let leaf = self.tree.segment(self.tree.leaf(seq)?);
        let mut kv = store.writing();
        leaf.chunk_ids.last().map_or(Ok(()), |&chunk| kv.back(chunk, reserve))
    }

    /// Begins a step, with tables of its own: the ones of an earlier step if that is closed, so that
    /// only what differs is written.
    pub fn begin_plan(
        &mut self,
        batch: &[Option<SeqHandle>],
        qo_indptr: Option<&[u32]>,
    ) -> Result<(Plan, Planner)> {
        let mut planner = self.take_planner(batch.len(), self.usual_work())?;
        let mut plan = planner.plan(&mut self.tree, batch, qo_indptr);
        // Tables keep their sizes, so that captured steps stay good: what needs more gets others.
        if plan.is_err()
            && let Some(work) = larger_work(&planner)
        {
            self.planners.push(planner);
            planner = self.take_planner(batch.len(), work)?;
            plan = planner.plan(&mut self.tree, batch, qo_indptr);
        }
        match plan {
            Ok(plan) => Ok((plan, planner)),
            Err(error) => {
                self.planners.push(planner);
                Err(error)
            }
        }
    }

    /// The capacities that tables usually have for work items.
    fn usual_work(&self) -> WorkLimits {
        match &self.backing {
            Backing::Device(device) => device.work,
            Backing::Host(..) | Backing::None => WorkLimits::default(),
        }
    }

    /// The tables of a closed plan that have these capacities, or new ones.
    fn take_planner(&mut self, num_sequences: usize, work: WorkLimits) -> Result<Planner> {
        if let Backing::Device(device) = &self.backing {
            let shape = device.shape;
            self.planners.retain(|planner| planner.cutter().is_some_and(|c| c.shape() == shape));
        }
        let fits = |planner: &Planner| {
            let layout = planner.image().layout();
            layout.work == work && layout.limits.max_sequences as usize >= num_sequences
        };
        if let Some(index) = self.planners.iter().rposition(fits) {
            return Ok(self.planners.remove(index));
        }
        let (page_size, limits) = (self.tree.chunk_size() as u32, self.limits(num_sequences));
        match &self.backing {
            Backing::Device(device) => {
                Planner::with_items(page_size, limits, work, device.cutter()?)
            }
            Backing::Host(..) | Backing::None => Planner::new(page_size, limits),
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

/// The capacities that a step needs which these tables refused for want of room; `None` if that was
/// not the reason.
fn larger_work(planner: &Planner) -> Option<WorkLimits> {
    let (needed, held) = (planner.work_needed()?, planner.image().layout().work);
    let work = held.enlarged(needed);
    (work != held).then_some(work)
}

/// A tree that Python objects share: a tree, its cache, and their plans.
#[derive(Debug)]
pub struct Shared {
    state: Mutex<State>,
    /// Whether operations copy K/V themselves, and so may have to wait until attention has read it.
    has_store: bool,
}

impl Shared {
    /// A tree, with the K/V of its chunks or without.
    pub fn new(tree: PrefixTree, backing: Backing) -> Arc<Self> {
        let has_store = matches!(backing, Backing::Host(..));
        let state = State { tree, planners: Vec::new(), backing };
        Arc::new(Self { state: Mutex::new(state), has_store })
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
