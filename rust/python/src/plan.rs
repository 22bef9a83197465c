//! `chunkcache.Plan`: one step over a tree, or over somebody else's block tables.

use std::sync::{Arc, PoisonError, RwLock};

use chunkcache::error::{Error, Result};
use chunkcache::plan::{BlockTablePlanner, Plan, PlanView, Planner};
use chunkcache::tree::{SeqHandle, StepId};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::args::IntoPython;
use crate::blocks::PyBlockTablePlanner;
use crate::numpy::{int64_array, uint32_array};
use crate::results::{Committed, Inherited};
use crate::shared::{LONG, Shared};
use crate::work::{Heads, WorkArrays, cutter, work_arrays};

/// Whose tables they are.
#[derive(Debug)]
enum Tables {
    Tree(Box<Planner>),
    Blocks(Box<BlockTablePlanner>),
}

/// An open plan and its tables; none once they serve a later plan.
#[derive(Debug)]
pub struct Open {
    plan: Plan,
    tables: Option<Tables>,
}

/// Where the state of a plan is: the plan has it, and who may take its tables for the next one.
pub type OpenPlan = RwLock<Option<Open>>;

/// Takes the planner of block tables out of an open plan, if it is still there.
pub fn take_blocks(open: &OpenPlan) -> Option<Box<BlockTablePlanner>> {
    let mut open = open.write().unwrap_or_else(PoisonError::into_inner);
    let tables = &mut open.as_mut()?.tables;
    match tables.take()? {
        Tables::Blocks(planner) => Some(planner),
        tree @ Tables::Tree(_) => {
            *tables = Some(tree);
            None
        }
    }
}

/// Gives a plan the planner back that was taken out of it; returns it if that is closed meanwhile.
pub fn put_blocks(
    open: &OpenPlan,
    planner: Box<BlockTablePlanner>,
) -> Option<Box<BlockTablePlanner>> {
    let mut open = open.write().unwrap_or_else(PoisonError::into_inner);
    match open.as_mut() {
        Some(open) => {
            open.tables = Some(Tables::Blocks(planner));
            None
        }
        None => Some(planner),
    }
}

/// A plan's rows, which outlive it.
#[derive(Debug)]
struct Rows {
    positions: Vec<i64>,
    slot_mapping: Vec<i64>,
    qo_indptr: Vec<i64>,
}

/// The rows as numpy arrays, made when first asked for.
#[derive(Debug)]
struct Arrays {
    positions: Py<PyAny>,
    slot_mapping: Py<PyAny>,
    qo_indptr: Py<PyAny>,
}

/// One step: which sequences compute which tokens, and the context tables that attention reads.
///
/// It is made by `PrefixTree.plan`, by `ChunkCache.plan`, or by `plan_from_block_tables` and
/// `plan_from_csr` of `chunkcache.attention`. It serves all layers, and holds its chunks until it
/// is committed or closed. As a context manager it closes itself.
#[pyclass(frozen, weakref, name = "Plan", module = "chunkcache")]
pub struct PyPlan {
    open: Arc<OpenPlan>,
    /// The tree of the plan; none over block tables.
    shared: Option<Arc<Shared>>,
    /// The planner that has the tables back when the plan ends.
    planner: Option<Py<PyBlockTablePlanner>>,
    epoch: u64,
    rows: Rows,
    arrays: PyOnceLock<Arrays>,
}

/// What `Plan.tables` returns.
type TableArrays<'py> = (
    u32,
    u32,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
);

/// The tables in plain words, without what is beyond their last row in use.
struct CopiedTables {
    page_size: u32,
    num_qo_rows: u32,
    order: Vec<u32>,
    sequences: Vec<u32>,
    segment_order: Vec<u32>,
    segments: Vec<u32>,
    page_ids: Vec<u32>,
}

impl CopiedTables {
    fn of(view: &PlanView<'_>) -> Self {
        let used = |order: &[u32]| order.iter().map(|&row| row as usize + 1).max().unwrap_or(0);
        let segments = &view.segments[..used(view.segment_order)];
        let in_use = view.segment_order.iter().map(|&row| &segments[row as usize]);
        let ids = in_use.map(|s| (s.ids_begin + s.num_pages) as usize).max().unwrap_or(0);
        let sequences = &view.sequences[..used(view.order)];
        Self {
            page_size: view.page_size,
            num_qo_rows: view.num_qo_rows,
            order: view.order.to_vec(),
            sequences: sequences
                .iter()
                .flat_map(|s| [s.leaf, s.qo_begin, s.qo_len, s.kv_len, s.num_cached_rows])
                .collect(),
            segment_order: view.segment_order.to_vec(),
            segments: segments
                .iter()
                .flat_map(|s| {
                    [s.parent, s.seq_begin, s.seq_end, s.start_pos, s.num_pages, s.ids_begin]
                })
                .collect(),
            page_ids: view.page_ids[..ids].to_vec(),
        }
    }
}

