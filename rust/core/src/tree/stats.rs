//! Statistics, all of them kept up as running totals.

use super::PrefixTree;

/// The state of a tree in figures.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TreeStats {
    /// Prompt tokens that were inserted, ever.
    pub prefix_cache_queries: u64,
    /// Those of them that were shared or copied. A prompt that is wholly cached counts in full,
    /// although its last token is computed once more.
    pub prefix_cache_hits: u64,
    /// Chunks in the pool: `num_free + num_evictable + num_in_use`.
    pub capacity: usize,
    /// Chunks that hold nothing.
    pub num_free: usize,
    /// Chunks that are retained for reuse and can be evicted.
    pub num_evictable: usize,
    /// Chunks that are live, pinned, or held by an open step.
    pub num_in_use: usize,
    /// Chunks that a pin holds, whether live or not.
    pub num_pinned: usize,
    /// Chunks that were evicted, ever.
    pub num_evicted: u64,
    /// K/V bytes in chunks that are not free; 0 for a tree without K/V.
    pub num_bytes: u64,
    /// Live sequences.
    pub num_sequences: usize,
    /// Nodes of the tree: runs of chunks without a branch.
    pub num_segments: usize,
    /// Tokens of the live sequences, each sequence's counted for itself.
    pub logical_tokens: u64,
    /// Tokens of the live sequences, shared ones counted once.
    pub physical_tokens: u64,
    /// The part of `logical_tokens` that two live sequences or more share.
    pub shared_tokens: u64,
    /// Token slots of live chunks without a token.
    pub unused_slots: u64,
    /// The paper's r = n_s / (n_p + n_c), over all live sequences: `shared_tokens` over
    /// `logical_tokens`; 0 if nothing is live.
    pub sharing_ratio: f64,
    /// `logical_tokens` over `physical_tokens`: how much more fits; 1 if nothing is live.
    pub capacity_multiplier: f64,
    /// The paper's estimate of the multiplier, 1 / (1 - r), which holds for many sequences;
    /// infinite if everything is shared.
    pub estimated_capacity_multiplier: f64,
    /// Memory lost to partial chunks: `unused_slots` over `logical_tokens`; 0 if nothing is live.
    pub fragmentation: f64,
    /// The paper's bound of that loss, (c - 1) / n per sequence, over all live sequences.
    pub fragmentation_bound: f64,
}

impl PrefixTree {
    /// The state in figures. O(1).
    ///
    /// Sequences that were removed while their step is open still count among the tokens and
    /// chunks, though not in `num_sequences`.
    pub fn stats(&self) -> TreeStats {
        let accounts = &self.accounts;
        let (free, evictable) = (self.pool.num_free(), self.num_evictable());
        let capacity = self.pool.capacity();
        let chunk_size = u64::from(self.chunk_size);
        let unused_slots = accounts.live_chunks * chunk_size - accounts.physical_tokens;
        let ratio = |part: u64, whole: u64, of_nothing: f64| {
            if whole == 0 { of_nothing } else { part as f64 / whole as f64 }
        };
        let sharing_ratio = ratio(accounts.shared_tokens, accounts.logical_tokens, 0.0);
        let most_unused = self.sequences.num_ended() as u64 * (chunk_size - 1);
        TreeStats {
            prefix_cache_queries: self.num_queries,
            prefix_cache_hits: self.num_hits,
            capacity,
            num_free: free,
            num_evictable: evictable,
            num_in_use: capacity - free - evictable,
            num_pinned: accounts.pinned_chunks as usize,
            num_evicted: self.num_evicted,
            num_bytes: (capacity - free) as u64 * self.chunk_bytes,
            num_sequences: self.sequences.num_live,
            num_segments: self.segments.len() - self.namespaces.len(),
            logical_tokens: accounts.logical_tokens,
            physical_tokens: accounts.physical_tokens,
            shared_tokens: accounts.shared_tokens,
            unused_slots,
            sharing_ratio,
            capacity_multiplier: ratio(accounts.logical_tokens, accounts.physical_tokens, 1.0),
            estimated_capacity_multiplier: 1.0 / (1.0 - sharing_ratio),
            fragmentation: ratio(unused_slots, accounts.logical_tokens, 0.0),
            fragmentation_bound: ratio(most_unused, accounts.logical_tokens, 0.0),
        }
    }
}
