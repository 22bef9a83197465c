// The producer warps: one takes items, bounds them by what their rows see and sends the copies of
// K/V; helpers, where there are any, follow it and bring their share. Together they keep the ring
// full across items.
#pragma once

#include "rows.cuh"

namespace chunkcache::tpp {

// Positions of a tile's queries: the smallest and the largest. Every lane gets both.
__device__ __forceinline__ void tile_positions(const TppParams& p, const Item& item, u32 lane,
                                               i32& lowest, i32& highest) {
  lowest = 0x7fffffff;
  highest = -1;
  if (item.seq != NONE) {
    const SequenceRow& s = p.sequences[item.seq];
    lowest = static_cast<i32>(s.kv_len - s.qo_len + item.first_query);
    highest = lowest + static_cast<i32>(item.num_tok) - 1;
    return;
  }
  for (u32 i = lane; i < item.num_tok; i += 32) {
    const TokenRow& t = p.tokens[item.tok_begin + i];
    const SequenceRow& s = p.sequences[t.seq];
    const i32 position = static_cast<i32>(s.kv_len - s.qo_len + (t.q_row - s.qo_begin));
    lowest = min(lowest, position);
    highest = max(highest, position);
  }
  lowest = __reduce_min_sync(~0u, lowest);
  highest = __reduce_max_sync(~0u, highest);
}

// Without a bound the range follows from the item alone.
__device__ __forceinline__ bool range_is_known(const TppParams& p, const Item& item) {
  return item.bounded == 0 && p.window_left < 0;
}

__device__ __forceinline__ KeyRange key_range(const TppParams& p, const Item& item, u32 lane) {
  KeyRange range{0, 0, item.num_keys};
  if (!range_is_known(p, item)) {
    i32 lowest, highest;
    tile_positions(p, item, lane, lowest, highest);
    const i32 start = static_cast<i32>(item.start_pos);
    const i32 seen = max(highest + 1 - start, 0);
    range.num_keys = min(range.num_keys, static_cast<u32>(seen));
    if (p.window_left >= 0) {
      range.first_block = static_cast<u32>(max(lowest - p.window_left - start, 0)) / KEYS;
    }
  }
  range.end_block = max((range.num_keys + KEYS - 1) / KEYS, range.first_block);
  return range;
}

// The page ids of a slice: the first from the item row, the others 32 at a time, in the lanes.
struct PageIds {
  const u32* ids;
  u32 begin;      // pages [begin, begin + count) are held
  u32 count;
  u32 mine;

