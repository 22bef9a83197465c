// The consumer warps: 16 query rows against the keys of one ring stage after another, on the
// tensor cores. S = Q K^T and O += P V keep their fragments in registers; P never leaves them.
#pragma once

#include "../common/softmax.cuh"
#include "fp8.cuh"
#include "masked.cuh"
#include "rows.cuh"

namespace chunkcache::tpp {

template <class T, u32 D>
struct Warp {
  using S = Shape<D>;
  static constexpr u32 k_steps = D / 16;

  u32 q[S::q_in_shared ? 1 : k_steps][4];
  u32 q_shared;
  float o[D / 8][4];
  SoftmaxState state;
  float row_scale[2];    // fp8: factor of a row's scores, in place of scale_log2

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (u32 i = 0; i < D / 8; ++i) {
      o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
    }
    state.reset();
  }

  // The A fragments of 16 rows of q; rows that do not exist are zeros.
  __device__ __forceinline__ void load_q(const TppParams& p, const u16* row0, const u16* row1,
                                         u32 lane) {
    if constexpr (FP8 && S::q_in_shared) {
      fp8::load_q_shared<D>(q_shared, row_scale, p.q_is_bf16 != 0, row0, row1, lane);
    } else if constexpr (FP8) {
      fp8::load_q(q, row_scale, p.q_is_bf16 != 0, row0, row1, lane);
    } else if constexpr (S::q_in_shared) {
      // Lane l holds row l / 2's half in turn: pieces of 16 bytes, swizzled as K is.
      constexpr u32 pieces = S::row_bytes / 16;
      __syncwarp();
#pragma unroll
      for (u32 r = 0; r < ROWS; ++r) {
        const u64 mine = reinterpret_cast<u64>(r < 8 ? row0 : row1);
        const u16* from = reinterpret_cast<const u16*>(__shfl_sync(0xffffffffu, mine, (r & 7) * 4));
        uint4 value = make_uint4(0, 0, 0, 0);
        if (lane < pieces && from != nullptr) value = reinterpret_cast<const uint4*>(from)[lane];
        const u32 to = q_shared + (lane / 8) * (ROWS * COLUMN_BYTES) + swizzled(r, lane & 7);
        if (lane < pieces) {
          asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x),
                       "r"(value.y), "r"(value.z), "r"(value.w)
                       : "memory");
        }
      }
      __syncwarp();
    } else {
      const u32 column = (lane & 3) * 2;
#pragma unroll
      for (u32 k = 0; k < k_steps; ++k) {
        q[k][0] = row0 ? ptx::load_u32(row0 + k * 16 + column) : 0;
        q[k][1] = row1 ? ptx::load_u32(row1 + k * 16 + column) : 0;
        q[k][2] = row0 ? ptx::load_u32(row0 + k * 16 + column + 8) : 0;
        q[k][3] = row1 ? ptx::load_u32(row1 + k * 16 + column + 8) : 0;
      }
    }
  }

  // The factor of a row's scores against keys of a head; load_q has left its part.
  __device__ __forceinline__ void scale_rows(const TppParams& p, u32 kv_head) {
    if constexpr (FP8) {
      const float factor = p.scale_log2 * (p.k_scale == nullptr ? 1.0f : p.k_scale[kv_head]);
      row_scale[0] *= factor;
      row_scale[1] *= factor;
    }
  }

  // After the last key: accumulators as pair_column says.
  __device__ __forceinline__ void arrange() {
    if constexpr (FP8) {
#pragma unroll
      for (u32 i = 0; i < D / 8; i += 2) {
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
          const float second = o[i + 1][2 * r];
          o[i + 1][2 * r] = o[i][2 * r + 1];
          o[i][2 * r + 1] = second;
        }
      }
    }
  }

  __device__ __forceinline__ void q_fragment(u32 (&a)[4], u32 k, u32 lane) {
    if constexpr (S::q_in_shared) {
      const u32 piece = 2 * k + (lane >> 4);
      const u32 row = lane & 15;
      ptx::ldmatrix_x4(a, q_shared + (piece / 8) * (ROWS * COLUMN_BYTES) + swizzled(row, piece & 7));
    } else {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) a[i] = q[k][i];
    }
  }

  // s = q K^T of one warp's 16 rows.
  __device__ __forceinline__ void scores(float (&s)[4][4], u32 address, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
    const u32 row = ((lane >> 4) & 1) * 8 + (lane & 7);
    const u32 base = address + row * COLUMN_BYTES;
    const u32 twist = (((lane >> 3) & 1) ^ (lane & 7)) << 4;
    constexpr u32 at_once = FP8 && S::q_in_shared ? 8 : k_steps;
#pragma unroll at_once
    for (u32 k = 0; k < k_steps; ++k) {
      u32 a[4];
      q_fragment(a, k, lane);
      if constexpr (FP8) {
        fp8::add_scores(s, a, address + swizzled(lane, 0), k);
      } else {
        const u32 at = base + (k / 4) * BOX_BYTES + (twist ^ ((2 * k % 8) << 4));
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
          u32 b[4];
          ptx::ldmatrix_x4(b, at + half * 16 * COLUMN_BYTES);
          T::mma(s[2 * half], a, b[0], b[1]);
          T::mma(s[2 * half + 1], a, b[2], b[3]);
        }
      }
    }
  }

  // Scale and cap, then with `masked` minus infinity where a row may not see a key: four blocks of
  // eight keys, the first of them key `first_key` of the slice.
  __device__ __forceinline__ void prepare(const TppParams& p, float (&s)[4][4], i32 first_key,
                                          bool masked, const int2* row_limits, i32 num_keys,
                                          u32 lane) const {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
#pragma unroll
      for (u32 j = 0; j < 4; ++j) s[i][j] *= FP8 ? row_scale[j >> 1] : p.scale_log2;
    }
    if (p.cap_log2 != 0.0f) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) s[i][j] = soft_capped(s[i][j], p.cap_log2);
      }
    }
    if (masked) {
      const int2 limits[2] = {row_limits[lane / 4], row_limits[lane / 4 + 8]};
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
          const i32 key = first_key + static_cast<i32>(i * 8 + (lane & 3) * 2 + (j & 1));
          const int2 limit = limits[j >> 1];
          if (key < limit.x || key > limit.y || key >= num_keys) s[i][j] = minus_infinity();
        }
      }
    }
  }

  // Scores times `factor`, which is not negative, become weights, as the fragments of 16 rows that
  // the second product takes.
  //
  // The base of the exponentials need not be the largest score, so that none is looked for: it stays
  // as long as f16 holds the weights and f32 their sums, and only when a lane's weights add up to
  // more than LIMIT, or a row has no base yet, it is raised and the weights are made again.
  template <u32 N>
  __device__ __forceinline__ void weigh(const float (&s)[N][4], float factor,
                                        u32 (&weights)[N / 2][4]) {
    constexpr float LIMIT = 4096.0f;
    float sum[2];
    make_weights<N>(s, factor, weights, sum);
    const bool holds = sum[0] <= LIMIT && sum[1] <= LIMIT && state.max[0] != minus_infinity() &&
                       state.max[1] != minus_infinity();
    if (!__all_sync(0xffffffffu, holds)) {
      raise_base<N>(s, factor);
      make_weights<N>(s, factor, weights, sum);
    }
    state.sum[0] += sum[0];
    state.sum[1] += sum[1];
  }

  template <u32 N>
  __device__ __forceinline__ void make_weights(const float (&s)[N][4], float factor,
                                               u32 (&weights)[N / 2][4], float (&sum)[2]) const {
    const float base[2] = {exponent_base(state.max[0]), exponent_base(state.max[1])};
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
      float weight[4];
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        weight[j] = ptx::exp2_approx(fmaf(s[i][j], factor, -base[j >> 1]));
      }
      sum[0] += weight[0] + weight[1];
      sum[1] += weight[2] + weight[3];
      weights[i / 2][(i & 1) * 2] = T::pack(weight[0], weight[1]);
      weights[i / 2][(i & 1) * 2 + 1] = T::pack(weight[2], weight[3]);
    }
  }

  template <u32 N>
  __device__ __forceinline__ void raise_base(const float (&s)[N][4], float factor) {
    float shrink[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      float high = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
      for (u32 i = 1; i < N; ++i) high = fmaxf(high, fmaxf(s[i][2 * r], s[i][2 * r + 1]));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2)) * factor;
      const float max = fmaxf(high, state.max[r]);
      shrink[r] = ptx::exp2_approx(state.max[r] - exponent_base(max));
      state.max[r] = max;
      state.sum[r] *= shrink[r];
    }
