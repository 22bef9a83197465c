//! How each tile is cut into slices.

use super::super::layout::WorkLimits;
use super::costs::{DeviceCosts, HeadShape, STEP_KEYS};
use super::kinds::{Cut, Kind, Kinds};
use super::span::{Batch, Blocks};

/// Items per block that a search tries for shared segments, against an even share.
const SHARED_RATIOS: [f32; 9] = [0.5, 0.75, 0.95, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0];

/// Private tiles of so many keys get slices of falling size: small ones go last.
const TAIL_KEYS: u32 = 512;

/// Where nothing is shared and a block reads less than this, the further items cost more than they
/// even out.
const TAIL_SHARE: f32 = 12_000.0;

/// A search ends at a cut this close to an even share.
const GOOD_ENOUGH: f32 = 1.03;

/// The even share that a cut was made for is kept while the total cost stays within this factor,
/// and the balance within [`WORSE_BALANCE`], of what they were then.
const OTHER_COST: f32 = 1.25;
const WORSE_BALANCE: f32 = 1.1;

/// Choices that are kept, for steps of different kinds that take turns.
const KEPT_CHOICES: usize = 4;

/// What the slices follow from, and what the step was like that it was chosen for.
#[derive(Debug, Clone, Copy)]
struct Choice {
    total: f32,
    /// What an item of a shared segment is to cost.
    shared: f32,
    has_tails: bool,
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

impl Terms {
    /// Slices begin at multiples of this: whole pages, and whole steps where pages are short.
    fn stride(&self) -> u32 {
        (STEP_KEYS / self.page_size).max(1) * self.page_size
    }

    fn share(&self, total: f32) -> f32 {
        (total / self.costs.num_blocks as f32).max(1.0)
    }
}

/// How the tiles of one kind are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slicing {
    sizes: Sizes,
    pub num_slices: u32,
    /// How the slices lie over the warps of a block.
    pub cut: Cut,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sizes {
    /// All of so many keys.
    Equal(u32),
    /// Three quarters in so many slices, and the rest in ever smaller ones. Multiprocessors read at
    /// different speeds (12 % apart on an H200): they end together only if small work is left for
    /// those that are early.
    Falling { count: u32, smallest: u32, stride: u32 },
}

impl Slicing {
    fn new(kind: &Kind, terms: &Terms, sizes: Sizes) -> Self {
        let (mut num_slices, mut longest) = (0, 0);
        for_each(kind.keys, sizes, |begin, end| {
            num_slices += 1;
            longest = longest.max(end - begin);
        });
        Self { sizes, num_slices, cut: kind.cut(&terms.shape, longest) }
    }

    /// One slice.
    fn whole(kind: &Kind, terms: &Terms) -> Self {
        Self::new(kind, terms, Sizes::Equal(u32::MAX))
    }

    /// Equal slices whose items cost about `target`.
    fn shared(kind: &Kind, terms: &Terms, target: f32) -> Self {
        let count = (tile_cost(kind, terms) / target.max(1.0)).ceil().max(1.0) as u32;
        let keys = kind.keys.max(1).div_ceil(count).next_multiple_of(terms.stride());
        Self::new(kind, terms, Sizes::Equal(keys))
    }

    /// Slices of a private tile, of falling size if it is long and `has_tails`.
    fn private(kind: &Kind, terms: &Terms, share: f32, has_tails: bool) -> Self {
        let (total, stride) = (kind.keys.max(1), terms.stride());
        let count = ((tile_cost(kind, terms) / share) as u32).min(total / stride).max(1);
        let sizes = if has_tails && total >= TAIL_KEYS {
            let steps = if kind.rows == 1 { 1 } else { 2 };
            let smallest = (steps * STEP_KEYS).next_multiple_of(stride);
            Sizes::Falling { count, smallest, stride }
        } else {
            Sizes::Equal(total.div_ceil(count).next_multiple_of(stride))
        };
        Self::new(kind, terms, sizes)
    }

