// The query rows of an item: which rows of q they are and which keys they see.
#pragma once

#include "layout.cuh"

namespace chunkcache::tpp {

struct Row {
  bool valid;
  u32 token;       // index in the token table
  u32 q_row;
  u32 head;        // within the group
  u32 seq;

  // Row `index` of some query tokens: token index / group, head index % group. `seq` NONE: look it up.
  __device__ __forceinline__ static Row of(const TppParams& p, u32 tok_begin, u32 num_tok, u32 seq,
                                           u32 index) {
    Row row;
    const u32 token = p.group == 1 ? index : __umulhi(index, p.group_magic);
    row.head = index - token * p.group;
    row.valid = token < num_tok;
    row.token = tok_begin + token;
    row.q_row = 0;
    row.seq = seq;
    if (row.valid) {
      row.q_row = p.tokens[row.token].q_row;
      if (seq == NONE) row.seq = p.tokens[row.token].seq;
    }
    return row;
  }

  __device__ __forceinline__ static Row of(const TppParams& p, const Item& item, u32 index) {
    return of(p, item.tok_begin, item.num_tok, item.seq, index);
  }

  __device__ __forceinline__ i32 position(const TppParams& p) const {
    const SequenceRow& s = p.sequences[seq];
    return static_cast<i32>(s.kv_len - s.qo_len + (q_row - s.qo_begin));
  }
};

// Keys [x, y] of the slice, relative to its first key, that a row sees. Rows that do not exist see
// all: they must not send the others the masked way.
__device__ __forceinline__ int2 key_limits(const TppParams& p, const Item& item, const Row& row) {
  if (!row.valid) return make_int2(-0x40000000, 0x40000000);
  const i32 high = row.position(p) - static_cast<i32>(item.start_pos);
  return make_int2(p.window_left < 0 ? -0x40000000 : high - p.window_left, high);
}

// Slots that the rows of one K/V head and key group take: whole groups of eight where there are
// that many, so that a fragment is written in one piece.
__device__ __forceinline__ u32 slot_rows(u32 rows) { return rows < 8 ? rows : (rows + 7) & ~7u; }

}  // namespace chunkcache::tpp
