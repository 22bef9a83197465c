//! The finished tables of a cut.

use super::super::view::{NONE, PlanView};
use super::costs::HeadShape;
use super::row::{ItemRow, MergeRow, TokenRow};
use super::slices::{Slices, Terms, num_slices, turn};
use super::tiles::{HeadRuns, Tile, Tiles};

/// Index of a token's number of partial states in its row.
const NUM_PARTIALS: usize = 3;

/// What the kernel reads beside the plan's own rows.
#[derive(Debug, Default)]
pub struct Work {
    /// Items: shared segments first, then the most expensive.
    pub items: Vec<ItemRow>,
    /// Query tokens, in depth-first order.
    pub tokens: Vec<TokenRow>,
    /// Partial states by token, in split order.
    pub merges: Vec<MergeRow>,
    /// Rows of the output that no key reaches.
    pub pad_rows: Vec<u32>,
    /// Partial slots to make room for.
    pub num_slots: u32,
    /// For each item its tile.
    pub(super) tile_of: Vec<u32>,
    drafts: Vec<Draft>,
    ranked: Vec<(u64, u32)>,
    /// For each tile its first partial slot, or [`NONE`] if its items write the output.
    slots: Vec<u32>,
    next_merge: Vec<u32>,
    named: Vec<bool>,
}

/// An item to be.
#[derive(Debug, Clone, Copy)]
struct Draft {
    tile: u32,
    slice: u32,
    kv_head: u32,
    num_heads: u32,
    key_groups: u32,
}

impl Work {
    pub(super) fn build(
        &mut self,
        view: &PlanView<'_>,
        tiles: &Tiles,
        slices: &Slices,
        terms: &Terms,
    ) {
        self.count_partials(tiles, slices);
        self.place_partials(&tiles.tiles, slices, &terms.shape);
        self.list_items(&tiles.tiles, slices, terms);
        self.write_items(view, &tiles.tiles, slices, &terms.shape);
        if self.items.len() <= terms.costs.num_blocks as usize {
            self.share_merging();
        }
        self.list_pad_rows(view.num_qo_rows);
    }

    fn count_partials(&mut self, tiles: &Tiles, slices: &Slices) {
        self.tokens.clear();
        let rows = tiles.queries.q_rows.iter().zip(&tiles.queries.seqs);
        self.tokens.extend(rows.map(|(&q_row, &seq)| [q_row, seq, 0, 0]));
        for (tile, &keys) in tiles.tiles.iter().zip(&slices.keys) {
            for token in &mut self.tokens[tile.tok_begin as usize..tile.tok_end as usize] {
                token[NUM_PARTIALS] += num_slices(tile, keys);
            }
        }
    }

    /// Gives slots to the partial states; a tile all of whose tokens have one needs none.
    fn place_partials(&mut self, tiles: &[Tile], slices: &Slices, shape: &HeadShape) {
        self.slots.clear();
        self.next_merge.clear();
        self.next_merge.resize(self.tokens.len(), 0);
        self.num_slots = 0;
        let span = |tile: &Tile| tile.tok_begin as usize..tile.tok_end as usize;
        for (tile, &keys) in tiles.iter().zip(&slices.keys) {
            if self.tokens[span(tile)].iter().all(|token| token[NUM_PARTIALS] == 1) {
                self.slots.push(NONE);
                continue;
            }
            self.slots.push(self.num_slots);
            let count = num_slices(tile, keys);
            self.num_slots += count * shape.num_kv_heads * tile.rows;
            for entries in &mut self.next_merge[span(tile)] {
                *entries += count;
            }
        }
        let mut num_merges = 0;
        for (token, entries) in self.tokens.iter_mut().zip(&mut self.next_merge) {
            token[2] = num_merges;
            num_merges += std::mem::replace(entries, num_merges);
        }
        self.merges.clear();
        self.merges.resize(num_merges as usize, [0; 2]);
        for ((tile, &keys), &first) in tiles.iter().zip(&slices.keys).zip(&self.slots) {
            if first == NONE {
                continue;
            }
            for slice in 0..num_slices(tile, keys) {
                let base = first + slice * shape.num_kv_heads * tile.rows;
                for (index, next) in self.next_merge[span(tile)].iter_mut().enumerate() {
                    self.merges[*next as usize] = [base + index as u32 * shape.group, tile.rows];
                    *next += 1;
                }
            }
        }
    }

