//! `chunkcache.PrefixTree`.

use std::sync::Arc;
use std::time::Duration;

use chunkcache::error::Error;
use chunkcache::tree::{PinHandle, PrefixTree, SeqHandle, TreeConfig};
use pyo3::prelude::*;

use crate::args::{self, IntoPython};
use crate::numpy::uint32_array;
use crate::plan::PyPlan;
use crate::results::{
    Committed, ForkResult, Inherited, InsertResult, PrefixMatch, SequenceInfo, Stats,
    TruncateResult,
};
use crate::shared::{Backing, LONG, Shared};
use crate::tokens::Tokens;

/// A prefix tree of token sequences over a pool of fixed-size chunks.
///
/// Equal prompt prefixes are stored once, per full chunk (other engines call a chunk a page or a
/// block). The tree holds token ids and chunk numbers but no K/V, so that a scheduler or a router
/// can use it alone; `ChunkCache` adds the K/V.
///
/// Every operation is atomic: when it raises, nothing has changed. It may be called from any
/// thread. Tokens are any sequence of integers from 0 to 2**32 - 1; contiguous uint32 and int32
/// arrays are read in place. A sequence is named by the handle that `insert` or `fork` gave.
///
/// Args:
///     capacity: chunks in the pool.
///     chunk_size: tokens per chunk, 1 or more.
///     enable_prefix_sharing: without it nothing is matched or kept, and `fork` is refused.
///
/// Raises:
///     InvalidConfigError: a size that is not allowed.
#[pyclass(frozen, name = "PrefixTree", module = "chunkcache")]
#[derive(Debug)]
pub struct PyPrefixTree {
    shared: Arc<Shared>,
    capacity: usize,
    chunk_size: usize,
}

impl PyPrefixTree {
    /// The Python object for a tree that others share.
    pub fn from_shared(shared: Arc<Shared>, capacity: usize, chunk_size: usize) -> Self {
        Self { shared, capacity, chunk_size }
    }
}

