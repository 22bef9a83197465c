// Partial states of one row become its output. Each split of a segment leaves one partial; they are
// added in split order by the item that finishes the row, so that the bits do not depend on time.
//
// A partial is its own flag: between launches every word of the workspace is NOT_WRITTEN, which no
// writer writes. Who merges looks until all words are there, and puts NOT_WRITTEN back. So neither
// fences nor counters are needed, and a partial is seen one trip to the L2 after it was written.
#pragma once

#include "../common/softmax.cuh"
#include "rows.cuh"

namespace chunkcache::tpp {

constexpr u32 NOT_WRITTEN = 0x80000000u;    // -0: adding +0 to what is written rules it out
constexpr u32 PIECE = 16;                   // columns that share a copy of the lse

__device__ __forceinline__ bool is_written(float x) { return __float_as_uint(x) != NOT_WRITTEN; }

__device__ __forceinline__ bool is_written(const float4& v) {
  return is_written(v.x) && is_written(v.y) && is_written(v.z) && is_written(v.w);
}

// Column 8 * i + j of a slot's state is at offset 64 * i + j.
__device__ __forceinline__ constexpr u32 state_offset(u32 column) {
  return column / 8 * 64 + column % 8;
}

template <u32 D>
__device__ __forceinline__ float* partial_state(const TppParams& p, u32 slot) {
  return p.partial_out + static_cast<u64>(slot >> 3) * (8 * D) + (slot & 7) * 8;
}

// The copy for columns [16 * i, 16 * i + 16) is at offset 8 * i.
template <u32 D>
__device__ __forceinline__ float* partial_lse(const TppParams& p, u32 slot) {
  return p.partial_lse + static_cast<u64>(slot >> 3) * (D / PIECE * 8) + (slot & 7);
}

template <class T>
__device__ __forceinline__ uint2 packed_as(const float4& v, float factor) {
  return make_uint2(T::pack(v.x * factor, v.y * factor), T::pack(v.z * factor, v.w * factor));
}

// One query row, as a lane that merges it or writes it knows it.
struct OutputRow {
  u32 q_row;
  u32 kv_head;
  u32 head;            // within the group
  u32 merge_begin;
  u32 num_partials;

  __device__ __forceinline__ static OutputRow of(const TppParams& p, const Row& row, u32 kv_head) {
    OutputRow r{row.q_row, kv_head, row.head, 0, 0};
    if (row.valid) {
      r.merge_begin = p.tokens[row.token].merge_begin;
      r.num_partials = p.tokens[row.token].num_partials;
    }
    return r;
  }

  __device__ __forceinline__ u32 qo_head(const TppParams& p) const {
    return kv_head * p.group + head;
  }

  // Four columns from `column`.
  template <class T>
  __device__ __forceinline__ void store(const TppParams& p, u32 column, const float4& v,
                                        float factor) const {
    if constexpr (FP8) {
      if (p.v_scale != nullptr) factor *= p.v_scale[kv_head];
    }
    u16* out = static_cast<u16*>(p.out) + q_row * p.out_row + qo_head(p) * p.out_head + column;
    uint2 packed;
    if (FP8 && p.q_is_bf16 != 0) {
      packed = packed_as<BF16>(v, factor);
    } else {
      packed = packed_as<T>(v, factor);
    }
    *reinterpret_cast<uint2*>(out) = packed;
  }

  __device__ __forceinline__ void store_lse(const TppParams& p, float base2) const {
    if (p.lse != nullptr) {
      p.lse[static_cast<u64>(q_row) * p.num_qo_heads + qo_head(p)] = base2 * LN_2;
    }
  }
};

// Four columns of the sum of a row's partials, by one lane.
struct ColumnMerge {
  float max;
  float total;
  float4 sum;

