// Element types: conversion, and for the 16-bit types of q, K/V and the output the matrix product.
#pragma once

#include "ptx.cuh"

namespace chunkcache {

struct F32 {
  using Storage = float;
  static constexpr u32 id = 0;
  static __device__ __forceinline__ float to_float(float x) { return x; }
  static __device__ __forceinline__ float from_float(float x) { return x; }
};

struct F16 {
  using Storage = u16;
  static constexpr u32 id = 1;
  // Of the elements of a word, all bits but the signs; and what carries infinities and NaN, and no
  // other, over into the signs.
  static constexpr u32 magnitude = 0x7fff7fff;
  static constexpr u32 to_sign = 0x04000400;
  static __device__ __forceinline__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
  static __device__ __forceinline__ float to_float(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
  }
  static __device__ __forceinline__ u16 from_float(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    ptx::mma_f16(c, a, b0, b1);
  }
#if __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ void wgmma_scores(float (*d)[4], const u32 (&a)[4], u64 b,
                                                      u32 accumulate) {
    ptx::wgmma_scores_f16(d, a, b, accumulate);
  }
  static __device__ __forceinline__ void wgmma_values(float (*d)[4], const u32 (&a)[4], u64 b) {
    ptx::wgmma_values_f16(d, a, b);
  }
#endif
};

struct BF16 {
  using Storage = u16;
  static constexpr u32 id = 2;
  static constexpr u32 magnitude = 0x7fff7fff;
  static constexpr u32 to_sign = 0x00800080;
  static __device__ __forceinline__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
  static __device__ __forceinline__ float to_float(u16 x) {
    return __uint_as_float(static_cast<u32>(x) << 16);
  }
  static __device__ __forceinline__ u16 from_float(float x) {
    return static_cast<u16>(pack(x, 0.0f) & 0xffffu);
  }
  static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    ptx::mma_bf16(c, a, b0, b1);
  }
#if __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ void wgmma_scores(float (*d)[4], const u32 (&a)[4], u64 b,
                                                      u32 accumulate) {
    ptx::wgmma_scores_bf16(d, a, b, accumulate);
  }
  static __device__ __forceinline__ void wgmma_values(float (*d)[4], const u32 (&a)[4], u64 b) {
    ptx::wgmma_values_bf16(d, a, b);
  }
#endif
};

// Float8 of four bits exponent and three bits mantissa, without infinities ("e4m3fn"): up to 448.
// sm_89 and newer.
struct E4M3 {
  using Storage = u8;
  static constexpr u32 id = 3;
  static constexpr u32 magnitude = 0x7f7f7f7f;
  static constexpr u32 to_sign = 0x01010101;
  // To the nearest, ties to even; beyond 448 it is 448, and NaN stays NaN.
  static __device__ __forceinline__ u16 pack(float low, float high) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
  }
};

}  // namespace chunkcache
