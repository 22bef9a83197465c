//! Room for chunk ids in the tables: blocks of fixed size, handed out to runs.

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::tree::RunKey;

/// The chunk ids of one run that the tables hold: its first ones.
#[derive(Debug, Default)]
struct Resident {
    /// The run's slot in the tree.
    run: u32,
    /// Its place among the runs of the step that used it last.
    place: u32,
    /// The blocks that hold them, each by its number.
    blocks: Vec<u32>,
    /// Number of chunk ids written, and the run's generation then.
    len: u32,
    generation: u64,
    /// The attempt to plan that asked for it last, and how many ids of which generation.
    attempt: u64,
    wanted: u32,
    wanted_generation: u64,
    /// The step that used it last.
    used_at: u64,
}

/// Blocks of the `page_ids` section and the runs that they hold.
///
/// A step asks for what it needs ([`PageArena::want`]) before it takes anything
/// ([`PageArena::take_wanted`]). Runs that no step uses any more stay until their room is needed, those first
/// that have been idle longest.
#[derive(Debug)]
pub(super) struct PageArena {
    block_len: u32,
    num_blocks: usize,
    free: Vec<u32>,
    /// Indices in `residents`, by run.
    runs: HashMap<u32, u32, foldhash::fast::RandomState>,
    residents: Vec<Resident>,
    /// Indices in `residents` that no run has.
    vacant: Vec<u32>,
    /// The runs of the current step, by their index in `residents`.
    used: Vec<u32>,
    /// The runs that the attempt asks for, likewise.
    wanted: Vec<u32>,
    /// Where in `used` the run is expected that is asked for next.
    expected: usize,
    /// Runs that went idle, and the step that used them last; outdated entries are passed over.
    idle: VecDeque<(u32, u64)>,
    attempt: u64,
    step: u64,
    /// Blocks that the runs of the current step hold.
    used_blocks: usize,
    /// Blocks that the attempt needs, those included that its runs hold already.
    wanted_blocks: usize,
}

/// Chunk ids to write: those of `run` from `begin` to `end` go to `page_ids[at..]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IdWrite {
    pub run: RunKey,
    pub begin: u32,
    pub end: u32,
    pub at: usize,
}

impl PageArena {
    pub fn new(block_len: u32, max_page_ids: u32) -> Self {
        let num_blocks = max_page_ids / block_len;
        Self {
            block_len,
            num_blocks: num_blocks as usize,
            free: (0..num_blocks).rev().collect(),
            runs: HashMap::default(),
            residents: Vec::new(),
            vacant: Vec::new(),
            used: Vec::new(),
            wanted: Vec::new(),
            expected: 0,
            idle: VecDeque::new(),
            attempt: 0,
            step: 0,
            used_blocks: 0,
            wanted_blocks: 0,
        }
    }

    pub fn block_len(&self) -> u32 {
        self.block_len
    }

    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Forgets an earlier attempt; the next one starts from nothing.
    pub fn begin_attempt(&mut self) {
        for index in 0..self.wanted.len() {
            let wanted = self.wanted[index];
            if self.residents[wanted as usize].blocks.is_empty() {
                self.forget(wanted);
            }
        }
        self.wanted.clear();
        self.attempt += 1;
        self.wanted_blocks = 0;
        self.expected = 0;
    }

    /// Asks for the first `end` chunk ids of a run; returns what [`PageArena::position`] takes.
    pub fn want(&mut self, run: RunKey, end: u32) -> u32 {
        let index = self.find(run.index);
        let resident = &mut self.residents[index as usize];
        if resident.attempt != self.attempt {
            resident.attempt = self.attempt;
            resident.wanted = 0;
            resident.wanted_generation = run.generation;
            self.wanted_blocks += resident.blocks.len();
            self.wanted.push(index);
        }
        let held = |len: u32| resident.blocks.len().max(len.div_ceil(self.block_len) as usize);
        self.wanted_blocks += held(end).saturating_sub(held(resident.wanted));
        resident.wanted = resident.wanted.max(end);
        index
    }

