//! Matching a prompt against the tree.

use super::PrefixTree;
use super::slab::NIL;
use super::types::PrefixMatch;

/// Children with an equal first token that are compared for a partial head, newest first.
const MAX_PARTIAL_CANDIDATES: usize = 64;

/// Tokens compared at once: a few kilobytes, which run at the speed of `memcmp`, then less and less
/// to find the first difference.
const COMPARE_BLOCKS: [usize; 2] = [1024, 32];

/// Where a prompt leaves the tree.
#[derive(Debug, Clone, Copy)]
pub(super) struct Walk {
    /// The last segment with a matched chunk, or the root.
    pub segment: u32,
    /// Chunks matched in it.
    pub num_chunks: u32,
    /// Tokens matched in all.
    pub matched: usize,
}

/// An equal head in the chunk where a prompt leaves the tree.
#[derive(Debug, Clone, Copy)]
pub(super) struct Partial {
    /// The segment that holds the chunk.
    pub segment: u32,
    pub num_tokens: usize,
}

/// Length of the common prefix.
fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    let len = a.len().min(b.len());
    let (a, b) = (&a[..len], &b[..len]);
    let mut equal = 0;
    for block in COMPARE_BLOCKS {
        while equal + block <= len && a[equal..equal + block] == b[equal..equal + block] {
            equal += block;
        }
    }
    equal + a[equal..].iter().zip(&b[equal..]).take_while(|(x, y)| x == y).count()
}

impl PrefixTree {
    /// Follows `tokens` down from `root` as far as full chunks are equal.
    pub(super) fn walk(&self, root: u32, tokens: &[u32]) -> Walk {
        let chunk_size = self.chunk_size as usize;
        let mut at = Walk { segment: root, num_chunks: 0, matched: 0 };
        if !self.sharing {
            return at;
        }
        loop {
            let rest = &tokens[at.matched..];
            if rest.len() < chunk_size {
                return at;
            }
            let Some((child, equal)) = self.step_down(at.segment, rest) else { return at };
            let num_chunks = equal / chunk_size;
            at.segment = child;
            at.num_chunks = num_chunks as u32;
            at.matched += num_chunks * chunk_size;
            if at.num_chunks * self.chunk_size < self.segments[child].len {
                return at;
            }
        }
    }

    /// The child of `parent` with which `rest` has at least one full chunk in common, and the
    /// number of tokens in common.
    fn step_down(&self, parent: u32, rest: &[u32]) -> Option<(u32, usize)> {
        let chunk_size = self.chunk_size as usize;
        // An only child is compared at once, which spares a chain of segments the hashing.
        if let Some(child) = self.only_child(parent) {
            if !self.segments[child].indexed {
                return None;
            }
            let equal = common_prefix(self.known_tokens(child), rest);
            return (equal >= chunk_size).then_some((child, equal));
        }
        let child = self.find_child(parent, &rest[..chunk_size])?;
        let known = self.known_tokens(child);
        let equal = chunk_size + common_prefix(&known[chunk_size..], &rest[chunk_size..]);
        Some((child, equal))
    }

    /// The longest written head that a chunk at the end of `walk` has in common with the rest of
    /// `tokens`.
    pub(super) fn partial_head(&self, walk: Walk, tokens: &[u32]) -> Option<Partial> {
        let rest = &tokens[walk.matched..];
        if rest.is_empty() || self.chunk_size == 1 || !self.sharing {
            return None;
        }
        if walk.num_chunks < self.segments[walk.segment].num_chunks(self.chunk_size) {
            return self.common_head(walk.segment, walk.num_chunks, rest);
        }
        let first = self.chain_head(walk.segment, rest[0]);
        let chain = std::iter::successors((first != NIL).then_some(first), |&id| {
            let next = self.segments[id].chain_next;
            (next != NIL).then_some(next)
        });
        let mut best: Option<Partial> = None;
        for child in chain.take(MAX_PARTIAL_CANDIDATES) {
            if let Some(head) = self.common_head(child, 0, rest)
                && best.is_none_or(|best| head.num_tokens > best.num_tokens)
            {
                best = Some(head);
            }
        }
        best
    }

    /// The written head that one chunk of a segment has in common with `rest`.
    fn common_head(&self, segment: u32, chunk: u32, rest: &[u32]) -> Option<Partial> {
        let begin = chunk * self.chunk_size;
        let usable = self.segments[segment].filled.saturating_sub(begin).min(self.chunk_size);
        let known = self.known_tokens(segment).get(begin as usize..)?;
        let known = &known[..known.len().min(usable as usize)];
        let num_tokens = common_prefix(known, rest);
        (num_tokens > 0).then_some(Partial { segment, num_tokens })
    }

    /// How much of `tokens` is cached in the namespace `salt`. Changes nothing, not even what was
    /// used last.
    ///
    /// The cost grows with the part that matches, at the speed of a memory compare.
    pub fn match_prefix(&self, tokens: &[u32], salt: &[u8]) -> PrefixMatch {
        let Some(root) = self.find_root(salt) else { return PrefixMatch::default() };
        let walk = self.walk(root, tokens);
        let num_partial = self.partial_head(walk, tokens).map_or(0, |head| head.num_tokens);
        let (num_filled, path) = self.matched_path(walk);
        let mut chunk_ids = Vec::with_capacity(walk.matched / self.chunk_size as usize);
        for &segment in path.iter().rev() {
            chunk_ids.extend_from_slice(self.chunks(segment));
        }
        chunk_ids.truncate(walk.matched / self.chunk_size as usize);
        PrefixMatch { num_tokens: walk.matched, num_filled, num_partial, chunk_ids }
    }

    /// The written tokens among the matched ones, and the matched segments, last one first.
    pub(super) fn matched_path(&self, walk: Walk) -> (usize, Vec<u32>) {
        let mut filled = walk.matched;
        let mut path = Vec::new();
        let mut segment = walk.segment;
        while !self.segments[segment].is_root() {
            let s = &self.segments[segment];
            if s.filled < s.len {
                filled = filled.min((s.start + s.filled) as usize);
            }
            path.push(segment);
            segment = s.parent;
        }
        (filled, path)
    }
}
