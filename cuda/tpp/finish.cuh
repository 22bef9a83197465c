// The end of an item: key groups are reduced within the block, and the state is written as one
// partial per split, or straight to the output where there is only one.
#pragma once

#include "consumer.cuh"
#include "merge.cuh"

namespace chunkcache::tpp {

// The room that an item with key groups holds in the ring: fragments of 16 rows, two to a stage.
template <u32 D>
struct ReduceRoom {
  using S = Shape<D>;
  u32 ring;
  u32 first_stage;

  __device__ __forceinline__ u32 slot(const TppParams& p, u32 i) const {
    const u32 stage = first_stage + i;
    return stage - __umulhi(stage, p.ring_magic) * p.ring_stages;
  }

  // Waits until the room is this item's.
  __device__ __forceinline__ void acquire(const TppParams& p, const Control& control) const {
    while (static_cast<i32>(ptx::published(ptx::shared_address(&control.issued)) - first_stage) <
           static_cast<i32>(S::reduce_stages)) {
    }
    for (u32 i = 0; i < S::reduce_stages; ++i) {
      ptx::barrier_wait(ptx::shared_address(&control.full[slot(p, i)]),
                        __umulhi(first_stage + i, p.ring_magic) & 1);
    }
  }

  __device__ __forceinline__ void release(const TppParams& p, const Control& control,
                                          u32 lane) const {
#if defined(CHUNKCACHE_TMA)
    ptx::copy_engine_fence();
#endif
    __syncwarp();
    if (lane < S::reduce_stages) {
      ptx::barrier_arrive(ptx::shared_address(&control.empty[slot(p, lane)]));
    }
  }

  // Four columns from 4 * `quad` of a row. Quads are permuted so that the eight rows that a warp
  // writes at once fall into different banks.
  __device__ __forceinline__ u32 address(const TppParams& p, u32 fragment, u32 row, u32 quad) const {
    return ring + slot(p, fragment / 2) * S::stage_bytes + (fragment & 1) * (S::stage_bytes / 2) +
           row * S::reduce_pitch * 4 + ((quad ^ ((row & 7) << 1)) << 4);
  }
};

// Puts this warp's accumulators into the room.
template <class T, u32 D>
__device__ __forceinline__ void share_fragment(const TppParams& p, const ReduceRoom<D>& room,
                                               const Warp<T, D>& warp, u32 fragment, u32 lane) {
  const u32 row = lane / 4;
  const u32 base = room.address(p, fragment, row, 0) & ~0xffu;
  const u32 twist = (row & 7) << 1;
#pragma unroll
  for (u32 n = 0; n < D / 8; ++n) {
    const u32 quad = n * 2 + (lane & 3) / 2;
    const u32 at = base + ((quad ^ twist) << 4) + (lane & 1) * 8;
    ptx::store_shared(at, warp.o[n][0], warp.o[n][1]);
    ptx::store_shared(at + 8 * Shape<D>::reduce_pitch * 4, warp.o[n][2], warp.o[n][3]);
  }
}

// Adds up the accumulators of the key groups, in key-group order. Lane i holds the weight of key
// group i % key_groups of this warp's result row i / key_groups, where its accumulators lie, and
// where the row goes.
template <class T, u32 D>
__device__ __forceinline__ void reduce_and_store(const Item& item, u32 count, u64 my_target,
                                                 float my_weight, u32 my_source, u32 lane) {
  constexpr u32 batch = 4;
  constexpr u32 quad_mask = D <= 128 ? Shape<D>::reduce_pitch / 4 - 1 : 63;
  const u32 last = item.key_groups - 1;
#pragma unroll
  for (u32 first = 0; first < D; first += 128) {
    const u32 quad = first / 4 + lane;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (u32 i = 0; i < count; i += batch) {
      float4 part[batch];
#pragma unroll
      for (u32 k = 0; k < batch; ++k) {
        const u32 source = __shfl_sync(~0u, my_source, i + k);
        // Past the last row or column this reads what is of no use, but of this room.
        part[k] = ptx::load_shared((source & ~0xffu) + (((quad & quad_mask) << 4) ^ (source & 0xffu)));
      }
#pragma unroll
      for (u32 k = 0; k < batch; ++k) {
        const float weight = __shfl_sync(~0u, my_weight, i + k);
        sum.x += weight * part[k].x;
        sum.y += weight * part[k].y;
        sum.z += weight * part[k].z;
        sum.w += weight * part[k].w;
        if (((i + k) & last) == last) {
          const u64 to = __shfl_sync(~0u, my_target, i + k);
          if (to != 0 && (D % 128 == 0 || quad * 4 < D)) {
            if (item.slot_begin != NONE) {
              reinterpret_cast<float4*>(to)[quad] = sum;
            } else {
              reinterpret_cast<uint2*>(to)[quad] =
                  make_uint2(T::pack(sum.x, sum.y), T::pack(sum.z, sum.w));
            }
          }
          sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
      }
    }
  }
}

// One warp holds a whole head and row tile of the item.
template <class T, u32 D>
__device__ __forceinline__ void store_fragment(const Item& item, Warp<T, D>& warp, u64 my_target,
                                               u32 lane) {
  const u32 column = (lane & 3) * 2;
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    const u64 to = __shfl_sync(~0u, my_target, lane / 4 + r * 8);
    const float inverse = warp.state.sum[r] > 0.0f ? 1.0f / warp.state.sum[r] : 0.0f;
    if (to == 0) continue;
    if (item.slot_begin != NONE) {
      float2* out = reinterpret_cast<float2*>(to) + column / 2;
#pragma unroll
      for (u32 i = 0; i < D / 8; ++i) {
        out[i * 4] = make_float2(warp.o[i][2 * r] * inverse, warp.o[i][2 * r + 1] * inverse);
      }
    } else {
      u32* out = reinterpret_cast<u32*>(to) + column / 2;
#pragma unroll
      for (u32 i = 0; i < D / 8; ++i) {
        out[i * 4] = T::pack(warp.o[i][2 * r] * inverse, warp.o[i][2 * r + 1] * inverse);
      }
    }
  }
}

template <class T, u32 D>
__device__ __forceinline__ void finish(const TppParams& p, const ItemMessage& message,
                                       Control& control, u32 ring, u32 stages, Warp<T, D>& warp,
                                       u32 warp_index, u32 lane) {
  constexpr u32 warps = Shape<D>::consumer_warps;
  const Item& item = message.item;
  const Role role = message.roles[warp_index];
  const bool together = item.key_groups > 1;
  const ReduceRoom<D> room{ring, message.first_stage + stages};
  float2* states = control.reduce_state[message.reductions & 1];
  warp.state.finish();
  if (together) {
    room.acquire(p, control);
    if (role.active) {
      if ((lane & 3) == 0) {
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
          states[warp_index * ROWS + lane / 4 + r * 8] =
              make_float2(warp.state.max[r], warp.state.sum[r]);
        }
      }
      share_fragment<T, D>(p, room, warp, warp_index, lane);
    }
    ptx::named_barrier_sync(1, warps * 32);
  } else if (!role.active) {
    return;
  }
  u32 started = 0;
  if (item.num_owners > 0) started = ptx::load_relaxed(p.queue + 2);

