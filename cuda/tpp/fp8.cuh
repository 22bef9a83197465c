// Fragments over K/V in e4m3. They become f16 in registers, which holds every e4m3 value, so that all
// products are f16 with f32 sums; q in bf16 becomes f16, too. What ldmatrix brings a lane is four elements in 32 bits, which are
// the two registers of a fragment if columns change places:
//
// Scores: lane 4g + t gets columns 4t to 4t + 3 (of 16) of key g. They stand where columns 2t, 2t + 1,
// 2t + 8 and 2t + 9 would, in q as in K: the order of a sum's terms is free.
//
// Values: transposed, lane 4g + t gets columns 2g and 2g + 1 of keys 2t and 2t + 1. Even columns make
// one fragment and odd ones the next, so that lane 4g + t ends with columns 4t to 4t + 3.
#pragma once

#include "layout.cuh"

namespace chunkcache::tpp {

// Accumulators i of a lane, once arranged, belong to columns pair_column(i) + lane_column(lane) and
// the next.
__device__ __forceinline__ constexpr u32 pair_column(u32 i) {
  return FP8 ? i / 2 * 16 + i % 2 * 2 : i * 8;
}
__device__ __forceinline__ u32 lane_column(u32 lane) { return (lane & 3) * (FP8 ? 4 : 2); }

namespace fp8 {

// Address for ldmatrix of 16 columns of all 32 keys of a stage, from that of the first 16.
__device__ __forceinline__ u32 columns_of_keys(u32 first, u32 piece) {
  return (first ^ piece % 8 << 4) + piece / 8 * BOX_BYTES;
}

// The power of two that brings a row's largest element to [1, 2): the range of f16 does not hold that
// of bf16, but it does hold a row whose scores are multiplied by `inverse` afterwards.
struct RowShift {
  float factor;
  float inverse;

  // From the bits of the largest |x| as f32.
  __device__ __forceinline__ static RowShift of(u32 largest) {
    const u32 exponent = min(max(largest >> 23, 1u), 253u);
    return {__uint_as_float((254 - exponent) << 23), __uint_as_float(exponent << 23)};
  }
};

__device__ __forceinline__ u32 larger(u32 bits, u32 bf16_pair) {
  return max(bits, max(bf16_pair << 16 & 0x7fffffffu, bf16_pair & 0x7fff0000u));
}

__device__ __forceinline__ u32 shifted(u32 bf16_pair, float factor) {
  return F16::pack(__uint_as_float(bf16_pair << 16) * factor,
                   __uint_as_float(bf16_pair & 0xffff0000u) * factor);
}

// The A fragments of 16 rows of q in registers; rows that do not exist are zeros.
template <u32 STEPS>
__device__ __forceinline__ void load_q(u32 (&q)[STEPS][4], float (&inverse)[2], bool is_bf16,
                                       const u16* row0, const u16* row1, u32 lane) {
  const u16* rows[2] = {row0, row1};
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
#pragma unroll
    for (u32 k = 0; k < STEPS; ++k) {
      // Two loads, since one of 64 bits wants registers that the product does not have side by side.
      const u16* from = rows[r] + k * 16 + (lane & 3) * 4;
      q[k][r] = rows[r] ? ptx::load_u32(from) : 0;
      q[k][2 + r] = rows[r] ? ptx::load_u32(from + 2) : 0;
    }
    inverse[r] = 1.0f;
  }
  if (!is_bf16) return;
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    u32 largest = 0;
#pragma unroll
    for (u32 k = 0; k < STEPS; ++k) largest = larger(larger(largest, q[k][r]), q[k][2 + r]);
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    const RowShift shift = RowShift::of(largest);
    inverse[r] = shift.inverse;
#pragma unroll
    for (u32 k = 0; k < STEPS; ++k) {
      q[k][r] = shifted(q[k][r], shift.factor);
      q[k][2 + r] = shifted(q[k][2 + r], shift.factor);
    }
  }
}

// The same into shared memory, where ldmatrix finds the fragments: the 32-bit words of two pieces of
// 16 bytes change places so that even ones make the first and odd ones the second.
template <u32 D>
__device__ __forceinline__ void load_q_shared(u32 q_shared, float (&inverse)[2], bool is_bf16,
                                              const u16* row0, const u16* row1, u32 lane) {
  constexpr u32 pieces = Shape<D>::row_bytes / 16;
  __syncwarp();
#pragma unroll 1
  for (u32 half = 0; half < 2; ++half) {
    // All loads before the first store, which none may pass.
    uint4 values[8];
#pragma unroll
    for (u32 r = 0; r < 8; ++r) {
      const u64 mine = reinterpret_cast<u64>(half == 0 ? row0 : row1);
      const u16* from = reinterpret_cast<const u16*>(__shfl_sync(~0u, mine, r * 4));
      values[r] = make_uint4(0, 0, 0, 0);
      if (lane < pieces && from != nullptr) values[r] = reinterpret_cast<const uint4*>(from)[lane];
    }
    float back = 1.0f;
#pragma unroll
    for (u32 r = 0; r < 8; ++r) {
      uint4 value = values[r];
      if (is_bf16) {
        const u32 mine = larger(larger(larger(larger(0, value.x), value.y), value.z), value.w);
        const RowShift shift = RowShift::of(__reduce_max_sync(~0u, mine));
        if (lane / 4 == r) back = shift.inverse;
        value = make_uint4(shifted(value.x, shift.factor), shifted(value.y, shift.factor),
                           shifted(value.z, shift.factor), shifted(value.w, shift.factor));
      }
      if (lane < pieces) {
        const u32 even = lane & ~1u;
        const u32 box = q_shared + even / 8 * (ROWS * COLUMN_BYTES) + (lane & 1) * 8;
        const u32 row = half * 8 + r;
        ptx::store_shared(box + swizzled(row, even & 7), __uint_as_float(value.x),
                          __uint_as_float(value.z));
        ptx::store_shared(box + swizzled(row, (even & 7) + 1), __uint_as_float(value.y),
                          __uint_as_float(value.w));
      }
    }
    if (half == 0) {
      inverse[0] = back;
    } else {
      inverse[1] = back;
    }
  }
  __syncwarp();
}

// s = q K^T for one step of 16 columns: four blocks of eight keys.
__device__ __forceinline__ void add_scores(float (&s)[4][4], const u32 (&a)[4], u32 first,
                                           u32 step) {
  u32 b[4];
  ptx::ldmatrix_x4(b, columns_of_keys(first, step));
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    u32 low, high;
    ptx::e4m3_to_f16(low, high, b[i]);
    F16::mma(s[i], a, low, high);
  }
}

// o += P V for 16 columns: the even and the odd ones. `keep` are masks of values that count.
template <bool MASKED>
__device__ __forceinline__ void add_values(float (&even)[4], float (&odd)[4], u32 first, u32 piece,
                                           const u32 (&weights)[2][4], const u32 (&keep)[2][2]) {
  u32 b[4];
  ptx::ldmatrix_x4_trans(b, columns_of_keys(first, piece));
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    u32 evens[2], odds[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      ptx::e4m3_to_f16(evens[i], odds[i], __byte_perm(b[2 * half + i], 0, 0x3120));
      if constexpr (MASKED) {
        evens[i] &= keep[half][i];
        odds[i] &= keep[half][i];
      }
    }
    F16::mma(even, weights[half], evens[0], evens[1]);
    F16::mma(odd, weights[half], odds[0], odds[1]);
  }
}

}  // namespace fp8

}  // namespace chunkcache::tpp