    /// Calls `visit(begin, end)` with the keys of each slice.
    pub fn for_each(&self, kind: &Kind, visit: impl FnMut(u32, u32)) {
        for_each(kind.keys, self.sizes, visit);
    }
}

/// Time of one item of the whole tile.
fn tile_cost(kind: &Kind, terms: &Terms) -> f32 {
    let cut = kind.cut(&terms.shape, kind.keys);
    kind.keys as f32 * cut.heads as f32 * cut.key_cost(&terms.costs)
}

fn for_each(keys: u32, sizes: Sizes, mut visit: impl FnMut(u32, u32)) {
    let total = keys.max(1);
    let mut begin = 0;
    let mut advance = |size: u32| {
        let end = begin + size.min(total - begin);
        visit(begin, end.min(keys));
        begin = end;
        begin < total
    };
    match sizes {
        Sizes::Equal(size) => while advance(size) {},
        Sizes::Falling { count, smallest, stride } => {
            let body_end = (u64::from(total) * 3 / 4) as u32;
            let body = (u64::from(total) * 3).div_ceil(4 * u64::from(count)) as u32;
            let body = body.next_multiple_of(stride);
            for _ in 0..body_end.div_ceil(body) {
                if !advance(body) {
                    return;
                }
            }
            let mut piece = total / (8 * count);
            loop {
                for _ in 0..count {
                    if !advance(piece.next_multiple_of(stride).max(smallest)) {
                        return;
                    }
                }
                piece /= 2;
            }
        }
    }
}

/// Chooses slices, and keeps the choice from step to step while it is good.
#[derive(Debug, Default)]
pub(super) struct Slices {
    /// By the number of the kind.
    pub slicings: Vec<Slicing>,
    /// The longest block of the cut.
    pub span: f32,
    choices: Vec<Choice>,
    candidate: Vec<Slicing>,
    tried: Vec<u64>,
    batches: Vec<(u64, u32)>,
    blocks: Blocks,
}

impl Slices {
    pub fn choose(&mut self, kinds: &Kinds, terms: &Terms) {
        let heads = terms.shape.num_kv_heads as f32;
        let cost = |(kind, count): (&Kind, u32)| {
            let cut = kind.cut(&terms.shape, kind.keys);
            count as f32 * heads * kind.keys as f32 * cut.key_cost(&terms.costs)
        };
        let total: f32 = kinds.iter().map(cost).sum();
        if !self.keep_choice(kinds, terms, total) {
            self.search(kinds, terms, total);
        }
    }

    /// Cuts by an earlier choice; false if there is none that is good.
    fn keep_choice(&mut self, kinds: &Kinds, terms: &Terms, total: f32) -> bool {
        let is_near = |choice: &Choice| {
            (total / choice.total).max(choice.total / total) <= OTHER_COST
                && choice.has_tails == has_tails(kinds, terms, choice.total)
        };
        let Some(at) = self.choices.iter().rposition(is_near) else { return false };
        let choice = self.choices.remove(at);
        if !self.cut(kinds, terms, &choice) {
            return false;
        }
        let span = self.candidate_span(kinds, terms);
        if span > WORSE_BALANCE * choice.balance * terms.share(total) {
            return false;
        }
        std::mem::swap(&mut self.slicings, &mut self.candidate);
        self.span = span;
        self.choices.push(choice);
        true
    }

    fn search(&mut self, kinds: &Kinds, terms: &Terms, total: f32) {
        let share = terms.share(total);
        self.tried.clear();
        let mut best: Option<Choice> = None;
        for has_tails in [has_tails(kinds, terms, total), false] {
            for ratio in SHARED_RATIOS {
                let shared = share / ratio;
                let mut choice = Choice { total, shared, has_tails, balance: 0.0 };
                if !self.cut(kinds, terms, &choice) || !self.is_new() {
                    continue;
                }
                let span = self.candidate_span(kinds, terms);
                choice.balance = span / share;
                if best.is_none_or(|best| choice.balance < best.balance) {
                    best = Some(choice);
                    self.span = span;
                    std::mem::swap(&mut self.slicings, &mut self.candidate);
                }
                if self.span <= GOOD_ENOUGH * share {
                    break;
                }
            }
            if best.is_some() {
                break;
            }
        }
        match best {
            Some(best) => {
                if self.choices.len() == KEPT_CHOICES {
                    self.choices.remove(0);
                }
                self.choices.push(best);
            }
            // No cut fits but the coarsest, for which the caller has checked that there is room.
            None => {
                self.candidate.clear();
                self.candidate.extend(kinds.iter().map(|(kind, _)| Slicing::whole(kind, terms)));
                self.span = self.candidate_span(kinds, terms);
                std::mem::swap(&mut self.slicings, &mut self.candidate);
            }
        }
    }

