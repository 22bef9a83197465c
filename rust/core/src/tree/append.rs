//! Decoding: appending tokens and reserving slots for tokens that are not known yet.

use super::PrefixTree;
use super::types::{SeqHandle, Truncated};
use crate::error::{Error, Result};

impl PrefixTree {
    /// Appends the ids of a sequence's next tokens: reserved slots get theirs first, in order,
    /// the rest takes new slots.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::OutOfChunks`], [`Error::InvalidConfig`] if the sequence
    /// would pass [`max_tokens`](Self::max_tokens). Nothing changes then.
    pub fn append(&mut self, seq: SeqHandle, tokens: &[u32]) -> Result<()> {
        self.expire_pins();
        let slot = self.resolve("seq", seq)?;
        let reserved = (self.num_tokens_of(slot) - self.num_known_of(slot)) as usize;
        let (into_reserved, new) = tokens.split_at(reserved.min(tokens.len()));
        let before = self.num_tokens_of(slot) as usize;
        if before + new.len() > self.max_tokens() {
            let given = format!("{} more for a sequence of {before}", new.len());
            let allowed = format!("at most {} tokens in all", self.max_tokens());
            return Err(Error::invalid("tokens", given, allowed));
        }
        self.ensure_free(self.num_chunks_for(before + new.len()) - self.num_chunks_for(before))?;
        for &token in into_reserved {
            self.fill_reserved(slot, token);
        }
        match new {
            [] => {}
            &[token] => self.push(slot, token),
            new => self.extend(slot, new),
        }
        Ok(())
    }

    /// Appends one token to each of several sequences: to all or to none.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::InvalidConfig`] if a sequence stands in the batch
    /// twice or would pass [`max_tokens`](Self::max_tokens), or the lengths differ;
    /// [`Error::OutOfChunks`]. Nothing changes then.
    pub fn append_batch(&mut self, seqs: &[SeqHandle], tokens: &[u32]) -> Result<()> {
        if seqs.len() != tokens.len() {
            let given = format!("{} for {} sequences", tokens.len(), seqs.len());
            return Err(Error::invalid("tokens", given, "one token for each sequence"));
        }
        self.for_each_of("seqs", seqs, true, |tree, i, slot| {
            let token = tokens[i];
            let leaf = &mut tree.segments[tree.sequences[slot].leaf];
            if leaf.known < leaf.len {
                tree.fill_reserved(slot, token);
            } else {
                tree.push(slot, token);
            }
        })
    }

    /// Reserves one more slot in each of several sequences, for tokens that are not known yet: in
    /// all or in none. A chunk with a reserved slot is not matched by anyone.
    ///
    /// # Errors
    /// As [`append_batch`](Self::append_batch).
    pub fn reserve(&mut self, seqs: &[SeqHandle]) -> Result<()> {
        self.for_each_of("seqs", seqs, false, |tree, _, slot| tree.push_reserved(slot))
    }

    /// Takes the youngest reserved slot of a sequence back.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::InvalidConfig`] if it has no reserved slot.
    pub fn cancel_reserved(&mut self, seq: SeqHandle) -> Result<()> {
        self.expire_pins();
        let slot = self.resolve("seq", seq)?;
        let num_tokens = self.num_tokens_of(slot);
        if self.num_known_of(slot) == num_tokens {
            let given = format!("sequence {seq}, without a reserved slot");
            return Err(Error::invalid("seq", given, "a sequence with a reserved slot"));
        }
        // A reserved slot is its sequence's own, so that nothing is copied or inherited.
        let mut unused = Truncated::default();
        self.truncate_slot(slot, num_tokens - 1, &mut unused)
    }

    /// Runs `act` on each sequence of a batch, after making sure that all find a slot.
    fn for_each_of(
        &mut self,
        argument: &str,
        seqs: &[SeqHandle],
        reserved_first: bool,
        mut act: impl FnMut(&mut Self, usize, u32),
    ) -> Result<()> {
        self.expire_pins();
        let mut slots = std::mem::take(&mut self.scratch);
        let checked =
            self.resolve_batch(argument, seqs.iter().copied(), &mut slots).and_then(|()| {
                let mut num_chunks = 0;
                for (i, &slot) in slots.iter().enumerate() {
                    let leaf = &self.segments[self.sequences[slot].leaf];
                    let has_slot = reserved_first && leaf.known < leaf.len;
                    // Whoever is at the most tokens is at the end of a chunk, too.
                    if has_slot || !leaf.len.is_multiple_of(self.chunk_size) {
                        continue;
                    }
                    if leaf.end() as usize == self.max_tokens() {
                        let given = format!("a sequence of {} tokens", leaf.end());
                        let allowed = format!("at most {} tokens in all", self.max_tokens());
                        return Err(Error::invalid(format!("{argument}[{i}]"), given, allowed));
                    }
                    num_chunks += 1;
                }
                self.ensure_free(num_chunks)
            });
        if checked.is_ok() {
            for (i, &slot) in slots.iter().enumerate() {
                act(self, i, slot);
            }
        }
        self.scratch = slots;
        checked
    }

