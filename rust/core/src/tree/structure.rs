//! The shape of the tree: attaching, splitting, merging, growing and cutting segments.

use super::PrefixTree;
use super::segment::{Run, Segment};
use super::slab::NIL;
use crate::pool::ChunkId;

impl PrefixTree {
    /// Changes a segment's length or holders, keeping the accounts.
    pub(super) fn update(&mut self, segment: u32, change: impl FnOnce(&mut Segment)) {
        let s = &mut self.segments[segment];
        self.accounts.subtract(s, self.chunk_size);
        change(s);
        self.accounts.add(s, self.chunk_size);
    }

    /// The chunks of a segment.
    pub(super) fn chunks(&self, segment: u32) -> &[ChunkId] {
        let s = &self.segments[segment];
        if s.is_root() {
            return &[];
        }
        let range = s.first_chunk as usize..s.end_chunk(self.chunk_size) as usize;
        &self.runs[s.run].chunks[range]
    }

    /// The tokens of a segment, up to its first reserved slot.
    pub(super) fn known_tokens(&self, segment: u32) -> &[u32] {
        let s = &self.segments[segment];
        if s.is_root() {
            return &[];
        }
        let begin = s.first_chunk as usize * self.chunk_size as usize;
        &self.runs[s.run].tokens[begin..begin + s.known as usize]
    }

