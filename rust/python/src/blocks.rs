//! Plans over somebody else's block tables, one after the other.

use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use chunkcache::error::{Error, Result};
use chunkcache::plan::{BlockTablePlanner, Cutter, Index, PageTable, Plan};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::args::{self, IntoPython};
use crate::attention::slice;
use crate::device::{TableState, stage, table_state};
use crate::plan::{OpenPlan, PyPlan, put_blocks, take_blocks};
use crate::work::{Heads, cutter};

/// Makes the plans of a paged cache that others manage: what `chunkcache.attention.BlockTablePlanner`
/// is made of. The tables are its own between plans, and the last plan's while that is open.
#[pyclass(frozen, weakref, name = "BlockTablePlanner", module = "chunkcache._core")]
#[derive(Debug)]
pub struct PyBlockTablePlanner {
    page_size: u32,
    state: Mutex<State>,
}

/// Somebody else's integers, contiguous: int32, as vLLM and FlashInfer have them, or int64.
#[derive(FromPyObject)]
enum Indices {
    Narrow(PyBuffer<i32>),
    Wide(PyBuffer<i64>),
}

impl Indices {
    /// Entries of the second dimension.
    fn width(&self) -> usize {
        let shape = match self {
            Self::Narrow(buffer) => buffer.shape(),
            Self::Wide(buffer) => buffer.shape(),
        };
        shape.get(1).copied().unwrap_or(0)
    }
}

/// Integers of a width that one call's arrays all have.
trait OfWidth: Index + pyo3::buffer::Element + Send + Sync {
    /// The integers, if they have that width.
    fn of(indices: &Indices) -> Option<&[Self]>;
}

impl OfWidth for i32 {
    fn of(indices: &Indices) -> Option<&[Self]> {
        match indices {
            Indices::Narrow(buffer) => Some(slice(buffer)),
            Indices::Wide(_) => None,
        }
    }
}

impl OfWidth for i64 {
    fn of(indices: &Indices) -> Option<&[Self]> {
        match indices {
            Indices::Narrow(_) => None,
            Indices::Wide(buffer) => Some(slice(buffer)),
        }
    }
}

/// Arrays that are not all of one width.
fn mixed() -> Error {
    Error::invalid("block_table", "arrays of int32 and of int64", "all of one dtype")
}

#[derive(Debug, Default)]
struct State {
    idle: Option<Box<BlockTablePlanner>>,
    last: Weak<OpenPlan>,
}

impl State {
    /// Takes the tables from where they are.
    fn take(&mut self) -> Option<Box<BlockTablePlanner>> {
        self.idle.take().or_else(|| take_blocks(&*self.last.upgrade()?))
    }

    /// Puts them back.
    fn restore(&mut self, planner: Box<BlockTablePlanner>) {
        self.idle = match self.last.upgrade() {
            Some(last) => put_blocks(&last, planner),
            None => Some(planner),
        };
    }
}

impl PyBlockTablePlanner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the tables of a plan that has ended.
    pub fn keep(&self, planner: Box<BlockTablePlanner>) {
        self.lock().idle = Some(planner);
    }

    fn next<T: OfWidth>(
        slf: Py<Self>,
        py: Python<'_>,
        table: &PageTable<'_, T>,
        qo_indptr: Option<&Indices>,
        only_grew: bool,
    ) -> PyResult<PyPlan> {
        let qo_indptr = match qo_indptr {
            Some(rows) => Some(T::of(rows).ok_or_else(mixed).into_python(py)?),
            None => None,
        };
        let made = py.detach(|| {
            let own = slf.get();
            let mut state = own.lock();
            let (num_sequences, num_pages) = table.size(own.page_size)?;
            let held = state.take();
            let fits = held.as_ref().is_some_and(|held| {
                held.image().layout().limits.max_sequences as usize >= num_sequences
                    && held.max_pages() as usize >= num_pages
            });
            match held {
                Some(mut planner) if fits => {
                    let plan = match only_grew {
                        true => planner.update_grown(table, qo_indptr),
                        false => planner.update(table, qo_indptr),
                    };
                    match plan {
                        Ok(plan) => Ok((planner, plan)),
                        Err(error) => {
                            state.restore(planner);
                            Err(error)
                        }
                    }
                }
                held => {
                    let made = renewed(own.page_size, held.as_deref(), table, qo_indptr);
                    if let (Err(_), Some(held)) = (&made, held) {
                        state.restore(held);
                    }
                    made
                }
            }
        });
        let (planner, plan) = made.into_python(py)?;
        let plan = PyPlan::of_planner(slf.clone_ref(py), planner, plan);
        let last = std::sync::Arc::downgrade(plan.open());
        slf.get().lock().last = last;
        Ok(plan)
    }
}

