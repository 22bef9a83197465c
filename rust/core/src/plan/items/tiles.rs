//! Query tokens against segments: what items are cut from.

use super::super::view::{NONE, PlanView};
use super::costs::HeadShape;
use super::kinds::{Kind, Kinds};

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
    /// What it is cut by, and the number of that in [`Tiles::kinds`].
    pub kind: Kind,
    pub kind_number: u32,
    /// The segment ends with its only sequence, and grows with it.
    pub open_end: bool,
    /// Some token of the tile may not see all keys.
    pub bounded: bool,
    /// The only sequence, or [`NONE`].
    pub seq: u32,
    /// With `seq`: the first token's index among the sequence's queries.
    pub first_query: u32,
}

impl Tile {
    pub fn num_tokens(&self) -> u32 {
        self.tok_end - self.tok_begin
    }
}

/// The tiles of one step.
#[derive(Debug, Default)]
pub(super) struct Tiles {
    pub queries: Queries,
    pub tiles: Vec<Tile>,
    pub kinds: Kinds,
}

impl Tiles {
    /// Lists the tiles of all segments, in their order.
    pub fn read(&mut self, view: &PlanView<'_>, shape: &HeadShape) {
        self.queries.read(view);
        self.tiles.clear();
        self.kinds.clear();
        for &row in view.segment_order {
            self.add_segment(view, shape, row);
        }
    }

    fn add_segment(&mut self, view: &PlanView<'_>, shape: &HeadShape, row: u32) {
        let segment = view.segments[row as usize];
        let Self { queries, tiles, kinds } = self;
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
                let kind = Kind {
                    keys: if open_end { length } else { keys } as u32,
                    rows: (tok_end - tok_begin) * shape.group,
                    is_single,
                };
                tiles.push(Tile {
                    segment: row,
                    tok_begin,
                    tok_end,
                    kind,
                    kind_number: kinds.add(kind),
                    open_end,
                    bounded: open_end || start + length > lowest + 1,
                    seq: if is_single { only } else { NONE },
                    first_query: if is_single { tok_begin - begin } else { 0 },
                });
            }
            tok_begin = tok_end;
        }
    }
}
