// The end of an item with keys: the state is written as one partial per split, or stays where it is
// and becomes the output together with the row's other partials.
#pragma once

#include "consumer.cuh"
#include "merge.cuh"

namespace chunkcache::tpp {

// Partials of this warp's rows. Eight rows' eight columns are one piece of 256 bytes.
template <class T, u32 D>
__device__ __forceinline__ void write_partials(const TppParams& p, const Item& item,
                                               const Role& role, const Warp<T, D>& warp,
                                               u32 lane) {
  const u32 rows = item.rows(p);
  const u32 first_slot =
      item.slot_begin + (role.head * item.key_groups + role.key_group) * slot_rows(rows);
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    const u32 index = role.row_tile * ROWS + lane / 4 + r * 8;
    if (index < rows) {
      const float sum = warp.state.sum[r];
      const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
      float* state = partial_state<D>(p, first_slot + index) + state_offset(lane_column(lane));
#pragma unroll
      for (u32 i = 0; i < D / 8; ++i) {
        ptx::hand_over(state + state_offset(pair_column(i)), fmaf(warp.o[i][2 * r], inverse, 0.0f),
                       fmaf(warp.o[i][2 * r + 1], inverse, 0.0f));
      }
      const float lse = warp.state.max[r] + ptx::log2_approx(sum) + 0.0f;
      float* copies = partial_lse<D>(p, first_slot + index);
#pragma unroll
      for (u32 i = 0; i < D / PIECE; i += 4) {
        if (i + (lane & 3) < D / PIECE) ptx::hand_over(copies + (i + (lane & 3)) * 8, lse);
      }
    }
  }
}

// Rows that end with this item, one after the other: the warp's accumulators of a row are laid out
// along its lanes, and the row's other partials are added in front.
template <class T, u32 D>
__device__ __forceinline__ void finish_rows(const TppParams& p, const Item& item, const Role& role,
                                            const Warp<T, D>& warp, u32 row_shared, u32 lane) {
  const u32 first = role.row_tile * ROWS;
  const u32 rows = item.rows(p);
  const u32 count = first < rows ? min(rows - first, ROWS) : 0;
  const OutputRow mine =
      OutputRow::of(p, Row::of(p, item, first + (lane & 15)), item.kv_head + role.head);
#pragma unroll 1
  for (u32 r = 0; r < count; ++r) {
    const u32 holder = (r & 7) * 4;
    const bool upper = r >= 8;
    if (lane / 4 == (r & 7)) {
#pragma unroll
      for (u32 i = 0; i < D / 8; ++i) {
        ptx::store_shared(row_shared + (pair_column(i) + lane_column(lane)) * 4,
                          upper ? warp.o[i][2] : warp.o[i][0], upper ? warp.o[i][3] : warp.o[i][1]);
      }
    }
    __syncwarp();
    const float max = __shfl_sync(~0u, upper ? warp.state.max[1] : warp.state.max[0], holder);
    const float sum = __shfl_sync(~0u, upper ? warp.state.sum[1] : warp.state.sum[0], holder);
    OutputRow out;
    out.q_row = __shfl_sync(~0u, mine.q_row, r);
    out.kv_head = mine.kv_head;
    out.head = __shfl_sync(~0u, mine.head, r);
    out.merge_begin = __shfl_sync(~0u, mine.merge_begin, r);
    const u32 num_partials = __shfl_sync(~0u, mine.num_partials, r);
#pragma unroll
    for (u32 begin = 0; begin < D; begin += 128) {
      const u32 column = begin + lane * 4;
      const bool wanted = D % 128 == 0 || column < D;
      out.num_partials = wanted ? num_partials : 0;
      ColumnMerge merge;
      merge.reset();
      merge.add_partials<D, Shape<D>::can_group ? 8 : 4>(p, out, column);
      const float4 own = ptx::load_shared(row_shared + (wanted ? column : 0) * 4);
      merge.add_state(max, sum, own);
      if (wanted) {
        out.store<T>(p, column, merge.sum, merge.inverse());
        if (column == 0) out.store_lse(p, merge.lse());
      }
    }
    __syncwarp();
  }
}

}  // namespace chunkcache::tpp
