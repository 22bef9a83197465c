//! The rows that the attention kernel reads beside the plan's own (`cuda/params.h`).

use super::super::view::Row;

/// One work item (`ItemRow` in `cuda/params.h`): a slice of a segment's pages, a run of K/V heads,
/// a tile of query tokens.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ItemRow {
    /// Index in `page_ids` of the slice's first page.
    pub ids_begin: u32,
    /// Keys in the slice's pages; [`NONE`](crate::plan::NONE): as far as the tile's last query
    /// sees.
    pub num_keys: u32,
    /// Token position of the slice's first key.
    pub start_pos: u32,
    /// First K/V head.
    pub kv_head: u32,
    /// K/V heads.
    pub num_heads: u32,
    /// First query token of the tile, a row of `tokens`.
    pub tok_begin: u32,
    /// Query tokens.
    pub num_tok: u32,
    /// First partial slot, or [`NONE`](crate::plan::NONE): the item finishes its rows.
    pub slot_begin: u32,
    /// The tile's only sequence, or [`NONE`](crate::plan::NONE).
    pub seq: u32,
    /// With `seq`: the first token's index among the sequence's queries.
    pub first_query: u32,
    /// Tiles of 16 query rows, a power of two.
    pub row_tiles: u32,
    /// Warps that take turns over the key blocks of one head and row tile.
    pub key_groups: u32,
    /// 1: some row of the tile may not see the whole slice.
    pub bounded: u32,
    /// 0.
    pub reserved: [u32; 3],
    /// The slice's first page ids.
    pub pages: [u32; Self::PAGES],
}

impl ItemRow {
    /// Page ids that a row carries itself.
    pub const PAGES: usize = 16;

    /// Words before the page ids.
    pub(in crate::plan) const HEAD_WORDS: usize = 16;

    /// The row as words, in the order of the fields.
    pub fn words(&self) -> &[u32; 32] {
        const { assert!(size_of::<Self>() == size_of::<[u32; 32]>()) };
        // SAFETY: `repr(C)`, `u32` fields alone, and of the same size and alignment.
        unsafe { &*std::ptr::from_ref(self).cast() }
    }
}

// SAFETY: `repr(C)`, 32 words of `u32`.
unsafe impl Row for ItemRow {}

/// One query token, in depth-first order of its sequences: its row of `q` and of the output, its
/// row of `sequences`, the first of its rows in `merges`, and how many partial states it has.
pub type TokenRow = [u32; 4];

/// Where the partial states of one split of a token lie: slot base + `kv_head` * stride + head
/// within the group.
pub type MergeRow = [u32; 2];

/// Rows to merge: of the query tokens from the first on, so many, the units from the first on, so
/// many; a unit is eight rows, query heads within tokens within K/V heads.
pub type MergeItem = [u32; 4];

// SAFETY: four words, also those of a merge item.
unsafe impl Row for TokenRow {}
// SAFETY: two words.
unsafe impl Row for MergeRow {}
