//! A simple model of the tree: plain lists per sequence, and a memory of what each chunk's slots
//! would hold, so that a slot that is read before it is written, or overwritten, is found.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use chunkcache::tree::{CopyChunk, Inherited, PrefixTree, SeqHandle, Step, StepId, TreeConfig};

/// What a slot's K/V depends on: all tokens up to it.
pub type Content = u64;

/// A chunk and an offset in it.
type Slot = (u32, usize);

pub fn content(tokens: &[u32]) -> Content {
    tokens.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &token| {
        (hash ^ u64::from(token)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(17)
    })
}

#[derive(Debug, Clone)]
pub struct ModelSequence {
    pub handle: SeqHandle,
    pub salt: Vec<u8>,
    /// All tokens; those of reserved slots are decided already, but only the model knows them.
    pub tokens: Vec<u32>,
    pub num_known: usize,
}

/// A row of an open step, with all that its execution needs.
#[derive(Debug, Clone)]
struct ModelRow {
    seq: SeqHandle,
    /// One past the last position whose result still counts: the row may be cut while it is open.
    counted: usize,
    start: usize,
    tokens: Vec<u32>,
    chunk_ids: Vec<u32>,
    first_write: usize,
    end: usize,
}

impl ModelRow {
    /// The slots of some positions.
    fn slots(&self, positions: Range<usize>, chunk_size: usize) -> impl Iterator<Item = Slot> + '_ {
        positions.map(move |at| (self.chunk_ids[at / chunk_size], at % chunk_size))
    }

    /// Whether its sequence was cut while the step was open.
    fn is_cut(&self) -> bool {
        self.counted < self.end
    }
}

/// What aborted steps and those that build on them were to compute.
#[derive(Default)]
struct Lost {
    slots: HashSet<Slot>,
    /// Where each of their sequences stands again, and whether it was cut meanwhile.
    reached: HashMap<SeqHandle, (usize, bool)>,
}

impl Lost {
    fn add(&mut self, step: &ModelStep, chunk_size: usize) {
        for row in &step.rows {
            let (at, was_cut) = self.reached.entry(row.seq).or_insert((row.start, false));
            (*at, *was_cut) = (row.start.min(*at), row.is_cut() || *was_cut);
            self.slots.extend(row.slots(row.first_write..row.end, chunk_size));
        }
    }

    /// Takes away what a later step computes in its stead.
    fn take_away(&mut self, step: &ModelStep, chunk_size: usize) {
        for row in &step.rows {
            self.reached.entry(row.seq).and_modify(|reached| reached.0 = row.end);
            for slot in row.slots(row.first_write..row.end, chunk_size) {
                self.slots.remove(&slot);
            }
        }
    }

    /// Whether a later step builds on it; `None` where a sequence was cut and others may depend on
    /// what it no longer does itself.
    fn holds_up(&self, step: &ModelStep, chunk_size: usize) -> Option<bool> {
        let writes = |row| ModelRow::slots(row, row.first_write..row.end, chunk_size);
        let own: HashSet<Slot> = step.rows.iter().flat_map(writes).collect();
        let mut was_cut = false;
        for row in &step.rows {
            let mut read = row.slots(0..row.counted, chunk_size);
            if read.any(|slot| self.slots.contains(&slot) && !own.contains(&slot)) {
                return Some(true);
            }
            match self.reached.get(&row.seq) {
                _ if row.is_cut() => was_cut = true,
                Some((_, true)) => was_cut = true,
                Some(&(reached, false)) if row.start > reached => return Some(true),
                _ => {}
            }
        }
        (!was_cut).then_some(false)
    }
}

#[derive(Debug, Clone)]
struct ModelStep {
    id: StepId,
    rows: Vec<ModelRow>,
    stale: bool,
}

fn cut_rows(steps: &mut [ModelStep], seq: SeqHandle, num_tokens: usize) {
    for row in steps.iter_mut().flat_map(|step| &mut step.rows) {
        if row.seq == seq {
            row.counted = row.counted.min(num_tokens);
        }
    }
}

pub struct Model {
    pub tree: PrefixTree,
    pub sequences: Vec<ModelSequence>,
    pub removed: Vec<SeqHandle>,
    memory: HashMap<Slot, Content>,
    steps: Vec<ModelStep>,
    /// Whether a step runs right after it began, or just before it is committed.
    run_at_begin: bool,
    pub num_hits: usize,
    pub num_queries: usize,
}

impl Model {
    pub fn new(config: TreeConfig, run_at_begin: bool) -> Self {
        Self {
            tree: PrefixTree::new(config).unwrap(),
            sequences: Vec::new(),
            removed: Vec::new(),
            memory: HashMap::new(),
            steps: Vec::new(),
            run_at_begin,
            num_hits: 0,
            num_queries: 0,
        }
    }

