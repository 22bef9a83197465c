// The running softmax of the rows of one 16-row fragment, in base 2.
#pragma once

#include "ptx.cuh"

namespace chunkcache {

constexpr float LN_2 = 0.69314718055994531f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// A lane of a 16-row fragment holds two rows: lane / 4 and lane / 4 + 8.
struct SoftmaxState {
  float max[2];
  float sum[2];    // this lane's columns only, until finish()

  __device__ __forceinline__ void reset() {
    max[0] = max[1] = minus_infinity();
    sum[0] = sum[1] = 0.0f;
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    }
  }
};

// Finite where a row has seen no key yet, so that exp2(-inf - base) is 0 and not NaN.
__device__ __forceinline__ float exponent_base(float max) {
  return max == minus_infinity() ? 0.0f : max;
}

// cap * tanh(x) with cap in base-2 units. 1 - 2 / (exp(2x) + 1) holds at both ends.
__device__ __forceinline__ float soft_capped(float x, float cap) {
  const float e = ptx::exp2_approx(x * 2.8853900817779268f);
  return cap - 2.0f * cap * ptx::reciprocal_approx(e + 1.0f);
}

}  // namespace chunkcache
