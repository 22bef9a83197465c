//! The K/V of a `ChunkCache` in host memory.

use std::sync::{Arc, RwLock};

use chunkcache::attention::{KvSource, attend};
use chunkcache::error::Error;
use chunkcache::kv::{HostKv, KvConfig, Reserve};
use chunkcache::tree::{PrefixTree, SeqHandle, TreeConfig};
use pyo3::prelude::*;

use crate::args::{self, IntoPython};
use crate::arrays::{View, dtype_from_name};
use crate::options::{Options, workers};
use crate::plan::PyPlan;
use crate::results::Committed;
use crate::shared::{Backing, Shared, Store};
use crate::tree::PyPrefixTree;

/// A tree and the K/V of its chunks: what `chunkcache.ChunkCache` is on the CPU. Its arguments have
/// been checked there; arrays come as `chunkcache._arrays.View`.
#[pyclass(frozen, module = "chunkcache._core")]
#[derive(Debug)]
pub struct HostCache {
    shared: Arc<Shared>,
    store: Arc<Store>,
    config: KvConfig,
}

#[pymethods]
impl HostCache {
    #[new]
    #[pyo3(signature = (
        num_layers, num_kv_heads, head_dim, *, dtype, chunk_size, capacity, capacity_bytes,
        num_threads, enable_prefix_sharing
    ))]
    #[expect(clippy::too_many_arguments, reason = "the keywords of ChunkCache")]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = args::num_layers)] num_layers: usize,
        #[pyo3(from_py_with = args::num_kv_heads)] num_kv_heads: usize,
        #[pyo3(from_py_with = args::head_dim)] head_dim: usize,
        dtype: &str,
        #[pyo3(from_py_with = args::kv_chunk_size)] chunk_size: usize,
        #[pyo3(from_py_with = args::optional_capacity)] capacity: Option<usize>,
        capacity_bytes: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::num_threads)] num_threads: Option<usize>,
        #[pyo3(from_py_with = args::enable_prefix_sharing)] enable_prefix_sharing: bool,
    ) -> PyResult<Self> {
        let dtype = dtype_from_name("dtype", dtype).into_python(py)?;
        let sizes = KvConfig { num_layers, num_kv_heads, head_dim, chunk_size, dtype, capacity: 1 };
        // Also checks all sizes but the capacity, which may be given in bytes.
        HostKv::new(sizes).into_python(py)?;
        let chunk_bytes = 2 * num_layers * num_kv_heads * chunk_size * head_dim * dtype.itemsize();
        let capacity = match capacity {
            Some(chunks) => chunks,
            None => args::chunks_of_bytes(capacity_bytes, chunk_bytes)?,
        };
        let config = KvConfig { capacity, ..sizes };
        let tree = PrefixTree::new(TreeConfig {
            enable_prefix_sharing,
            chunk_bytes: chunk_bytes as u64,
            ..TreeConfig::new(capacity, chunk_size)
        });
        let tree = tree.into_python(py)?;
        let kv = RwLock::new(HostKv::new(config).into_python(py)?);
        let store = Arc::new(Store { kv, workers: workers(num_threads).into_python(py)? });
        let reserve = Reserve::new(store.reading().layout());
        let shared = Shared::new(tree, Backing::Host(Arc::clone(&store), reserve));
        Ok(Self { shared, store, config })
    }

    /// The tree; its operations make the copies of K/V that they ask for.
    #[getter]
    fn tree(&self) -> PyPrefixTree {
        let KvConfig { capacity, chunk_size, .. } = self.config;
        PyPrefixTree::from_shared(Arc::clone(&self.shared), capacity, chunk_size)
    }

    /// Bytes of memory taken so far.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> usize {
        py.detach(|| self.store.reading().allocated_bytes())
    }

    /// Commit a plan of this cache.
    fn commit(&self, py: Python<'_>, plan: &PyPlan) -> PyResult<Committed> {
        plan.check_is_of(&self.shared).into_python(py)?;
        plan.commit(py)
    }

    /// Write rows `[rows, num_kv_heads, head_dim]` of one layer to the slots of a plan.
    fn write_kv(
        &self,
        py: Python<'_>,
        layer: &Bound<'_, PyAny>,
        k: View,
        v: View,
        plan: &PyPlan,
    ) -> PyResult<()> {
        let layer = args::layer(layer, self.config.num_layers)?;
        plan.check_is_of(&self.shared).into_python(py)?;
        py.detach(|| {
            plan.read(|_, slots| {
                // SAFETY: the caller in Python has checked the arrays, and holds them.
                let (k, v) = unsafe { (k.rows(), v.rows()) };
                self.store.writing().write_kv(layer, &k, &v, slots)
            })
        })
        .into_python(py)
    }

    /// Read the rows of a sequence's tokens from `begin` on into k and v.
    fn read_kv(
        &self,
        py: Python<'_>,
        layer: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::seq)] seq: SeqHandle,
        #[pyo3(from_py_with = args::begin)] begin: usize,
        k: View,
        v: View,
    ) -> PyResult<()> {
        let layer = args::layer(layer, self.config.num_layers)?;
        let chunk_size = self.config.chunk_size;
        let tokens = begin..begin + k.shape[0];
        self.shared.with(py, true, |state| {
            let ids = state.tree.chunk_ids(seq)?;
            let slot = |token: usize| {
                i64::from(ids[token / chunk_size]) * chunk_size as i64 + (token % chunk_size) as i64
            };
            let num_tokens = state.tree.sequence(seq)?.num_tokens;
            if tokens.end > num_tokens {
                let allowed = format!("begin to {num_tokens}, the tokens of the sequence");
                return Err(Error::invalid("end", tokens.end, allowed));
            }
            let slots: Vec<i64> = tokens.map(slot).collect();
            // SAFETY: the caller in Python has just made the arrays, and holds them.
            let (mut k, mut v) = unsafe { (k.rows_mut()?, v.rows_mut()?) };
            self.store.reading().read_kv(layer, &slots, &mut k, &mut v)
        })
    }

    /// Attention of q `[rows, num_qo_heads, head_dim]` into out and lse.
    #[expect(clippy::too_many_arguments, reason = "the arrays of a call")]
    fn attend(
        &self,
        py: Python<'_>,
        layer: &Bound<'_, PyAny>,
        q: View,
        plan: &PyPlan,
        options: Options,
        out: View,
        lse: Option<View>,
    ) -> PyResult<()> {
        let layer = args::layer(layer, self.config.num_layers)?;
        plan.check_is_of(&self.shared).into_python(py)?;
        let params = options.params(self.config.head_dim);
        py.detach(|| {
            plan.read(|view, _| {
                // SAFETY: the caller in Python has checked that the arrays lie apart, and holds them.
                let (q, mut out) = unsafe { (q.rows(), out.rows_mut()?) };
                // SAFETY: as above.
                let lse = lse.map(|lse| unsafe { lse.floats_mut() });
                let kv = self.store.reading();
                let source = KvSource::Host { kv: &kv, layer };
                attend(view, &source, &q, &params, &mut out, lse, &self.store.workers)
            })
        })
        .into_python(py)
    }
}
