// x [num_rows, columns] times up to three weight matrices [rows, columns], transposed, for few rows.
//
// Reading the weights is what takes the time, so everything is arranged for that: one block a
// multiprocessor, each with an equal share of the units (parts.cuh), a producer thread that keeps a
// ring of stages full across tiles, and eight warps that multiply. Weights depend on no launch before:
// the ring is filled with them while the launch before still runs; x is waited for. The two
// blocks of a team multiply tiles side by side, and each copies half of x for both.
//
// Grid: num_teams * TEAM blocks of 288 threads. Memory: weights and x by tensor maps, boxes of 64
// columns and 128 or N / TEAM rows; the sums leave as parts.
#pragma once

#include "common/product_ptx.cuh"
#include "decode/parts.cuh"

namespace chunkcache::decode {

constexpr u32 DEPTH_BYTES = 128;  // of a row of a stage: 64 columns
constexpr u32 WEIGHT_BYTES = TILE * DEPTH_BYTES;
constexpr u32 CONSUMERS = 8;      // warps
constexpr u32 MOST_STAGES = 16;

struct ProductParams {
  TensorMap weights[3];
  TensorMap x;
  Parts parts;
  u32 end_tile[3];    // of each matrix, counted through; the last ones are equal if there are fewer
  u32 ring_stages;
};

#if __CUDA_ARCH__ >= 900

template <class E>
struct Multiply;
template <>
struct Multiply<F16> {
  template <u32 N>
  static __device__ __forceinline__ void run(float (&d)[N][4], u64 a, u64 b) {
    ptx::wgmma_shared_f16(d, a, b);
  }
};
template <>
struct Multiply<BF16> {
  template <u32 N>
  static __device__ __forceinline__ void run(float (&d)[N][4], u64 a, u64 b) {
    ptx::wgmma_shared_bf16(d, a, b);
  }
};

struct ProductControl {
  u64 full[MOST_STAGES];
  u64 empty[MOST_STAGES];
};

struct RingSlot {
  u32 index = 0;
  u32 lap = 0;

  __device__ __forceinline__ void advance(u32 stages) {
    if (++index == stages) {
      index = 0;
      ++lap;
    }
  }
};

template <u32 N, u32 TEAM>
struct Producer {
  static constexpr u32 x_bytes = N * DEPTH_BYTES;
  static constexpr u32 stage_bytes = WEIGHT_BYTES + x_bytes;
  const ProductParams& p;
  ProductControl& control;
  u32 ring;
  u32 rank;
  u64 read_once = ptx::policy_evict_first();
#ifdef X_FIRST
  u64 read_again = ptx::policy_evict_first();
#else
  u64 read_again = ptx::policy_evict_last();
#endif

  __device__ __forceinline__ void copy_weights(u32 slot, u32 unit) const {
    const u32 group = unit / p.parts.tile_units;
    const u32 last = p.end_tile[2] - 1;
    const u32 tile = min(group * TEAM + rank, last);
    const u32 matrix = (tile >= p.end_tile[0]) + (tile >= p.end_tile[1]);
    const u32 first = matrix == 0 ? 0 : p.end_tile[matrix - 1];
    const u32 barrier = ptx::shared_address(&control.full[slot]);
    ptx::barrier_arrive_expect_bytes(barrier, stage_bytes);
    ptx::copy_matrix_box(ring + slot * stage_bytes, &p.weights[matrix], barrier, read_once,
                         (unit - group * p.parts.tile_units) * 64, (tile - first) * TILE);
  }

  __device__ __forceinline__ void copy_x(u32 slot, u32 unit) const {
    const u32 column = unit % p.parts.tile_units * 64;
    const u32 to = ring + slot * stage_bytes + WEIGHT_BYTES;
    const u32 barrier = ptx::shared_address(&control.full[slot]);
    if constexpr (TEAM == 1) {
      ptx::copy_matrix_box(to, &p.x, barrier, read_again, column, 0);
    } else {
      constexpr u32 rows = N / TEAM;
      ptx::copy_matrix_box(to + rank * rows * DEPTH_BYTES, &p.x, barrier, read_again, column,
                           rank * rows, static_cast<u16>((1 << TEAM) - 1));
    }
  }

