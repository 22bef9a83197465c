//! Two leaves that filled with equal tokens are private duplicates while they live. When the second
//! one is retained, its equal chunks are freed and what hangs below moves to the first one.

use super::PrefixTree;
use super::slab::NIL;

impl PrefixTree {
    /// Merges a retained segment, whose first chunk a sibling has in the table, into that sibling.
    pub(super) fn deduplicate(&mut self, segment: u32) {
        let parent = self.segments[segment].parent;
        self.detach(segment);
        // Retained segments without a parent, each with the one to go below.
        let mut pending = vec![(segment, parent)];
        while let Some((segment, parent)) = pending.pop() {
            let chunk = &self.known_tokens(segment)[..self.chunk_size as usize];
            let Some(twin) = self.find_child(parent, chunk) else {
                self.attach(segment, parent);
                self.lru_touch_path(parent);
                continue;
            };
            let equal = self.equal_written_chunks(segment, twin);
            let num_chunks = self.segments[segment].num_chunks(self.chunk_size);
            if equal < num_chunks && self.continues_unwritten(segment, twin, equal) {
                // The twin's writer is about to produce the same chunk: nothing may hang below it
                // before that, so the duplicate goes.
                self.free_subtree(segment);
                continue;
            }
            let below = if equal * self.chunk_size < self.segments[twin].len
                && (equal < num_chunks || self.segments[segment].first_child != NIL)
            {
                self.split(twin, equal)
            } else {
                twin
            };
            if equal < num_chunks {
                self.behead(segment, equal);
                pending.push((segment, below));
                continue;
            }
            while self.segments[segment].first_child != NIL {
                let child = self.segments[segment].first_child;
                self.detach(child);
                pending.push((child, below));
            }
            self.free_segment(segment);
            self.lru_touch_path(below);
        }
    }

    /// Number of leading chunks of a retained segment that `twin` has too, written.
    fn equal_written_chunks(&self, segment: u32, twin: u32) -> u32 {
        let chunk_size = self.chunk_size as usize;
        let (own, other) = (self.known_tokens(segment), self.known_tokens(twin));
        let written = self.segments[twin].filled as usize;
        let equal = own
            .chunks_exact(chunk_size)
            .zip(other[..other.len().min(written)].chunks_exact(chunk_size))
            .take_while(|(a, b)| a == b)
            .count();
        equal as u32
    }

    /// Whether the chunk of `twin` after `equal` ones has the same tokens but is not written.
    fn continues_unwritten(&self, segment: u32, twin: u32, equal: u32) -> bool {
        let begin = (equal * self.chunk_size) as usize;
        let end = begin + self.chunk_size as usize;
        let other = self.known_tokens(twin);
        end <= other.len()
            && self.segments[twin].filled < end as u32
            && self.known_tokens(segment)[begin..end] == other[begin..end]
    }

    /// Frees a retained segment without a parent and all below it.
    fn free_subtree(&mut self, segment: u32) {
        let mut order = vec![segment];
        let mut next = 0;
        while next < order.len() {
            let children: Vec<u32> = self.children(order[next]).collect();
            order.extend(children);
            next += 1;
        }
        for &segment in order.iter().rev() {
            debug_assert!(self.segments[segment].first_child == NIL);
            self.free_segment(segment);
        }
    }
}
