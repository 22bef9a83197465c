//! What the tree's operations return, as frozen Python classes.

use chunkcache::tree;
use pyo3::prelude::*;

/// A frozen class of public fields with an equality and a repr, made from a type of the core.
macro_rules! result {
    (
        $(#[$doc:meta])*
        $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }
    ) => {
        $(#[$doc])*
        #[pyclass(frozen, get_all, eq, module = "chunkcache")]
        #[derive(Debug, Clone, PartialEq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        #[pymethods]
        impl $name {
            fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
                let mut fields: Vec<String> = Vec::new();
                $({
                    let value = self.$field.clone().into_pyobject(py).map_err(Into::<PyErr>::into)?;
                    fields.push(format!("{}={}", stringify!($field), value.repr()?));
                })*
                Ok(format!("{}({})", stringify!($name), fields.join(", ")))
            }
        }
    };
}

result! {
    /// What of a prompt is cached.
    PrefixMatch {
        /// Tokens in full chunks that an insert would share, written or not; a multiple of chunk_size.
        num_tokens: usize,
        /// How many of `num_tokens` are written; a prefix of them.
        num_filled: usize,
        /// Further tokens, in the chunk where the prompt diverges or ends, that an insert would copy.
        num_partial: usize,
        /// The ids of the matched chunks.
        chunk_ids: Vec<u32>,
    }
}

result! {
    /// The K/V of a chunk's first tokens that its owner must copy, in every layer, right after the
    /// call that reports it. A ChunkCache makes its copies itself.
    ChunkCopy {
        /// The chunk to read.
        src_chunk: u32,
        /// The chunk to write.
        dst_chunk: u32,
        /// How many tokens, from the chunk's first.
        num_tokens: usize,
    }
}

result! {
    /// A new sequence.
    InsertResult {
        /// Its handle.
        seq: u64,
        /// Tokens in full chunks that it shares, written or not.
        num_matched_tokens: usize,
        /// Further tokens whose K/V is copied from a chunk with an equal head (copy-on-write).
        num_copied_tokens: usize,
        /// `num_matched_tokens + num_copied_tokens`.
        cached_tokens: usize,
        /// Where its own work starts: the cached tokens, but at most all tokens except the last.
        num_computed_tokens: usize,
        /// The copy behind `num_copied_tokens`, or None.
        copy: Option<ChunkCopy>,
    }
}

result! {
    /// A forked sequence.
    ForkResult {
        /// Its handle.
        seq: u64,
        /// The copy of the source's written partial chunk, or None.
        copy: Option<ChunkCopy>,
        /// Whether that chunk is not written yet: the fork waits for the commit that writes it.
        waiting: bool,
    }
}

result! {
    /// What a cut has caused.
    TruncateResult {
        /// The copy to make where the cut went through a shared chunk, or None.
        copy: Option<ChunkCopy>,
        /// Whether the copy has to wait for an open plan, as after a fork.
        waiting: bool,
        /// Who writes what the sequence would have written beyond the cut.
        inherited: Vec<Inherited>,
    }
}

result! {
    /// Unwritten tokens that a sequence must now write, because their writer has left.
    Inherited {
        /// The sequence that inherits.
        seq: u64,
        /// First token position.
        begin: usize,
        /// One past the last.
        end: usize,
    }
}

result! {
    /// What a commit has set free.
    Committed {
        /// Who inherits the work of sequences that were removed while their step was open.
        inherited: Vec<Inherited>,
        /// The copies that waiting forks waited for, in the order to make them.
        copies: Vec<ChunkCopy>,
    }
}

result! {
    /// A sequence's state.
    SequenceInfo {
        /// Tokens, reserved slots included.
        num_tokens: usize,
        /// Tokens whose ids are known: all but the reserved slots.
        num_known_tokens: usize,
        /// The next position to compute; moved by commits.
        num_computed_tokens: usize,
        /// The next position to plan: `num_computed_tokens` plus what open plans compute.
        num_scheduled_tokens: usize,
        /// Whether a plan with one query of it can be made now.
        is_ready: bool,
        /// Whether it is a fork that waits for its source's partial chunk.
        is_waiting: bool,
        /// Its chunks, in token order.
        chunk_ids: Vec<u32>,
    }
}