    fn chunk_size(&self) -> usize {
        self.tree.chunk_size()
    }

    fn find(&self, handle: SeqHandle) -> Option<usize> {
        self.sequences.iter().position(|sequence| sequence.handle == handle)
    }

    /// Makes a copy, after checking that its source holds what the sequence with `tokens` needs.
    fn copy(&mut self, copy: CopyChunk, tokens: &[u32], begin: usize) {
        for offset in 0..copy.num_tokens {
            let expected = content(&tokens[..=begin + offset]);
            let found = self.memory.get(&(copy.src, offset)).copied();
            assert_eq!(found, Some(expected), "source of {copy:?} at {offset}");
            self.memory.insert((copy.dst, offset), expected);
        }
    }

    pub fn insert(&mut self, tokens: Vec<u32>, salt: &[u8]) -> bool {
        let matched = self.tree.match_prefix(&tokens, salt);
        let state = self.fingerprint();
        let Ok(inserted) = self.tree.insert(&tokens, salt) else {
            assert_eq!(self.fingerprint(), state);
            return false;
        };
        assert_eq!(inserted.num_matched_tokens, matched.num_tokens);
        assert!(inserted.num_copied_tokens <= matched.num_partial);
        assert_eq!(inserted.num_matched_tokens % self.chunk_size(), 0);
        let cached = inserted.cached_tokens();
        assert_eq!(inserted.num_computed_tokens, cached.min(tokens.len() - 1));
        assert_eq!(inserted.copy.map_or(0, |copy| copy.num_tokens), inserted.num_copied_tokens);
        if let Some(copy) = inserted.copy {
            self.copy(copy, &tokens, inserted.num_matched_tokens);
        }
        let ids = self.tree.chunk_ids(inserted.seq).unwrap();
        assert_eq!(ids[..matched.chunk_ids.len()], matched.chunk_ids);
        for position in 0..matched.num_filled {
            self.assert_written(&ids, &tokens, position);
        }
        self.num_queries += tokens.len();
        self.num_hits += cached;
        let num_known = tokens.len();
        let sequence =
            ModelSequence { handle: inserted.seq, salt: salt.to_vec(), tokens, num_known };
        self.sequences.push(sequence);
        true
    }

    fn assert_written(&self, chunk_ids: &[u32], tokens: &[u32], position: usize) {
        let slot = (chunk_ids[position / self.chunk_size()], position % self.chunk_size());
        let found = self.memory.get(&slot).copied();
        assert_eq!(found, Some(content(&tokens[..=position])), "position {position} in {slot:?}");
    }

    /// Appends tokens: to reserved slots those that the model has decided, then `new` ones.
    pub fn append(&mut self, index: usize, new: &[u32]) {
        let sequence = &self.sequences[index];
        let mut tokens = sequence.tokens[sequence.num_known..].to_vec();
        tokens.extend_from_slice(new);
        let state = self.fingerprint();
        if self.tree.append(self.sequences[index].handle, &tokens).is_err() {
            assert_eq!(self.fingerprint(), state);
            return;
        }
        let sequence = &mut self.sequences[index];
        sequence.tokens.extend_from_slice(new);
        sequence.num_known = sequence.tokens.len();
    }

    pub fn append_batch(&mut self, indices: &[usize], new: u32) {
        let handles: Vec<_> = indices.iter().map(|&i| self.sequences[i].handle).collect();
        let next = |sequence: &ModelSequence| {
            sequence.tokens.get(sequence.num_known).copied().unwrap_or(new)
        };
        let tokens: Vec<u32> = indices.iter().map(|&i| next(&self.sequences[i])).collect();
        let state = self.fingerprint();
        if self.tree.append_batch(&handles, &tokens).is_err() {
            assert_eq!(self.fingerprint(), state);
            return;
        }
        for (&i, token) in indices.iter().zip(tokens) {
            let sequence = &mut self.sequences[i];
            if sequence.num_known == sequence.tokens.len() {
                sequence.tokens.push(token);
            }
            sequence.num_known += 1;
        }
    }

    pub fn reserve(&mut self, indices: &[usize], secret: u32) {
        let handles: Vec<_> = indices.iter().map(|&i| self.sequences[i].handle).collect();
        let state = self.fingerprint();
        if self.tree.reserve(&handles).is_err() {
            assert_eq!(self.fingerprint(), state);
            return;
        }
        for &i in indices {
            self.sequences[i].tokens.push(secret);
        }
    }

