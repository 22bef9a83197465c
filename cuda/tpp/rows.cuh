// The query rows of one warp: which rows of q they are and which keys they see.
#pragma once

#include "layout.cuh"

namespace chunkcache::tpp {

struct Row {
  bool valid;
  u32 token;       // index in the token table
  u32 q_row;
  u32 head;        // within the group
  u32 seq;

  // Row `index` of an item's tile: token index / group, head index % group.
  __device__ __forceinline__ static Row of(const TppParams& p, const Item& item, u32 index) {
    Row row;
    const u32 token = p.group == 1 ? index : __umulhi(index, p.group_magic);
    row.head = index - token * p.group;
    row.valid = token < item.num_tok;
    row.token = item.tok_begin + token;
    row.q_row = 0;
    row.seq = item.seq;
    if (row.valid) {
      row.q_row = p.tokens[row.token].q_row;
      if (item.seq == NONE) row.seq = p.tokens[row.token].seq;
    }
    return row;
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

}  // namespace chunkcache::tpp