  __device__ __forceinline__ u32 get(u32 page, u32 lane, u32 num_pages) {
    if (page - begin >= count) {
      begin = page;
      count = 32;
      mine = page + lane < num_pages ? ids[page + lane] : 0;
    }
    return __shfl_sync(~0u, mine, page - begin);
  }
};

// Where one stage's keys lie: a copy each of one page, two where pages are no multiple of a stage.
struct StageSource {
  u32 parts;
  u32 page0, offset0;
  u32 page1, offset1;
};

// Calls fill(source, K/V head) for every stage of an item, in ring order.
template <class Fill>
__device__ __forceinline__ void for_each_stage(const TppParams& p, const Item& item,
                                               const KeyRange& range, u32 inline_page, u32 lane,
                                               Fill&& fill) {
  const u32 max_pages = item.num_keys == NONE ? NONE : item.num_keys / p.page_size;
  const u32 num_pages = min((range.num_keys + p.page_size - 1) / p.page_size, max_pages);
  u32 page = range.first_block * KEYS / p.page_size;
  u32 offset = range.first_block * KEYS - page * p.page_size;
  PageIds pages{p.page_ids + item.ids_begin, 0, ITEM_PAGES, inline_page};
  const auto step = [&] {
    offset += p.box_tokens;
    if (offset >= p.page_size) {
      offset = 0;
      ++page;
    }
  };
#pragma unroll 1
  for (u32 block = range.first_block; block < range.end_block; ++block) {
    StageSource from{1, pages.get(page, lane, num_pages), offset, 0, 0};
    step();
    if (p.box_tokens < KEYS) {
      if (block * KEYS + p.box_tokens < range.num_keys) {
        from.parts = 2;
        from.page1 = pages.get(page, lane, num_pages);
        from.offset1 = offset;
      }
      step();
    }
#pragma unroll 1
    for (u32 head = 0; head < item.num_heads; ++head) fill(from, item.kv_head + head);
  }
}

#if defined(CHUNKCACHE_TMA)
// Sends K of one stage by the tensor copy engine.
template <u32 D>
__device__ __forceinline__ void copy_boxes(const TppParams& p, u32 stage, u32 full,
                                           const StageSource& from, u32 head, u64 policy) {
  using S = Shape<D>;
  // With whole 128-byte columns, one copy brings all of them, box after box.
  constexpr bool whole = D % 64 == 0;
  const u32 part_bytes = p.box_tokens * COLUMN_BYTES;
  const bool at_once = whole && p.box_tokens == KEYS;
  const u32 bytes = from.parts * S::boxes * part_bytes;
  const u32 copies = at_once ? 1 : from.parts * S::boxes;
  if (ptx::elect_one()) {
    ptx::barrier_arrive_expect_bytes(full, bytes);
#pragma unroll 1
    for (u32 i = 0; i < copies; ++i) {
      const u32 part = i / S::boxes;
      const u32 box = i - part * S::boxes;
      const u32 page = part == 0 ? from.page0 : from.page1;
      const u32 offset = part == 0 ? from.offset0 : from.offset1;
      const u32 to = stage + box * BOX_BYTES + part * part_bytes;
      const u32 column = whole ? 0 : box * 64;
      const u32 columns = whole ? box : 0;
      ptx::copy_box(to, &p.k_map, full, policy, column, offset, columns, head, page);
    }
  }
  __syncwarp();
}
#endif

// Thread `thread` of `threads` copies its share of the rows of K or of V.
template <u32 D>
__device__ __forceinline__ void copy_rows(const u8* base, i64 page_bytes, i64 head_bytes,
                                          i64 token_bytes, u32 rows_of_part, u32 to,
                                          const StageSource& from, u32 head, u64 policy, u32 thread,
                                          u32 threads) {
  constexpr u32 pieces = Shape<D>::row_bytes / 16;
#pragma unroll 1
  for (u32 part = 0; part < from.parts; ++part) {
    const u32 page = part == 0 ? from.page0 : from.page1;
    const u32 offset = part == 0 ? from.offset0 : from.offset1;
    const u8* source = base + page * page_bytes + head * head_bytes + offset * token_bytes;
#pragma unroll 4
    for (u32 i = thread; i < rows_of_part * pieces; i += threads) {
      const u32 row = i / pieces;
      const u32 piece = i % pieces;
      ptx::copy_async_16(
          to + (piece / 8) * BOX_BYTES + swizzled(part * rows_of_part + row, piece % 8),
          source + row * token_bytes + piece * 16, policy);
    }
  }
}

// This thread's share of a stage by cp.async.
template <u32 D>
__device__ __forceinline__ void copy_share(const TppParams& p, u32 stage, u32 full,
                                           const StageSource& from, u32 head, u64 policy,
                                           u32 thread) {
  constexpr u32 threads = COPY_WARPS * 32;
#if !defined(CHUNKCACHE_TMA)
  copy_rows<D>(static_cast<const u8*>(p.k), p.k_page_bytes, p.k_head_bytes, p.k_token_bytes,
               p.box_tokens, stage, from, head, policy, thread, threads);
#endif
  copy_rows<D>(static_cast<const u8*>(p.v), p.v_page_bytes, p.v_head_bytes, p.v_token_bytes,
               p.box_tokens, stage + Shape<D>::k_bytes, from, head, policy, thread, threads);
  ptx::copy_async_arrive(full);
}

template <u32 D>
__device__ __forceinline__ void produce(const TppParams& p, Control& control, u32 ring, u32 lane) {
  using S = Shape<D>;
  const u64 policy = ptx::policy_evict_first();
  const u32 num_items = p.header->num_items;
  RingPosition stage{0, 0};
  u32 issued = 0;
  u32 reductions = 0;
  RingPosition slot{0, 0};
  u32 index = blockIdx.x;
  u32 word = 0;
  if (index < num_items) word = reinterpret_cast<const u32*>(p.items + index)[lane];
#if defined(CHUNKCACHE_TMA)
  // Tables are written by launches that let none start early; all else is read from here on.
  ptx::wait_for_launches_before();
#endif
  if (lane == 0) atomicAdd(p.queue + 2, 1u);
  while (index < num_items) {
    Item item;
    u32* fields = reinterpret_cast<u32*>(&item);
#pragma unroll
    for (u32 i = 0; i < ITEM_HEAD_WORDS; ++i) fields[i] = __shfl_sync(~0u, word, i);

    ptx::barrier_wait(ptx::shared_address(&control.item_empty[slot.slot]), slot.phase ^ 1);
    ItemMessage& message = control.items[slot.slot];
    reinterpret_cast<u32*>(&message.item)[lane] = word;
    if (lane < S::consumer_warps) message.roles[lane] = Role::of(item, lane);
    if (lane == 0) {
      message.first_stage = issued;
      message.last = 0;
      message.reductions = reductions;
    }
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&control.item_full[slot.slot]));

    const KeyRange range = key_range(p, item, lane);
    if (lane == 0) {
      message.range = range;
      ptx::barrier_arrive(ptx::shared_address(&control.range_full[slot.slot]));
    }
    __syncwarp();
    slot.advance(1, ITEM_SLOTS);

