//! The host's half of a `ChunkCache` on a CUDA device: the tree, the plans' tables, the addresses.

use std::sync::Arc;

use chunkcache::error::{Error, Result};
use chunkcache::kv::independent_runs;
use chunkcache::plan::{Cutter, DeviceCosts, Image, Layout, WorkLimits};
use chunkcache::pool::KvLayout;
use chunkcache::tree::{PrefixTree, SeqHandle, TreeConfig};
use pyo3::prelude::*;

use crate::args::{self, IntoPython};
use crate::plan::PyPlan;
use crate::results::Committed;
use crate::shared::{Backing, Device, Shared};
use crate::tree::PyPrefixTree;
use crate::work::{Heads, head_shape};

/// Capacities of the work items' sections that new tables begin with: a decoding batch of a
/// thousand sequences, or a prefill of a few thousand tokens. Larger steps make larger tables.
const USUAL_WORK: WorkLimits =
    WorkLimits { max_items: 1 << 14, max_rows: 1 << 12, max_merges: 1 << 15 };

/// A run of copies `(src_chunk, dst_chunk, num_tokens)` that may be made all at once.
type CopyRun = Vec<(u32, u32, usize)>;

/// A tree and the tables of its steps for one CUDA device: what `chunkcache.ChunkCache` has on the
/// host there. Its arguments have been checked in Python, which owns all device memory.
#[pyclass(frozen, module = "chunkcache._core")]
#[derive(Debug)]
pub struct DeviceCache {
    shared: Arc<Shared>,
    arena: KvLayout,
    num_layers: u32,
    capacity: usize,
    chunk_size: usize,
}

#[pymethods]
impl DeviceCache {
    /// Registers an arena `[layer][chunk][K, V][num_kv_heads][chunk_size][head_dim]` at `address`,
    /// with `sizes` of layers, chunks, K/V heads, tokens per chunk, `head_dim` and bytes of an
    /// element. `heads` and `costs` are as `Plan.cut` takes them.
    #[new]
    #[pyo3(signature = (address, sizes, heads, costs, enable_prefix_sharing))]
    fn new(
        py: Python<'_>,
        address: u64,
        sizes: (u32, u32, u32, u32, u32, u32),
        heads: Heads,
        costs: (u32, f32, f32, f32),
        #[pyo3(from_py_with = args::enable_prefix_sharing)] enable_prefix_sharing: bool,
    ) -> PyResult<Self> {
        let (num_layers, num_chunks, num_kv_heads, chunk_size, head_dim, item_size) = sizes;
        let arena = KvLayout::arena(
            address,
            num_layers,
            num_chunks,
            num_kv_heads,
            chunk_size,
            head_dim,
            item_size,
        );
        let arena = arena.into_python(py)?;
        let (capacity, chunk_size) = (num_chunks as usize, chunk_size as usize);
        let tree = PrefixTree::new(TreeConfig {
            enable_prefix_sharing,
            chunk_bytes: arena.chunk_stride() * u64::from(num_layers),
            ..TreeConfig::new(capacity, chunk_size)
        });
        let (num_blocks, item, row_tile, partial_row) = costs;
        let costs = DeviceCosts { num_blocks, item, row_tile, partial_row };
        costs.check().into_python(py)?;
        let device = Device {
            shape: head_shape(heads).into_python(py)?,
            costs,
            work: USUAL_WORK,
            copies: Vec::new(),
            table_copies: 0,
            table_bytes_copied: 0,
        };
        let shared = Shared::new(tree.into_python(py)?, Backing::Device(Box::new(device)));
        Ok(Self { shared, arena, num_layers, capacity, chunk_size })
    }

    /// The tree; the copies that its operations ask for are in `take_copies`.
    #[getter]
    fn tree(&self) -> PyPrefixTree {
        PyPrefixTree::from_shared(Arc::clone(&self.shared), self.capacity, self.chunk_size)
    }

