// x [num_rows, columns] times up to three weight matrices [rows, columns], transposed, for few rows.
//
// Reading the weights is what takes the time, so everything is arranged for that: one block a
// multiprocessor, each with an equal share of the units (parts.cuh), a producer thread that keeps a
// ring of stages full across tiles, and eight warps that multiply. Weights depend on no launch before:
// the ring is filled with them while the launch before still runs; x is waited for.
//
// Grid: num_blocks of 288 threads. Memory: weights and x by tensor maps, boxes of 64 columns and 128 or
// N rows; the sums leave as parts.
#pragma once

#include "common/product_ptx.cuh"
#include "decode/parts.cuh"

namespace chunkcache::decode {

constexpr u32 DEPTH = 64;
constexpr u32 DEPTH_BYTES = DEPTH * 2;
constexpr u32 WEIGHT_BYTES = TILE * DEPTH_BYTES;
constexpr u32 CONSUMERS = 8;  // warps
constexpr u32 MOST_STAGES = 16;

// Up to three matrices, one below the other.
struct Weights {
  TensorMap maps[3];
  u32 end_tile[3];  // of each matrix, counted through; the last ones are equal if there are fewer
};

struct ProductParams {
  Weights weights;
  TensorMap x;
  Parts parts;
  u32 padded_rows;  // N
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

// Where a unit's weights are.
struct WeightBox {
  const TensorMap* map;
  u32 column;
  u32 row;

  __device__ __forceinline__ WeightBox(const Weights& weights, u32 tile_units, u32 unit) {
    const u32 tile = unit / tile_units;
    const u32 matrix = (tile >= weights.end_tile[0]) + (tile >= weights.end_tile[1]);
    map = &weights.maps[matrix];
    column = (unit - tile * tile_units) * DEPTH;
    row = (tile - (matrix == 0 ? 0 : weights.end_tile[matrix - 1])) * TILE;
  }
};

struct Producer {
  const ProductParams& p;
  ProductControl& control;
  u32 ring;
  u32 stage_bytes;
  u64 read_once = ptx::policy_evict_first();
  u64 read_again = ptx::policy_evict_last();

  __device__ __forceinline__ void copy_weights(u32 slot, u32 unit) const {
    const WeightBox box(p.weights, p.parts.cut.tile_units, unit);
    const u32 barrier = ptx::shared_address(&control.full[slot]);
    ptx::barrier_arrive_expect_bytes(barrier, stage_bytes);
    ptx::copy_matrix_box(ring + slot * stage_bytes, box.map, barrier, read_once, box.column, box.row);
  }

  __device__ __forceinline__ void copy_x(u32 slot, u32 unit) const {
    ptx::copy_matrix_box(ring + slot * stage_bytes + WEIGHT_BYTES, &p.x,
                         ptx::shared_address(&control.full[slot]), read_again,
                         unit % p.parts.cut.tile_units * DEPTH, 0);
  }

  // Sends for as many weights as there is room for.
  __device__ __forceinline__ void start(u32 begin, u32 ahead) const {
    for (u32 unit = begin; unit < ahead; ++unit) copy_weights(unit - begin, unit);
  }

  __device__ __forceinline__ void run(u32 begin, u32 ahead, u32 end) const {
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

template <class E, u32 N>
struct Consumer {
  const ProductParams& p;
  ProductControl& control;
  u32 ring;
  static constexpr u32 stage_bytes = WEIGHT_BYTES + N * DEPTH_BYTES;

  __device__ __forceinline__ void release(u32 slot) const {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::shared_address(&control.empty[slot]));
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

  __device__ __forceinline__ void run(u32 begin, u32 end) const {
    const Cut& cut = p.parts.cut;
    const u32 group_row = threadIdx.x / 128 * 64;
    RingSlot slot;
    for (u32 unit = begin; unit < end;) {
      const u32 tile = unit / cut.tile_units;
      const u32 count = min(end - unit, (tile + 1) * cut.tile_units - unit);
      float d[N / 8][4] = {};
      u32 before = 0;
      for (u32 i = 0; i < count; ++i) {
        ptx::barrier_wait(ptx::shared_address(&control.full[slot.index]), slot.lap & 1);
        const u32 stage = ring + slot.index * stage_bytes;
        const u64 a = ptx::wgmma_descriptor(stage + group_row * DEPTH_BYTES);
        const u64 b = ptx::wgmma_descriptor(stage + WEIGHT_BYTES);
        ptx::wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < DEPTH / 16; ++k) Multiply<E>::run(d, a + 2 * k, b + 2 * k);
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
      store(d, tile, blockIdx.x - cut.block_of(tile * cut.tile_units));
      unit += count;
    }
  }
};

template <class E>
__device__ __forceinline__ void multiply(const ProductParams& p) {
  extern __shared__ u8 memory[];
  __shared__ ProductControl control;
  const u32 ring = (ptx::shared_address(memory) + 1023) & ~1023u;
  const u32 begin = p.parts.cut.begin_of(blockIdx.x);
  const u32 end = p.parts.cut.begin_of(blockIdx.x + 1);
  const u32 ahead = min(end, begin + p.ring_stages);
  const u32 stage_bytes = WEIGHT_BYTES + p.padded_rows * DEPTH_BYTES;
  const Producer producer{p, control, ring, stage_bytes};
  const bool produces = threadIdx.x / 32 == CONSUMERS && ptx::elect_one();
  if (produces) {
    for (u32 i = 0; i < p.ring_stages; ++i) {
      ptx::barrier_init(ptx::shared_address(&control.full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&control.empty[i]), CONSUMERS);
    }
    ptx::barrier_init_fence();
    producer.start(begin, ahead);
  }
  __syncthreads();
  if (produces) producer.run(begin, ahead, end);
  if (threadIdx.x / 32 == CONSUMERS) return;
  switch (p.padded_rows) {
    case 8: Consumer<E, 8>{p, control, ring}.run(begin, end); break;
    case 32: Consumer<E, 32>{p, control, ring}.run(begin, end); break;
    case 64: Consumer<E, 64>{p, control, ring}.run(begin, end); break;
    default: Consumer<E, 96>{p, control, ring}.run(begin, end); break;
  }
}
#endif

}  // namespace chunkcache::decode