  // Each lane looks after one row that this warp brings: after a reduction every eighth (fourth)
  // of the block's rows, one lane a key group, the first of them in charge; otherwise the 16 of the
  // warp's own fragment.
  const u32 tiles = item.num_heads * item.row_tiles;
  const u32 number = together ? lane >> log2_of(item.key_groups) : lane;
  const u32 row = together ? warp_index + number * warps
                           : (role.head * item.row_tiles + role.row_tile) * ROWS + lane;
  const bool wanted = together ? row < tiles * ROWS : lane < ROWS;
  const u32 tile = row / ROWS;
  const u32 head = tile >> log2_of(item.row_tiles);
  const u32 index = (tile - head * item.row_tiles) * ROWS + row % ROWS;
  LaneRow mine = LaneRow::of(p, item, index, head, wanted);

  float2 state;    // max and sum of the lane's row
  float weight = 0.0f;
  if (together) {
    const u32 group = lane & (item.key_groups - 1);
    const float2 part = wanted ? states[group * tiles * ROWS + row] : make_float2(0.0f, 0.0f);
    state.x = part.x;
    for (u32 d = 1; d < item.key_groups; d *= 2) {
      state.x = fmaxf(state.x, __shfl_xor_sync(~0u, state.x, d));
    }
    weight = ptx::exp2_approx(part.x - exponent_base(state.x));
    state.y = part.y * weight;
    for (u32 d = 1; d < item.key_groups; d *= 2) state.y += __shfl_xor_sync(~0u, state.y, d);
    weight = state.y > 0.0f ? weight / state.y : 0.0f;
  } else {
    const float2 low = make_float2(__shfl_sync(~0u, warp.state.max[0], (lane & 7) * 4),
                                   __shfl_sync(~0u, warp.state.sum[0], (lane & 7) * 4));
    const float2 high = make_float2(__shfl_sync(~0u, warp.state.max[1], (lane & 7) * 4),
                                    __shfl_sync(~0u, warp.state.sum[1], (lane & 7) * 4));
    state = lane < 8 ? low : high;
  }
  u64 target = 0;    // the row's f32 partial, or its output
  if (mine.valid) {
    const float lse = state.x + ptx::log2_approx(state.y);
    if (item.slot_begin != NONE) {
      const u64 slot = item.slot_begin + head * item.num_tok * p.group + index;
      target = reinterpret_cast<u64>(p.partial_out + slot * D);
      p.partial_lse[slot] = lse;
    } else {
      target = reinterpret_cast<u64>(mine.output<T>(p));
      mine.store_lse(p, lse);
    }
  }
  if (together) {
    const u32 group = lane & (item.key_groups - 1);
    const u32 source = room.address(p, group * tiles + (wanted ? tile : 0), row % ROWS, 0);
    const u32 rows = (tiles * ROWS - warp_index + warps - 1) / warps;
    reduce_and_store<T, D>(item, rows * item.key_groups, target, weight, source, lane);
    room.release(p, control, lane);
    mine.valid = mine.valid && (lane & (item.key_groups - 1)) == 0;
  } else {
    store_fragment<T, D>(item, warp, target, lane);
  }
  if (item.slot_begin != NONE) arrive_and_merge<T, D>(p, item, mine, number, started, lane);
}

}  // namespace chunkcache::tpp