    /// The index of a run, which may be new.
    fn find(&mut self, run: u32) -> u32 {
        // Most runs come in the order of the step before: there is no need to look them up.
        if let Some(&index) = self.used.get(self.expected)
            && self.residents[index as usize].run == run
        {
            self.expected += 1;
            return index;
        }
        if let Some(&index) = self.runs.get(&run) {
            self.expected = self.residents[index as usize].place as usize + 1;
            return index;
        }
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.residents.push(Resident::default());
            self.residents.len() as u32 - 1
        });
        self.residents[index as usize].run = run;
        self.runs.insert(run, index);
        index
    }

    /// Forgets what is known of a run; its blocks have been taken.
    fn forget(&mut self, index: u32) {
        let gone = std::mem::take(&mut self.residents[index as usize]);
        self.runs.remove(&gone.run);
        self.vacant.push(index);
    }

    /// Blocks that the attempt needs in all.
    pub fn wanted_blocks(&self) -> usize {
        self.wanted_blocks
    }

    /// Turns the attempt into the current step: takes the blocks, and lists the ids to write.
    /// The caller has checked that [`PageArena::wanted_blocks`] are no more than there are.
    pub fn take_wanted(&mut self, writes: &mut Vec<IdWrite>) {
        self.step += 1;
        for index in self.used.drain(..) {
            let resident = &self.residents[index as usize];
            if resident.attempt != self.attempt {
                self.idle.push_back((resident.run, resident.used_at));
            }
        }
        self.used_blocks = self.wanted_blocks;
        std::mem::swap(&mut self.used, &mut self.wanted);
        // Every run is marked before any block is taken from an idle one.
        let mut short = Vec::new();
        for (place, &index) in (0..).zip(&self.used) {
            let resident = &mut self.residents[index as usize];
            resident.used_at = self.step;
            resident.place = place;
            if resident.generation != resident.wanted_generation {
                // What is the same after all is found when the ids are written.
                resident.generation = resident.wanted_generation;
                resident.len = 0;
            }
            if resident.len < resident.wanted {
                short.push(index);
            }
        }
        for index in short {
            self.fill(index, self.residents[index as usize].wanted, writes);
        }
        self.drop_outdated();
    }

    /// Blocks that a run of the current step lacks to hold `end` chunk ids; `index` is what
    /// [`PageArena::want`] returned.
    pub fn lacking(&self, index: u32, end: u32) -> usize {
        let held = self.residents[index as usize].blocks.len();
        (end.div_ceil(self.block_len) as usize).saturating_sub(held)
    }

    /// Blocks that the current step does not use.
    pub fn num_spare(&self) -> usize {
        self.num_blocks - self.used_blocks
    }

    /// Extends a run of the current step, `index`, from `begin` chunk ids to `end`, and lists the ids
    /// to write. The caller has checked that the blocks it lacks are to spare.
    pub fn grow(
        &mut self,
        index: u32,
        run: RunKey,
        begin: u32,
        end: u32,
        writes: &mut Vec<IdWrite>,
    ) {
        self.used_blocks += self.lacking(index, end);
        let resident = &mut self.residents[index as usize];
        // The run may have been longer once, and lost those chunks since.
        resident.len = resident.len.min(begin);
        resident.generation = run.generation;
        self.fill(index, end, writes);
    }

    /// Where the chunk id of `chunk` in a run lies in `page_ids`.
    pub fn position(&self, index: u32, chunk: u32) -> u32 {
        let block = self.residents[index as usize].blocks[(chunk / self.block_len) as usize];
        block * self.block_len + chunk % self.block_len
    }

    fn fill(&mut self, index: u32, end: u32, writes: &mut Vec<IdWrite>) {
        let num_blocks = end.div_ceil(self.block_len) as usize;
        while self.residents[index as usize].blocks.len() < num_blocks {
            let block = self.take_block();
            self.residents[index as usize].blocks.push(block);
        }
        let resident = &mut self.residents[index as usize];
        let run = RunKey { index: resident.run, generation: resident.generation };
        while resident.len < end {
            let begin = resident.len;
            let border = (begin / self.block_len + 1) * self.block_len;
            let block = resident.blocks[(begin / self.block_len) as usize];
            let at = (block * self.block_len + begin % self.block_len) as usize;
            resident.len = border.min(end);
            writes.push(IdWrite { run, begin, end: resident.len, at });
        }
    }

    fn take_block(&mut self) -> u32 {
        loop {
            if let Some(block) = self.free.pop() {
                return block;
            }
            let (run, used_at) = self.idle.pop_front().expect("the caller checked the room");
            if self.is_idle(run, used_at)
                && let Some(&index) = self.runs.get(&run)
            {
                self.free.extend(self.residents[index as usize].blocks.drain(..).rev());
                self.forget(index);
            }
        }
    }

    /// Whether a run was not used again since it went idle after the step `used_at`.
    fn is_idle(&self, run: u32, used_at: u64) -> bool {
        let index = self.runs.get(&run);
        index.is_some_and(|&index| self.residents[index as usize].used_at == used_at)
    }

    /// Bounds the idle list where runs go idle and come back over and over.
    fn drop_outdated(&mut self) {
        if self.idle.len() > 2 * self.runs.len() + 64 {
            let mut idle = std::mem::take(&mut self.idle);
            idle.retain(|&(run, used_at)| self.is_idle(run, used_at));
            self.idle = idle;
        }
    }
}