/// How the step of a tree ends.
#[derive(Debug, Clone, Copy)]
enum End {
    Commit,
    Abort,
}

impl PyPlan {
    fn new(plan: Plan, tables: Tables, shared: Option<Arc<Shared>>) -> Self {
        let rows = Rows {
            positions: plan.positions().to_vec(),
            slot_mapping: plan.slot_mapping().to_vec(),
            qo_indptr: plan.qo_indptr().iter().map(|&row| row.into()).collect(),
        };
        let epoch = plan.epoch();
        let open = Arc::new(RwLock::new(Some(Open { plan, tables: Some(tables) })));
        Self { open, shared, planner: None, epoch, rows, arrays: PyOnceLock::new() }
    }

    /// A step of a tree.
    pub fn over_tree(
        py: Python<'_>,
        shared: &Arc<Shared>,
        batch: &[Option<SeqHandle>],
        qo_indptr: Option<&[u32]>,
    ) -> PyResult<Self> {
        let (plan, planner) =
            shared.with(py, batch.len() > LONG, |state| state.begin_plan(batch, qo_indptr))?;
        Ok(Self::new(plan, Tables::Tree(Box::new(planner)), Some(Arc::clone(shared))))
    }

    /// A step of somebody else's paged cache.
    pub fn over_blocks(planner: BlockTablePlanner, plan: Plan) -> Self {
        Self::new(plan, Tables::Blocks(Box::new(planner)), None)
    }

    /// A step of somebody else's paged cache, whose tables go back to a planner.
    pub fn of_planner(
        owner: Py<PyBlockTablePlanner>,
        planner: Box<BlockTablePlanner>,
        plan: Plan,
    ) -> Self {
        let mut made = Self::new(plan, Tables::Blocks(planner), None);
        made.planner = Some(owner);
        made
    }

    /// Where the state of the plan is.
    pub fn open(&self) -> &Arc<OpenPlan> {
        &self.open
    }

