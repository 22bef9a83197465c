// Two-phase partition attention in one launch (ChunkAttention, ACL 2024, section 3.2).
//
// Chunk-first and sequence-first work are items of one kind: a slice of a segment's pages, a run of
// K/V heads and a tile of query rows. A shared segment's tile holds the rows of all its sequences,
// a private one's those of its own; several query tokens a sequence (prefill, verification) make
// more rows, masked by position. So prefill over a cached prefix is the same kernel.
//
// Grid: one block a multiprocessor, persistent. The first item of a block is its block index, the
// others come from a queue. A producer warp keeps a ring of K/V stages full across items (bulk
// tensor copies on sm_90, cp.async before); eight consumer warps share an item by row tile, head
// and key group. Each split of a segment leaves one partial state; the last to arrive at a row
// merges its partials in split order.
//
// Memory: K/V pages by base and strides of page, head and token; q and out [rows, heads, head_dim]
// by strides; partials f32 [slots, head_dim], normalised, with lse in base 2.
#pragma once

#include "tpp/finish.cuh"
#include "tpp/producer.cuh"

namespace chunkcache::tpp {

template <class T, u32 D>
__device__ __forceinline__ void consume(const TppParams& p, Control& control, u32 ring,
                                        u32 q_shared, u32 warp_index, u32 lane) {
  using S = Shape<D>;
  if (lane == 0) control.taken[warp_index] = 0;
  __syncwarp();
  Warp<T, D> warp;
  warp.q_shared = q_shared + warp_index * (S::q_bytes / S::consumer_warps);
  while (true) {
    const u32 count = control.taken[warp_index];
    ptx::barrier_wait(ptx::shared_address(&control.item_full[count % ITEM_SLOTS]), count / ITEM_SLOTS & 1);
    const ItemMessage& message = control.items[count % ITEM_SLOTS];
    if (message.last != 0) break;
    const Item& item = message.item;
    u32 blocks = 0;
    if (message.roles[warp_index].active) {
      const Role role = message.roles[warp_index];
      const Row mine = Row::of(p, item, role.row_tile * ROWS + (lane & 15));
#if defined(CHUNKCACHE_TMA)
      ptx::wait_for_launches_before();
#endif
      {
        const u16* my_q = nullptr;
        if (mine.valid) {
          const u32 qo_head = (item.kv_head + role.head) * p.group + mine.head;
          my_q = static_cast<const u16*>(p.q) + mine.q_row * p.q_row + qo_head * p.q_head;
        }
        const u16* q_rows[2];
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
          q_rows[r] = reinterpret_cast<const u16*>(
              __shfl_sync(~0u, reinterpret_cast<u64>(my_q), lane / 4 + r * 8));
        }
        warp.load_q(q_rows[0], q_rows[1], lane);
      }
      warp.reset();
      int2* limits = control.limits + warp_index * ROWS;
      if (range_is_known(p, item)) {
        // Only the last block can be masked, by the number of keys.
        blocks = (item.num_keys + KEYS - 1) / KEYS;
        if (lane < ROWS) limits[lane] = make_int2(-0x40000000, 0x40000000);
        if (lane == 0) {
          const i32 end = static_cast<i32>(item.num_keys);
          control.keys[warp_index] = make_int4(-0x40000000, end - 1, 0, end);
        }
      } else {
        const int2 my_limits = key_limits(p, item, mine);
        if (lane < ROWS) limits[lane] = my_limits;
        const i32 low = __reduce_max_sync(~0u, my_limits.x);
        const i32 high = __reduce_min_sync(~0u, my_limits.y);
        ptx::barrier_wait(ptx::shared_address(&control.range_full[count % ITEM_SLOTS]),
                          count / ITEM_SLOTS & 1);
        blocks = message.range.end_block - message.range.first_block;
        if (lane == 0) {
          const i32 end = static_cast<i32>(message.range.num_keys);
          control.keys[warp_index] = make_int4(
              low, min(high, end - 1), static_cast<i32>(message.range.first_block * KEYS), end);
        }
      }
      __syncwarp();
      u32 stage = message.first_stage + role.key_group * item.num_heads + role.head;
      for (u32 block = role.key_group; block < blocks; block += item.key_groups) {
        const u32 lap = __umulhi(stage, p.ring_magic);
        const u32 slot = stage - lap * p.ring_stages;
        while (static_cast<i32>(ptx::published(ptx::shared_address(&control.issued)) - stage) <= 0) {
        }
        ptx::barrier_wait(ptx::shared_address(&control.full[slot]), lap & 1);
        const u32 address = ring + slot * S::stage_bytes;
        const int4 keys = control.keys[warp_index];
        const i32 first_key = keys.z + static_cast<i32>(block * KEYS);
        const bool masked = first_key < keys.x || first_key + static_cast<i32>(KEYS) - 1 > keys.y;
        const bool grouped =
            item.row_tiles % 4 == 0 && first_key + static_cast<i32>(KEYS) <= keys.w;
        warp.stage(p, address, first_key, masked, grouped, limits, keys.w, lane);
        __syncwarp();
        if (lane * item.row_tiles < S::consumer_warps) {
          ptx::barrier_arrive(ptx::shared_address(&control.empty[slot]));
        }
        stage += item.key_groups * item.num_heads;
      }
    } else {
      // Takes part in a block reduction, if there is one.
      ptx::barrier_wait(ptx::shared_address(&control.range_full[count % ITEM_SLOTS]),
                        count / ITEM_SLOTS & 1);
      blocks = message.range.end_block - message.range.first_block;
      warp.reset();
    }
    finish<T, D>(p, message, control, ring, blocks * item.num_heads, warp, warp_index, lane);
    __syncwarp();
    if (lane == 0) {
      const u32 done = control.taken[warp_index];
      control.taken[warp_index] = done + 1;
      ptx::barrier_arrive(ptx::shared_address(&control.item_empty[done % ITEM_SLOTS]));
    }
    __syncwarp();
  }

#if defined(CHUNKCACHE_TMA)
  ptx::wait_for_launches_before();
#endif
  const u32 pads = p.header->num_pad_rows;
  for (u32 i = blockIdx.x * S::consumer_warps + warp_index; i < pads;
       i += gridDim.x * S::consumer_warps) {
    const u64 row = p.pad_rows[i];
    const float4 zero[lane_pieces<D>] = {};
    for (u32 head = lane / ROW_LANES; head < p.num_qo_heads; head += 32 / ROW_LANES) {
      store_row<T, D>(static_cast<u16*>(p.out) + row * p.out_row + head * p.out_head, zero, 0.0f,
                      lane % ROW_LANES);
      if (p.lse != nullptr && lane % ROW_LANES == 0) {
        p.lse[row * p.num_qo_heads + head] = minus_infinity();
      }
    }
  }
}