    pub(super) fn children(&self, segment: u32) -> impl Iterator<Item = u32> + '_ {
        let first = self.segments[segment].first_child;
        std::iter::successors((first != NIL).then_some(first), |&child| {
            let next = self.segments[child].next;
            (next != NIL).then_some(next)
        })
    }

    /// The only child of a segment.
    pub(super) fn only_child(&self, segment: u32) -> Option<u32> {
        let child = self.segments[segment].first_child;
        (child != NIL && self.segments[child].next == NIL).then_some(child)
    }

    /// Whether a segment ends where its run ends, so that the run can grow for it.
    pub(super) fn is_at_run_end(&self, segment: u32) -> bool {
        let s = &self.segments[segment];
        s.end_chunk(self.chunk_size) as usize == self.runs[s.run].chunks.len()
    }

    /// Puts a segment without a parent below `parent`, and into the tables as far as its first
    /// tokens are known.
    pub(super) fn attach(&mut self, segment: u32, parent: u32) {
        let first = std::mem::replace(&mut self.segments[parent].first_child, segment);
        if first != NIL {
            self.segments[first].prev = segment;
        }
        let s = &mut self.segments[segment];
        s.parent = parent;
        s.prev = NIL;
        s.next = first;
        self.chain(segment);
        self.index_first_chunk(segment);
    }

    /// Takes a segment from its parent and out of the tables.
    pub(super) fn detach(&mut self, segment: u32) {
        self.unindex_first_chunk(segment);
        self.unchain(segment);
        let s = &self.segments[segment];
        let (parent, prev, next) = (s.parent, s.prev, s.next);
        if prev == NIL {
            self.segments[parent].first_child = next;
        } else {
            self.segments[prev].next = next;
        }
        if next != NIL {
            self.segments[next].prev = prev;
        }
        let s = &mut self.segments[segment];
        s.parent = NIL;
        s.prev = NIL;
        s.next = NIL;
    }

    /// Gives the place of `from` among its siblings and in the tables to `to`, which has the same
    /// first chunk.
    fn take_place(&mut self, from: u32, to: u32) {
        let s = &self.segments[from];
        let (parent, prev, next) = (s.parent, s.prev, s.next);
        let t = &mut self.segments[to];
        t.parent = parent;
        t.prev = prev;
        t.next = next;
        if prev == NIL {
            self.segments[parent].first_child = to;
        } else {
            self.segments[prev].next = to;
        }
        if next != NIL {
            self.segments[next].prev = to;
        }
        self.replace_chained(from, to);
        self.replace_indexed(from, to);
    }

    /// Cuts a segment in two after `num_chunks` full chunks, at least one of which stays on each
    /// side. The new segment is the upper part; the old one keeps its lower end, and with it
    /// whoever ends there. O(1) in the length of the segment.
    pub(super) fn split(&mut self, segment: u32, num_chunks: u32) -> u32 {
        let at = num_chunks * self.chunk_size;
        let s = &self.segments[segment];
        debug_assert!(0 < at && at < s.len);
        let upper = Segment {
            len: at,
            filled: s.filled.min(at),
            scheduled: s.scheduled.min(at),
            known: s.known.min(at),
            pin_ends: 0,
            writer: if s.filled >= at { NIL } else { s.writer },
            first_child: segment,
            first_end: NIL,
            chained: false,
            indexed: false,
            twin: false,
            ..s.clone()
        };
        let (retained, live) = (s.is_retained(), s.live > 0);
        self.runs[upper.run].num_segments += 1;
        let upper = self.segments.insert(upper);
        self.take_place(segment, upper);
        let s = &mut self.segments[segment];
        s.first_chunk += num_chunks;
        s.start += at;
        s.len -= at;
        s.filled = s.filled.saturating_sub(at);
        s.scheduled = s.scheduled.saturating_sub(at);
        s.known = s.known.saturating_sub(at);
        s.parent = upper;
        s.prev = NIL;
        s.next = NIL;
        self.chain(segment);
        self.index_first_chunk(segment);
        if retained {
            self.lru_insert_after(segment, upper);
        }
        if live {
            self.journal.structure_version += 1;
        }
        upper
    }

    /// Undoes a split: if nothing but its one child needs `segment` as a node of its own and the
    /// two are neighbours in one run, the child takes it over. O(1).
    pub(super) fn merge_into_child(&mut self, segment: u32) {
        let Some(child) = self.only_child(segment) else { return };
        let (s, c) = (&self.segments[segment], &self.segments[child]);
        let neighbours = s.run == c.run && s.end_chunk(self.chunk_size) == c.first_chunk;
        let needed = s.is_root() || s.first_end != NIL || s.pin_ends > 0;
        if !neighbours || needed {
            return;
        }
        // A retained pair may only merge if it was used last at the same time.
        if s.is_retained() && c.lru_next != segment {
            return;
        }
        if s.filled < s.len && s.writer != c.writer {
            return;
        }
        let join = |upper: u32, lower: u32| if upper == s.len { upper + lower } else { upper };
        let (filled, scheduled, known) =
            (join(s.filled, c.filled), join(s.scheduled, c.scheduled), join(s.known, c.known));
        let (len, start, first_chunk, run) = (s.len + c.len, s.start, s.first_chunk, s.run);
        let (retained, live) = (s.is_retained(), s.live > 0);
        self.unindex_first_chunk(child);
        self.unchain(child);
        if retained {
            self.lru_remove(segment);
        }
        let c = &mut self.segments[child];
        c.len = len;
        c.start = start;
        c.first_chunk = first_chunk;
        c.filled = filled;
        c.scheduled = scheduled;
        c.known = known;
        self.take_place(segment, child);
        self.segments.remove(segment);
        self.runs[run].num_segments -= 1;
        if live {
            self.journal.structure_version += 1;
        }
    }

    /// A segment without tokens, at the end of `parent`'s run if that is free and of a new one
    /// otherwise, with the sequence `slot` as its one user. [`Self::grow`] gives it tokens.
    pub(super) fn new_segment(&mut self, parent: u32, slot: u32) -> u32 {
        let p = &self.segments[parent];
        let start = p.end();
        let (run, first_chunk) = if !p.is_root() && self.is_at_run_end(parent) {
            (p.run, p.end_chunk(self.chunk_size))
        } else {
            (
                self.runs
                    .insert(Run { generation: self.journal.next_generation(), ..Run::default() }),
                0,
            )
        };
        self.runs[run].num_segments += 1;
        let segment =
            Segment { run, first_chunk, start, live: 1, writer: slot, ..Segment::default() };
        self.segments.insert(segment)
    }

    /// Whether `segment`, where one sequence ends, can take more tokens in place.
    pub(super) fn can_grow(&self, segment: u32) -> bool {
        let s = &self.segments[segment];
        if !s.len.is_multiple_of(self.chunk_size) {
            return true;
        }
        !s.is_root()
            && s.live == 1
            && s.first_child == NIL
            && s.pin_ends == 0
            && self.is_at_run_end(segment)
    }

    /// Lets the sequence `slot` end `tokens.len()` tokens further, in place if it can and in a new
    /// child segment otherwise. The chunks must be free.
    pub(super) fn extend(&mut self, slot: u32, tokens: &[u32]) {
        let leaf = self.sequences[slot].leaf;
        if self.can_grow(leaf) {
            self.grow(leaf, slot, tokens);
            self.enter_tables(leaf);
            return;
        }
        self.unlink_end(slot);
        let child = self.new_segment(leaf, slot);
        self.link_end(slot, child);
        self.grow(child, slot, tokens);
        self.attach(child, leaf);
        self.journal.structure_version += 1;
    }

    /// Appends tokens to a segment at the end of its run, written by `slot`.
    pub(super) fn grow(&mut self, segment: u32, slot: u32, tokens: &[u32]) {
        let s = &self.segments[segment];
        let run = &mut self.runs[s.run];
        let before = s.num_chunks(self.chunk_size);
        let after = (s.len + tokens.len() as u32).div_ceil(self.chunk_size);
        run.tokens.extend_from_slice(tokens);
        let allocated = self.pool.allocate_many((after - before) as usize, &mut run.chunks);
        debug_assert!(allocated.is_ok());
        self.update(segment, |s| {
            s.len += tokens.len() as u32;
            s.known += tokens.len() as u32;
            s.writer = slot;
        });
    }

    /// Puts a segment with a parent into the tables whose tokens have become known.
    pub(super) fn enter_tables(&mut self, segment: u32) {
        let s = &self.segments[segment];
        if !s.chained {
            self.chain(segment);
        }
        if !self.segments[segment].indexed {
            self.index_first_chunk(segment);
        }
    }

    /// Cuts a segment at the end of its run down to its first `len` tokens, at least one.
    pub(super) fn cut(&mut self, segment: u32, len: u32) {
        self.update(segment, |s| {
            s.len = len;
            s.filled = s.filled.min(len);
            s.scheduled = s.scheduled.min(len);
            s.known = s.known.min(len);
        });
        let s = &self.segments[segment];
        let (run, end_chunk) = (s.run, s.end_chunk(self.chunk_size));
        let end_token = s.first_chunk as usize * self.chunk_size as usize + len as usize;
        if s.known < self.chunk_size {
            self.unindex_first_chunk(segment);
        }
        self.runs[run].tokens.truncate(end_token);
        self.give_back_from(run, end_chunk);
    }

    /// Gives back the chunks of a run from index `chunk` on.
    fn give_back_from(&mut self, run: u32, chunk: u32) {
        let Self { runs, pool, journal, steps, .. } = self;
        let chunks = &mut runs[run].chunks;
        if chunks.len() <= chunk as usize {
            return;
        }
        // In reverse, so that the first of them is handed out first.
        for id in chunks.drain(chunk as usize..).rev() {
            steps.give_back(pool, id);
        }
        runs[run].generation = journal.next_generation();
    }

    /// Frees a segment without children, sequences and pins, its chunks included, and the
    /// namespace's root if nothing is left below it.
    pub(super) fn free_segment(&mut self, segment: u32) {
        let parent = self.segments[segment].parent;
        if parent != NIL {
            self.detach(segment);
        }
        self.lru_remove_if_in(segment);
        let s = &self.segments[segment];
        let (run, first, end) = (s.run, s.first_chunk, s.end_chunk(self.chunk_size));
        self.update(segment, |s| s.len = 0);
        self.segments.remove(segment);
        self.free_window(run, first, end);
        self.runs[run].num_segments -= 1;
        if self.runs[run].num_segments == 0 {
            self.runs.remove(run);
        }
        if parent != NIL {
            self.prune_root(parent);
        }
    }

    /// Frees the leading `num_chunks` full chunks of a retained segment that is not attached.
    pub(super) fn behead(&mut self, segment: u32, num_chunks: u32) {
        let s = &self.segments[segment];
        self.free_window(s.run, s.first_chunk, s.first_chunk + num_chunks);
        let tokens = num_chunks * self.chunk_size;
        self.update(segment, |s| {
            s.first_chunk += num_chunks;
            s.start += tokens;
            s.len -= tokens;
            s.filled -= tokens;
            s.scheduled -= tokens;
            s.known -= tokens;
        });
    }

    /// Gives back the chunks `[begin, end)` of a run. What lies at the run's end is cut off; what
    /// lies before other windows stays as dead entries, until those are cut off too.
    fn free_window(&mut self, run: u32, begin: u32, end: u32) {
        if end as usize == self.runs[run].chunks.len() {
            self.give_back_from(run, begin);
            let Run { tokens, chunks, .. } = &mut self.runs[run];
            while chunks.last() == Some(&NIL) {
                chunks.pop();
            }
            tokens.truncate(chunks.len() * self.chunk_size as usize);
            return;
        }
        let Self { runs, pool, steps, .. } = self;
        for id in runs[run].chunks[begin as usize..end as usize].iter_mut().rev() {
            steps.give_back(pool, *id);
            *id = NIL;
        }
    }
}
