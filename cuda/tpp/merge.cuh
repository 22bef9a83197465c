// Partial states of one row become its output. Each split of a segment leaves one partial; the
// merge adds them in split order, whoever runs it, so that the bits do not depend on who came last.
#pragma once

#include "../common/softmax.cuh"
#include "rows.cuh"

namespace chunkcache::tpp {

// Eight lanes to a row, four columns to a lane.
constexpr u32 ROW_LANES = 8;

template <u32 D>
constexpr u32 lane_pieces = (D + 4 * ROW_LANES - 1) / (4 * ROW_LANES);

// An arrival counter holds the number of partials that have come; this bit says that the row's
// owner will not wait for the others.
constexpr u32 LEFT_TO_LAST = 0x80000000u;

// One query row of a tile, held by one lane.
struct LaneRow {
  bool valid;
  u32 q_row;
  u32 kv_head;
  u32 head;            // within the group
  u32 token;
  u32 merge_begin;
  u32 num_partials;

  __device__ __forceinline__ static LaneRow of(const TppParams& p, const Item& item, u32 index,
                                               u32 item_head, bool wanted) {
    LaneRow r;
    const Row row = Row::of(p, item, wanted ? index : 4096);
    r.valid = row.valid;
    r.q_row = row.q_row;
    r.kv_head = item.kv_head + item_head;
    r.head = row.head;
    r.token = row.token;
    r.merge_begin = 0;
    r.num_partials = 0;
    if (r.valid && item.slot_begin != NONE) {
      r.merge_begin = p.tokens[r.token].merge_begin;
      r.num_partials = p.tokens[r.token].num_partials;
      ptx::prefetch(p.merges + r.merge_begin);
    }
    return r;
  }

  __device__ __forceinline__ u32 qo_head(const TppParams& p) const {
    return kv_head * p.group + head;
  }

  template <class T>
  __device__ __forceinline__ u16* output(const TppParams& p) const {
    return static_cast<u16*>(p.out) + q_row * p.out_row + qo_head(p) * p.out_head;
  }

  __device__ __forceinline__ void store_lse(const TppParams& p, float base2) const {
    if (p.lse != nullptr) {
      p.lse[static_cast<u64>(q_row) * p.num_qo_heads + qo_head(p)] = base2 * LN_2;
    }
  }
};

template <class T, u32 D>
__device__ __forceinline__ void store_row(u16* out, const float4 (&value)[lane_pieces<D>],
                                          float factor, u32 sub) {
#pragma unroll
  for (u32 i = 0; i < lane_pieces<D>; ++i) {
    const u32 column = (i * ROW_LANES + sub) * 4;
    if (column < D) {
      *reinterpret_cast<uint2*>(out + column) =
          make_uint2(T::pack(value[i].x * factor, value[i].y * factor),
                     T::pack(value[i].z * factor, value[i].w * factor));
    }
  }
}

// One row's merge by eight lanes: partials first, first + step, ... of it.
template <u32 D>
struct RowMerge {
  static constexpr u32 batch = 4;    // partials in flight
  float max;
  float total;
  float4 sum[lane_pieces<D>];