    pub fn cancel_reserved(&mut self, index: usize) {
        let sequence = &mut self.sequences[index];
        let reserved = sequence.num_known < sequence.tokens.len();
        let result = self.tree.cancel_reserved(sequence.handle);
        assert_eq!(result.is_ok(), reserved);
        if reserved {
            sequence.tokens.pop();
            cut_rows(&mut self.steps, sequence.handle, sequence.tokens.len());
        }
    }

    pub fn fork(&mut self, index: usize) {
        let state = self.fingerprint();
        let source = self.sequences[index].clone();
        let Ok(forked) = self.tree.fork(source.handle) else {
            assert_eq!(self.fingerprint(), state);
            return;
        };
        let tokens = source.tokens[..source.num_known].to_vec();
        let shared = tokens.len() - tokens.len() % self.chunk_size();
        assert!(forked.copy.is_none() || !forked.waiting);
        assert_eq!(forked.copy.is_some() || forked.waiting, shared < tokens.len());
        if let Some(copy) = forked.copy {
            self.copy(copy, &tokens, shared);
        }
        self.sequences.push(ModelSequence { handle: forked.seq, tokens, ..source });
    }

    pub fn truncate(&mut self, index: usize, num_tokens: usize) {
        let handle = self.sequences[index].handle;
        let state = self.fingerprint();
        let Ok(truncated) = self.tree.truncate(handle, num_tokens) else {
            assert_eq!(self.fingerprint(), state);
            return;
        };
        let sequence = &mut self.sequences[index];
        sequence.tokens.truncate(num_tokens);
        sequence.num_known = sequence.num_known.min(num_tokens);
        cut_rows(&mut self.steps, handle, num_tokens);
        if let Some(copy) = truncated.copy {
            let tokens = sequence.tokens.clone();
            self.copy(copy, &tokens, num_tokens - num_tokens % self.chunk_size());
        }
        self.check_inherited(&truncated.inherited);
    }

    pub fn remove(&mut self, index: usize) {
        let handle = self.sequences.swap_remove(index).handle;
        let inherited = self.tree.remove(handle).unwrap();
        self.removed.push(handle);
        self.check_inherited(&inherited);
    }

    /// What is inherited is not written yet, and its heir is to compute it.
    fn check_inherited(&self, inherited: &[Inherited]) {
        for heir in inherited {
            let sequence = &self.sequences[self.find(heir.seq).expect("a live heir")];
            assert!(heir.begin < heir.end && heir.end <= sequence.tokens.len());
            assert!(self.tree.sequence(heir.seq).unwrap().num_computed_tokens <= heir.begin);
        }
    }

    pub fn begin(&mut self, batch: &[(usize, usize)]) -> bool {
        let handles: Vec<_> =
            batch.iter().map(|&(i, len)| (self.sequences[i].handle, len as u32)).collect();
        let state = self.fingerprint();
        let Ok(Step { id, rows }) = self.tree.begin_step(&handles) else {
            assert_eq!(self.fingerprint(), state);
            return false;
        };
        let rows = rows
            .iter()
            .zip(batch)
            .map(|(row, &(i, len))| {
                assert_eq!(row.seq, self.sequences[i].handle);
                assert_eq!(row.len as usize, len);
                ModelRow {
                    seq: row.seq,
                    counted: (row.start + row.len) as usize,
                    start: row.start as usize,
                    tokens: self.sequences[i].tokens.clone(),
                    chunk_ids: self.tree.chunk_ids(row.seq).unwrap(),
                    first_write: (row.start + row.num_cached_rows) as usize,
                    end: (row.start + row.len) as usize,
                }
            })
            .collect();
        self.steps.push(ModelStep { id, rows, stale: false });
        if self.run_at_begin {
            self.run(self.steps.len() - 1);
        }
        true
    }

    /// Does what the kernels of a step do: every row is written, then every row reads all of its
    /// tokens.
    fn run(&mut self, step: usize) {
        let rows = self.steps[step].rows.clone();
        let chunk_size = self.chunk_size();
        for row in &rows {
            for position in row.first_write..row.end {
                let slot = (row.chunk_ids[position / chunk_size], position % chunk_size);
                self.memory.insert(slot, content(&row.tokens[..=position]));
            }
        }
        for row in &rows {
            for position in 0..row.counted {
                self.assert_written(&row.chunk_ids, &row.tokens, position);
            }
        }
    }

    pub fn num_open_steps(&self) -> usize {
        self.steps.len()
    }