  __device__ __forceinline__ void reset() {
    max = minus_infinity();
    total = 0.0f;
    sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  // A lane without a row has no partials; all lanes of a warp call this together, with lanes that
  // share a copy of an lse side by side in it. BATCH partials are in flight at once.
  template <u32 D, u32 BATCH>
  __device__ __forceinline__ void add_partials(const TppParams& p, const OutputRow& row,
                                               u32 column) {
    const u32 longest = __reduce_max_sync(~0u, row.num_partials);
    const u32 offset = state_offset(column);
    const u32 copy = column / PIECE * 8;
#pragma unroll 1
    for (u32 first = 0; first < longest; first += BATCH) {
      u32 slots[BATCH];
      float4 v[BATCH];
      float lse[BATCH];
#pragma unroll
      for (u32 k = 0; k < BATCH; ++k) {
        slots[k] = NONE;
        if (first + k < row.num_partials) {
          const MergeEntry e = p.merges[row.merge_begin + first + k];
          slots[k] = e.base + row.kv_head * e.stride + row.head;
        }
      }
#pragma unroll 1
      while (true) {
        bool waiting = false;
#pragma unroll
        for (u32 k = 0; k < BATCH; ++k) {
          v[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          lse[k] = minus_infinity();
          if (slots[k] != NONE) {
            v[k] = ptx::look4(partial_state<D>(p, slots[k]) + offset);
            lse[k] = ptx::look(partial_lse<D>(p, slots[k]) + copy);
          }
        }
#pragma unroll
        for (u32 k = 0; k < BATCH; ++k) waiting |= !is_written(v[k]) || !is_written(lse[k]);
        if (!__any_sync(~0u, waiting)) break;
        // Who waits asks for one word of each, so that many who wait do not slow down those who write.
        do {
          waiting = false;
#pragma unroll
          for (u32 k = 0; k < BATCH; ++k) {
            if (slots[k] != NONE) lse[k] = ptx::look(partial_lse<D>(p, slots[k]) + copy);
          }
#pragma unroll
          for (u32 k = 0; k < BATCH; ++k) waiting |= !is_written(lse[k]);
        } while (__any_sync(~0u, waiting));
      }

      float high = max;
#pragma unroll
      for (u32 k = 0; k < BATCH; ++k) high = fmaxf(high, lse[k]);
      const float base = exponent_base(high);
      scale(ptx::exp2_approx(max - base));
      max = high;
#pragma unroll
      for (u32 k = 0; k < BATCH; ++k) {
        const float weight = ptx::exp2_approx(lse[k] - base);
        add(weight, weight, v[k]);
      }
      const float none = __uint_as_float(NOT_WRITTEN);
#pragma unroll
      for (u32 k = 0; k < BATCH; ++k) {
        if (slots[k] != NONE) {
          ptx::hand_over(partial_state<D>(p, slots[k]) + offset, make_float4(none, none, none, none));
          if (column % PIECE == 0) ptx::hand_over(partial_lse<D>(p, slots[k]) + copy, none);
        }
      }
    }
  }

  // A state that is not normalised.
  __device__ __forceinline__ void add_state(float other_max, float other_sum, const float4& v) {
    const float high = fmaxf(max, other_max);
    const float base = exponent_base(high);
    scale(ptx::exp2_approx(max - base));
    max = high;
    const float weight = ptx::exp2_approx(other_max - base);
    add(weight, weight * other_sum, v);
  }

  __device__ __forceinline__ float inverse() const { return total > 0.0f ? 1.0f / total : 0.0f; }
  __device__ __forceinline__ float lse() const { return max + ptx::log2_approx(total); }

 private:
  __device__ __forceinline__ void scale(float factor) {
    total *= factor;
    sum.x *= factor;
    sum.y *= factor;
    sum.z *= factor;
    sum.w *= factor;
  }

  __device__ __forceinline__ void add(float weight, float weight_sum, const float4& v) {
    total += weight_sum;
    sum.x += weight * v.x;
    sum.y += weight * v.y;
    sum.z += weight * v.z;
    sum.w += weight * v.w;
  }
};

// This block's merge items: pieces of 8 rows and 16 columns, two lanes a row and 8 columns.
template <class T, u32 D, u32 WARPS>
__device__ __forceinline__ void merge_rest(const TppParams& p, const Control& control, u32 warp,
                                           u32 lane) {
  constexpr u32 pieces = D / PIECE;
  ptx::barrier_wait(ptx::shared_address(&control.merge_known), 0);
  const u32 num_items = control.num_merge_items;
  MergeItem item = control.merge_item;
#pragma unroll 1
  for (u32 number = blockIdx.x; number < num_items; number += gridDim.x) {
    if (number != blockIdx.x) item = p.merge_items[number];
    const u32 rows = item.num_tok * p.group;
#pragma unroll 1
    for (u32 i = warp; i < item.num_units * pieces; i += WARPS) {
      // Rows of one head behind those of the other.
      const u32 at = (item.first_unit + i / pieces) * 8 + ((lane >> 1) & 7);
      const u32 kv_head = at / rows;
      const u32 index = kv_head * p.group < p.num_qo_heads ? at - kv_head * rows : rows;
      const u32 column = (i % pieces) * PIECE + (lane >> 4) * 8 + (lane & 1) * 4;
      const Row row = Row::of(p, item.tok_begin, item.num_tok, 0, index);
      const OutputRow out = OutputRow::of(p, row, kv_head);
      ColumnMerge merge;
      merge.reset();
      merge.add_partials<D, 8>(p, out, column);
      if (row.valid) {
        out.store<T>(p, column, merge.sum, merge.inverse());
        if (column == 0) out.store_lse(p, merge.lse());
      }
    }
  }
}

}  // namespace chunkcache::tpp
