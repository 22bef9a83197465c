//! Retained segments in the order of their last use, and eviction.
//!
//! The list holds exactly the segments that neither a sequence nor a pin holds. A segment is
//! appended after all of its retained children, so that the head never has a child.

use super::PrefixTree;
use super::slab::NIL;
use crate::error::{Error, Result};

/// Ends of the intrusive list: least recently used first.
#[derive(Debug, Clone)]
pub(super) struct Lru {
    pub head: u32,
    pub tail: u32,
}

impl Default for Lru {
    fn default() -> Self {
        Self { head: NIL, tail: NIL }
    }
}

impl PrefixTree {
    /// Appends a segment as the most recently used one.
    pub(super) fn lru_push(&mut self, segment: u32) {
        let tail = self.lru.tail;
        self.lru_link(segment, tail, NIL);
    }

    pub(super) fn lru_insert_after(&mut self, after: u32, segment: u32) {
        let next = self.segments[after].lru_next;
        self.lru_link(segment, after, next);
    }

    fn lru_link(&mut self, segment: u32, prev: u32, next: u32) {
        self.segments[segment].lru_prev = prev;
        self.segments[segment].lru_next = next;
        if prev == NIL {
            self.lru.head = segment;
        } else {
            self.segments[prev].lru_next = segment;
        }
        if next == NIL {
            self.lru.tail = segment;
        } else {
            self.segments[next].lru_prev = segment;
        }
    }

    pub(super) fn lru_remove(&mut self, segment: u32) {
        let (prev, next) = (self.segments[segment].lru_prev, self.segments[segment].lru_next);
        if prev == NIL {
            self.lru.head = next;
        } else {
            self.segments[prev].lru_next = next;
        }
        if next == NIL {
            self.lru.tail = prev;
        } else {
            self.segments[next].lru_prev = prev;
        }
        self.segments[segment].lru_prev = NIL;
        self.segments[segment].lru_next = NIL;
    }

    pub(super) fn lru_remove_if_in(&mut self, segment: u32) {
        if self.segments[segment].lru_prev != NIL || self.lru.head == segment {
            self.lru_remove(segment);
        }
    }

    /// Moves the retained segments from `segment` up to the root to the end of the list, after
    /// something more recently used was attached below them.
    pub(super) fn lru_touch_path(&mut self, segment: u32) {
        let mut segment = segment;
        while !self.segments[segment].is_root() && self.segments[segment].is_retained() {
            self.lru_remove_if_in(segment);
            self.lru_push(segment);
            segment = self.segments[segment].parent;
        }
    }

    /// Makes sure that `needed` chunks are free, evicting the least recently used ones.
    ///
    /// # Errors
    /// [`Error::OutOfChunks`] if that cannot be done; then nothing changes.
    pub(super) fn ensure_free(&mut self, needed: usize) -> Result<()> {
        let free = self.pool.num_free();
        if needed <= free {
            return Ok(());
        }
        if needed > free + self.num_evictable() {
            return Err(self.out_of_chunks(needed));
        }
        self.evict_chunks(needed - free, NIL);
        Ok(())
    }

    pub(super) fn num_evictable(&self) -> usize {
        self.accounts.evictable_chunks as usize
    }

    pub(super) fn out_of_chunks(&self, needed: usize) -> Error {
        Error::OutOfChunks {
            needed,
            free: self.pool.num_free(),
            evictable: self.num_evictable(),
            capacity: self.pool.capacity(),
        }
    }

    /// Evicts up to `count` chunks, least recently used and leaves first, but not the first chunk
    /// of `protected`. Gives the number that were evicted.
    pub(super) fn evict_chunks(&mut self, count: usize, protected: u32) -> usize {
        let mut evicted = 0;
        while evicted < count {
            let mut victim = self.lru.head;
            if victim != NIL
                && victim == protected
                && self.segments[victim].num_chunks(self.chunk_size) == 1
            {
                victim = self.segments[victim].lru_next;
            }
            if victim == NIL {
                break;
            }
            let chunks = self.segments[victim].num_chunks(self.chunk_size) as usize;
            let keep = usize::from(victim == protected);
            let taken = (chunks - keep).min(count - evicted);
            evicted += taken;
            if taken < chunks {
                self.cut(victim, (chunks - taken) as u32 * self.chunk_size);
                continue;
            }
            let parent = self.segments[victim].parent;
            let parent_stays = !self.segments[parent].is_root();
            self.free_segment(victim);
            if parent_stays && parent != protected {
                self.merge_into_child(parent);
            }
        }
        self.num_evicted += evicted as u64;
        evicted
    }

    /// Evicts up to `num_chunks` retained chunks, least recently used and leaves first. Gives the
    /// number that were evicted; what is live, pinned or part of an open step is never touched.
    pub fn evict(&mut self, num_chunks: usize) -> usize {
        self.expire_pins();
        self.evict_chunks(num_chunks, NIL)
    }

    /// Drops everything that is retained, as vLLM's `reset_prefix_cache` and SGLang's
    /// `flush_cache` do, and gives the number of dropped chunks.
    ///
    /// Live sequences, pinned prefixes and open steps go on undisturbed and can still be matched;
    /// after a change of the model's weights, check that no chunk is in use any more.
    pub fn clear(&mut self) -> usize {
        self.evict(usize::MAX)
    }
}
