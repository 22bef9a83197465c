//! Inserting a prompt: sharing what is there, copying an equal head, adding the rest.

use super::PrefixTree;
use super::lookup::{Partial, Walk};
use super::slab::NIL;
use super::types::{CopyChunk, Inserted};
use crate::error::{Error, Result};

impl PrefixTree {
    /// Adds a sequence with the tokens of a prompt to the namespace `salt`.
    ///
    /// Full chunks that are in the tree are shared, written or not: of equal prompts that arrive
    /// together, the first one writes the common chunks for all. In the chunk where the prompt
    /// diverges or ends, the longest equal written head of another chunk is copied
    /// ([`Inserted::copy`]); those tokens count as written at once.
    ///
    /// Retained chunks are evicted as needed, least recently used first.
    ///
    /// The statistics count all tokens as queried, and the shared and copied ones as hits, also
    /// for a prompt that is wholly cached, whose last token is computed once more.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for an empty prompt or one of more than
    /// [`max_tokens`](Self::max_tokens);
    /// [`Error::OutOfChunks`] if the chunks that are not shared do not fit, at once and with the
    /// sizes if they never can. Nothing changes then.
    pub fn insert(&mut self, tokens: &[u32], salt: &[u8]) -> Result<Inserted> {
        self.check_prompt(tokens)?;
        self.expire_pins();
        let existing = self.find_root(salt);
        let nothing = Walk { segment: NIL, num_chunks: 0, matched: 0 };
        let walk = existing.map_or(nothing, |root| self.walk(root, tokens));
        let mut head = existing.and_then(|_| self.partial_head(walk, tokens));
        let needed = self.num_chunks_for(tokens.len()) - self.num_chunks_for(walk.matched);
        if needed > self.pool.num_free() {
            let evictable = self.num_evictable() - self.num_evictable_on(walk);
            let room = self.pool.num_free() + evictable;
            if needed > room {
                return Err(Error::OutOfChunks {
                    needed,
                    free: self.pool.num_free(),
                    evictable,
                    capacity: self.pool.capacity(),
                });
            }
            // The copied chunk itself may have to go to make room for the prompt.
            head = head.filter(|head| needed + usize::from(self.is_sole_holder(head)) <= room);
        }

        let root = existing.unwrap_or_else(|| self.make_root(salt));
        let (parent, source) = self.open_path(root, walk, head);
        let slot = self.sequences.open();
        self.link_end(slot, parent);
        self.hold_path(parent);
        self.evict_chunks(needed.saturating_sub(self.pool.num_free()), source);
        let rest = &tokens[walk.matched..];
        if !rest.is_empty() {
            self.extend(slot, rest);
        }
        let num_copied_tokens = head.map_or(0, |head| head.num_tokens);
        let copy = (num_copied_tokens > 0).then(|| {
            let leaf = self.sequences[slot].leaf;
            let first_new = (walk.matched as u32 - self.segments[leaf].start) / self.chunk_size;
            let copy = CopyChunk {
                src: self.chunks(source)[0],
                dst: self.chunks(leaf)[first_new as usize],
                num_tokens: num_copied_tokens,
            };
            self.mark_filled(slot, walk.matched as u32, (walk.matched + num_copied_tokens) as u32);
            copy
        });
        let cached = walk.matched + num_copied_tokens;
        let computed = cached.min(tokens.len() - 1);
        self.sequences[slot].computed = computed as u32;
        self.sequences[slot].scheduled = computed as u32;
        self.num_queries += tokens.len() as u64;
        self.num_hits += cached as u64;
        self.journal.structure_version += 1;
        Ok(Inserted {
            seq: self.sequences.handle(slot),
            num_matched_tokens: walk.matched,
            num_copied_tokens,
            num_computed_tokens: computed,
            copy,
        })
    }

    fn check_prompt(&self, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            return Err(Error::invalid("tokens", "an empty prompt", "1 token or more"));
        }
        if tokens.len() > self.max_tokens() {
            let allowed = format!("at most {} tokens", self.max_tokens());
            return Err(Error::invalid("tokens", format!("{} tokens", tokens.len()), allowed));
        }
        let needed = self.num_chunks_for(tokens.len());
        if needed > self.pool.capacity() {
            return Err(self.out_of_chunks(needed));
        }
        Ok(())
    }

    pub(super) fn num_chunks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.chunk_size as usize)
    }

    /// Chunks that a prompt shares and that only eviction could take.
    fn num_evictable_on(&self, walk: Walk) -> usize {
        if walk.matched == 0 {
            return 0;
        }
        let mut count = 0;
        let mut segment = walk.segment;
        let mut num_chunks = walk.num_chunks;
        while !self.segments[segment].is_root() {
            if self.segments[segment].is_retained() {
                count += num_chunks as usize;
            }
            segment = self.segments[segment].parent;
            num_chunks = self.segments[segment].num_chunks(self.chunk_size);
        }
        count
    }

    /// Whether a partial head lies in a retained chunk, which then must not be evicted.
    fn is_sole_holder(&self, head: &Partial) -> bool {
        self.segments[head.segment].is_retained()
    }

    /// Makes the end of a match the end of a segment. Gives that segment, and the one that begins
    /// with the chunk of the partial head (or `NIL`).
    fn open_path(&mut self, root: u32, walk: Walk, head: Option<Partial>) -> (u32, u32) {
        if walk.matched == 0 {
            return (root, head.map_or(NIL, |head| head.segment));
        }
        let whole = self.segments[walk.segment].num_chunks(self.chunk_size);
        if walk.num_chunks == whole {
            return (walk.segment, head.map_or(NIL, |head| head.segment));
        }
        let upper = self.split(walk.segment, walk.num_chunks);
        (upper, if head.is_some() { walk.segment } else { NIL })
    }

    /// Counts one more sequence on the path from `segment` to the root.
    pub(super) fn hold_path(&mut self, segment: u32) {
        let mut segment = segment;
        while segment != NIL {
            if !self.segments[segment].is_root() && self.segments[segment].is_retained() {
                self.lru_remove(segment);
            }
            self.update(segment, |s| s.live += 1);
            segment = self.segments[segment].parent;
        }
    }
}