result! {
    /// The accounts of a tree and its pool.
    Stats {
        /// Prompt tokens that were inserted, ever.
        prefix_cache_queries: u64,
        /// Those of them that were shared or copied.
        prefix_cache_hits: u64,
        /// Chunks in the pool: `num_free + num_evictable + num_in_use`.
        capacity: usize,
        /// Chunks that hold nothing.
        num_free: usize,
        /// Chunks that are retained for reuse and can be evicted.
        num_evictable: usize,
        /// Chunks that are live, pinned, or held by an open plan.
        num_in_use: usize,
        /// Chunks that a pin holds, whether live or not.
        num_pinned: usize,
        /// Chunks that were evicted, ever.
        num_evicted: u64,
        /// K/V bytes in chunks that are not free; 0 for a tree without K/V.
        num_bytes: u64,
        /// Live sequences.
        num_sequences: usize,
        /// Nodes of the tree: runs of chunks without a branch.
        num_segments: usize,
        /// Tokens of the live sequences, each sequence's counted for itself.
        logical_tokens: u64,
        /// Tokens of the live sequences, shared ones counted once.
        physical_tokens: u64,
        /// The part of `logical_tokens` that two live sequences or more share.
        shared_tokens: u64,
        /// Token slots of live chunks without a token.
        unused_slots: u64,
        /// The paper's r = n_s / (n_p + n_c) over all live sequences: `shared_tokens` over
        /// `logical_tokens`; 0 if nothing is live.
        sharing_ratio: f64,
        /// As measured: `logical_tokens` over `physical_tokens`; 1 if nothing is live.
        capacity_multiplier: f64,
        /// The paper's estimate of the multiplier, 1 / (1 - r).
        estimated_capacity_multiplier: f64,
        /// As measured, the memory lost to partial chunks: `unused_slots` over `logical_tokens`.
        fragmentation: f64,
        /// The paper's bound of that loss, (c - 1) / n per sequence, over all live sequences.
        fragmentation_bound: f64,
        /// Transfers of tables to the device so far, one for each step whose structure differs from
        /// that of the step before; 0 on the CPU.
        table_copies: u64,
        /// The bytes of these.
        table_bytes_copied: u64,
    }
}

impl From<tree::PrefixMatch> for PrefixMatch {
    fn from(found: tree::PrefixMatch) -> Self {
        Self {
            num_tokens: found.num_tokens,
            num_filled: found.num_filled,
            num_partial: found.num_partial,
            chunk_ids: found.chunk_ids,
        }
    }
}

impl From<tree::CopyChunk> for ChunkCopy {
    fn from(copy: tree::CopyChunk) -> Self {
        Self { src_chunk: copy.src, dst_chunk: copy.dst, num_tokens: copy.num_tokens }
    }
}

impl From<tree::Inserted> for InsertResult {
    fn from(inserted: tree::Inserted) -> Self {
        Self {
            seq: inserted.seq.as_u64(),
            num_matched_tokens: inserted.num_matched_tokens,
            num_copied_tokens: inserted.num_copied_tokens,
            cached_tokens: inserted.cached_tokens(),
            num_computed_tokens: inserted.num_computed_tokens,
            copy: inserted.copy.map(Into::into),
        }
    }
}

impl From<tree::Forked> for ForkResult {
    fn from(forked: tree::Forked) -> Self {
        Self {
            seq: forked.seq.as_u64(),
            copy: forked.copy.map(Into::into),
            waiting: forked.waiting,
        }
    }
}

impl From<tree::Truncated> for TruncateResult {
    fn from(truncated: tree::Truncated) -> Self {
        Self {
            copy: truncated.copy.map(Into::into),
            waiting: truncated.waiting,
            inherited: truncated.inherited.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<tree::Inherited> for Inherited {
    fn from(inherited: tree::Inherited) -> Self {
        Self { seq: inherited.seq.as_u64(), begin: inherited.begin, end: inherited.end }
    }
}

impl From<tree::Committed> for Committed {
    fn from(committed: tree::Committed) -> Self {
        Self {
            inherited: committed.inherited.into_iter().map(Into::into).collect(),
            copies: committed.copies.into_iter().map(Into::into).collect(),
        }
    }
}

impl SequenceInfo {
    /// A sequence's state with its chunks.
    pub fn new(info: tree::SequenceInfo, chunk_ids: Vec<u32>) -> Self {
        Self {
            num_tokens: info.num_tokens,
            num_known_tokens: info.num_known_tokens,
            num_computed_tokens: info.num_computed_tokens,
            num_scheduled_tokens: info.num_scheduled_tokens,
            is_ready: info.is_ready,
            is_waiting: info.is_waiting,
            chunk_ids,
        }
    }
}

impl From<tree::TreeStats> for Stats {
    fn from(stats: tree::TreeStats) -> Self {
        Self {
            prefix_cache_queries: stats.prefix_cache_queries,
            prefix_cache_hits: stats.prefix_cache_hits,
            capacity: stats.capacity,
            num_free: stats.num_free,
            num_evictable: stats.num_evictable,
            num_in_use: stats.num_in_use,
            num_pinned: stats.num_pinned,
            num_evicted: stats.num_evicted,
            num_bytes: stats.num_bytes,
            num_sequences: stats.num_sequences,
            num_segments: stats.num_segments,
            logical_tokens: stats.logical_tokens,
            physical_tokens: stats.physical_tokens,
            shared_tokens: stats.shared_tokens,
            unused_slots: stats.unused_slots,
            sharing_ratio: stats.sharing_ratio,
            capacity_multiplier: stats.capacity_multiplier,
            estimated_capacity_multiplier: stats.estimated_capacity_multiplier,
            fragmentation: stats.fragmentation,
            fragmentation_bound: stats.fragmentation_bound,
            table_copies: 0,
            table_bytes_copied: 0,
        }
    }
}
