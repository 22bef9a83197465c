//! Room for chunk ids in the tables: blocks of fixed size, handed out to runs.

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::tree::RunKey;

/// The chunk ids of one run that the tables hold: its first ones.
#[derive(Debug, Default)]
struct Resident {
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
    runs: HashMap<u32, Resident, foldhash::fast::RandomState>,
    /// The runs of the current step.
    used: Vec<u32>,
    /// The runs that the attempt asks for.
    wanted: Vec<u32>,
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
            used: Vec::new(),
            wanted: Vec::new(),
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
        for run in self.wanted.drain(..) {
            if self.runs.get(&run).is_some_and(|resident| resident.blocks.is_empty()) {
                self.runs.remove(&run);
            }
        }
        self.attempt += 1;
        self.wanted_blocks = 0;
    }

    /// Asks for the first `end` chunk ids of a run.
    pub fn want(&mut self, run: RunKey, end: u32) {
        let resident = self.runs.entry(run.index).or_default();
        if resident.attempt != self.attempt {
            resident.attempt = self.attempt;
            resident.wanted = 0;
            resident.wanted_generation = run.generation;
            self.wanted_blocks += resident.blocks.len();
            self.wanted.push(run.index);
        }
        let held = |len: u32| resident.blocks.len().max(len.div_ceil(self.block_len) as usize);
        self.wanted_blocks += held(end).saturating_sub(held(resident.wanted));
        resident.wanted = resident.wanted.max(end);
    }

    /// Blocks that the attempt needs in all.
    pub fn wanted_blocks(&self) -> usize {
        self.wanted_blocks
    }

    /// Turns the attempt into the current step: takes the blocks, and lists the ids to write.
    /// The caller has checked that [`PageArena::wanted_blocks`] are no more than there are.
    pub fn take_wanted(&mut self, writes: &mut Vec<IdWrite>) {
        self.step += 1;
        for run in self.used.drain(..) {
            if let Some(resident) = self.runs.get(&run)
                && resident.attempt != self.attempt
            {
                self.idle.push_back((run, resident.used_at));
            }
        }
        self.used_blocks = self.wanted_blocks;
        self.used = std::mem::take(&mut self.wanted);
        // Every run is marked before any block is taken from an idle one.
        let mut short = Vec::new();
        for &index in &self.used {
            let Some(resident) = self.runs.get_mut(&index) else { continue };
            resident.used_at = self.step;
            if resident.generation != resident.wanted_generation {
                // What is the same after all is found when the ids are written.
                resident.generation = resident.wanted_generation;
                resident.len = 0;
            }
            if resident.len < resident.wanted {
                short.push((RunKey { index, generation: resident.generation }, resident.wanted));
            }
        }
        for (run, end) in short {
            self.fill(run, end, writes);
        }
        self.drop_outdated();
    }

    /// Blocks that `run`, of the current step, lacks to hold `end` chunk ids.
    pub fn lacking(&self, run: RunKey, end: u32) -> usize {
        let held = self.runs.get(&run.index).map_or(0, |resident| resident.blocks.len());
        (end.div_ceil(self.block_len) as usize).saturating_sub(held)
    }

    /// Blocks that the current step does not use.
    pub fn num_spare(&self) -> usize {
        self.num_blocks - self.used_blocks
    }

    /// Extends a run of the current step from `begin` chunk ids to `end`. The caller has checked
    /// that the blocks it lacks are to spare.
    pub fn grow(&mut self, run: RunKey, begin: u32, end: u32, writes: &mut Vec<IdWrite>) {
        self.used_blocks += self.lacking(run, end);
        if let Some(resident) = self.runs.get_mut(&run.index) {
            // The run may have been longer once, and lost those chunks since.
            resident.len = resident.len.min(begin);
            resident.generation = run.generation;
        }
        self.fill(run, end, writes);
    }

    /// Where the chunk id of `chunk` in `run` lies in `page_ids`.
    pub fn position(&self, run: RunKey, chunk: u32) -> u32 {
        let block = self.runs[&run.index].blocks[(chunk / self.block_len) as usize];
        block * self.block_len + chunk % self.block_len
    }

    fn fill(&mut self, run: RunKey, end: u32, writes: &mut Vec<IdWrite>) {
        for _ in 0..self.lacking(run, end) {
            let block = self.take_block();
            self.runs.entry(run.index).or_default().blocks.push(block);
        }
        let Some(resident) = self.runs.get_mut(&run.index) else { return };
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
                && let Some(resident) = self.runs.remove(&run)
            {
                self.free.extend(resident.blocks.iter().rev());
            }
        }
    }

    /// Whether a run was not used again since it went idle after the step `used_at`.
    fn is_idle(&self, run: u32, used_at: u64) -> bool {
        self.runs.get(&run).is_some_and(|resident| resident.used_at == used_at)
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
