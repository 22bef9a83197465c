//! Query tokens against segments: what items are cut from.

use super::super::view::{NONE, PlanView};
use super::costs::{
    DeviceCosts, GROUP_TILES, HeadShape, SLOT_ROWS, STAGE_KEYS, STEP_KEYS, WARP_ROWS,
};

/// The query tokens of a step, in depth-first order of their sequences.
#[derive(Debug, Default)]
pub(super) struct Queries {
    /// For each place in `order` its first token, and one past the last.
    pub starts: Vec<u32>,
    /// For each token its row of `q`.
    pub q_rows: Vec<u32>,
    /// For each token its row of `sequences`.
    pub seqs: Vec<u32>,
    /// For each token its position; negative where a sequence has fewer keys than queries.
    positions: Vec<i64>,
}

impl Queries {
    fn read(&mut self, view: &PlanView<'_>) {
        let Self { starts, q_rows, seqs, positions } = self;
        starts.clear();
        q_rows.clear();
        seqs.clear();
        positions.clear();
        starts.push(0);
        for &row in view.order {
            let sequence = view.sequences[row as usize];
            let first = i64::from(sequence.kv_len) - i64::from(sequence.qo_len);
            for query in 0..sequence.qo_len {
                q_rows.push(sequence.qo_begin + query);
                seqs.push(row);
                positions.push(first + i64::from(query));
            }
            starts.push(q_rows.len() as u32);
        }
    }
}

/// Query tokens `tok_begin..tok_end` and the keys of one segment that some of them see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tile {
    pub segment: u32,
    pub tok_begin: u32,
    pub tok_end: u32,
    /// Keys that some token of the tile sees now; of an open end those that its pages have room for.
    pub keys: u32,
    /// The segment ends with its only sequence, and grows with it.
    pub open_end: bool,
    /// Some token of the tile may not see all keys.
    pub bounded: bool,
    /// The only sequence, or [`NONE`].
    pub seq: u32,
    /// With `seq`: the first token's index among the sequence's queries.
    pub first_query: u32,
    /// Query rows: tokens times query heads per K/V head.
    pub rows: u32,
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

impl Tile {
    pub fn num_tokens(&self) -> u32 {
        self.tok_end - self.tok_begin
    }

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
        let side_by_side = self.seq != NONE || keys <= STAGE_KEYS * shape.warps / row_tiles / 2;
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

/// The tiles of one step.
#[derive(Debug, Default)]
pub(super) struct Tiles {
    pub queries: Queries,
    pub tiles: Vec<Tile>,
}

impl Tiles {
    /// Lists the tiles of all segments, in their order.
    pub fn read(&mut self, view: &PlanView<'_>, shape: &HeadShape) {
        self.queries.read(view);
        self.tiles.clear();
        for &row in view.segment_order {
            self.add_segment(view, shape, row);
        }
    }

    fn add_segment(&mut self, view: &PlanView<'_>, shape: &HeadShape, row: u32) {
        let segment = view.segments[row as usize];
        let Self { queries, tiles } = self;
        let begin = queries.starts[segment.seq_begin as usize];
        let end = queries.starts[segment.seq_end as usize];
        if begin == end || segment.num_pages == 0 {
            return;
        }
        let start = i64::from(segment.start_pos);
        let length = i64::from(segment.num_pages) * i64::from(view.page_size);
        let is_single = segment.seq_end - segment.seq_begin == 1;
        let only = queries.seqs[begin as usize];
        let open_end = is_single && view.sequences[only as usize].leaf == row;
        let num_tiles = (end - begin).div_ceil(shape.max_tokens());
        let per_tile = (end - begin).div_ceil(num_tiles);
        let mut tok_begin = begin;
        while tok_begin < end {
            let tok_end = (tok_begin + per_tile).min(end);
            let seen = &queries.positions[tok_begin as usize..tok_end as usize];
            let (lowest, highest) = seen
                .iter()
                .fold((i64::MAX, i64::MIN), |(low, high), &at| (low.min(at), high.max(at)));
            let keys = length.min(highest + 1 - start).max(0);
            if keys > 0 || open_end {
                tiles.push(Tile {
                    segment: row,
                    tok_begin,
                    tok_end,
                    keys: if open_end { length } else { keys } as u32,
                    open_end,
                    bounded: open_end || start + length > lowest + 1,
                    seq: if is_single { only } else { NONE },
                    first_query: if is_single { tok_begin - begin } else { 0 },
                    rows: (tok_end - tok_begin) * shape.group,
                });
            }
            tok_begin = tok_end;
        }
    }
}
