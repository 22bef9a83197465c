//! Attention without a cache of ours: over somebody else's pages, and over plain arrays. The
//! arguments have been checked by `chunkcache.attention`; arrays come as `chunkcache._arrays.View`.

use chunkcache::attention::{
    Isa, KvSource, attend, merge_states as merge, partial_attention as partial,
};
use chunkcache::kv::{PageStrides, PagedKv, PagedShape};
use chunkcache::plan;
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;

use crate::args::{self, IntoPython};
use crate::arrays::View;
use crate::options::{Options, kept_workers};
use crate::plan::PyPlan;

/// Somebody else's integers, contiguous int64.
type Indices = PyBuffer<i64>;

/// The integers.
pub fn slice<T: Element>(indices: &PyBuffer<T>) -> &[T] {
    // SAFETY: the export keeps the array in place; it was made for this call.
    indices.as_slice_ptr().map_or(&[], |slice| unsafe { slice.as_ref() })
}

/// The instruction sets that kernels exist for and this processor has, the fastest last.
#[pyfunction]
pub fn available_isas() -> Vec<String> {
    Isa::available().iter().map(ToString::to_string).collect()
}

/// Plan over a block table `[sequences, width]`.
#[pyfunction]
#[pyo3(signature = (block_table, seq_lens, page_size, qo_indptr))]
pub fn plan_from_block_tables(
    py: Python<'_>,
    block_table: Indices,
    seq_lens: Indices,
    #[pyo3(from_py_with = args::page_size)] page_size: u32,
    qo_indptr: Option<Indices>,
) -> PyResult<PyPlan> {
    let width = block_table.shape().get(1).copied().unwrap_or(0);
    let (table, lens) = (slice(&block_table), slice(&seq_lens));
    let qo_indptr = qo_indptr.as_ref().map(slice);
    let planned =
        py.detach(|| plan::plan_from_block_tables(table, width, lens, page_size, qo_indptr));
    let (planner, plan) = planned.into_python(py)?;
    Ok(PyPlan::over_blocks(planner, plan))
}

/// Plan over FlashInfer's three arrays.
#[pyfunction]
#[pyo3(signature = (kv_indptr, kv_indices, kv_last_page_len, page_size, qo_indptr))]
pub fn plan_from_csr(
    py: Python<'_>,
    kv_indptr: Indices,
    kv_indices: Indices,
    kv_last_page_len: Indices,
    #[pyo3(from_py_with = args::page_size)] page_size: u32,
    qo_indptr: Option<Indices>,
) -> PyResult<PyPlan> {
    let (indptr, indices) = (slice(&kv_indptr), slice(&kv_indices));
    let last = slice(&kv_last_page_len);
    let qo_indptr = qo_indptr.as_ref().map(slice);
    let planned = py.detach(|| plan::plan_from_csr(indptr, indices, last, page_size, qo_indptr));
    let (planner, plan) = planned.into_python(py)?;
    Ok(PyPlan::over_blocks(planner, plan))
}

/// Attention over pages `[pages, heads, tokens, head_dim]`, in any order of memory.
#[pyfunction]
#[pyo3(signature = (plan, q, k_pages, v_pages, options, out, lse, num_threads))]
#[expect(clippy::too_many_arguments, reason = "the arrays of a call")]
pub fn run(
    py: Python<'_>,
    plan: &PyPlan,
    q: View,
    k_pages: View,
    v_pages: View,
    options: Options,
    out: View,
    lse: Option<View>,
    #[pyo3(from_py_with = args::num_threads)] num_threads: Option<usize>,
) -> PyResult<()> {
    let workers = kept_workers(py, num_threads)?;
    py.detach(|| {
        plan.read(|view, _| {
            let shape = PagedShape {
                num_pages: k_pages.shape[0],
                num_kv_heads: k_pages.shape[1],
                page_size: k_pages.shape[2],
                head_dim: k_pages.shape[3],
                dtype: k_pages.dtype,
            };
            let (k, v) = (k_pages.as_ptr(), v_pages.as_ptr());
            let (k_strides, v_strides) = (page_strides(&k_pages), page_strides(&v_pages));
            // SAFETY: the caller in Python has checked that both arrays have this shape, and holds
            // them.
            let paged = unsafe { PagedKv::from_raw(k, v, shape, k_strides, v_strides)? };
            // SAFETY: the caller in Python has checked that the arrays lie apart, and holds them.
            let (q, mut out) = unsafe { (q.rows(), out.rows_mut()?) };
            // SAFETY: as above.
            let lse = lse.map(|lse| unsafe { lse.floats_mut() });
            let params = options.params(shape.head_dim);
            attend(view, &KvSource::Paged(paged), &q, &params, &mut out, lse, &workers)
        })
    })
    .into_python(py)
}

fn page_strides(pages: &View) -> PageStrides {
    PageStrides { page: pages.strides[0], head: pages.strides[1], token: pages.strides[2] }
}

/// Attention of q `[rows, num_qo_heads, head_dim]` to all of k and v.
#[pyfunction]
#[pyo3(signature = (q, k, v, options, out, lse, num_threads))]
#[expect(clippy::too_many_arguments, reason = "the arrays of a call")]
pub fn partial_attention(
    py: Python<'_>,
    q: View,
    k: View,
    v: View,
    options: Options,
    out: View,
    lse: Option<View>,
    #[pyo3(from_py_with = args::num_threads)] num_threads: Option<usize>,
) -> PyResult<()> {
    let workers = kept_workers(py, num_threads)?;
    let params = options.params(q.shape[2]);
    py.detach(|| {
        // SAFETY: the caller in Python has checked that the arrays lie apart, and holds them.
        let (q, k, v, mut out) = unsafe { (q.rows(), k.rows(), v.rows(), out.rows_mut()?) };
        // SAFETY: as above.
        let lse = lse.map(|lse| unsafe { lse.floats_mut() });
        partial(&q, &k, &v, &params, &mut out, lse, &workers)
    })
    .into_python(py)
}

/// Merge states (o, lse) into o and lse.
#[pyfunction]
pub fn merge_states(py: Python<'_>, states: Vec<(View, View)>, o: View, lse: View) -> PyResult<()> {
    py.detach(|| {
        let states: Vec<_> = states
            .iter()
            // SAFETY: the caller in Python has checked that the arrays lie apart, and holds them.
            .map(|(o, lse)| unsafe { (o.rows(), lse.floats()) })
            .collect();
        // SAFETY: as above.
        let (mut o, lse) = unsafe { (o.rows_mut()?, lse.floats_mut()) };
        merge(&states, &mut o, lse)
    })
    .into_python(py)
}
