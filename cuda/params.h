// What the host hands to the kernels: plain structs, no constructors, the same bytes in Python
// (chunkcache/kernels/params.py). Sizes are in elements unless a name says bytes.
#pragma once

namespace chunkcache {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 NONE = 0xffffffffu;

// CUtensorMap: 128 opaque bytes.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// One sequence of the step (rust/core/src/plan/view.rs, SequenceRow).
struct SequenceRow {
  u32 leaf;
  u32 qo_begin;
  u32 qo_len;
  u32 kv_len;
  u32 num_cached_rows;
};

// One query token, in depth-first order of its sequences.
struct TokenRow {
  u32 q_row;          // row of q and of the output
  u32 seq;            // row of the sequence table
  u32 merge_begin;    // first of its entries in the merge table
  u32 num_partials;   // number of them; each (token, query head) takes one partial state from each
};

// Where a token's partial state of one split lies: slot base + kv_head * stride + (head within the
// group). The state that the finishing item keeps to itself is not listed.
struct MergeEntry {
  u32 base;
  u32 stride;
};

// One work item: a slice of a segment's pages, a run of K/V heads, a tile of query tokens. Items wait
// only for partials of items before them in the table.
struct ItemRow {
  u32 ids_begin;      // index in page_ids of the slice's first page
  u32 num_keys;       // keys in the slice's pages; NONE: as far as the tile's last query sees
  u32 start_pos;      // token position of the slice's first key
  u32 kv_head;        // first K/V head
  u32 num_heads;      // K/V heads, 1 to 8
  u32 tok_begin;      // first query token of the tile
  u32 num_tok;        // query tokens; num_tok * group <= 16 * row_tiles
  u32 slot_begin;     // first partial slot, or NONE: finishes its rows, merging their other partials
  u32 seq;            // the tile's only sequence, or NONE
  u32 first_query;    // with seq: the first token's index among the sequence's queries
  u32 row_tiles;      // tiles of 16 query rows, each one warp: 1, 2, 4 or 8
  u32 key_groups;     // warps that take turns over the keys of one head and row tile
  u32 bounded;        // 1: some row of the tile may not see the whole slice
  u32 reserved[3];
  u32 pages[16];      // the slice's first page ids, so that copies start without a second table
};
constexpr u32 ITEM_HEAD_WORDS = 16;
constexpr u32 ITEM_PAGES = 16;

// Rows of query tokens [tok_begin, tok_begin + num_tok) that no item finishes: they are merged when
// all items are handed out. A unit is eight rows of the num_tok * group rows of one K/V head after the
// other; units [first_unit, first_unit + num_units) are one block's.
struct MergeItem {
  u32 tok_begin;
  u32 num_tok;
  u32 first_unit;
  u32 num_units;
};

// The head of the tables.
struct TableHeader {
  u32 num_items;
  u32 num_pad_rows;
  u32 num_merge_items;
};

// Two-phase attention, one launch (tpp_attention.cuh).
struct TppParams {
  TensorMap k_map;              // 5-D; used by the sm_90 path
  TensorMap v_map;
  const void* k;                // page 0, head 0, token 0; used by the sm_80 path
  const void* v;
  i64 k_page_bytes, k_head_bytes, k_token_bytes;
  i64 v_page_bytes, v_head_bytes, v_token_bytes;
  const void* q;                // [rows, num_qo_heads, head_dim], innermost contiguous
  i64 q_row, q_head;
  void* out;
  i64 out_row, out_head;
  float* lse;                   // natural logarithm, [rows, num_qo_heads], or null
  const TableHeader* header;
  const ItemRow* items;         // at least as many rows as the grid has blocks
  const MergeItem* merge_items;
  const TokenRow* tokens;
  const SequenceRow* sequences;
  const MergeEntry* merges;
  const u32* page_ids;
  const u32* pad_rows;          // rows of the output that no key reaches: 0, lse -inf
  float* partial_out;           // [slots / 8, head_dim / 8, 8, 8] slot and column, normalised
  float* partial_lse;           // [slots / 8, head_dim / 16, 8], base 2: a copy for every 16 columns
                                // both: NOT_WRITTEN between launches (tpp/merge.cuh)
  u32* queue;                   // {items handed out and blocks started, blocks done, claims [blocks]},
                                // 0 between launches
  u32 group;                    // query heads per K/V head
  u32 num_qo_heads;
  u32 page_size;
  u32 box_tokens;               // tokens of one copy: 32, or 16 where page_size is no multiple of 32
  u32 ring_stages;
  i32 window_left;              // -1: no window
  float scale_log2;             // sm_scale * log2(e); with a cap: sm_scale / cap
  float cap_log2;               // logits_soft_cap * log2(e), or 0
  u32 ring_magic;               // ceil(2^32 / ring_stages)
  u32 group_magic;              // ceil(2^32 / group), 0 for group 1
  const float* k_scale;         // fp8: [num_kv_heads], or null for 1
  const float* v_scale;
  u32 q_is_bf16;                // fp8: q and out are bf16, not f16
  u32 unused;
};

}  // namespace chunkcache