    /// Slices for a choice, in `candidate`; false if they pass the capacities.
    fn cut(&mut self, kinds: &Kinds, terms: &Terms, choice: &Choice) -> bool {
        let share = terms.share(choice.total);
        self.candidate.clear();
        let (mut num_items, mut num_merges) = (0_u64, 0_u64);
        for (kind, count) in kinds.iter() {
            let slicing = match kind.is_single {
                true => Slicing::private(kind, terms, share, choice.has_tails),
                false => Slicing::shared(kind, terms, choice.shared),
            };
            let Slicing { num_slices, cut, .. } = slicing;
            let runs = terms.shape.num_kv_heads.div_ceil(cut.heads);
            let num_slices = u64::from(num_slices) * u64::from(count);
            num_items += num_slices * u64::from(runs);
            let num_tokens = kind.rows / terms.shape.group;
            num_merges += num_slices * u64::from(num_tokens) * u64::from(cut.key_groups);
            self.candidate.push(slicing);
        }
        num_items <= terms.limits.max_items.into() && num_merges <= terms.limits.max_merges.into()
    }

    /// Whether no cut like the candidate was tried before.
    fn is_new(&mut self) -> bool {
        let mix = |hash: u64, slicing: &Slicing| {
            (hash ^ u64::from(slicing.num_slices)).wrapping_mul(0x0100_0000_01B3)
        };
        let hash = self.candidate.iter().fold(0xCBF2_9CE4_8422_2325, mix);
        let is_new = !self.tried.contains(&hash);
        self.tried.push(hash);
        is_new
    }

    /// The longest block of the candidate.
    fn candidate_span(&mut self, kinds: &Kinds, terms: &Terms) -> f32 {
        self.batches.clear();
        for ((kind, count), slicing) in kinds.iter().zip(&self.candidate) {
            let cut = &slicing.cut;
            let runs = terms.shape.num_kv_heads.div_ceil(cut.heads);
            let finishes = kind.may_finish(cut);
            slicing.for_each(kind, |begin, end| {
                let cost = kind.item_cost(&terms.costs, cut, end - begin, cut.heads);
                let is_last = finishes && end == kind.keys;
                self.batches.push((turn(kind, cost, is_last), runs * count));
            });
        }
        // Stable, since that is fast where much is in order, as the slices of one kind are.
        self.batches.sort();
        let batches = self.batches.iter().map(|&(turn, count)| Batch {
            cost: cost_of(turn),
            count,
            waits: turn >> LAST != 0,
        });
        self.blocks.makespan(batches, terms.costs.num_blocks)
    }
}

/// Whether private tiles of a step of this cost get slices of falling size.
fn has_tails(kinds: &Kinds, terms: &Terms, total: f32) -> bool {
    terms.share(total) >= TAIL_SHARE || kinds.iter().any(|(kind, _)| !kind.is_single)
}

/// Bit of a turn: an item that finishes rows, and waits for their other partial states.
const LAST: u32 = 33;

/// Where an item comes in the list, as an integer that sorts: those that finish rows last; of both,
/// shared segments first, since their products hide behind the private reads; then the most
/// expensive.
pub(super) fn turn(kind: &Kind, cost: f32, is_last: bool) -> u64 {
    u64::from(is_last) << LAST | u64::from(kind.is_single) << 32 | u64::from(!cost.to_bits())
}

fn cost_of(turn: u64) -> f32 {
    f32::from_bits(!(turn as u32))
}