template <class T, u32 D>
__device__ __forceinline__ void attention(const TppParams& p) {
  using S = Shape<D>;
  extern __shared__ u8 shared_start[];
  // The swizzle pattern repeats every 1024 bytes.
  const u32 ring = (ptx::shared_address(shared_start) + 1023) & ~1023u;
  u8* after_ring = shared_start + (ring - ptx::shared_address(shared_start)) +
                   p.ring_stages * S::stage_bytes;
  const u32 q_shared = ptx::shared_address(after_ring);
  Control& control = *reinterpret_cast<Control*>(after_ring + S::q_bytes);
  const u32 warp = threadIdx.x / 32;
  const u32 lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    control.issued = 0;
#if defined(CHUNKCACHE_TMA)
    constexpr u32 full_arrivals = 1 + COPY_WARPS * 32;
    ptx::prefetch_tensor_map(&p.k_map);
    ptx::prefetch_tensor_map(&p.v_map);
#else
    constexpr u32 full_arrivals = COPY_WARPS * 32;
#endif
    for (u32 i = 0; i < p.ring_stages; ++i) {
      ptx::barrier_init(ptx::shared_address(&control.full[i]), full_arrivals);
      ptx::barrier_init(ptx::shared_address(&control.empty[i]), S::consumer_warps);
    }
    for (u32 i = 0; i < ITEM_SLOTS; ++i) {
      ptx::barrier_init(ptx::shared_address(&control.item_full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&control.range_full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&control.item_empty[i]), S::consumer_warps + HELPERS);
    }
#if defined(CHUNKCACHE_TMA)
    ptx::barrier_init_fence();
#endif
  }
  __syncthreads();
#if defined(CHUNKCACHE_TMA)
  ptx::let_next_launch_start();
#endif
  if (warp == S::consumer_warps) {
    produce<D>(p, control, ring, lane);
  } else if (warp > S::consumer_warps) {
    if constexpr (HELPERS > 0) help<D>(p, control, ring, warp - S::consumer_warps - 1, lane);
  } else {
    consume<T, D>(p, control, ring, q_shared, warp, lane);
  }
}

}  // namespace chunkcache::tpp
