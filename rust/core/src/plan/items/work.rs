//! The finished tables of a cut.

use super::super::view::{NONE, PlanView};
use super::costs::{HeadShape, SLOT_ROWS};
use super::kinds::Cut;
use super::row::{ItemRow, MergeItem, MergeRow, TokenRow};
use super::slices::{Slices, Terms, turn};
use super::tiles::{Tile, Tiles};

/// Index of a token's first row in `merges`, and of its number of them, in its row.
const FIRST_MERGE: usize = 2;
const NUM_PARTIALS: usize = 3;

/// What the kernel reads beside the plan's own rows.
///
/// A row of the output is finished, its partial states added up, either by the last slice of its
/// deepest tile, which keeps its own state in registers, or by a merge item. Items wait only for
/// items before them: first come those that write partial states, then those that finish.
#[derive(Debug, Default)]
pub struct Work {
    /// Items: those that finish last; of both, shared segments first, then the most expensive.
    pub items: Vec<ItemRow>,
    /// Items that only merge.
    pub merge_items: Vec<MergeItem>,
    /// Query tokens, in depth-first order.
    pub tokens: Vec<TokenRow>,
    /// Partial states by token, in split order, without the state that a finishing item keeps.
    pub merges: Vec<MergeRow>,
    /// Rows of the output that no key reaches.
    pub pad_rows: Vec<u32>,
    /// Partial slots to make room for, a multiple of 8.
    pub num_slots: u32,
    /// For each item its tile.
    pub(super) tile_of: Vec<u32>,
    parts: Vec<Part>,
    ranked: Vec<(u64, u32)>,
    /// By token.
    marks: Vec<Mark>,
    named: Vec<bool>,
}

/// A slice to be, with the items of all its heads.
#[derive(Debug, Clone, Copy)]
struct Part {
    tile: u32,
    begin: u32,
    end: u32,
    cut: Cut,
    /// Its first partial slot, or [`NONE`]: its items finish the tile's rows.
    slot: u32,
}

/// What is known of a token on the way.
#[derive(Debug, Clone, Copy)]
struct Mark {
    /// The last tile that it is in.
    deepest: u32,
    /// Tiles that it is in.
    depth: u32,
    is_finished: bool,
    next_merge: u32,
}

const NO_MARK: Mark = Mark { deepest: NONE, depth: 0, is_finished: false, next_merge: 0 };

impl Work {
    pub(super) fn build(
        &mut self,
        view: &PlanView<'_>,
        tiles: &Tiles,
        slices: &Slices,
        terms: &Terms,
    ) {
        self.mark_tokens(tiles);
        self.list_parts(&tiles.tiles, slices, terms);
        self.place_merges(&tiles.tiles, &terms.shape);
        self.write_items(view, &tiles.tiles, &terms.shape);
        self.list_merge_items(&terms.shape, terms.costs.num_blocks);
        self.list_pad_rows(view.num_qo_rows);
    }

    fn mark_tokens(&mut self, tiles: &Tiles) {
        self.tokens.clear();
        let rows = tiles.queries.q_rows.iter().zip(&tiles.queries.seqs);
        self.tokens.extend(rows.map(|(&q_row, &seq)| [q_row, seq, 0, 0]));
        self.marks.clear();
        self.marks.resize(self.tokens.len(), NO_MARK);
        for (tile, number) in tiles.tiles.iter().zip(0..) {
            for mark in &mut self.marks[span(tile)] {
                mark.deepest = number;
                mark.depth += 1;
            }
        }
    }

    /// Lists the slices and gives slots to those that write partial states.
    fn list_parts(&mut self, tiles: &[Tile], slices: &Slices, terms: &Terms) {
        let Self { parts, ranked, marks, tokens, num_slots, .. } = self;
        parts.clear();
        ranked.clear();
        *num_slots = 0;
        for (tile, number) in tiles.iter().zip(0..) {
            let kind = &tile.kind;
            let slicing = &slices.slicings[tile.kind_number as usize];
            let cut = slicing.cut;
            let first = parts.len();
            slicing.for_each(kind, |begin, end| {
                parts.push(Part { tile: number, begin, end, cut, slot: 0 });
            });
            let marks = &mut marks[span(tile)];
            let is_alone = parts.len() - first == 1 && marks.iter().all(|mark| mark.depth == 1);
            let finishes = cut.key_groups == 1
                && (kind.rows == 1 || is_alone)
                && marks.iter().all(|mark| mark.deepest == number);
            let num_parts = parts.len();
            for (part, index) in parts[first..].iter_mut().zip(first..) {
                let is_last = finishes && index + 1 == num_parts;
                let cost = kind.item_cost(&terms.costs, &cut, part.end - part.begin, cut.heads);
                ranked.push((turn(kind, cost, is_last), index as u32));
                if is_last {
                    part.slot = NONE;
                    continue;
                }
                part.slot = *num_slots;
                let states = terms.shape.num_kv_heads * cut.key_groups * kind.slot_rows();
                *num_slots += states.next_multiple_of(SLOT_ROWS);
                for token in &mut tokens[span(tile)] {
                    token[NUM_PARTIALS] += cut.key_groups;
                }
            }
            if finishes {
                marks.iter_mut().for_each(|mark| mark.is_finished = true);
            }
        }
        // Stable: of equal rank the first comes first.
        ranked.sort_by_key(|&(turn, _)| turn);
    }