    /// Runs `work` on the tables and the slots, for a thread without the GIL; closing the plan
    /// waits until it has ended.
    ///
    /// # Errors
    /// [`Error::ClosedPlan`]; [`Error::StalePlan`] if its tables serve a later plan;
    /// [`Error::AbandonedPlan`] if it builds on one that was aborted.
    pub fn read<T>(&self, work: impl FnOnce(&PlanView<'_>, &[i64]) -> Result<T>) -> Result<T> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        let Open { plan, tables } = open.as_ref().ok_or_else(|| self.closed())?;
        let view = match tables {
            Some(Tables::Tree(planner)) => plan.view(planner.image())?,
            Some(Tables::Blocks(planner)) => plan.view(planner.image())?,
            None => return Err(self.stale()),
        };
        work(&view, &self.rows.slot_mapping)
    }

    /// Runs `work` on the plan and the planner of its tables.
    ///
    /// # Errors
    /// [`Error::ClosedPlan`]; [`Error::StalePlan`] if its tables serve a later plan;
    /// [`Error::InvalidConfig`] for a plan over block tables.
    pub fn with_planner<T>(
        &self,
        work: impl FnOnce(&mut Plan, &mut Planner) -> Result<T>,
    ) -> Result<T> {
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        match open.as_mut() {
            Some(Open { plan, tables: Some(Tables::Tree(planner)) }) => work(plan, planner),
            Some(Open { tables: Some(Tables::Blocks(_)), .. }) => {
                let given = "a plan over block tables";
                Err(Error::invalid("plan", given, "a plan of a tree"))
            }
            Some(Open { tables: None, .. }) => Err(self.stale()),
            None => Err(self.closed()),
        }
    }

    /// Runs `work` on the plan and the planner of its block tables.
    ///
    /// # Errors
    /// [`Error::ClosedPlan`]; [`Error::StalePlan`] if its tables serve a later plan;
    /// [`Error::InvalidConfig`] for a plan of a tree.
    pub fn with_blocks<T>(
        &self,
        work: impl FnOnce(&mut Plan, &mut BlockTablePlanner) -> Result<T>,
    ) -> Result<T> {
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        match open.as_mut() {
            Some(Open { plan, tables: Some(Tables::Blocks(planner)) }) => work(plan, planner),
            Some(Open { tables: Some(Tables::Tree(_)), .. }) => {
                Err(Error::invalid("plan", "a plan of a tree", "a plan over block tables"))
            }
            Some(Open { tables: None, .. }) => Err(self.stale()),
            None => Err(self.closed()),
        }
    }

    /// Takes the planner out of an open plan of a tree, if it is still there.
    pub fn take_planner(&self) -> Option<Planner> {
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        let tables = &mut open.as_mut()?.tables;
        match tables.take()? {
            Tables::Tree(planner) => Some(*planner),
            blocks @ Tables::Blocks(_) => {
                *tables = Some(blocks);
                None
            }
        }
    }

    /// Fails unless the plan is one of this tree.
    pub fn check_is_of(&self, shared: &Arc<Shared>) -> Result<()> {
        match &self.shared {
            Some(own) if Arc::ptr_eq(own, shared) => Ok(()),
            _ => Err(Error::invalid("plan", "a plan of something else", "a plan of this cache")),
        }
    }

    /// Closes a plan over block tables.
    fn end_blocks(&self) {
        let planner = take_blocks(&self.open);
        self.open.write().unwrap_or_else(PoisonError::into_inner).take();
        if let (Some(owner), Some(planner)) = (&self.planner, planner) {
            owner.get().keep(planner);
        }
    }

    fn stale(&self) -> Error {
        Error::StalePlan { plan: self.epoch }
    }

    fn closed(&self) -> Error {
        Error::ClosedPlan { plan: self.epoch }
    }

    fn arrays(&self, py: Python<'_>) -> PyResult<&Arrays> {
        self.arrays.get_or_try_init(py, || {
            let array = |values: &[i64]| int64_array(py, values).map(Bound::unbind);
            Ok(Arrays {
                positions: array(&self.rows.positions)?,
                slot_mapping: array(&self.rows.slot_mapping)?,
                qo_indptr: array(&self.rows.qo_indptr)?,
            })
        })
    }

    /// Ends the step of the tree and gives the tables back to it. None if the plan was closed.
    fn end(&self, py: Python<'_>, how: End) -> PyResult<Option<Committed>> {
        let lock = || self.open.write().unwrap_or_else(PoisonError::into_inner);
        let Some(shared) = &self.shared else {
            py.detach(|| self.end_blocks());
            return Ok(None);
        };
        let committed = shared.with(py, true, |state| {
            let mut open = lock();
            let Some(step) = step_of(&open) else { return Ok(None) };
            let committed = match how {
                End::Commit => state.tree.commit_step(step)?,
                End::Abort => state.tree.abort_step(step)?,
            };
            if let Some(Open { tables: Some(Tables::Tree(planner)), .. }) = open.take() {
                state.keep_planner(*planner);
            }
            state.copy(&committed.copies)?;
            Ok(Some(committed))
        })?;
        Ok(committed.map(Into::into))
    }
}

fn step_of(open: &Option<Open>) -> Option<StepId> {
    open.as_ref().and_then(|open| open.plan.step())
}

impl Drop for PyPlan {
    fn drop(&mut self) {
        let Some(shared) = &self.shared else { return self.end_blocks() };
        let step = step_of(&self.open.write().unwrap_or_else(PoisonError::into_inner));
        if let Some(step) = step {
            shared.with_on_drop(|state| state.abandon(step));
        }
    }
}

#[pymethods]
impl PyPlan {
    /// The token position of each row in its sequence, int64 `[rows]`; 0 for padding.
    #[getter]
    fn positions(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(self.arrays(py)?.positions.clone_ref(py))
    }

    /// The slot that each row's K/V is written to, `chunk * chunk_size + offset`, int64 `[rows]`; -1
    /// for padding and for tokens that are written already or by another sequence.
    #[getter]
    fn slot_mapping(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(self.arrays(py)?.slot_mapping.clone_ref(py))
    }

    /// Entry i of the batch has the rows `qo_indptr[i]` to `qo_indptr[i + 1]`, int64 `[entries + 1]`.
    #[getter]
    fn qo_indptr(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(self.arrays(py)?.qo_indptr.clone_ref(py))
    }