  __device__ __forceinline__ void run(const TppParams& p, const MergeEntry* entries, u32 kv_head,
                                      u32 head, u32 first, u32 step, u32 count, u32 longest,
                                      u32 sub) {
    max = minus_infinity();
    total = 0.0f;
#pragma unroll
    for (u32 j = 0; j < lane_pieces<D>; ++j) sum[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (u32 i = first; i - first < longest; i += batch * step) {
      float lse[batch];
      float4 v[batch][lane_pieces<D>];
#pragma unroll
      for (u32 k = 0; k < batch; ++k) {
        const bool here = i + k * step < count;
        const MergeEntry e = here ? entries[i + k * step] : MergeEntry{0, 0};
        const u64 slot = e.base + kv_head * e.stride + head;
        lse[k] = here ? ptx::load_coherent(p.partial_lse + slot) : minus_infinity();
        const float* from = p.partial_out + slot * D;
#pragma unroll
        for (u32 j = 0; j < lane_pieces<D>; ++j) {
          const u32 column = (j * ROW_LANES + sub) * 4;
          v[k][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (here && column < D) {
            v[k][j] = ptx::load_coherent(reinterpret_cast<const float4*>(from + column));
          }
        }
      }
      const float high = fmaxf(fmaxf(fmaxf(lse[0], lse[1]), fmaxf(lse[2], lse[3])), max);
      const float base = exponent_base(high);
      scale(ptx::exp2_approx(max - base));
      max = high;
#pragma unroll
      for (u32 k = 0; k < batch; ++k) {
        const float weight = ptx::exp2_approx(lse[k] - base);
        total += weight;
#pragma unroll
        for (u32 j = 0; j < lane_pieces<D>; ++j) {
          sum[j].x += weight * v[k][j].x;
          sum[j].y += weight * v[k][j].y;
          sum[j].z += weight * v[k][j].z;
          sum[j].w += weight * v[k][j].w;
        }
      }
    }
  }

  // Adds the state that the lane `distance` away holds; both lanes get the same.
  __device__ __forceinline__ void join(u32 distance) {
    const float other = __shfl_xor_sync(~0u, max, distance);
    const float high = fmaxf(max, other);
    scale(ptx::exp2_approx(max - exponent_base(high)));
    max = high;
    total += __shfl_xor_sync(~0u, total, distance);
#pragma unroll
    for (u32 j = 0; j < lane_pieces<D>; ++j) {
      sum[j].x += __shfl_xor_sync(~0u, sum[j].x, distance);
      sum[j].y += __shfl_xor_sync(~0u, sum[j].y, distance);
      sum[j].z += __shfl_xor_sync(~0u, sum[j].z, distance);
      sum[j].w += __shfl_xor_sync(~0u, sum[j].w, distance);
    }
  }

 private:
  __device__ __forceinline__ void scale(float factor) {
    total *= factor;
#pragma unroll
    for (u32 j = 0; j < lane_pieces<D>; ++j) {
      sum[j].x *= factor;
      sum[j].y *= factor;
      sum[j].z *= factor;
      sum[j].w *= factor;
    }
  }
};

// Output rows from their partials. `rows` is a mask of the lanes that hold them. Four rows side by
// side, or, `wide`, one row by the whole warp, each eight lanes taking every fourth partial. Which
// of the two is settled by the plan, so that the same plan gives the same bits.
template <class T, u32 D>
__device__ __forceinline__ void merge_rows(const TppParams& p, const LaneRow& mine, bool wide,
                                           u32 rows, u32 lane) {
  const u32 sub = lane % ROW_LANES;
  const u32 team = lane / ROW_LANES;
#pragma unroll 1
  while (rows != 0) {
    u32 holder = __ffs(rows) - 1;
    bool wanted = true;
    if (wide) {
      rows &= rows - 1;
    } else {
      wanted = false;
#pragma unroll
      for (u32 i = 0; i < 32 / ROW_LANES; ++i) {
        if (rows != 0 && team == i) {
          holder = __ffs(rows) - 1;
          wanted = true;
        }
        rows &= rows - 1;
      }
    }
    LaneRow row;
    row.q_row = __shfl_sync(~0u, mine.q_row, holder);
    row.kv_head = __shfl_sync(~0u, mine.kv_head, holder);
    row.head = __shfl_sync(~0u, mine.head, holder);
    const MergeEntry* entries = p.merges + __shfl_sync(~0u, mine.merge_begin, holder);
    const u32 held = __shfl_sync(~0u, mine.num_partials, holder);
    const u32 count = wanted ? held : 0;
    RowMerge<D> merge;
    merge.run(p, entries, row.kv_head, row.head, wide ? team : 0, wide ? 32 / ROW_LANES : 1, count,
              __reduce_max_sync(~0u, count), sub);
    if (wide) {
      merge.join(ROW_LANES);
      merge.join(2 * ROW_LANES);
      wanted = team == 0;
    }
    if (wanted) {
      store_row<T, D>(row.output<T>(p), merge.sum,
                      merge.total > 0.0f ? 1.0f / merge.total : 0.0f, sub);
      if (sub == 0) row.store_lse(p, merge.max + ptx::log2_approx(merge.total));
    }
  }
}

// After this warp's partials are written: count them in, and merge rows that are complete.
//
// Usually the last to arrive merges. Where all splits of a tile end together (item.num_owners > 0)
// that would leave the merging to one block; there each split owns its share of the rows and waits
// for the others, if all blocks of the launch are running, so that no wait can be in vain.
template <class T, u32 D>
__device__ __forceinline__ void arrive_and_merge(const TppParams& p, const Item& item,
                                                 const LaneRow& mine, u32 share, u32 started,
                                                 u32 lane) {
  const bool owner = item.num_owners > 0 && mine.valid && share % item.num_owners == item.owner;
  const bool all_running = item.num_owners > 0 && started % gridDim.x == 0;
  ptx::release_fence();
  __syncwarp();
  u32* counter =
      p.arrivals + static_cast<u64>(mine.token) * p.num_qo_heads + mine.qo_head(p);
  bool merges = false;
  if (mine.valid) {
    const u32 before = ptx::add_acquire(counter, owner && !all_running ? 1 + LEFT_TO_LAST : 1u);
    const bool last = (before & ~LEFT_TO_LAST) == mine.num_partials - 1;
    if (item.num_owners == 0) {
      merges = last;
    } else if (owner && all_running) {
      merges = true;
      while (ptx::load_acquire(counter) != mine.num_partials) {
      }
    } else {
      merges = last && (owner || (before & LEFT_TO_LAST) != 0);
    }
    if (merges) *counter = 0;
  }
  const u32 rows = __ballot_sync(~0u, merges);
  if (rows != 0) merge_rows<T, D>(p, mine, item.num_owners > 0, rows, lane);
}

}  // namespace chunkcache::tpp
