// Two-phase partition attention in one launch (ChunkAttention, ACL 2024, section 3.2).
//
// Chunk-first and sequence-first work are items of one kind: a slice of a segment's pages, a run of
// K/V heads and a tile of query rows. A shared segment's tile holds the rows of all its sequences,
// a private one's those of its own; several query tokens a sequence (prefill, verification) make
// more rows, masked by position. So prefill over a cached prefix is the same kernel.
//
// Grid: one block a multiprocessor, persistent. The first item of a block is its block index, unless
// another block was faster; the others come from a queue. A producer warp keeps a ring of K/V stages full across items (bulk
// tensor copies on sm_90, cp.async before); eight consumer warps share an item by row tile, head
// and key group. Each split of a segment leaves one partial state per key group; they are merged, in
// split order, by the item that ends a row or, once all items are handed out, block by block
// (tpp/merge.cuh). An item waits only for items before it, which are in the hands of blocks that run:
// the queue hands out the first items of blocks that have not started, too, so that launches that
// share the device do not wait for each other.
//
// Memory: K/V pages by base and strides of page, head and token; q and out [rows, heads, head_dim]
// by strides.
#pragma once

#include "tpp/finish.cuh"
#include "tpp/producer.cuh"

namespace chunkcache::tpp {

// The same value in all lanes, in a way that the compiler sees. Products of a warpgroup that may
// diverge are waited for one by one.
__device__ __forceinline__ u32 uniform(u32 x) { return __shfl_sync(~0u, x, 0); }

// What a consumer warp knows of its part of an item while it goes through the keys.
struct Keys {
  u32 first_stage;       // of the item
  u32 num_heads;
  u32 head;
  u32 key_group;
  u32 key_groups;
  u32 row_tiles;
  u32 grouped;           // 1: warpgroups multiply
  u32 blocks;            // of the range

  __device__ __forceinline__ u32 stages_of(u32 step) const { return min(blocks - step * STEP, STEP); }

  __device__ __forceinline__ u32 stage(u32 step) const {
    return first_stage + step * STEP * num_heads + head * stages_of(step);
  }
};

// The ring as consumers see it: stages are numbered over the whole launch.
template <u32 D>
struct Ring {
  using S = Shape<D>;
  const TppParams& p;
  Control& control;
  u32 start;

  // Waits for stages that follow each other and says where they lie.
  template <u32 N>
  __device__ __forceinline__ void wait(u32 stage, u32 (&slot)[N], u32 (&address)[N]) const {
    while (static_cast<i32>(ptx::published(ptx::shared_address(&control.issued)) - stage) <
           static_cast<i32>(N)) {
      ptx::sleep();
    }
    const u32 lap = __umulhi(stage, p.ring_magic);
    RingPosition at{stage - lap * p.ring_stages, lap & 1};
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
      slot[i] = at.slot;
      address[i] = start + at.slot * S::stage_bytes;
      ptx::barrier_wait(ptx::shared_address(&control.full[at.slot]), at.phase);
      const bool wraps = at.slot + 1 == p.ring_stages;
      at = RingPosition{wraps ? 0 : at.slot + 1, at.phase ^ (wraps ? 1 : 0)};
    }
  }

  // A stage expects one arrival from every consumer warp; those that read it, one in `row_tiles`,
  // arrive for all, with as many lanes each.
  __device__ __forceinline__ static bool releases(u32 lane, u32 row_tiles) {
    return lane * row_tiles < S::consumer_warps * ptx::ARRIVING_LANES;
  }

  template <u32 N>
  __device__ __forceinline__ void release(const u32 (&slot)[N], u32 row_tiles) const {
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
      const u32 barrier = ptx::shared_address(&control.empty[slot[i]]);
      ptx::barrier_arrive(barrier);
      if constexpr (ptx::ARRIVING_LANES > 1) {
        for (u32 k = 1; k * row_tiles < S::consumer_warps; ++k) ptx::barrier_arrive(barrier);
      }
    }
  }
};