/// Pages that tables have room for at least, beside those of the batch that they are made for.
const ROOM_TO_GROW: usize = 16;

/// Larger tables, for the same heads as those before.
fn renewed<T: OfWidth>(
    page_size: u32,
    before: Option<&BlockTablePlanner>,
    table: &PageTable<'_, T>,
    qo_indptr: Option<&[T]>,
) -> Result<(Box<BlockTablePlanner>, Plan)> {
    let (num_sequences, num_pages) = table.size(page_size)?;
    let capacity = |needed: usize, held: u32| {
        let needed = u32::try_from(needed.next_power_of_two()).unwrap_or(u32::MAX);
        needed.max(held)
    };
    let held = before.map_or((1, 1), |before| {
        (before.image().layout().limits.max_sequences, before.max_pages())
    });
    let max_sequences = capacity(num_sequences, held.0);
    let mut planner = BlockTablePlanner::new(
        page_size,
        max_sequences,
        capacity(num_pages + ROOM_TO_GROW, held.1),
    )?;
    let mut plan = planner.update(table, qo_indptr)?;
    if let Some(cutter) = before.and_then(BlockTablePlanner::cutter) {
        planner.set_cutter(&mut plan, Cutter::new(cutter.shape(), cutter.costs())?)?;
    }
    Ok((Box::new(planner), plan))
}

#[pymethods]
impl PyBlockTablePlanner {
    #[new]
    #[pyo3(signature = (page_size))]
    fn new(#[pyo3(from_py_with = args::page_size)] page_size: u32) -> Self {
        Self { page_size, state: Mutex::default() }
    }

    /// Tokens per page.
    #[getter]
    fn page_size(&self) -> u32 {
        self.page_size
    }

