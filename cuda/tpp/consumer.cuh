// The consumer warps: 16 query rows against the keys of one ring stage after another, on the
// tensor cores. S = Q K^T and O += P V keep their fragments in registers; P never leaves them.
#pragma once

#include "../common/softmax.cuh"
#include "rows.cuh"

namespace chunkcache::tpp {

template <class T, u32 D>
struct Warp {
  using S = Shape<D>;
  static constexpr u32 k_steps = D / 16;
  static constexpr bool can_group = TMA && D % 64 == 0 && !S::q_in_shared;

  u32 q[S::q_in_shared ? 1 : k_steps][4];
  u32 q_shared;
  float o[D / 8][4];
  SoftmaxState state;

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (u32 i = 0; i < D / 8; ++i) {
      o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
    }
    state.reset();
  }

  // The A fragments of 16 rows of q; rows that do not exist are zeros.
  __device__ __forceinline__ void load_q(const u16* row0, const u16* row1, u32 lane) {
    if constexpr (S::q_in_shared) {
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
#pragma unroll
    for (u32 k = 0; k < k_steps; ++k) {
      u32 a[4];
      q_fragment(a, k, lane);
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

#if defined(CHUNKCACHE_TMA)
  // The same products by a warpgroup: four warps whose row tiles follow each other. K and V are
  // read from shared memory once for 64 rows, and the fragments lie as those of a single warp.
  __device__ __forceinline__ void group_scores(float (&s)[4][4], u32 address, u32 lane) {
    // V was written by cp.async, which the tensor cores do not see without a fence.
    ptx::copy_engine_fence();
    ptx::wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < k_steps; ++k) {
      u32 a[4];
      q_fragment(a, k, lane);
      T::wgmma_scores(s, a, ptx::wgmma_descriptor(address + (k / 4) * BOX_BYTES + (k % 4) * 32),
                      k > 0);
    }
    ptx::wgmma_commit_and_wait();
  }

  __device__ __forceinline__ void group_add_values(u32 address, const u32 (&probability)[2][4]) {
    ptx::wgmma_fence();
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
#pragma unroll
      for (u32 box = 0; box < S::boxes; ++box) {
        T::wgmma_values(&o[box * 8], probability[half],
                        ptx::wgmma_descriptor(address + box * BOX_BYTES +
                                              half * 16 * COLUMN_BYTES));
      }
    }
    ptx::wgmma_commit_and_wait();
  }
#endif

  // One stage: keys [first_key, first_key + 32) of the slice. `masked`: some row may not see all of
  // them. `grouped`: the four warps of a warpgroup call this together, with all keys there.
  __device__ __forceinline__ void stage(const TppParams& p, u32 address, i32 first_key, bool masked,
                                        bool grouped, const int2* row_limits, i32 num_keys,
                                        u32 lane) {
    float s[4][4];
#if defined(CHUNKCACHE_TMA)
    if (can_group && grouped) {
      if constexpr (can_group) group_scores(s, address, lane);
    } else {
      scores(s, address, lane);
    }
#else
    scores(s, address, lane);
#endif

    // Scale, cap, mask.
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
#pragma unroll
      for (u32 j = 0; j < 4; ++j) s[i][j] *= p.scale_log2;
    }
    if (p.cap_log2 != 0.0f) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) s[i][j] = soft_capped(s[i][j], p.cap_log2);
      }
    }
    // Rows of V past the last key hold whatever was there: 0 times that may be NaN.
    u32 keep[2][2];
    if (masked) {
      const int2 limits[2] = {row_limits[lane / 4], row_limits[lane / 4 + 8]};
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const i32 first = first_key + static_cast<i32>(i * 8 + (lane & 3) * 2);
        keep[i / 2][i & 1] =
            (first < num_keys ? 0xffffu : 0u) | (first + 1 < num_keys ? 0xffff0000u : 0u);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
          const i32 key = first + static_cast<i32>(j & 1);
          const int2 limit = limits[j >> 1];
          if (key < limit.x || key > limit.y || key >= num_keys) s[i][j] = minus_infinity();
        }
      }
    }
    float high[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      high[r] = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
      for (u32 i = 1; i < 4; ++i) high[r] = fmaxf(high[r], fmaxf(s[i][2 * r], s[i][2 * r + 1]));
    }
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      high[r] = fmaxf(high[r], __shfl_xor_sync(0xffffffffu, high[r], 1));
      high[r] = fmaxf(high[r], __shfl_xor_sync(0xffffffffu, high[r], 2));
    }
    // The base need not be the largest score: it stays until one is 2^8 times above it, which f16
    // weights and f32 sums hold, and most stages spare the rescaling.
    if (__any_sync(0xffffffffu, high[0] > state.max[0] + 8.0f || high[1] > state.max[1] + 8.0f)) {
      float factor[2];
#pragma unroll
      for (u32 r = 0; r < 2; ++r) {
        const float max = fmaxf(high[r], state.max[r]);
        factor[r] = ptx::exp2_approx(state.max[r] - exponent_base(max));
        state.max[r] = max;
        state.sum[r] *= factor[r];
      }
#pragma unroll
      for (u32 i = 0; i < D / 8; ++i) {
        o[i][0] *= factor[0];
        o[i][1] *= factor[0];
        o[i][2] *= factor[1];
        o[i][3] *= factor[1];
      }
    }
    u32 probability[2][4];
    {
      const float base[2] = {exponent_base(state.max[0]), exponent_base(state.max[1])};
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
          s[i][j] = ptx::exp2_approx(s[i][j] - base[j >> 1]);
          state.sum[j >> 1] += s[i][j];
        }
        probability[i / 2][(i & 1) * 2] = T::pack(s[i][0], s[i][1]);
        probability[i / 2][(i & 1) * 2 + 1] = T::pack(s[i][2], s[i][3]);
      }
    }

#if defined(CHUNKCACHE_TMA)
    if constexpr (can_group) {
      if (grouped) {
        group_add_values(address + S::k_bytes, probability);
        return;
      }
    }
#endif
    if (masked) {
      add_values<true>(address + S::k_bytes, probability, keep, lane);
    } else {
      add_values<false>(address + S::k_bytes, probability, keep, lane);
    }
  }

  // o += P V
  template <bool MASKED>
  __device__ __forceinline__ void add_values(u32 address, const u32 (&probability)[2][4],
                                             const u32 (&keep)[2][2], u32 lane) {
    const u32 row = ((lane >> 3) & 1) * 8 + (lane & 7);
    const u32 base = address + row * COLUMN_BYTES;
    const u32 twist = (((lane >> 4) & 1) ^ (lane & 7)) << 4;
#pragma unroll
    for (u32 n = 0; n < D / 16; ++n) {
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
        T::mma(o[2 * n], probability[half], b[0], b[1]);
        T::mma(o[2 * n + 1], probability[half], b[2], b[3]);
      }
    }
  }
};

}  // namespace chunkcache::tpp