    pub fn commit(&mut self, step: usize) {
        let stale = self.steps[step].stale;
        let in_order = self.steps[..step].iter().all(|step| step.stale);
        if !self.run_at_begin && !stale && in_order {
            self.run(step);
        }
        let state = self.fingerprint();
        let result = self.tree.commit_step(self.steps[step].id);
        assert_eq!(result.is_ok(), !stale && in_order);
        let Ok(committed) = result else {
            assert_eq!(self.fingerprint(), state);
            return;
        };
        self.steps.remove(step);
        for copy in committed.copies {
            for offset in 0..copy.num_tokens {
                let source = self.memory[&(copy.src, offset)];
                self.memory.insert((copy.dst, offset), source);
            }
        }
        self.check_inherited(&committed.inherited);
    }

    pub fn abort(&mut self, step: usize) {
        let step = self.steps.remove(step);
        let committed = self.tree.abort_step(step.id).unwrap();
        assert!(committed.copies.is_empty());
        if !step.stale {
            self.lose(&step);
        }
        self.check_inherited(&committed.inherited);
    }

    /// Forgets the results of an aborted step, and of the later ones that build on them: that read
    /// a slot that it was to write, or go on in a sequence where it was to stop.
    fn lose(&mut self, aborted: &ModelStep) {
        let chunk_size = self.chunk_size();
        let mut lost = Lost::default();
        lost.add(aborted, chunk_size);
        for later in self.steps.iter_mut().filter(|step| step.id > aborted.id && !step.stale) {
            let watch = self.tree.watch_step(later.id).unwrap();
            later.stale = match lost.holds_up(later, chunk_size) {
                Some(stale) => stale,
                None => watch.is_stale(),
            };
            if later.stale {
                lost.add(later, chunk_size);
            } else {
                lost.take_away(later, chunk_size);
            }
        }
        for slot in lost.slots {
            self.memory.remove(&slot);
        }
    }

    /// Everything that an operation which fails must leave as it was.
    fn fingerprint(&mut self) -> String {
        // Pins whose time has come end with any operation, also with one that fails.
        self.tree.evict(0);
        let infos: Vec<_> =
            self.sequences.iter().map(|sequence| self.tree.sequence(sequence.handle)).collect();
        format!("{}{:?}{infos:?}", self.tree.render(), self.tree.stats())
    }

    /// Checks the invariants, and the tree against the lists.
    pub fn check(&self) {
        if let Err(message) = self.tree.check_invariants() {
            panic!("{message}\n{}", self.tree.render());
        }
        let stats = self.tree.stats();
        assert_eq!(stats.num_free + stats.num_evictable + stats.num_in_use, stats.capacity);
        assert_eq!(stats.num_sequences, self.sequences.len());
        assert_eq!(stats.prefix_cache_queries as usize, self.num_queries);
        assert_eq!(stats.prefix_cache_hits as usize, self.num_hits);
        if self.steps.is_empty() {
            let logical: usize = self.sequences.iter().map(|sequence| sequence.tokens.len()).sum();
            assert_eq!(stats.logical_tokens as usize, logical);
        }
        for sequence in &self.sequences {
            let info = self.tree.sequence(sequence.handle).unwrap();
            assert_eq!(info.num_tokens, sequence.tokens.len());
            assert_eq!(info.num_known_tokens, sequence.num_known);
            let known = &sequence.tokens[..sequence.num_known];
            assert_eq!(self.tree.tokens(sequence.handle).unwrap(), known);
            let num_chunks = sequence.tokens.len().div_ceil(self.chunk_size());
            assert_eq!(self.tree.chunk_ids(sequence.handle).unwrap().len(), num_chunks);
        }
        for &handle in &self.removed {
            assert!(self.tree.sequence(handle).is_err());
        }
    }

    /// Lets every sequence compute all of its tokens, which must always be possible.
    pub fn finish(&mut self) {
        while let Some(last) = self.steps.len().checked_sub(1) {
            if self.steps[0].stale {
                self.abort(last)
            } else {
                self.commit(0)
            }
            self.check();
        }
        loop {
            let mut batch = Vec::new();
            let mut all_computed = true;
            for (i, sequence) in self.sequences.iter().enumerate() {
                let info = self.tree.sequence(sequence.handle).unwrap();
                let left = info.num_tokens - info.num_computed_tokens;
                all_computed &= left == 0 && !info.is_waiting;
                if info.is_ready {
                    batch.push((i, left));
                }
            }
            if all_computed {
                break;
            }
            assert!(!batch.is_empty(), "sequences that nobody can go on with");
            assert!(self.begin(&batch));
            self.commit(0);
            self.check();
        }
        for sequence in &self.sequences {
            let info = self.tree.sequence(sequence.handle).unwrap();
            assert!(!info.is_waiting);
            let ids = self.tree.chunk_ids(sequence.handle).unwrap();
            for position in 0..sequence.tokens.len() {
                self.assert_written(&ids, &sequence.tokens, position);
            }
        }
    }
}