    /// Plan over a block table `[sequences, width]`.
    #[pyo3(signature = (block_table, seq_lens, qo_indptr, only_grew))]
    fn plan(
        slf: Py<Self>,
        py: Python<'_>,
        block_table: Indices,
        seq_lens: Indices,
        qo_indptr: Option<Indices>,
        only_grew: bool,
    ) -> PyResult<PyPlan> {
        fn over<'a, T: OfWidth>(
            block_table: &'a Indices,
            seq_lens: &'a Indices,
        ) -> Option<PageTable<'a, T>> {
            let width = block_table.width();
            let (block_table, seq_lens) = (T::of(block_table)?, T::of(seq_lens)?);
            Some(PageTable::Dense { block_table, width, seq_lens })
        }
        let qo_indptr = qo_indptr.as_ref();
        if let Some(table) = over::<i32>(&block_table, &seq_lens) {
            return Self::next(slf, py, &table, qo_indptr, only_grew);
        }
        let table = over::<i64>(&block_table, &seq_lens).ok_or_else(mixed).into_python(py)?;
        Self::next(slf, py, &table, qo_indptr, only_grew)
    }

    /// Plan over FlashInfer's three arrays.
    #[pyo3(signature = (kv_indptr, kv_indices, kv_last_page_len, qo_indptr, only_grew))]
    fn plan_csr(
        slf: Py<Self>,
        py: Python<'_>,
        kv_indptr: Indices,
        kv_indices: Indices,
        kv_last_page_len: Indices,
        qo_indptr: Option<Indices>,
        only_grew: bool,
    ) -> PyResult<PyPlan> {
        fn over<'a, T: OfWidth>(
            kv_indptr: &'a Indices,
            kv_indices: &'a Indices,
            kv_last_page_len: &'a Indices,
        ) -> Option<PageTable<'a, T>> {
            let (kv_indptr, kv_indices) = (T::of(kv_indptr)?, T::of(kv_indices)?);
            let kv_last_page_len = T::of(kv_last_page_len)?;
            Some(PageTable::Csr { kv_indptr, kv_indices, kv_last_page_len })
        }
        let qo_indptr = qo_indptr.as_ref();
        if let Some(table) = over::<i32>(&kv_indptr, &kv_indices, &kv_last_page_len) {
            return Self::next(slf, py, &table, qo_indptr, only_grew);
        }
        let table = over::<i64>(&kv_indptr, &kv_indices, &kv_last_page_len);
        let table = table.ok_or_else(mixed).into_python(py)?;
        Self::next(slf, py, &table, qo_indptr, only_grew)
    }

    /// The tables of an open plan, as `DeviceCache.tables` tells them.
    ///
    /// Raises:
    ///     StalePlanError: the plan is closed, or its tables serve a later one.
    fn tables(&self, py: Python<'_>, plan: &PyPlan) -> PyResult<TableState> {
        let state = plan.with_blocks(|plan, planner| {
            plan.check(planner.image().version())?;
            Ok(table_state(planner.image(), planner.cutter()))
        });
        state.into_python(py)
    }

    /// The heads that an open plan is cut for, as `Plan.cut` takes them; None if it is not cut.
    ///
    /// Raises:
    ///     StalePlanError: the plan is closed, or its tables serve a later one.
    fn heads(&self, py: Python<'_>, plan: &PyPlan) -> PyResult<Option<Heads>> {
        let heads = plan.with_blocks(|_, planner| {
            let shape = planner.cutter().map(Cutter::shape);
            Ok(shape.map(|s| (s.num_kv_heads, s.group, s.warps, s.grouped)))
        });
        heads.into_python(py)
    }

    /// Cut an open plan, and those to come, for heads on a device, as `Plan.cut` takes them.
    ///
    /// Raises:
    ///     StalePlanError: the plan is closed, or its tables serve a later one.
    ///     InvalidConfigError: a head shape, costs or pages that are not allowed.
    fn set_heads(
        &self,
        py: Python<'_>,
        plan: &PyPlan,
        heads: Heads,
        costs: (u32, f32, f32, f32),
    ) -> PyResult<()> {
        py.detach(|| {
            let cutter = cutter(heads, costs)?;
            plan.with_blocks(|plan, planner| planner.set_cutter(plan, cutter))
        })
        .into_python(py)
    }

    /// Write what a copy of the tables needs to pinned memory, as `DeviceCache.stage` does.
    ///
    /// Raises:
    ///     StalePlanError: the plan is closed, or its tables serve a later one.
    ///     InvalidConfigError: too little memory.
    fn stage(
        &self,
        py: Python<'_>,
        plan: &PyPlan,
        held: (u64, u64),
        address: usize,
        num_words: usize,
        step: u32,
    ) -> PyResult<usize> {
        let staged = plan.with_blocks(|plan, planner| {
            plan.check(planner.image().version())?;
            // SAFETY: the caller in Python owns the memory, and no one else uses it meanwhile.
            let words = unsafe { std::slice::from_raw_parts_mut(address as *mut u32, num_words) };
            stage(planner.image(), held, words, step)
        });
        staged.into_python(py)
    }

    /// Words that the longest patch of a plan's tables has, with the number of its step.
    ///
    /// Raises:
    ///     StalePlanError: the plan is closed, or its tables serve a later one.
    fn max_patch_words(&self, py: Python<'_>, plan: &PyPlan) -> PyResult<usize> {
        let words = plan.with_blocks(|_, planner| Ok(1 + planner.image().max_patch_words()));
        words.into_python(py)
    }
}