    /// Appends one token.
    fn push(&mut self, slot: u32, token: u32) {
        let leaf = self.sequences[slot].leaf;
        let s = &mut self.segments[leaf];
        if s.len.is_multiple_of(self.chunk_size) {
            self.extend(slot, &[token]);
            return;
        }
        // A partial chunk belongs to this sequence alone, so the accounts move by one token.
        s.len += 1;
        s.known += 1;
        s.writer = slot;
        self.runs[s.run].tokens.push(token);
        self.accounts.logical_tokens += 1;
        self.accounts.physical_tokens += 1;
        if s.known == self.chunk_size {
            self.index_first_chunk(leaf);
        }
    }

    /// Appends one slot whose token is not known.
    fn push_reserved(&mut self, slot: u32) {
        // The token is overwritten before anyone can see it.
        const UNKNOWN: u32 = 0;
        let leaf = self.sequences[slot].leaf;
        let s = &self.segments[leaf];
        let known = s.known;
        let fresh = s.len.is_multiple_of(self.chunk_size) && !self.can_grow(leaf);
        if fresh {
            self.unlink_end(slot);
            let child = self.new_segment(leaf, slot);
            self.link_end(slot, child);
            self.grow(child, slot, &[UNKNOWN]);
            self.segments[child].known = 0;
            self.attach(child, leaf);
            self.journal.structure_version += 1;
        } else {
            self.grow(leaf, slot, &[UNKNOWN]);
            self.segments[leaf].known = known;
        }
    }

    /// Gives the oldest reserved slot of a sequence its token.
    fn fill_reserved(&mut self, slot: u32, token: u32) {
        let leaf = self.sequences[slot].leaf;
        let s = &mut self.segments[leaf];
        let at = s.first_chunk as usize * self.chunk_size as usize + s.known as usize;
        self.runs[s.run].tokens[at] = token;
        s.known += 1;
        let known = s.known;
        if known == 1 {
            self.chain(leaf);
        }
        if known == self.chunk_size {
            self.index_first_chunk(leaf);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::types::TreeConfig;
    use super::*;

    /// Sequences of 4 tokens, the second of which stands `room` tokens before the last position.
    fn near_the_end(room: u32) -> (PrefixTree, [SeqHandle; 2]) {
        let mut tree = PrefixTree::new(TreeConfig::new(64, 4)).unwrap();
        let seqs = [[1; 4], [2; 4]].map(|tokens| tree.insert(&tokens, b"").unwrap().seq);
        let leaf = tree.sequences[seqs[1].slot()].leaf;
        tree.segments[leaf].start = tree.max_tokens() as u32 - 4 - room;
        (tree, seqs)
    }

    fn assert_refused(room: u32, act: impl Fn(&mut PrefixTree, [SeqHandle; 2]) -> Result<()>) {
        let (mut tree, seqs) = near_the_end(room);
        let drawing = tree.render();
        let error = act(&mut tree, seqs).unwrap_err();
        assert!(matches!(error, Error::InvalidConfig { .. }), "{error}");
        assert!(error.to_string().contains("at most 2147483644 tokens in all"), "{error}");
        assert_eq!(tree.render(), drawing);
    }

    #[test]
    fn append_keeps_to_the_last_position() {
        assert_refused(4, |tree, [_, seq]| tree.append(seq, &[1; 5]));
    }

    #[test]
    fn append_batch_keeps_to_the_last_position() {
        assert_refused(0, |tree, seqs| tree.append_batch(&seqs, &[5, 6]));
    }

    #[test]
    fn reserve_keeps_to_the_last_position() {
        assert_refused(0, |tree, seqs| tree.reserve(&seqs));
    }

    #[test]
    fn the_last_positions_are_used() {
        let (mut tree, [_, seq]) = near_the_end(4);
        tree.reserve(&[seq]).unwrap();
        tree.append_batch(&[seq], &[5]).unwrap();
        tree.append(seq, &[6, 7, 8]).unwrap();
        assert_eq!(tree.num_tokens_of(seq.slot()) as usize, tree.max_tokens());
    }
}