#pragma unroll
    for (u32 i = 0; i < D / 8; ++i) {
      o[i][0] *= shrink[0];
      o[i][1] *= shrink[0];
      o[i][2] *= shrink[1];
      o[i][3] *= shrink[1];
    }
  }

  // One stage by a warp alone: keys [first_key, first_key + 32) of the slice, of which all rows see
  // those from bounds.x to bounds.y, and which end at bounds.w.
  __device__ __forceinline__ void stage(const TppParams& p, u32 address, i32 first_key,
                                        const int4& bounds, const int2* row_limits, u32 lane) {
    const i32 num_keys = bounds.w;
    const i32 last_key = first_key + static_cast<i32>(KEYS) - 1;
    const bool masked = first_key < bounds.x || last_key > bounds.y;
    float s[4][4];
    scores(s, address, lane);
    prepare(p, s, first_key, masked, row_limits, num_keys, lane);
    u32 weights[2][4];
    weigh<4>(s, 1.0f, weights);
    const u32 v = address + S::k_bytes;
    if (masked) {
      // A key that some rows do not see has weight 0 there, and 0 times what is not finite is NaN.
      const bool partly_seen = first_key < bounds.x || min(last_key, num_keys - 1) > bounds.y;
      if (partly_seen && !all_finite<T, D>(v, num_keys - first_key, lane)) {
        add_values_seen<T, D>(o, v, weights, first_key, row_limits, num_keys);
        return;
      }
      // Rows of V past the last key hold whatever was there: 0 times that may be NaN.
      u32 keep[2][2];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const i32 first = first_key + static_cast<i32>(i * 8 + (lane & 3) * 2);
        keep[i / 2][i & 1] =
            (first < num_keys ? 0xffffu : 0u) | (first + 1 < num_keys ? 0xffff0000u : 0u);
      }
      add_values<true>(v, weights, keep, lane);
    } else {
      const u32 keep[2][2] = {};
      add_values<false>(v, weights, keep, lane);
    }
  }

  // o += P V
  template <bool MASKED>
  __device__ __forceinline__ void add_values(u32 address, const u32 (&weights)[2][4],
                                             const u32 (&keep)[2][2], u32 lane) {
    const u32 row = ((lane >> 3) & 1) * 8 + (lane & 7);
    const u32 base = address + row * COLUMN_BYTES;
    const u32 twist = (((lane >> 4) & 1) ^ (lane & 7)) << 4;
#pragma unroll
    for (u32 n = 0; n < D / 16; ++n) {
      if constexpr (FP8) {
        fp8::add_values<MASKED>(o[2 * n], o[2 * n + 1], address + swizzled(lane, 0), n, weights,
                                keep);
      } else {
        const u32 at = base + (n / 4) * BOX_BYTES + (twist ^ ((2 * n % 8) << 4));
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
          u32 b[4];
          ptx::ldmatrix_x4_trans(b, at + half * 16 * COLUMN_BYTES);
          if constexpr (MASKED) {
            b[0] &= keep[half][0];
            b[1] &= keep[half][1];
            b[2] &= keep[half][0];
            b[3] &= keep[half][1];
          }
          T::mma(o[2 * n], weights[half], b[0], b[1]);
          T::mma(o[2 * n + 1], weights[half], b[2], b[3]);
        }
      }
    }
  }