#if defined(CHUNKCACHE_TMA)
// Steps by a warpgroup, as long as they are whole and all rows see all of their keys. While one
// warpgroup turns scores into weights, the products of the other run, and the scores of a step
// follow the values of the one before without a wait. Returns the first step that is left.
template <class T, u32 D>
__device__ __forceinline__ u32 group_steps(const TppParams& p, const Ring<D>& ring,
                                           const Keys& keys, const int4& bounds, u32 step,
                                           Warp<T, D>& warp, u32 lane) {
  constexpr i32 step_keys = STEP * KEYS;
  // Steps [first, last) are whole and seen.
  const i32 low = max(bounds.x - bounds.z, 0);
  const i32 high = min(bounds.y + 1, bounds.w) - bounds.z;
  const u32 first = uniform((low + step_keys - 1) / step_keys);
  const u32 last = uniform(max(high, 0) / step_keys);
  const u32 stride = uniform(keys.key_groups);
  const bool arrives = Ring<D>::releases(lane, keys.row_tiles);
  step = uniform(step);
  if (step < first) return step;    // the window begins here
  u32 before[STEP];
  bool running = false;
  float s[4 * STEP][4] = {};
#pragma unroll 1
  for (; step < last; step += stride) {
    u32 slot[STEP], address[STEP];
    ring.wait(keys.stage(step), slot, address);
    warp.group_scores(s, address);
    ptx::wgmma_wait();
    ptx::pin(s);
    ptx::pin(warp.o);
    if (running && arrives) ring.release(before, keys.row_tiles);
    running = true;
#pragma unroll
    for (u32 i = 0; i < STEP; ++i) before[i] = slot[i];
    u32 weights[2 * STEP][4];
    warp.group_weigh(p, s, weights);
    ptx::pin(warp.o);
    warp.group_add_values(address, weights);
  }
  ptx::wgmma_wait();
  ptx::pin(warp.o);
  if (running && arrives) ring.release(before, keys.row_tiles);
  return step;
}
#endif

// Loads the queries of a warp's part of an item and says which keys they go through.
template <class T, u32 D>
__device__ __forceinline__ Keys prepare(const TppParams& p, const ItemMessage& message,
                                        Control& control, Warp<T, D>& warp, u32 warp_index,
                                        u32 item_slot, u32 parity, u32 lane) {
  const Item& item = message.item;
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
    warp.load_q(p, q_rows[0], q_rows[1], lane);
    warp.scale_rows(p, item.kv_head + role.head);
  }
  Keys keys{};
  keys.first_stage = message.first_stage;
  keys.num_heads = item.num_heads;
  keys.head = role.head;
  keys.key_group = role.key_group;
  keys.key_groups = item.key_groups;
  keys.row_tiles = item.row_tiles;
  keys.grouped = item.grouped<D>() && p.scale_log2 >= 0.0f;
  int2* limits = control.limits + warp_index * ROWS;
  if (range_is_known(p, item)) {
    // Only the last block can be masked, by the number of keys.
    keys.blocks = (item.num_keys + KEYS - 1) / KEYS;
    if (lane < ROWS) limits[lane] = make_int2(-0x40000000, 0x40000000);
    if (lane == 0) {
      const i32 end = static_cast<i32>(item.num_keys);
      control.keys[warp_index] = make_int4(-0x40000000, end - 1, 0, end);
    }
  } else {
    int2 bound = key_limits(p, item, mine);
    if (lane < ROWS) limits[lane] = bound;
    if (item.grouped<D>()) {
      // The warps of a warpgroup go the same way.
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const int2 other = key_limits(
            p, item, Row::of(p, item, (role.row_tile & ~3u) * ROWS + i * 32 + lane));
        bound = make_int2(max(bound.x, other.x), min(bound.y, other.y));
      }
    }
    const i32 low = __reduce_max_sync(~0u, bound.x);
    const i32 high = __reduce_min_sync(~0u, bound.y);
    ptx::barrier_wait(ptx::shared_address(&control.range_full[item_slot]), parity);
    keys.blocks = message.range.end_block - message.range.first_block;
    if (lane == 0) {
      const i32 end = static_cast<i32>(message.range.num_keys);
      control.keys[warp_index] = make_int4(
          low, min(high, end - 1), static_cast<i32>(message.range.first_block * KEYS), end);
    }
  }
  __syncwarp();
  return keys;
}