    /// Bytes of the arena.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.arena.num_bytes()
    }

    /// The address of a layer's pages, and bytes from a page, a head and a token to the next.
    ///
    /// Raises:
    ///     InvalidConfigError: no such layer.
    fn layer(&self, py: Python<'_>, layer: u32) -> PyResult<(u64, u64, u64, u64)> {
        let arena = &self.arena;
        if layer >= self.num_layers {
            let allowed = format!("0 to {}", self.num_layers - 1);
            return Err(Error::invalid("layer", layer, allowed)).into_python(py);
        }
        let strides = (arena.chunk_stride(), arena.head_stride(), arena.token_stride());
        Ok((arena.layer_address(layer), strides.0, strides.1, strides.2))
    }

    /// Commit a plan of this cache.
    fn commit(&self, py: Python<'_>, plan: &PyPlan) -> PyResult<Committed> {
        plan.check_is_of(&self.shared).into_python(py)?;
        plan.commit(py)
    }

    /// The copies that the tree's operations have asked for since the last call, in runs whose
    /// copies may be made all at once.
    fn take_copies(&self, py: Python<'_>) -> PyResult<Vec<CopyRun>> {
        let copies = self.with_device(py, |device| Ok(std::mem::take(&mut device.copies)))?;
        let run = |run: &[chunkcache::tree::CopyChunk]| {
            run.iter().map(|copy| (copy.src, copy.dst, copy.num_tokens)).collect()
        };
        Ok(independent_runs(&copies).map(run).collect())
    }

    /// The chunks that hold the tokens `[begin, end)` of a sequence.
    ///
    /// Raises:
    ///     UnknownSequenceError: no such sequence.
    ///     InvalidConfigError: more tokens than it has.
    fn chunks_of(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::seq)] seq: SeqHandle,
        begin: usize,
        end: usize,
    ) -> PyResult<Vec<u32>> {
        self.shared.with(py, false, |state| {
            let num_tokens = state.tree.sequence(seq)?.num_tokens;
            if end > num_tokens {
                let allowed = format!("begin to {num_tokens}, the tokens of the sequence");
                return Err(Error::invalid("end", end, allowed));
            }
            let ids = state.tree.chunk_ids(seq)?;
            let size = self.chunk_size;
            Ok(ids[begin / size..end.div_ceil(size).max(begin / size)].to_vec())
        })
    }

    /// The tables of an open plan of this cache: their image and its version; its layout, as the
    /// word offsets of sequences, page ids, items, merge items, tokens, merges, rows without keys, the number of
    /// words, and the rows that it has room for; the query heads that its items are cut for, and
    /// the partial slots that they need.
    ///
    /// Raises:
    ///     StalePlanError: the plan is closed, or its tables serve a later one.
    ///     InvalidConfigError: not a plan of this cache.
    fn tables(&self, py: Python<'_>, plan: &PyPlan) -> PyResult<TableState> {
        plan.check_is_of(&self.shared).into_python(py)?;
        plan.with_planner(|plan, planner| {
            plan.check(planner.image().version())?;
            Ok(table_state(planner.image(), planner.cutter()))
        })
        .into_python(py)
    }

    /// Cut an open plan, and those to come, for another number of query heads per K/V head.
    ///
    /// Raises:
    ///     InvalidConfigError: a head shape that is not allowed.
    fn set_heads(&self, py: Python<'_>, plan: &PyPlan, heads: Heads) -> PyResult<()> {
        plan.check_is_of(&self.shared).into_python(py)?;
        self.with_device(py, |device| {
            let before = device.shape;
            device.shape = head_shape(heads)?;
            let cutter = device.cutter();
            let set = cutter.and_then(|cutter| {
                plan.with_planner(|plan, planner| planner.set_cutter(Some(plan), cutter))
            });
            if set.is_err() {
                device.shape = before;
            }
            set
        })
    }

    /// Write what a copy of the tables needs that holds `image` at `version` to pinned memory of
    /// `num_words` words at `address`: the number of the step, then the patch. Returns its number of
    /// words: 0, with nothing written, if the copy gets there by advancing its lengths.
    ///
    /// Raises:
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
        plan.check_is_of(&self.shared).into_python(py)?;
        let staged = plan.with_planner(|plan, planner| {
            plan.check(planner.image().version())?;
            // SAFETY: the caller in Python owns the memory, and no one else uses it meanwhile.
            let words = unsafe { std::slice::from_raw_parts_mut(address as *mut u32, num_words) };
            stage(planner.image(), held, words, step)
        });
        let num_words = staged.into_python(py)?;
        if num_words > 0 {
            self.with_device(py, |device| {
                device.table_copies += 1;
                device.table_bytes_copied += 4 * num_words as u64;
                Ok(())
            })?;
        }
        Ok(num_words)
    }

    /// Words that the longest patch of a plan's tables has, with the number of its step.
    ///
    /// Raises:
    ///     StalePlanError: the plan is closed, or its tables serve a later one.
    fn max_patch_words(&self, py: Python<'_>, plan: &PyPlan) -> PyResult<usize> {
        plan.with_planner(|_, planner| Ok(1 + planner.image().max_patch_words())).into_python(py)
    }

    /// Let the next plan have the tables of this one, all of whose work has been submitted; it can
    /// still be committed or closed.
    fn release(&self, py: Python<'_>, plan: &PyPlan) -> PyResult<()> {
        plan.check_is_of(&self.shared).into_python(py)?;
        self.shared.with(py, false, |state| {
            if let Some(planner) = plan.take_planner() {
                state.keep_planner(planner);
            }
            Ok(())
        })
    }
}

impl DeviceCache {
    fn with_device<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Device) -> Result<T> + Send,
    ) -> PyResult<T> {
        self.shared.with(py, false, |state| match &mut state.backing {
            Backing::Device(device) => work(device),
            Backing::Host(..) | Backing::None => {
                Err(Error::invalid("cache", "a cache in host memory", "a cache on a device"))
            }
        })
    }
}

/// What `DeviceCache.tables` returns.
pub type TableState = (u64, u64, [usize; 9], u32, u32);

/// What the device has to know of tables.
pub fn table_state(image: &Image, cutter: Option<&Cutter>) -> TableState {
    let num_qo_heads = cutter.map_or(0, |cutter| cutter.shape().num_qo_heads());
    let num_slots = cutter.map_or(0, |cutter| cutter.work().num_slots);
    (image.id(), image.version(), offsets(image.layout()), num_qo_heads, num_slots)
}

/// Writes the number of a step and the patch for a copy that holds `held` to `words`; returns how
/// many: 0, with nothing written, if the copy gets there by advancing its lengths.
///
/// # Errors
/// [`Error::InvalidConfig`] for too few words.
pub fn stage(image: &Image, held: (u64, u64), words: &mut [u32], step: u32) -> Result<usize> {
    let diff = image.diff_for(held.0, held.1);
    if diff.advance && diff.is_empty() {
        return Ok(0);
    }
    if words.len() <= diff.patch_words() {
        let allowed = format!("{} or more", diff.patch_words() + 1);
        return Err(Error::invalid("num_words", words.len(), allowed));
    }
    words[0] = step;
    Ok(1 + image.write_patch(&diff, &mut words[1..])?)
}

fn offsets(layout: &Layout) -> [usize; 9] {
    [
        layout.sequences,
        layout.page_ids,
        layout.items,
        layout.merge_items,
        layout.tokens,
        layout.merges,
        layout.pad_rows,
        layout.num_words,
        layout.work.max_rows as usize,
    ]
}