    /// The planner over block tables that made the plan; None for other plans.
    #[getter]
    fn planner(&self, py: Python<'_>) -> Option<Py<PyBlockTablePlanner>> {
        self.planner.as_ref().map(|planner| planner.clone_ref(py))
    }

    /// Rows of q and of the output, padding included.
    #[getter]
    fn num_rows(&self) -> usize {
        self.rows.positions.len()
    }

    /// Whether the plan was neither committed nor closed.
    #[getter]
    fn is_open(&self, py: Python<'_>) -> bool {
        py.detach(|| self.open.read().unwrap_or_else(PoisonError::into_inner).is_some())
    }

    /// Whether it builds on an earlier plan that was closed without a commit. It can then only be
    /// closed: the K/V that it reads is never written.
    #[getter]
    fn is_stale(&self, py: Python<'_>) -> bool {
        py.detach(|| {
            let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
            open.as_ref().is_some_and(|open| open.plan.is_stale())
        })
    }

    /// The context tables of the step: tokens per page, rows of q, and uint32 arrays `order`,
    /// `sequences [rows, 5]`, `segment_order`, `segments [rows, 6]` (both flat) and `page_ids`.
    ///
    /// Raises:
    ///     StalePlanError: the plan is closed, or stale.
    fn tables<'py>(&self, py: Python<'py>) -> PyResult<TableArrays<'py>> {
        let copied = self.read(|view, _| Ok(CopiedTables::of(view))).into_python(py)?;
        let array = |words: &[u32]| uint32_array(py, words);
        Ok((
            copied.page_size,
            copied.num_qo_rows,
            array(&copied.order)?,
            array(&copied.sequences)?,
            array(&copied.segment_order)?,
            array(&copied.segments)?,
            array(&copied.page_ids)?,
        ))
    }

    /// Cut the step into work items for the GPU kernel.
    ///
    /// Args:
    ///     heads: K/V heads, query heads per K/V head, warps of a block that compute, and whether
    ///         four of them multiply together.
    ///     costs: blocks of the grid, and what an item, a tile of rows and a partial row cost.
    ///
    /// Returns:
    ///     uint32 arrays of items, merge items, query tokens, partial states by token, and rows without keys (all
    ///     flat), and the number of partial slots.
    ///
    /// Raises:
    ///     StalePlanError: the plan is closed.
    ///     InvalidConfigError: heads or costs that are not allowed.
    fn cut<'py>(
        &self,
        py: Python<'py>,
        heads: Heads,
        costs: (u32, f32, f32, f32),
    ) -> PyResult<WorkArrays<'py>> {
        let cutter = py.detach(|| {
            let mut cutter = cutter(heads, costs)?;
            self.read(|view, _| {
                cutter.cut(view);
                Ok(())
            })?;
            Ok(cutter)
        });
        work_arrays(py, cutter.into_python(py)?.work())
    }

    /// Count the step's tokens as written, and close the plan. Plans of one tree are committed in the
    /// order in which they were made.
    ///
    /// Raises:
    ///     StalePlanError: the plan is closed, or stale.
    ///     InvalidConfigError: an earlier plan is still open, or the plan is not one of a tree.
    pub fn commit(&self, py: Python<'_>) -> PyResult<Committed> {
        if self.shared.is_none() {
            let given = "a plan over block tables";
            return Err(Error::invalid("plan", given, "a plan of a tree")).into_python(py);
        }
        match self.end(py, End::Commit)? {
            Some(committed) => Ok(committed),
            None => Err(self.closed()).into_python(py),
        }
    }

    /// Close the plan without a commit: nothing counts as written. A plan that is closed already
    /// stays so.
    ///
    /// Returns:
    ///     Who must now write what sequences that were removed meanwhile were to write.
    fn close(&self, py: Python<'_>) -> PyResult<Vec<Inherited>> {
        let committed = self.end(py, End::Abort)?;
        Ok(committed.map(|committed| committed.inherited).unwrap_or_default())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (exc_type, exc_value, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: &Bound<'_, PyAny>,
        exc_value: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let _ = (exc_type, exc_value, traceback);
        self.close(py).map(|_| ())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let state = if self.is_open(py) { "open" } else { "closed" };
        let entries = self.rows.qo_indptr.len() - 1;
        format!("Plan({entries} entries, {} rows, {state})", self.num_rows())
    }
}