    fn list_items(&mut self, tiles: &[Tile], slices: &Slices, terms: &Terms) {
        self.drafts.clear();
        self.ranked.clear();
        for (index, (tile, &keys)) in tiles.iter().zip(&slices.keys).enumerate() {
            let HeadRuns { run, key_groups } = tile.head_runs(&terms.shape, keys.min(tile.keys));
            for slice in 0..num_slices(tile, keys) {
                let here = keys.min(tile.keys.saturating_sub(slice * keys));
                for kv_head in (0..terms.shape.num_kv_heads).step_by(run as usize) {
                    let num_heads = run.min(terms.shape.num_kv_heads - kv_head);
                    let cost = tile.item_cost(&terms.costs, here, num_heads);
                    self.ranked.push((turn(tile, cost), self.drafts.len() as u32));
                    let tile = index as u32;
                    self.drafts.push(Draft { tile, slice, kv_head, num_heads, key_groups });
                }
            }
        }
        self.ranked.sort_unstable();
    }

    fn write_items(
        &mut self,
        view: &PlanView<'_>,
        tiles: &[Tile],
        slices: &Slices,
        shape: &HeadShape,
    ) {
        self.items.clear();
        self.tile_of.clear();
        for &(_, draft) in &self.ranked {
            let Draft { tile: index, slice, kv_head, num_heads, key_groups } =
                self.drafts[draft as usize];
            let tile = &tiles[index as usize];
            let keys = slices.keys[index as usize];
            let segment = view.segments[tile.segment as usize];
            let start = slice * keys;
            let is_last = slice + 1 == num_slices(tile, keys);
            let held = segment.num_pages * view.page_size - start;
            let num_keys = match is_last {
                true if tile.open_end => NONE,
                true => held,
                false => keys,
            };
            let ids_begin = segment.ids_begin + start / view.page_size;
            let num_pages = held.min(num_keys).div_ceil(view.page_size) as usize;
            let mut pages = [0; ItemRow::PAGES];
            let carried = num_pages.min(ItemRow::PAGES);
            let ids = &view.page_ids[ids_begin as usize..ids_begin as usize + carried];
            pages[..carried].copy_from_slice(ids);
            let slot_begin = match self.slots[index as usize] {
                NONE => NONE,
                first => first + (slice * shape.num_kv_heads + kv_head) * tile.rows,
            };
            self.tile_of.push(index);
            self.items.push(ItemRow {
                ids_begin,
                num_keys,
                start_pos: segment.start_pos + start,
                kv_head,
                num_heads,
                tok_begin: tile.tok_begin,
                num_tok: tile.num_tokens(),
                slot_begin,
                seq: tile.seq,
                first_query: tile.first_query,
                row_tiles: tile.row_tiles,
                key_groups,
                bounded: u32::from(tile.bounded),
                owner: 0,
                num_owners: 0,
                reserved: 0,
                pages,
            });
        }
    }

    /// Lets the splits of a tile divide its rows among them for the merge, as all run at once.
    fn share_merging(&mut self) {
        type Key = (u32, u32, u32, u32);
        let key = |item: &ItemRow| (item.tok_begin, item.num_tok, item.kv_head, item.num_heads);
        let mut order: Vec<(Key, u32)> =
            self.items.iter().zip(0..).map(|(item, index)| (key(item), index)).collect();
        order.sort_unstable();
        for splits in order.chunk_by(|a, b| a.0 == b.0) {
            let (tok_begin, num_tok, ..) = splits[0].0;
            let tokens = tok_begin as usize..(tok_begin + num_tok) as usize;
            let is_all = |token: &TokenRow| token[NUM_PARTIALS] as usize == splits.len();
            if splits.len() < 2 || !self.tokens[tokens].iter().all(is_all) {
                continue;
            }
            for (&(_, item), owner) in splits.iter().zip(0..) {
                self.items[item as usize].owner = owner;
                self.items[item as usize].num_owners = splits.len() as u32;
            }
        }
    }

    fn list_pad_rows(&mut self, num_qo_rows: u32) {
        self.named.clear();
        self.named.resize(num_qo_rows as usize, false);
        for token in self.tokens.iter().filter(|token| token[NUM_PARTIALS] > 0) {
            if let Some(named) = self.named.get_mut(token[0] as usize) {
                *named = true;
            }
        }
        self.pad_rows.clear();
        let rows = self.named.iter().enumerate().filter(|&(_, &named)| !named);
        self.pad_rows.extend(rows.map(|(row, _)| row as u32));
    }
}
