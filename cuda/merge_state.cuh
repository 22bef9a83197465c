// merge_state: two partial states over disjoint keys into the state over both (the paper's
// attn_reduce, with o normalised and lse the natural logarithm).
//
// Grid: one warp a (row, head). Memory: o [rows, heads, head_dim] and lse f32 [rows, heads], all
// contiguous. The state over no keys is (0, -inf); what its o holds is not read into the result.
#pragma once

#include "common/element.cuh"
#include "common/softmax.cuh"

namespace chunkcache {

struct MergeStateParams {
  const void* o_a;
  const float* lse_a;
  const void* o_b;
  const float* lse_b;
  void* o;
  float* lse;
  u64 num_states;      // rows * heads
  u32 head_dim;
  u32 unused;
};

template <class T>
__device__ __forceinline__ void merge_state(const MergeStateParams& p) {
  using Storage = typename T::Storage;
  const u64 index = blockIdx.x * static_cast<u64>(blockDim.x / 32) + threadIdx.x / 32;
  const u32 lane = threadIdx.x % 32;
  if (index >= p.num_states) return;
  const float a = p.lse_a[index];
  const float b = p.lse_b[index];
  const float max = fmaxf(a, b);
  const float base = exponent_base(max);
  const float weight_a = ptx::exp2_approx((a - base) / LN_2);
  const float weight_b = ptx::exp2_approx((b - base) / LN_2);
  const float total = weight_a + weight_b;
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
  const Storage* o_a = static_cast<const Storage*>(p.o_a) + index * p.head_dim;
  const Storage* o_b = static_cast<const Storage*>(p.o_b) + index * p.head_dim;
  Storage* o = static_cast<Storage*>(p.o) + index * p.head_dim;
  for (u32 i = lane; i < p.head_dim; i += 32) {
    float sum = 0.0f;
    if (weight_a > 0.0f) sum += weight_a * inverse * T::to_float(o_a[i]);
    if (weight_b > 0.0f) sum += weight_b * inverse * T::to_float(o_b[i]);
    o[i] = T::from_float(sum);
  }
  if (lane == 0) p.lse[index] = max + ptx::log2_approx(total) * LN_2;
}

}  // namespace chunkcache