#if defined(CHUNKCACHE_TMA)
  // The same by a warpgroup, four warps whose row tiles follow each other, for the stages of a whole
  // step that all rows see. Keys and values are read from shared memory once for 64 rows, and the
  // fragments lie as those of a single warp. The products are on their way when these return.
  __device__ __forceinline__ void group_scores(float (&s)[4 * STEP][4],
                                               const u32 (&address)[STEP]) const {
    ptx::wgmma_fence();
#pragma unroll
    for (u32 half = 0; half < STEP; ++half) {
      const u64 keys = ptx::wgmma_descriptor(address[half]);
#pragma unroll
      for (u32 k = 0; k < k_steps; ++k) {
        T::wgmma_scores(&s[half * 4], q[k],
                        keys + (((k / 4) * BOX_BYTES + (k % 4) * 32) >> ptx::DESCRIPTOR_SHIFT),
                        k > 0);
      }
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void group_weigh(const TppParams& p, float (&s)[4 * STEP][4],
                                              u32 (&weights)[2 * STEP][4]) {
    float factor = p.scale_log2;
    if (p.cap_log2 != 0.0f) {
#pragma unroll
      for (u32 i = 0; i < 4 * STEP; ++i) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) s[i][j] = soft_capped(s[i][j] * factor, p.cap_log2);
      }
      factor = 1.0f;
    }
    weigh(s, factor, weights);
  }

  __device__ __forceinline__ void group_add_values(const u32 (&address)[STEP],
                                                   const u32 (&weights)[2 * STEP][4]) {
    ptx::wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < 2 * STEP; ++i) {
      const u64 values = ptx::wgmma_descriptor(address[i / 2] + S::k_bytes);
#pragma unroll
      for (u32 box = 0; box < S::boxes; ++box) {
        T::wgmma_values(&o[box * 8], weights[i],
                        values + ((box * BOX_BYTES + (i % 2) * 16 * COLUMN_BYTES) >>
                                  ptx::DESCRIPTOR_SHIFT));
      }
    }
    ptx::wgmma_commit();
  }
#endif
};

}  // namespace chunkcache::tpp