  __device__ __forceinline__ void run(u32 begin, u32 end) const {
    const u32 ahead = min(end, begin + p.ring_stages);
    for (u32 unit = begin; unit < ahead; ++unit) copy_weights(unit - begin, unit);
    ptx::wait_for_launches_before();
    ptx::let_next_launch_start();
    for (u32 unit = begin; unit < ahead; ++unit) copy_x(unit - begin, unit);
    RingSlot slot;
    for (u32 unit = ahead; unit < end; ++unit) {
      ptx::barrier_wait(ptx::shared_address(&control.empty[slot.index]), slot.lap & 1);
      copy_weights(slot.index, unit);
      copy_x(slot.index, unit);
      slot.advance(p.ring_stages);
    }
  }
};

template <class E, u32 N, u32 TEAM>
struct Consumer {
  static constexpr u32 stage_bytes = Producer<N, TEAM>::stage_bytes;
  const ProductParams& p;
  ProductControl& control;
  u32 ring;
  u32 rank;

  __device__ __forceinline__ void release(u32 slot) const {
    const u32 lane = threadIdx.x % 32;
    const u32 barrier = ptx::shared_address(&control.empty[slot]);
    if constexpr (TEAM == 1) {
      if (lane == 0) ptx::barrier_arrive(barrier);
    } else {
      if (lane < TEAM) ptx::barrier_arrive_at(barrier, lane);
    }
  }

  __device__ __forceinline__ void store(const float (&d)[N / 8][4], u32 tile, u32 part) const {
    const u32 lane = threadIdx.x % 32;
    const u32 row = threadIdx.x / 32 * 16 + lane / 4;
    float* to = p.parts.part(tile, part, 0) + row;
#pragma unroll
    for (u32 i = 0; i < N / 8; ++i) {
#pragma unroll
      for (u32 j = 0; j < 2; ++j) {
        const u32 column = i * 8 + lane % 4 * 2 + j;
        if (column < p.parts.num_rows) {
          to[column * TILE] = d[i][j];
          to[column * TILE + 8] = d[i][j + 2];
        }
      }
    }
  }

  __device__ __forceinline__ void run(u32 team, u32 begin, u32 end) const {
    const u32 group_row = threadIdx.x / 128 * 64;
    RingSlot slot;
    for (u32 unit = begin; unit < end;) {
      const u32 tile_units = p.parts.tile_units;
      const u32 group = unit / tile_units;
      const u32 count = min(end - unit, (group + 1) * tile_units - unit);
      float d[N / 8][4] = {};
      u32 before = 0;
      for (u32 i = 0; i < count; ++i) {
        ptx::barrier_wait(ptx::shared_address(&control.full[slot.index]), slot.lap & 1);
        const u32 stage = ring + slot.index * stage_bytes;
        const u64 a = ptx::wgmma_descriptor(stage + group_row * DEPTH_BYTES);
        const u64 b = ptx::wgmma_descriptor(stage + WEIGHT_BYTES);
        ptx::wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < 4; ++k) Multiply<E>::run(d, a + 2 * k, b + 2 * k);
        ptx::wgmma_commit();
        if (i != 0) {
          ptx::wgmma_wait_for_all_but<1>();
          release(before);
        }
        before = slot.index;
        slot.advance(p.ring_stages);
      }
      ptx::wgmma_wait_for_all_but<0>();
      ptx::pin(d);
      release(before);
      const u32 tile = group * TEAM + rank;
      if (tile < p.end_tile[2]) store(d, tile, team - p.parts.team_of(group * tile_units));
      unit += count;
    }
  }
};

template <class E, u32 N, u32 TEAM>
__device__ __forceinline__ void multiply(const ProductParams& p) {
  extern __shared__ u8 memory[];
  __shared__ ProductControl control;
  const u32 ring = (ptx::shared_address(memory) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < p.ring_stages; ++i) {
      ptx::barrier_init(ptx::shared_address(&control.full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&control.empty[i]), CONSUMERS * TEAM);
    }
    ptx::barrier_init_fence();
  }
  u32 rank = 0;
  if constexpr (TEAM > 1) {
    rank = ptx::cluster_rank();
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  const u32 team = blockIdx.x / TEAM;
  const u32 begin = p.parts.begin_of(team);
  const u32 end = p.parts.begin_of(team + 1);
  if (threadIdx.x / 32 == CONSUMERS) {
    if (ptx::elect_one()) Producer<N, TEAM>{p, control, ring, rank}.run(begin, end);
    __syncwarp();
  } else {
    Consumer<E, N, TEAM>{p, control, ring, rank}.run(team, begin, end);
  }
  // No block of a team goes while another may still arrive at its barriers.
  if constexpr (TEAM > 1) ptx::cluster_sync();
}
#endif

}  // namespace chunkcache::decode
