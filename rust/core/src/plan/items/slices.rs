//! How many keys each tile's slices have.

use super::super::layout::WorkLimits;
use super::super::view::NONE;
use super::costs::{DeviceCosts, HeadShape, STAGE_KEYS};
use super::span::{Batch, Blocks};
use super::tiles::Tile;

/// Items per block that a search tries for private and for shared segments, against an even
/// share.
const PRIVATE_RATIOS: [f32; 6] = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0];
const SHARED_RATIOS: [f32; 8] = [0.75, 0.95, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0];

/// A search ends at a cut this close to an even share.
const GOOD_ENOUGH: f32 = 1.03;

/// Items that a search looks at, over all cuts that it tries.
const SEARCH_ITEMS: usize = 8192;

/// The cost that each item aims at is kept while the total cost stays within this factor, and the
/// balance within [`WORSE_BALANCE`], of what they were when it was chosen.
const OTHER_COST: f32 = 1.25;
const WORSE_BALANCE: f32 = 1.1;

/// What an item of a private and of a shared segment is to cost.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Targets {
    private: f32,
    shared: f32,
}

/// The targets in use, and what the step was like that they were chosen for.
#[derive(Debug, Clone, Copy)]
struct Choice {
    targets: Targets,
    total: f32,
    /// The longest block against an even share.
    balance: f32,
}

/// What slices are chosen for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    pub shape: HeadShape,
    pub costs: DeviceCosts,
    pub page_size: u32,
    pub limits: WorkLimits,
}

/// Chooses slices, and keeps the choice from step to step while it is good.
#[derive(Debug, Default)]
pub(super) struct Slices {
    /// For each tile the keys of its slices; the last has what is left.
    pub keys: Vec<u32>,
    /// The longest block of the cut.
    pub span: f32,
    choice: Option<Choice>,
    candidate: Vec<u32>,
    tried: Vec<u64>,
    batches: Vec<(u64, u32)>,
    blocks: Blocks,
}

/// Slices of a tile, one at least.
pub(super) fn num_slices(tile: &Tile, keys: u32) -> u32 {
    tile.keys.div_ceil(keys).max(1)
}

impl Slices {
    pub fn choose(&mut self, tiles: &[Tile], terms: &Terms) {
        let cost = |tile: &Tile| {
            let keys = terms.shape.num_kv_heads as f32 * tile.keys as f32;
            keys * tile.key_cost(&terms.costs)
        };
        let total: f32 = tiles.iter().map(cost).sum();
        if !self.keep_choice(tiles, terms, total) {
            self.search(tiles, terms, total);
        }
    }

    /// Cuts by the targets in use; false if they are not good any more.
    fn keep_choice(&mut self, tiles: &[Tile], terms: &Terms, total: f32) -> bool {
        let Some(choice) = self.choice else { return false };
        let changed = (total / choice.total).max(choice.total / total);
        if !(changed <= OTHER_COST && self.cut(tiles, terms, choice.targets)) {
            return false;
        }
        std::mem::swap(&mut self.keys, &mut self.candidate);
        self.span = self.candidate_span(tiles, terms, true);
        self.span <= WORSE_BALANCE * choice.balance * (total / terms.costs.num_blocks as f32)
    }

    fn search(&mut self, tiles: &[Tile], terms: &Terms, total: f32) {
        let share = (total / terms.costs.num_blocks as f32).max(1.0);
        self.tried.clear();
        self.choice = None;
        let mut num_items = 0;
        for (private, shared) in candidates() {
            let targets = Targets { private: share / private, shared: share / shared };
            if !self.cut(tiles, terms, targets) || !self.is_new() {
                continue;
            }
            let span = self.candidate_span(tiles, terms, false);
            let balance = span / share;
            if self.choice.is_none_or(|best| balance < best.balance) {
                self.choice = Some(Choice { targets, total, balance });
                self.span = span;
                std::mem::swap(&mut self.keys, &mut self.candidate);
            }
            num_items += self.batches.iter().map(|batch| batch.1 as usize).sum::<usize>();
            if num_items > SEARCH_ITEMS || self.span <= GOOD_ENOUGH * share {
                break;
            }
        }
        if self.choice.is_none() {
            // No cut fits but the coarsest, for which the caller has checked that there is room.
            self.keys.clear();
            self.keys.extend(tiles.iter().map(|tile| whole(tile, terms.page_size)));
            self.span = self.candidate_span(tiles, terms, true);
        }
    }

