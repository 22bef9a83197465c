//! Kinds of tiles: those of one kind are cut alike, so that a cut is sought for kinds alone.

use hashbrown::HashMap;

use super::costs::{
    DeviceCosts, GROUP_TILES, HeadShape, SLOT_ROWS, STAGE_KEYS, STEP_KEYS, WARP_ROWS,
};

/// What the slices of a tile follow from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Kind {
    /// Keys that some token of the tile sees now; of an open end those that its pages have room for.
    pub keys: u32,
    /// Query rows: tokens times query heads per K/V head.
    pub rows: u32,
    /// The segment has one sequence.
    pub is_single: bool,
}

/// How the slices of a tile lie over the warps of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    /// Tiles of 16 rows, a power of two.
    pub row_tiles: u32,
    /// K/V heads side by side: those of an item; the last item has what is left.
    pub heads: u32,
    /// Warps, or warpgroups, that take turns over the keys of one head and row tile. Each leaves a
    /// partial state of its own.
    pub key_groups: u32,
}

impl Cut {
    /// Time of one key of one head: the read, or the matrix products where these take longer.
    pub fn key_cost(&self, costs: &DeviceCosts) -> f32 {
        (costs.row_tile * self.row_tiles as f32).max(1.0)
    }
}

impl Kind {
    /// Rows from one partial state's slots to the next.
    pub fn slot_rows(&self) -> u32 {
        if self.rows < SLOT_ROWS { self.rows } else { self.rows.next_multiple_of(SLOT_ROWS) }
    }

    /// How slices of up to `keys` keys lie over the warps.
    pub fn cut(&self, shape: &HeadShape, keys: u32) -> Cut {
        let keys = keys.min(self.keys);
        let mut row_tiles = self.rows.div_ceil(WARP_ROWS).next_power_of_two();
        // Heads side by side leave one partial state each; warps that take turns over keys leave
        // one each too, of the same head.
        let side_by_side = self.is_single || keys <= STAGE_KEYS * shape.warps / row_tiles / 2;
        if shape.grouped && !side_by_side {
            row_tiles = row_tiles.max(GROUP_TILES);
        }
        let warps = shape.warps / row_tiles;
        let heads = if side_by_side { shape.num_kv_heads.min(warps) } else { 1 };
        let mut key_groups = 1;
        while key_groups * 2 * heads <= warps
            && key_groups * 2 * STEP_KEYS <= keys.next_multiple_of(STEP_KEYS)
        {
            key_groups *= 2;
        }
        Cut { row_tiles, heads, key_groups }
    }

    /// Whether its last slice may finish its rows: one warp keeps the state of a row.
    pub fn may_finish(&self, cut: &Cut) -> bool {
        self.rows == 1 && cut.key_groups == 1
    }

    /// Time of an item of `keys` keys of `num_heads` heads.
    pub fn item_cost(&self, costs: &DeviceCosts, cut: &Cut, keys: u32, num_heads: u32) -> f32 {
        let partials = costs.partial_row * (self.rows * cut.key_groups) as f32;
        costs.item + num_heads as f32 * (keys as f32 * cut.key_cost(costs) + partials)
    }
}

/// The kinds of one step's tiles, in the order in which they were met.
#[derive(Debug, Default)]
pub(super) struct Kinds {
    met: Vec<(Kind, u32)>,
    numbers: HashMap<Kind, u32, foldhash::fast::RandomState>,
}

impl Kinds {
    pub fn clear(&mut self) {
        self.met.clear();
        self.numbers.clear();
    }

    /// Counts one more tile of a kind; returns the kind's number.
    pub fn add(&mut self, kind: Kind) -> u32 {
        let next = self.met.len() as u32;
        let number = match self.met.last() {
            Some(last) if last.0 == kind => next - 1,
            _ => *self.numbers.entry(kind).or_insert(next),
        };
        match self.met.get_mut(number as usize) {
            Some(met) => met.1 += 1,
            None => self.met.push((kind, 1)),
        }
        number
    }

    /// Each kind with the number of its tiles.
    pub fn iter(&self) -> impl Iterator<Item = (&Kind, u32)> {
        self.met.iter().map(|(kind, count)| (kind, *count))
    }
}
