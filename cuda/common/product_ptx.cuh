// Instructions of sm_90 that a decode step's kernels need beside those of ptx.cuh: copies of 2-D boxes,
// clusters, and products of a warpgroup with both operands in shared memory.
#pragma once

#include "ptx.cuh"

#if __CUDA_ARCH__ >= 900
namespace chunkcache::ptx {

// One box of a matrix into shared memory; the barrier counts its bytes.
__device__ __forceinline__ void copy_matrix_box(u32 to, const TensorMap* map, u32 barrier, u64 policy,
                                                u32 column, u32 row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "l"(policy), "r"(column), "r"(row)
      : "memory");
}

__device__ __forceinline__ u64 policy_evict_last() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// In two halves: what is between them need not wait for blocks that have not come to the first.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// All threads of the cluster's blocks come here before any goes on.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Writes a value into the shared memory of a block of the cluster, at the place that the address has in
// this one.
__device__ __forceinline__ void store_at(u32 address, u32 rank, float x) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.f32 [there], %2;\n"
      "}\n" ::"r"(address),
      "r"(rank), "f"(x)
      : "memory");
}

// Waits until at most so many groups of products are under way.
template <u32 N>
__device__ __forceinline__ void wgmma_wait_for_all_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// d[64, n] += a[64, 16] b[n, 16]^T: both in shared memory, rows of 128 bytes along k.
#define CHUNKCACHE_F4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define CHUNKCACHE_F16(i) \
  CHUNKCACHE_F4(i), CHUNKCACHE_F4(i + 1), CHUNKCACHE_F4(i + 2), CHUNKCACHE_F4(i + 3)
#define CHUNKCACHE_WGMMA(shape, type, registers, a_at, b_at)                                     \
  "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" registers "}, " a_at ", " b_at \
  ", 1, 1, 1, 0, 0;\n"
#define CHUNKCACHE_R4 "%0, %1, %2, %3"
#define CHUNKCACHE_R16                                                                            \
  CHUNKCACHE_R4 ", %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define CHUNKCACHE_R32                                                                            \
  CHUNKCACHE_R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CHUNKCACHE_R48                                                                            \
  CHUNKCACHE_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"

#define CHUNKCACHE_WGMMAS(name, type)                                                              \
  __device__ __forceinline__ void name(float (&d)[1][4], u64 a, u64 b) {           \
    asm volatile(CHUNKCACHE_WGMMA("m64n8k16", type, CHUNKCACHE_R4, "%4", "%5")               \
                 : CHUNKCACHE_F4(0)                                                                \
                 : "l"(a), "l"(b));                                               \
  }                                                                                                \
  __device__ __forceinline__ void name(float (&d)[4][4], u64 a, u64 b) {           \
    asm volatile(CHUNKCACHE_WGMMA("m64n32k16", type, CHUNKCACHE_R16, "%16", "%17")          \
                 : CHUNKCACHE_F16(0)                                                               \
                 : "l"(a), "l"(b));                                               \
  }                                                                                                \
  __device__ __forceinline__ void name(float (&d)[8][4], u64 a, u64 b) {           \
    asm volatile(CHUNKCACHE_WGMMA("m64n64k16", type, CHUNKCACHE_R32, "%32", "%33")          \
                 : CHUNKCACHE_F16(0), CHUNKCACHE_F16(4)                                            \
                 : "l"(a), "l"(b));                                               \
  }                                                                                                \
  __device__ __forceinline__ void name(float (&d)[12][4], u64 a, u64 b) {          \
    asm volatile(CHUNKCACHE_WGMMA("m64n96k16", type, CHUNKCACHE_R48, "%48", "%49")          \
                 : CHUNKCACHE_F16(0), CHUNKCACHE_F16(4), CHUNKCACHE_F16(8)                         \
                 : "l"(a), "l"(b));                                               \
  }

CHUNKCACHE_WGMMAS(wgmma_shared_f16, "f16")
CHUNKCACHE_WGMMAS(wgmma_shared_bf16, "bf16")

}  // namespace chunkcache::ptx
#endif