    /// Slices for the targets, in `candidate`; false if they pass the capacities.
    fn cut(&mut self, tiles: &[Tile], terms: &Terms, targets: Targets) -> bool {
        self.candidate.clear();
        let (mut num_items, mut num_merges) = (0_u64, 0_u64);
        for tile in tiles {
            let target = if tile.seq == NONE { targets.shared } else { targets.private };
            let keys = slice_keys(tile, terms, target);
            self.candidate.push(keys);
            let slices = u64::from(num_slices(tile, keys));
            let run = tile.head_runs(&terms.shape, keys.min(tile.keys)).run;
            num_items += slices * u64::from(terms.shape.num_kv_heads.div_ceil(run));
            num_merges += slices * u64::from(tile.num_tokens());
        }
        num_items <= terms.limits.max_items.into() && num_merges <= terms.limits.max_merges.into()
    }

    /// Whether no cut like the candidate was tried before.
    fn is_new(&mut self) -> bool {
        let mix = |hash: u64, &keys: &u32| (hash ^ u64::from(keys)).wrapping_mul(0x0100_0000_01B3);
        let hash = self.candidate.iter().fold(0xCBF2_9CE4_8422_2325, mix);
        let is_new = !self.tried.contains(&hash);
        self.tried.push(hash);
        is_new
    }

    /// The longest block of the candidate, or of the slices that were chosen.
    fn candidate_span(&mut self, tiles: &[Tile], terms: &Terms, chosen: bool) -> f32 {
        let slices = if chosen { &self.keys } else { &self.candidate };
        self.batches.clear();
        for (tile, &keys) in tiles.iter().zip(slices) {
            let count = num_slices(tile, keys);
            let runs = tile.head_runs(&terms.shape, keys.min(tile.keys));
            let heads = terms.shape.num_kv_heads;
            let last = tile.keys.saturating_sub((count - 1) * keys);
            let mut add = |keys: u32, num_heads: u32, count: u32| {
                if count > 0 && num_heads > 0 {
                    let cost = tile.item_cost(&terms.costs, keys, num_heads);
                    self.batches.push((turn(tile, cost), count));
                }
            };
            for (keys, count) in [(keys.min(tile.keys), count - 1), (last, 1)] {
                add(keys, runs.run, count * (heads / runs.run));
                add(keys, heads % runs.run, count);
            }
        }
        self.batches.sort_unstable();
        let batches =
            self.batches.iter().map(|&(turn, count)| Batch { cost: cost_of(turn), count });
        self.blocks.makespan(batches, terms.costs.num_blocks)
    }
}

/// All pairs of ratios, the even share first.
fn candidates() -> impl Iterator<Item = (f32, f32)> {
    PRIVATE_RATIOS
        .into_iter()
        .flat_map(|private| SHARED_RATIOS.into_iter().map(move |shared| (private, shared)))
}

/// Where an item comes in the list, as an integer that sorts: shared segments first, since their
/// products and reductions hide behind the private reads; then the most expensive.
pub(super) fn turn(tile: &Tile, cost: f32) -> u64 {
    u64::from(tile.seq != NONE) << 32 | u64::from(!cost.to_bits())
}

fn cost_of(turn: u64) -> f32 {
    f32::from_bits(!(turn as u32))
}

/// Keys of each slice of a tile whose items shall cost about `target`.
fn slice_keys(tile: &Tile, terms: &Terms, target: f32) -> u32 {
    let run = tile.head_runs(&terms.shape, tile.keys).run;
    let cost = tile.keys as f32 * run as f32 * tile.key_cost(&terms.costs);
    let count = (cost / target.max(1.0)).ceil().max(1.0) as u32;
    let keys = tile.keys.max(1).div_ceil(count);
    // A slice starts where a page and a stage of the ring do.
    let stride = (STAGE_KEYS / terms.page_size).max(1) * terms.page_size;
    keys.next_multiple_of(stride)
}

fn whole(tile: &Tile, page_size: u32) -> u32 {
    tile.keys.max(1).next_multiple_of(page_size)
}