    fn place_merges(&mut self, tiles: &[Tile], shape: &HeadShape) {
        let mut num_merges = 0;
        for (token, mark) in self.tokens.iter_mut().zip(&mut self.marks) {
            token[FIRST_MERGE] = num_merges;
            mark.next_merge = num_merges;
            num_merges += token[NUM_PARTIALS];
        }
        self.merges.clear();
        self.merges.resize(num_merges as usize, [0; 2]);
        for part in self.parts.iter().filter(|part| part.slot != NONE) {
            let tile = &tiles[part.tile as usize];
            let rows = tile.kind.slot_rows();
            for (mark, index) in self.marks[span(tile)].iter_mut().zip(0..) {
                for key_group in 0..part.cut.key_groups {
                    let base = part.slot + key_group * rows + index * shape.group;
                    self.merges[mark.next_merge as usize] = [base, part.cut.key_groups * rows];
                    mark.next_merge += 1;
                }
            }
        }
    }

    fn write_items(&mut self, view: &PlanView<'_>, tiles: &[Tile], shape: &HeadShape) {
        self.items.clear();
        self.tile_of.clear();
        for &(_, part) in &self.ranked {
            let part = self.parts[part as usize];
            let tile = &tiles[part.tile as usize];
            let whole = row_of(view, tile, &part);
            for kv_head in (0..shape.num_kv_heads).step_by(part.cut.heads as usize) {
                let slot = match part.slot {
                    NONE => NONE,
                    first => first + kv_head * part.cut.key_groups * tile.kind.slot_rows(),
                };
                self.tile_of.push(part.tile);
                self.items.push(ItemRow {
                    kv_head,
                    num_heads: part.cut.heads.min(shape.num_kv_heads - kv_head),
                    slot_begin: slot,
                    ..whole
                });
            }
        }
    }

    /// Spreads the merging of rows that no item finishes over all blocks.
    fn list_merge_items(&mut self, shape: &HeadShape, num_blocks: u32) {
        let Self { merge_items, marks, .. } = self;
        merge_items.clear();
        let mut runs = Vec::new();
        let mut begin = 0;
        for run in marks.chunk_by(|a, b| (a.deepest, a.is_finished) == (b.deepest, b.is_finished)) {
            let end = begin + run.len() as u32;
            if run[0].deepest != NONE && !run[0].is_finished {
                let rows = u64::from(shape.num_qo_heads()) * u64::from(end - begin);
                runs.push((begin, end - begin, rows.div_ceil(SLOT_ROWS.into()) as u32));
            }
            begin = end;
        }
        let num_units: u64 = runs.iter().map(|run| u64::from(run.2)).sum();
        let per_item = num_units.div_ceil(num_blocks.into()).max(1) as u32;
        for (tok_begin, num_tok, total) in runs {
            for first in (0..total).step_by(per_item as usize) {
                merge_items.push([tok_begin, num_tok, first, per_item.min(total - first)]);
            }
        }
    }

    fn list_pad_rows(&mut self, num_qo_rows: u32) {
        self.named.clear();
        self.named.resize(num_qo_rows as usize, false);
        let reached = self.tokens.iter().zip(&self.marks).filter(|(_, mark)| mark.depth > 0);
        for (token, _) in reached {
            if let Some(named) = self.named.get_mut(token[0] as usize) {
                *named = true;
            }
        }
        self.pad_rows.clear();
        let rows = self.named.iter().enumerate().filter(|&(_, &named)| !named);
        self.pad_rows.extend(rows.map(|(row, _)| row as u32));
    }
}

fn span(tile: &Tile) -> std::ops::Range<usize> {
    tile.tok_begin as usize..tile.tok_end as usize
}

/// The item of a slice, without what depends on its K/V heads.
fn row_of(view: &PlanView<'_>, tile: &Tile, part: &Part) -> ItemRow {
    let segment = view.segments[tile.segment as usize];
    let held = segment.num_pages * view.page_size - part.begin;
    let num_keys = match part.end == tile.kind.keys {
        true if tile.open_end => NONE,
        true => held,
        false => part.end - part.begin,
    };
    let ids_begin = segment.ids_begin + part.begin / view.page_size;
    let num_pages = held.min(num_keys).div_ceil(view.page_size) as usize;
    let mut pages = [0; ItemRow::PAGES];
    let carried = num_pages.min(ItemRow::PAGES);
    let ids = &view.page_ids[ids_begin as usize..ids_begin as usize + carried];
    pages[..carried].copy_from_slice(ids);
    ItemRow {
        ids_begin,
        num_keys,
        start_pos: segment.start_pos + part.begin,
        tok_begin: tile.tok_begin,
        num_tok: tile.num_tokens(),
        seq: tile.seq,
        first_query: tile.first_query,
        row_tiles: part.cut.row_tiles,
        key_groups: part.cut.key_groups,
        bounded: u32::from(tile.bounded),
        pages,
        ..ItemRow::default()
    }
}