// All keys of an item for one warp.
template <class T, u32 D>
__device__ __forceinline__ void attend(const TppParams& p, const Keys& keys, Control& control,
                                       const Ring<D>& ring, Warp<T, D>& warp, u32 warp_index,
                                       u32 lane) {
  const int2* limits = control.limits + warp_index * ROWS;
  u32 step = keys.key_group;
#if defined(CHUNKCACHE_TMA)
  if constexpr (Shape<D>::can_group) {
    if (uniform(keys.grouped) != 0) {
      step = group_steps<T, D>(p, ring, keys, control.keys[warp_index], step, warp, lane);
    }
  }
#endif
  // The others alone. (Not in turns: products in a loop within a loop are waited for one by one.)
#pragma unroll 1
  while (step * STEP < keys.blocks) {
    const u32 first = keys.stage(step);
#pragma unroll 1
    for (u32 i = 0; i < keys.stages_of(step); ++i) {
      u32 slot[1], address[1];
      ring.wait(first + i, slot, address);
      const int4 bounds = control.keys[warp_index];
      const i32 first_key = bounds.z + static_cast<i32>((step * STEP + i) * KEYS);
      warp.stage(p, address[0], first_key, bounds, limits, lane);
      __syncwarp();
      if (Ring<D>::releases(lane, keys.row_tiles)) ring.release(slot, keys.row_tiles);
    }
    step += keys.key_groups;
  }
  warp.state.finish();
  warp.arrange();
}