    const u32 inline_page = __shfl_sync(~0u, word, ITEM_HEAD_WORDS + lane % ITEM_PAGES);
    // The next item is taken when few copies of this one are left: early enough to be there in time,
    // late enough that a long item's block does not take work that others wait for.
    u32 next = 0;
    u32 left = (range.end_block - range.first_block) * item.num_heads;
    const u32 take_at = min(left, TAKE_NEXT_AT);
    const auto take = [&] {
      if (lane == 0) next = gridDim.x + atomicAdd(p.queue, 1u);
    };
    if (left == 0) take();
    for_each_stage(p, item, range, inline_page, lane, [&](const StageSource& from, u32 head) {
      if (left-- == take_at) take();
      ptx::barrier_wait(ptx::shared_address(&control.empty[stage.slot]), stage.phase ^ 1);
      // The slot's fill before this one has landed and was read: from here on the parity of its
      // barrier is unambiguous, also to a warp that did not take part in that fill.
      ++issued;
      if (lane == 0) ptx::publish(ptx::shared_address(&control.issued), issued);
      const u32 to = ring + stage.slot * S::stage_bytes;
      const u32 full = ptx::shared_address(&control.full[stage.slot]);
#if defined(CHUNKCACHE_TMA)
      copy_boxes<D>(p, to, full, from, head, policy);
#else
      copy_share<D>(p, to, full, from, head, policy, lane);
#endif
      stage.advance(1, p.ring_stages);
    });

    if (item.key_groups > 1) {
      ++reductions;
      for (u32 i = 0; i < S::reduce_stages; ++i) {
        ptx::barrier_wait(ptx::shared_address(&control.empty[stage.slot]), stage.phase ^ 1);
        ++issued;
        if (lane == 0) ptx::publish(ptx::shared_address(&control.issued), issued);
        if (!TMA || lane == 0) ptx::barrier_arrive(ptx::shared_address(&control.full[stage.slot]));
        stage.advance(1, p.ring_stages);
      }
    }
    // Not before the copies are on their way.
    next = __shfl_sync(~0u, next, 0);
    if (next < num_items) word = reinterpret_cast<const u32*>(p.items + next)[lane];
    index = next;
  }

  ptx::barrier_wait(ptx::shared_address(&control.item_empty[slot.slot]), slot.phase ^ 1);
  if (lane == 0) {
    control.items[slot.slot].last = 1;
    ptx::barrier_arrive(ptx::shared_address(&control.item_full[slot.slot]));
    // The last block to take its last item leaves the queue as it found it.
    __threadfence();
    if (atomicAdd(p.queue + 1, 1u) == gridDim.x - 1) {
      p.queue[0] = 0;
      p.queue[1] = 0;
      p.queue[2] = gridDim.x;
    }
  }
}

// A helper warp: the producer's items, as the consumers get them, and its share of every stage.
template <u32 D>
__device__ __forceinline__ void help(const TppParams& p, Control& control, u32 ring, u32 helper,
                                     u32 lane) {
  using S = Shape<D>;
#if defined(CHUNKCACHE_TMA)
  ptx::wait_for_launches_before();
#endif
  const u64 policy = ptx::policy_evict_first();
  RingPosition stage{0, 0};
  RingPosition slot{0, 0};
  const u32 thread = (helper + COPY_WARPS - HELPERS) * 32 + lane;
  while (true) {
    ptx::barrier_wait(ptx::shared_address(&control.item_full[slot.slot]), slot.phase);
    const ItemMessage& message = control.items[slot.slot];
    if (message.last != 0) break;
    ptx::barrier_wait(ptx::shared_address(&control.range_full[slot.slot]), slot.phase);
    for_each_stage(p, message.item, message.range, message.pages[lane % ITEM_PAGES], lane,
                   [&](const StageSource& from, u32 head) {
                     ptx::barrier_wait(ptx::shared_address(&control.empty[stage.slot]),
                                       stage.phase ^ 1);
                     copy_share<D>(p, ring + stage.slot * S::stage_bytes,
                                   ptx::shared_address(&control.full[stage.slot]), from, head,
                                   policy, thread);
                     stage.advance(1, p.ring_stages);
                   });
    if (message.item.key_groups > 1) {
      for (u32 i = 0; i < S::reduce_stages; ++i) {
        ptx::barrier_wait(ptx::shared_address(&control.empty[stage.slot]), stage.phase ^ 1);
        ptx::barrier_arrive(ptx::shared_address(&control.full[stage.slot]));
        stage.advance(1, p.ring_stages);
      }
    }
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&control.item_empty[slot.slot]));
    slot.advance(1, ITEM_SLOTS);
  }
}

}  // namespace chunkcache::tpp
