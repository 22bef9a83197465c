// Values of a stage that not all rows of a warp see, where some of them are not finite: a product on
// the tensor cores takes all keys for all rows, and 0 times infinity or NaN is NaN. So the rest of
// the rows is spared here, key by key, at many times the usual cost. Code that seldom runs, so small.
#pragma once

#include "fp8.cuh"
#include "rows.cuh"

namespace chunkcache::tpp {

// Values as they are stored, and the four bytes of 16 that a lane has accumulators for: two columns of
// one block of eight, or four of two (fp8.cuh).
template <class T, bool = FP8>
struct StoredValues {
  using Type = T;
  static constexpr u32 blocks = 1;
  static __device__ __forceinline__ void widen(float (&x)[2], u32 word) {
    x[0] = T::to_float(static_cast<u16>(word));
    x[1] = T::to_float(static_cast<u16>(word >> 16));
  }
};
template <class T>
struct StoredValues<T, true> {
  using Type = E4M3;
  static constexpr u32 blocks = 2;
  static __device__ __forceinline__ void widen(float (&x)[4], u32 word) {
    u32 halves[2];
    ptx::e4m3_to_f16(halves[0], halves[1], word);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) x[i] = F16::to_float(static_cast<u16>(halves[i / 2] >> i % 2 * 16));
  }
};

// Whether the first `count` rows of V of a stage are finite; the same in all lanes.
template <class T, u32 D>
__device__ __forceinline__ bool all_finite(u32 v, i32 count, u32 lane) {
  using Stored = typename StoredValues<T>::Type;
  constexpr u32 pieces = Shape<D>::kv_row_bytes / 16;
  const u32 rows = static_cast<u32>(min(count, static_cast<i32>(KEYS)));
  u32 carried = 0;
#pragma unroll 1
  for (u32 i = lane; i < rows * pieces; i += 32) {
    const u32 row = i / pieces;
    const u32 piece = i - row * pieces;
    const float4 words = ptx::load_shared(v + piece / 8 * BOX_BYTES + swizzled(row, piece % 8));
    carried |= (__float_as_uint(words.x) & Stored::magnitude) + Stored::to_sign;
    carried |= (__float_as_uint(words.y) & Stored::magnitude) + Stored::to_sign;
    carried |= (__float_as_uint(words.z) & Stored::magnitude) + Stored::to_sign;
    carried |= (__float_as_uint(words.w) & Stored::magnitude) + Stored::to_sign;
  }
  return !__any_sync(~0u, (carried & ~Stored::magnitude) != 0);
}

// o += P V of the keys that a row sees, which end at `num_keys`.
template <class T, u32 D>
__device__ __forceinline__ void add_values_seen(float (&o)[D / 8][4], u32 v,
                                                const u32 (&weights)[2][4], i32 first_key,
                                                const int2* row_limits, i32 num_keys) {
  // Read anew, so that no register is kept for it: the warps beside these have few.
  const u32 lane = ptx::lane();
  const int2 limits[2] = {row_limits[lane / 4], row_limits[lane / 4 + 8]};
#pragma unroll 1
  for (u32 k = 0; k < KEYS; ++k) {
    const i32 key = first_key + static_cast<i32>(k);
    if (key >= num_keys) break;
    float weight[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      // Of the 32 keys, eight are in a register of the row's four lanes, two in each.
      const u32 low = k & 8 ? weights[0][2 + r] : weights[0][r];
      const u32 high = k & 8 ? weights[1][2 + r] : weights[1][r];
      const u32 pair = __shfl_sync(~0u, k & 16 ? high : low, (lane & ~3u) | (k & 7) >> 1);
      weight[r] = T::to_float(static_cast<u16>(k & 1 ? pair >> 16 : pair));
    }
    const bool seen[2] = {key >= limits[0].x && key <= limits[0].y,
                          key >= limits[1].x && key <= limits[1].y};
    const u32 first = v + swizzled(k, 0) + (lane & 3) * 4;
    constexpr u32 blocks = StoredValues<T>::blocks;
#pragma unroll
    for (u32 i = 0; i < D / 8; i += blocks) {
      const u32 piece = i / blocks;
      float x[2 * blocks];
      StoredValues<T>::widen(
          x, ptx::load_shared_word((first ^ piece % 8 << 4) + piece / 8 * BOX_BYTES));
#pragma unroll
      for (u32 r = 0; r < 2; ++r) {
        if (seen[r]) {
#pragma unroll
          for (u32 j = 0; j < blocks; ++j) {
            o[i + j][2 * r] = fmaf(weight[r], x[j], o[i + j][2 * r]);
            o[i + j][2 * r + 1] = fmaf(weight[r], x[blocks + j], o[i + j][2 * r + 1]);
          }
        }
      }
    }
  }
}

}  // namespace chunkcache::tpp