template <class T, u32 D>
__device__ __forceinline__ void consume(const TppParams& p, Control& control, u32 ring_start,
                                        u32 q_shared, u32 warp_index, u32 lane) {
  using S = Shape<D>;
  if (lane == 0) control.taken[warp_index] = 0;
  __syncwarp();
  const Ring<D> ring{p, control, ring_start};
  const u32 row_shared = ptx::shared_address(control.row) + warp_index * D * 4;
  Warp<T, D> warp;
  warp.q_shared = q_shared + warp_index * (S::q_bytes / S::consumer_warps);
  while (true) {
    const u32 count = control.taken[warp_index];
    const u32 slot = count % ITEM_SLOTS;
    const u32 parity = count / ITEM_SLOTS & 1;
    ptx::barrier_wait(ptx::shared_address(&control.item_full[slot]), parity);
    const ItemMessage& message = control.items[slot];
    if (uniform(message.last) != 0) break;
    if (uniform(message.roles[warp_index].active) != 0) {
      warp.reset();
      const Keys keys = prepare<T, D>(p, message, control, warp, warp_index, slot, parity, lane);
      attend<T, D>(p, keys, control, ring, warp, warp_index, lane);
      bool ours = true;
      if (count == 0) {
        ptx::barrier_wait(ptx::shared_address(&control.claim_known), 0);
        ours = uniform(control.stolen) == 0;
      }
      if (!ours) {
        // Someone else writes, or has written, the same.
      } else if (uniform(message.item.slot_begin) != NONE) {
        write_partials<T, D>(p, message.item, message.roles[warp_index], warp, lane);
      } else {
        finish_rows<T, D>(p, message.item, message.roles[warp_index], warp, row_shared, lane);
      }
    }
    __syncwarp();
    if (lane == 0) control.taken[warp_index] = count + 1;
    if (lane < ptx::ARRIVING_LANES) {
      ptx::barrier_arrive(ptx::shared_address(&control.item_empty[slot]));
    }
    __syncwarp();
  }

#if defined(CHUNKCACHE_TMA)
  ptx::wait_for_launches_before();
#endif
  merge_rest<T, D, S::consumer_warps>(p, control, warp_index, lane);
  const u32 pads = p.header->num_pad_rows;
  for (u32 i = blockIdx.x * S::consumer_warps + warp_index; i < pads;
       i += gridDim.x * S::consumer_warps) {
    const u64 row = p.pad_rows[i];
    for (u32 head = 0; head < p.num_qo_heads; ++head) {
      u16* out = static_cast<u16*>(p.out) + row * p.out_row + head * p.out_head;
      for (u32 column = lane * 4; column < D; column += 128) {
        *reinterpret_cast<uint2*>(out + column) = make_uint2(0, 0);
      }
      if (p.lse != nullptr && lane == 0) p.lse[row * p.num_qo_heads + head] = minus_infinity();
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
  const u32 warp = uniform(threadIdx.x / 32);
  const u32 lane = threadIdx.x % 32;

  // Asked for before all else: row blockIdx.x is there also where there are fewer items.
  u32 word = 0, num_items = 0;
  if (warp == S::consumer_warps) {
    word = reinterpret_cast<const u32*>(p.items + blockIdx.x)[lane];
    num_items = p.header->num_items;
  }
  // The parameters come into the constant cache line by line, each at its first use: now.
  ptx::use(p.k);
  ptx::use(p.q);
  ptx::use(p.lse);
  ptx::use(p.merges);
  ptx::use(p.group);
  ptx::use(p.group_magic);
  // One barrier takes some forty cycles to set up: every warp does its share.
  constexpr u32 num_warps = S::threads / 32;
  if (lane == 0) {
#if defined(CHUNKCACHE_TMA)
    constexpr u32 full_arrivals = 1 + COPY_THREADS;
    if (warp == 0) ptx::prefetch_tensor_map(&p.k_map);
    if (warp == 1) ptx::prefetch_tensor_map(&p.v_map);
#else
    constexpr u32 full_arrivals = STAGE_THREADS;
#endif
    if (warp == 0) {
      control.issued = 0;
      ptx::barrier_init(ptx::shared_address(&control.claim_known), 1);
      ptx::barrier_init(ptx::shared_address(&control.merge_known), 1);
    }
    for (u32 i = warp; i < p.ring_stages; i += num_warps) {
      ptx::barrier_init(ptx::shared_address(&control.full[i]), full_arrivals);
      ptx::barrier_init(ptx::shared_address(&control.empty[i]), S::consumer_warps * ptx::ARRIVING_LANES);
    }
    for (u32 i = num_warps - 1 - warp; i < ITEM_SLOTS; i += num_warps) {
      ptx::barrier_init(ptx::shared_address(&control.item_full[i]), ptx::ARRIVING_LANES);
      ptx::barrier_init(ptx::shared_address(&control.range_full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&control.item_empty[i]),
                        (S::consumer_warps + HELPERS) * ptx::ARRIVING_LANES);
    }
#if defined(CHUNKCACHE_TMA)
    ptx::barrier_init_fence();
#endif
  }
  __syncthreads();
#if defined(CHUNKCACHE_TMA)
  ptx::let_next_launch_start();
#endif
  if (warp >= S::consumer_warps) {
#if defined(CHUNKCACHE_TMA)
    if constexpr (S::consumer_warps == 8) ptx::shrink_registers<72>();
#endif
    if (warp == S::consumer_warps) {
      produce<D>(p, control, ring, word, num_items, lane);
    } else {
      help<D>(p, control, ring, warp - S::consumer_warps - 1, lane);
    }
  } else {
#if defined(CHUNKCACHE_TMA)
    if constexpr (S::consumer_warps == 8) ptx::grow_registers<216>();
#endif
    consume<T, D>(p, control, ring, q_shared, warp, lane);
  }
}

}  // namespace chunkcache::tpp