#[pymethods]
impl PyPrefixTree {
    #[new]
    #[pyo3(signature = (capacity, chunk_size=64, *, enable_prefix_sharing=true))]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = args::capacity)] capacity: usize,
        #[pyo3(from_py_with = args::chunk_size)] chunk_size: usize,
        #[pyo3(from_py_with = args::enable_prefix_sharing)] enable_prefix_sharing: bool,
    ) -> PyResult<Self> {
        let config = TreeConfig { enable_prefix_sharing, ..TreeConfig::new(capacity, chunk_size) };
        let tree = PrefixTree::new(config).into_python(py)?;
        Ok(Self::from_shared(Shared::new(tree, Backing::None), capacity, chunk_size))
    }

    /// Chunks in the pool.
    #[getter]
    fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tokens per chunk.
    #[getter]
    fn chunk_size(&self) -> usize {
        self.chunk_size
    }

    /// Look up how much of a prompt is cached, changing nothing.
    ///
    /// Args:
    ///     tokens: the prompt.
    ///     cache_salt: the namespace; nothing is shared between two of them.
    ///
    /// Raises:
    ///     InvalidConfigError: tokens that are no ids, or a salt that is no str.
    #[pyo3(signature = (tokens, cache_salt=""))]
    fn match_prefix(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::tokens)] tokens: Tokens,
        #[pyo3(from_py_with = args::cache_salt)] cache_salt: &str,
    ) -> PyResult<PrefixMatch> {
        let tokens = tokens.as_slice();
        let found = self.shared.with(py, tokens.len() > LONG, |state| {
            Ok(state.tree.match_prefix(tokens, cache_salt.as_bytes()))
        })?;
        Ok(found.into())
    }

    /// Add a sequence with the tokens of a prompt.
    ///
    /// Full chunks that are in the tree are shared, written or not: of equal prompts that arrive
    /// together, the first one writes the common chunks for all. In the chunk where the prompt
    /// diverges or ends, the equal written head of another chunk is copied (copy-on-write).
    /// Retained chunks are evicted as needed, least recently used first.
    ///
    /// Args:
    ///     tokens: the prompt, at least one token.
    ///     cache_salt: the namespace; nothing is shared between two of them.
    ///
    /// Raises:
    ///     InvalidConfigError: an empty prompt, tokens that are no ids, or a salt that is no str.
    ///     OutOfChunksError: the chunks that are not shared do not fit.
    #[pyo3(signature = (tokens, cache_salt=""))]
    fn insert(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::tokens)] tokens: Tokens,
        #[pyo3(from_py_with = args::cache_salt)] cache_salt: &str,
    ) -> PyResult<InsertResult> {
        let tokens = tokens.as_slice();
        let inserted = self.shared.with_copies(py, tokens.len() > LONG, |state| {
            let salt = cache_salt.as_bytes();
            state.make_room(|tree| tree.match_prefix(tokens, salt).num_partial > 0)?;
            let inserted = state.tree.insert(tokens, salt)?;
            state.copy(inserted.copy.as_slice())?;
            Ok(inserted)
        })?;
        Ok(inserted.into())
    }

    /// Append the next token or tokens to a sequence: reserved slots get their ids first, in
    /// order, the rest takes new slots.
    ///
    /// Args:
    ///     seq: the sequence.
    ///     tokens: one id, or several.
    ///
    /// Raises:
    ///     UnknownSequenceError: no such sequence.
    ///     InvalidConfigError: tokens that are no ids.
    ///     OutOfChunksError: a chunk is needed and none can be had.
    fn append(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::seq)] seq: SeqHandle,
        #[pyo3(from_py_with = args::token_or_tokens)] tokens: Tokens,
    ) -> PyResult<()> {
        let tokens = tokens.as_slice();
        self.shared.with(py, tokens.len() > LONG, |state| state.tree.append(seq, tokens))
    }

    /// Append one token to each of several sequences: to all or to none.
    ///
    /// Args:
    ///     seqs: the sequences, each once.
    ///     tokens: one id for each.
    ///
    /// Raises:
    ///     UnknownSequenceError: no such sequence.
    ///     InvalidConfigError: another number of tokens, or a sequence that is named twice.
    ///     OutOfChunksError: not enough chunks for all.
    fn append_batch(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::seqs)] seqs: Vec<SeqHandle>,
        #[pyo3(from_py_with = args::tokens)] tokens: Tokens,
    ) -> PyResult<()> {
        let tokens = tokens.as_slice();
        let is_long = tokens.len() > LONG;
        self.shared.with(py, is_long, |state| state.tree.append_batch(&seqs, tokens))
    }

    /// Reserve one more slot in each of several sequences, for tokens that are not known yet: in
    /// all or in none. A chunk with a reserved slot is matched by no one.
    ///
    /// Args:
    ///     seqs: the sequences, each once.
    ///
    /// Raises:
    ///     UnknownSequenceError: no such sequence.
    ///     InvalidConfigError: a sequence that is named twice.
    ///     OutOfChunksError: not enough chunks for all.
    fn reserve(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::seqs)] seqs: Vec<SeqHandle>,
    ) -> PyResult<()> {
        self.shared.with(py, seqs.len() > LONG, |state| state.tree.reserve(&seqs))
    }

    /// Take the youngest reserved slot of a sequence back.
    ///
    /// Args:
    ///     seq: the sequence.
    ///
    /// Raises:
    ///     UnknownSequenceError: no such sequence.
    ///     InvalidConfigError: it has no reserved slot.
    fn cancel_reserved(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::seq)] seq: SeqHandle,
    ) -> PyResult<()> {
        self.shared.with(py, false, |state| state.tree.cancel_reserved(seq))
    }

    /// Add a sequence with the known tokens of another.
    ///
    /// Full chunks are shared; the head of a partial last chunk is copied. If that head is not
    /// written yet, the fork waits, and cannot be planned until the commit that writes it.
    ///
    /// Args:
    ///     seq: the source.
    ///
    /// Raises:
    ///     UnknownSequenceError: no such sequence.
    ///     InvalidConfigError: the tree does not share prefixes.
    ///     OutOfChunksError: a chunk is needed and none can be had.
    fn fork(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::seq)] seq: SeqHandle,
    ) -> PyResult<ForkResult> {
        let forked = self.shared.with_copies(py, false, |state| {
            let is_partial = |tree: &PrefixTree| {
                let num_known = tree.sequence(seq).map_or(0, |info| info.num_known_tokens);
                !num_known.is_multiple_of(tree.chunk_size())
            };
            state.make_room(is_partial)?;
            let forked = state.tree.fork(seq)?;
            state.copy(forked.copy.as_slice())?;
            if forked.waiting {
                state.back_waiting(forked.seq)?;
            }
            Ok(forked)
        })?;
        Ok(forked.into())
    }

    /// Shorten a sequence to its first tokens.
    ///
    /// Chunks that only it used beyond that are freed. A cut through a chunk that others need
    /// leaves that chunk whole and copies its head.
    ///
    /// Args:
    ///     seq: the sequence.
    ///     num_tokens: its new length, 1 to its present one.
    ///
    /// Raises:
    ///     UnknownSequenceError: no such sequence.
    ///     InvalidConfigError: a length that is not allowed.
    ///     OutOfChunksError: there is no chunk for the copy.
    fn truncate(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::seq)] seq: SeqHandle,
        #[pyo3(from_py_with = args::num_tokens)] num_tokens: usize,
    ) -> PyResult<TruncateResult> {
        let truncated = self.shared.with_copies(py, false, |state| {
            state.make_room(|tree| tree.truncate_copies(seq, num_tokens))?;
            let truncated = state.tree.truncate(seq, num_tokens)?;
            state.copy(truncated.copy.as_slice())?;
            if truncated.waiting {
                state.back_waiting(seq)?;
            }
            Ok(truncated)
        })?;
        Ok(truncated.into())
    }

    /// Let the next plan of a sequence begin at an earlier token.
    ///
    /// Its chunks stay as they are: tokens that are written get queries without a write (slot -1),
    /// for those who need the model's output at positions that were found in the tree.
    ///
    /// Args:
    ///     seq: the sequence, in no open plan.
    ///     num_computed_tokens: where the next plan begins, 0 to its present
    ///         `num_computed_tokens`.
    ///
    /// Raises:
    ///     UnknownSequenceError: no such sequence.
    ///     InvalidConfigError: a position that is not allowed, or a sequence in an open plan.
    fn rewind(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::seq)] seq: SeqHandle,
        #[pyo3(from_py_with = args::num_computed_tokens)] num_computed_tokens: usize,
    ) -> PyResult<()> {
        self.shared.with(py, false, |state| state.tree.rewind(seq, num_computed_tokens))
    }

    /// Remove a sequence; its handle is invalid from here on.
    ///
    /// Full written chunks are retained for reuse until they are evicted; a partial leaf, and
    /// chunks that nobody has written, are freed. Chunks of an open plan stay until it is closed.
    ///
    /// Args:
    ///     seq: the sequence.
    ///
    /// Returns:
    ///     The sequences that must now write what this one had begun and they share.
    ///
    /// Raises:
    ///     UnknownSequenceError: no such sequence, or it was already removed.
    fn remove(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::seq)] seq: SeqHandle,
    ) -> PyResult<Vec<Inherited>> {
        let inherited = self.shared.with(py, false, |state| state.tree.remove(seq))?;
        Ok(inherited.into_iter().map(Into::into).collect())
    }

    /// Declare the next tokens of sequences as written, for a tree whose K/V is elsewhere and
    /// whose steps are not planned here.
    ///
    /// Args:
    ///     seqs: the sequences, each once.
    ///     num_tokens: for each, how many tokens from its `num_computed_tokens` on.
    ///
    /// Raises:
    ///     UnknownSequenceError: no such sequence.
    ///     InvalidConfigError: more tokens than the sequence has (reserved slots included), a token before them that is not written,
    ///         or a sequence that is named twice.
    fn commit(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::seqs)] seqs: Vec<SeqHandle>,
        #[pyo3(from_py_with = args::num_tokens_each)] num_tokens: Vec<u32>,
    ) -> PyResult<Committed> {
        if seqs.len() != num_tokens.len() {
            let given = format!("{} for {} sequences", num_tokens.len(), seqs.len());
            let error = Error::invalid("num_tokens", given, "one number for each sequence");
            return Err(error).into_python(py);
        }
        let batch: Vec<(SeqHandle, u32)> = seqs.into_iter().zip(num_tokens).collect();
        let committed = self.shared.with_copies(py, false, |state| {
            let committed = state.tree.commit(&batch).map_err(with_names_of_commit)?;
            state.copy(&committed.copies)?;
            Ok(committed)
        })?;
        Ok(committed.into())
    }

    /// Begin a step: the sequences whose next tokens are computed together.
    ///
    /// The queries of a sequence stand at its next positions, from `num_scheduled_tokens` on. The
    /// plan holds its chunks until it is committed or closed; later operations do not change it.
    ///
    /// Args:
    ///     batch: the sequences in the order of the rows, each at most once; None is padding.
    ///     qo_indptr: entry i has the rows `qo_indptr[i]` to `qo_indptr[i + 1]` of q and of the
    ///         output; by default one row each.
    ///
    /// Raises:
    ///     UnknownSequenceError: no such sequence.
    ///     InvalidConfigError: a sequence that is named twice or is not ready, more rows than it
    ///         has tokens to compute, or row offsets that do not fit the batch.
    #[pyo3(signature = (batch, qo_indptr=None))]
    fn plan(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::batch)] batch: Vec<Option<SeqHandle>>,
        #[pyo3(from_py_with = args::qo_indptr)] qo_indptr: Option<Tokens>,
    ) -> PyResult<PyPlan> {
        PyPlan::over_tree(py, &self.shared, &batch, qo_indptr.as_ref().map(Tokens::as_slice))
    }

    /// Keep the written full chunks of a prompt from eviction.
    ///
    /// Args:
    ///     tokens: the prompt.
    ///     cache_salt: the namespace.
    ///     ttl: seconds after which the pin ends by itself; None is without end.
    ///
    /// Returns:
    ///     The pin, for `unpin`.
    ///
    /// Raises:
    ///     InvalidConfigError: tokens that are no ids, a salt that is no str, a negative time, or
    ///         no full chunk of the prompt is written.
    #[pyo3(signature = (tokens, cache_salt="", ttl=None))]
    fn pin(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::tokens)] tokens: Tokens,
        #[pyo3(from_py_with = args::cache_salt)] cache_salt: &str,
        #[pyo3(from_py_with = args::ttl)] ttl: Option<Duration>,
    ) -> PyResult<u64> {
        let tokens = tokens.as_slice();
        let pinned = self.shared.with(py, tokens.len() > LONG, |state| {
            state.tree.pin(tokens, cache_salt.as_bytes(), ttl)
        })?;
        Ok(pinned.pin.as_u64())
    }

    /// End a pin.
    ///
    /// Args:
    ///     pin: what `pin` returned.
    ///
    /// Raises:
    ///     InvalidConfigError: no such pin, or it has ended.
    fn unpin(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::pin)] pin: PinHandle,
    ) -> PyResult<()> {
        self.shared.with(py, false, |state| state.tree.unpin(pin))
    }

    /// Evict retained chunks, least recently used and leaves first; what is live, pinned or part of
    /// an open plan is never touched.
    ///
    /// Args:
    ///     num_chunks: how many at most.
    ///
    /// Returns:
    ///     How many were evicted.
    fn evict(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::num_chunks)] num_chunks: usize,
    ) -> PyResult<usize> {
        self.shared.with(py, num_chunks > LONG, |state| Ok(state.tree.evict(num_chunks)))
    }

    /// Evict all that is retained, such as after a change of the model's weights.
    ///
    /// Returns:
    ///     How many chunks were evicted.
    fn clear(&self, py: Python<'_>) -> PyResult<usize> {
        self.shared.with(py, true, |state| Ok(state.tree.clear()))
    }

    /// Return a sequence's state.
    ///
    /// Args:
    ///     seq: the sequence.
    ///
    /// Raises:
    ///     UnknownSequenceError: no such sequence.
    fn sequence(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::seq)] seq: SeqHandle,
    ) -> PyResult<SequenceInfo> {
        let (info, chunk_ids) = self
            .shared
            .with(py, false, |state| Ok((state.tree.sequence(seq)?, state.tree.chunk_ids(seq)?)))?;
        Ok(SequenceInfo::new(info, chunk_ids))
    }

    /// Return the known token ids of a sequence as a new uint32 array; reserved slots are left out.
    ///
    /// Args:
    ///     seq: the sequence.
    ///
    /// Raises:
    ///     UnknownSequenceError: no such sequence.
    fn tokens<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::seq)] seq: SeqHandle,
    ) -> PyResult<Bound<'py, PyAny>> {
        let tokens = self.shared.with(py, false, |state| state.tree.tokens(seq))?;
        uint32_array(py, &tokens)
    }

    /// Return the accounts of the pool and what was queried, hit and evicted so far.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        self.shared.with(py, false, |state| {
            let stats = Stats::from(state.tree.stats());
            Ok(match &state.backing {
                Backing::Device(device) => Stats {
                    table_copies: device.table_copies,
                    table_bytes_copied: device.table_bytes_copied,
                    ..stats
                },
                Backing::Host(..) | Backing::None => stats,
            })
        })
    }

    /// Check the numbered invariants of the tree and its pool, for tests; the time grows with the
    /// size of the tree.
    ///
    /// Raises:
    ///     AssertionError: an invariant does not hold; the message cites its number.
    fn check_invariants(&self, py: Python<'_>) -> PyResult<()> {
        let broken = self.shared.with(py, true, |state| Ok(state.tree.check_invariants().err()))?;
        match broken {
            None => Ok(()),
            Some(message) => Err(pyo3::exceptions::PyAssertionError::new_err(message.to_string())),
        }
    }

    /// Draw the tree as text: its namespaces, segments, and who uses them.
    fn render(&self, py: Python<'_>) -> PyResult<String> {
        self.shared.with(py, true, |state| Ok(state.tree.render()))
    }

    fn __repr__(&self) -> String {
        format!("PrefixTree(capacity={}, chunk_size={})", self.capacity, self.chunk_size)
    }
}

/// Names the arguments of `commit` in an error of the step that it stands for.
fn with_names_of_commit(mut error: Error) -> Error {
    if let Error::InvalidConfig { argument, .. } | Error::UnknownSequence { argument, .. } =
        &mut error
    {
        *argument = argument.replace("batch", "seqs").replace("qo_len", "num_tokens");
    }
    error
}
