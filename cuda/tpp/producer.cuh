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
#pragma unroll 1
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
  u32 num_keys;   // that are wanted
  u32 page_size;

  __device__ __forceinline__ u32 get(u32 page, u32 lane) {
    if (page - begin >= count) {
      const u32 num_pages = (num_keys + page_size - 1) / page_size;
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

// Calls fill(source, K/V head) for every stage of an item, in ring order: step by step, and within a
// step head by head, so that what follows each other in memory is asked for together.
template <class Fill>
__device__ __forceinline__ void for_each_stage(const TppParams& p, const Item& item,
                                               const KeyRange& range, u32 inline_page, u32 lane,
                                               Fill&& fill) {
  u32 page = range.first_block == 0 ? 0 : range.first_block * KEYS / p.page_size;
  u32 offset = range.first_block * KEYS - page * p.page_size;
  PageIds pages{p.page_ids + item.ids_begin, 0, ITEM_PAGES, inline_page, range.num_keys, p.page_size};
  const auto advance = [&] {
    offset += p.box_tokens;
    if (offset >= p.page_size) {
      offset = 0;
      ++page;
    }
  };
  const auto next = [&](u32 block) {
    StageSource from{1, pages.get(page, lane), offset, 0, 0};
    advance();
    if (p.box_tokens < KEYS) {
      if (block * KEYS + p.box_tokens < range.num_keys) {
        from.parts = 2;
        from.page1 = pages.get(page, lane);
        from.offset1 = offset;
      }
      advance();
    }
    return from;
  };
#pragma unroll 1
  for (u32 block = range.first_block; block < range.end_block; block += STEP) {
    const u32 blocks = min(range.end_block - block, STEP);
    const StageSource first = next(block);
    const StageSource second = blocks > 1 ? next(block + 1) : first;
#pragma unroll 1
    for (u32 i = 0; i < item.num_heads * blocks; ++i) {
      const bool other = (i & (blocks - 1)) != 0;
      const StageSource from{other ? second.parts : first.parts,
                             other ? second.page0 : first.page0,
                             other ? second.offset0 : first.offset0,
                             other ? second.page1 : first.page1,
                             other ? second.offset1 : first.offset1};
      fill(from, item.kv_head + (blocks > 1 ? i / STEP : i));
    }
  }
}

#if defined(CHUNKCACHE_TMA)
// Sends K of one stage by the tensor copy engine, and V with it where `both`.
template <u32 D>
__device__ __forceinline__ void copy_boxes(const TppParams& p, u32 stage, u32 full,
                                           const StageSource& from, u32 head, bool both,
                                           u64 policy) {
  using S = Shape<D>;
  // With whole 128-byte columns, one copy brings all of them, box after box.
  constexpr bool whole = D % 64 == 0;
  const u32 part_bytes = p.box_tokens * COLUMN_BYTES;
  const bool at_once = whole && p.box_tokens == KEYS;
  const u32 bytes = from.parts * S::boxes * part_bytes;
  const u32 copies = at_once ? 1 : from.parts * S::boxes;
  if (ptx::elect_one()) {
    ptx::barrier_arrive_expect_bytes(full, both ? 2 * bytes : bytes);
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
      if (both) {
        ptx::copy_box(to + S::k_bytes, &p.v_map, full, policy, column, offset, columns, head, page);
      }
    }
  }
  __syncwarp();
}
#endif

#if defined(CHUNKCACHE_TMA)
// How many stages of a block's first item `start_copies` sends: none where a stage takes more than
// one box, or the first keys are out of the window.
template <u32 D>
__device__ __forceinline__ u32 stages_at_start(const TppParams& p, const Item& item,
                                               const KeyRange& range) {
  if (D % 64 != 0 || p.box_tokens != KEYS || range.first_block != 0) return 0;
  const u32 most = item.grouped<D>() ? STEP : START_STAGES;
  return min(range.end_block / STEP * STEP * item.num_heads, most);
}

// Sends them, K and V by the tensor copy engine, with as little code as that takes: the loop that
// sends all others, which runs for the first time, would take longer than the way to the memory.
template <u32 D>
__device__ __forceinline__ void start_copies(const TppParams& p, Control& control, u32 ring,
                                             const Item& item, u32 word, u32 count, u64 policy) {
  using S = Shape<D>;
  u32 head = 0, first = 0;
#pragma unroll 1
  for (u32 i = 0; i < count; ++i) {
    u32 page = ITEM_HEAD_WORDS, offset = first + i % STEP * KEYS;
#pragma unroll 1
    for (; offset >= p.page_size; offset -= p.page_size) ++page;
    const u32 id = __shfl_sync(~0u, word, page);
    const u32 full = ptx::shared_address(&control.full[i]);
    const u32 to = ring + i * S::stage_bytes;
    if (ptx::elect_one()) {
      ptx::barrier_arrive_expect_bytes(full, S::stage_bytes);
      ptx::copy_box(to, &p.k_map, full, policy, 0, offset, 0, item.kv_head + head, id);
      ptx::copy_box(to + S::k_bytes, &p.v_map, full, policy, 0, offset, 0, item.kv_head + head, id);
    }
    __syncwarp();
    if (i % STEP == STEP - 1 && ++head == item.num_heads) {
      head = 0;
      first += STEP * KEYS;
    }
  }
  if (ptx::elect_one()) ptx::publish(ptx::shared_address(&control.issued), count);
  __syncwarp();
}
#endif

// Where K or V lie.
struct Source {
  const u8* base;
  i64 page_bytes, head_bytes, token_bytes;
};

// Thread `thread` copies its share of the rows of K or of V of one stage.
template <u32 D>
__device__ __forceinline__ void copy_rows(const Source& source, u32 box_tokens, u32 to,
                                          const StageSource& from, u32 head, u64 policy,
                                          u32 thread) {
  constexpr u32 pieces = Shape<D>::kv_row_bytes / 16;
  constexpr u32 rows_at_once = STAGE_THREADS / pieces;
  if (STAGE_THREADS % pieces == 0 && (FP8 || rows_at_once % 8 == 0) && box_tokens == KEYS) {
    // Rows that are a multiple of eight apart lie one below the other, also once they are swizzled.
    constexpr u32 rows_apart = rows_at_once % 8 == 0 ? rows_at_once : 8;
    const u32 row = thread / pieces;
    const u32 piece = thread % pieces;
    const u8* at = source.base + from.page0 * source.page_bytes + head * source.head_bytes +
                   (from.offset0 + row) * source.token_bytes + piece * 16;
#pragma unroll
    for (u32 first = 0; first < rows_apart; first += rows_at_once) {
      const u32 below = to + ((piece / 8) * BOX_BYTES + swizzled(row + first, piece % 8));
      const u8* next = at + first * source.token_bytes;
#pragma unroll
      for (u32 i = 0; i < KEYS; i += rows_apart) {
        ptx::copy_async_16(below + i * COLUMN_BYTES, next, policy);
        next += rows_apart * source.token_bytes;
      }
    }
    return;
  }
#pragma unroll 1
  for (u32 part = 0; part < from.parts; ++part) {
    const u32 page = part == 0 ? from.page0 : from.page1;
    const u32 offset = part == 0 ? from.offset0 : from.offset1;
    const u8* at = source.base + page * source.page_bytes + head * source.head_bytes +
                   offset * source.token_bytes;
#pragma unroll 1
    for (u32 i = thread; i < box_tokens * pieces; i += STAGE_THREADS) {
      const u32 row = i / pieces;
      const u32 piece = i % pieces;
      ptx::copy_async_16(to + (piece / 8) * BOX_BYTES + swizzled(part * box_tokens + row, piece % 8),
                         at + row * source.token_bytes + piece * 16, policy);
    }
  }
}

// Whether a thread takes part in filling the stage that is the `number`th of the launch.
__device__ __forceinline__ bool fills(u32 number, u32 thread) {
  constexpr u32 turns = COPY_THREADS / STAGE_THREADS;
  return turns == 1 || number % turns == thread / STAGE_THREADS;
}

// This thread's share of a stage by cp.async.
template <u32 D>
__device__ __forceinline__ void copy_share(const TppParams& p, u32 stage, u32 full,
                                           const StageSource& from, u32 head, u64 policy,
                                           u32 thread) {
  if constexpr (STAGE_THREADS < COPY_THREADS) thread %= STAGE_THREADS;
  if constexpr (!TMA) {
    const Source k{static_cast<const u8*>(p.k), p.k_page_bytes, p.k_head_bytes, p.k_token_bytes};
    copy_rows<D>(k, p.box_tokens, stage, from, head, policy, thread);
  }
  const Source v{static_cast<const u8*>(p.v), p.v_page_bytes, p.v_head_bytes, p.v_token_bytes};
  copy_rows<D>(v, p.box_tokens, stage + Shape<D>::k_bytes, from, head, policy, thread);
  ptx::copy_async_arrive(full);
}

// The queue's first word counts the items it has handed out, below STARTED, and the blocks that have
// claimed their first item.
constexpr u32 STARTED = 1u << 20;
constexpr u32 CLAIMS = 2;

// The first item of a block that has not claimed it, or NONE: now it is this block's.
__device__ __forceinline__ u32 steal(u32* queue, u32 first_items, u32 lane) {
#pragma unroll 1
  for (u32 first = 0; first < first_items; first += 32) {
    const u32 item = first + lane;
    u32 free = __ballot_sync(
        ~0u, item < first_items && *const_cast<volatile u32*>(queue + CLAIMS + item) == 0);
#pragma unroll 1
    while (free != 0) {
      const u32 at = __ffs(free) - 1;
      free &= free - 1;
      const u32 claim = lane == at ? atomicExch(queue + CLAIMS + item, 1u) : 0;
      if (__shfl_sync(~0u, claim, at) == 0) return first + at;
    }
  }
  return NONE;
}

// `word`: this lane's of row blockIdx.x of the items.
template <u32 D>
__device__ __forceinline__ void produce(const TppParams& p, Control& control, u32 ring, u32 word,
                                        u32 num_items, u32 lane) {
  using S = Shape<D>;
  const u64 policy = ptx::policy_evict_first();
  u32 index = blockIdx.x;
  u32 held = NONE;    // an item of the queue that waits until all first items are claimed
  RingPosition stage{0, 0};
  u32 issued = 0;
  u32 sent = 0;       // stages whose copies went out at the start
  RingPosition slot{0, 0};
#if defined(CHUNKCACHE_TMA)
  // Tables are written by launches that let none start early; all else is read from here on.
  ptx::wait_for_launches_before();
#endif
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
    }
    __syncwarp();
    if (lane < ptx::ARRIVING_LANES) {
      ptx::barrier_arrive(ptx::shared_address(&control.item_full[slot.slot]));
    }

    const KeyRange range = key_range(p, item, lane);
    const bool is_first = index == blockIdx.x && issued == 0;
#if defined(CHUNKCACHE_TMA)
    if (is_first) sent = stages_at_start<D>(p, item, range);
#endif
    if (lane == 0) {
      if (is_first) control.sent = sent;
      message.range = range;
      ptx::barrier_arrive(ptx::shared_address(&control.range_full[slot.slot]));
    }
    __syncwarp();
#if defined(CHUNKCACHE_TMA)
    if (is_first) start_copies<D>(p, control, ring, item, word, sent, policy);
#endif
    slot.advance(ITEM_SLOTS);

    const u32 inline_page = __shfl_sync(~0u, word, ITEM_HEAD_WORDS + lane % ITEM_PAGES);
    const bool grouped = item.grouped<D>();
    u32 left = (range.end_block - range.first_block) * item.num_heads;
    const u32 take_at = min(left, TAKE_NEXT_AT);
    // A short item's copies go out first: nobody waits for the queue then.
    const u32 load_at = take_at > LOAD_NEXT_AT ? LOAD_NEXT_AT : 0;
    u32 ticket = 0;
    const auto look_ahead = [&] {
      if (left == take_at && lane == 0 && held == NONE) ticket = atomicAdd(p.queue, 1u);
      if (left == load_at) {
        bool all_started = false;
        if (held == NONE) {
          ticket = __shfl_sync(~0u, ticket, 0);
          held = gridDim.x + ticket % STARTED;
          all_started = ticket / STARTED == gridDim.x;
        }
        index = all_started ? NONE : steal(p.queue, min(gridDim.x, num_items), lane);
        if (index == NONE) {
          index = held;
          held = NONE;
        }
        if (index < num_items) word = reinterpret_cast<const u32*>(p.items + index)[lane];
      }
    };
    for_each_stage(p, item, range, inline_page, lane, [&](const StageSource& from, u32 head) {
      look_ahead();
      --left;
      ptx::barrier_wait(ptx::shared_address(&control.empty[stage.slot]), stage.phase ^ 1);
      // The slot's fill before this one has landed and was read: from here on the parity of its
      // barrier is unambiguous, also to a warp that did not take part in that fill.
      ++issued;
      if (lane == 0) ptx::publish(ptx::shared_address(&control.issued), max(issued, sent));
      const u32 to = ring + stage.slot * S::stage_bytes;
      const u32 full = ptx::shared_address(&control.full[stage.slot]);
#if defined(CHUNKCACHE_TMA)
      if (issued > sent) copy_boxes<D>(p, to, full, from, head, grouped, policy);
#endif
      if (grouped || issued <= sent) {
        ptx::barrier_arrive(full);
      } else if (fills(issued, lane)) {
        copy_share<D>(p, to, full, from, head, policy, lane);
      }
      stage.advance(p.ring_stages);
    });
    if (load_at == 0) look_ahead();
  }

  ptx::barrier_wait(ptx::shared_address(&control.item_empty[slot.slot]), slot.phase ^ 1);
  if (lane == 0) control.items[slot.slot].last = 1;
  if (lane < ptx::ARRIVING_LANES) {
    ptx::barrier_arrive(ptx::shared_address(&control.item_full[slot.slot]));
  }
  // The last block to take its last item leaves the queue as it found it.
  ptx::barrier_wait(ptx::shared_address(&control.claim_known), 0);
  u32 done = 0;
  if (lane == 0) {
    __threadfence();
    done = atomicAdd(p.queue + 1, 1u);
  }
  if (__shfl_sync(~0u, done, 0) == gridDim.x - 1) {
    for (u32 i = lane; i < CLAIMS + gridDim.x; i += 32) p.queue[i] = 0;
  }
}

// Brings what the consumers will read at an item's start and end into the L1: the rows of the tables
// and of q, each behind the one before it.
__device__ __forceinline__ void warm(const TppParams& p, const Item& item, u32 lane) {
#pragma unroll 1
  for (u32 i = lane; i < item.num_tok; i += 32) {
    const TokenRow token = p.tokens[item.tok_begin + i];
    if (item.slot_begin == NONE && token.num_partials != 0) ptx::touch(p.merges + token.merge_begin);
    const u16* q = static_cast<const u16*>(p.q) + token.q_row * p.q_row +
                   item.kv_head * p.group * p.q_head;
    ptx::touch(p.sequences + token.seq);
#pragma unroll 1
    for (u32 k = 0; k < item.num_heads * p.group; ++k) ptx::touch(q + k * p.q_head);
  }
}

// The same for this block's first merge item, which goes to shared memory.
__device__ __forceinline__ void warm_merges(const TppParams& p, Control& control, u32 lane) {
  const u32 num_items = p.header->num_merge_items;
  MergeItem item{0, 0, 0, 0};
  if (blockIdx.x < num_items) item = p.merge_items[blockIdx.x];
  if (lane == 0) {
    control.num_merge_items = num_items;
    control.merge_item = item;
  }
#pragma unroll 1
  for (u32 i = lane; i < item.num_tok; i += 32) {
    const TokenRow token = p.tokens[item.tok_begin + i];
#pragma unroll 1
    for (u32 k = 0; k < token.num_partials; k += 8) ptx::touch(p.merges + token.merge_begin + k);
  }
}

// Where stages are filled in turn, a warp does not wait for those of others, so that it may be a lap
// ahead of the slot's last fill, and the parity that it waits for may be that of two fills before.
// The producer waits for every stage: once it has begun the slot's last fill that one is over.
__device__ __forceinline__ void wait_for_producer(const Control& control, u32 number) {
  if constexpr (STAGE_THREADS < COPY_THREADS) {
    while (static_cast<i32>(ptx::published(ptx::shared_address(&control.issued)) - number) < 0) {
      ptx::sleep();
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
  u32 sent = NONE;    // of the first item's stages, those that went out at the start: not known yet
  if (helper == 0) {
    warm_merges(p, control, lane);
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&control.merge_known));
  }
  if (helper == 1 && lane == 0) {
    // A block that starts late may find its first item taken; nobody waits for the answer before
    // the item's end.
    control.stolen = atomicExch(p.queue + CLAIMS + blockIdx.x, 1u);
    atomicAdd(p.queue, STARTED);
    __threadfence();
    ptx::barrier_arrive(ptx::shared_address(&control.claim_known));
  }
  __syncwarp();
  const u32 thread = (1 + helper) * 32 + lane;
  u32 number = 0;
  while (true) {
    ptx::barrier_wait(ptx::shared_address(&control.item_full[slot.slot]), slot.phase);
    const ItemMessage& message = control.items[slot.slot];
    if (message.last != 0) break;
    if (helper == HELPERS - 1) warm(p, message.item, lane);
    ptx::barrier_wait(ptx::shared_address(&control.range_full[slot.slot]), slot.phase);
    if (sent == NONE) sent = control.sent;
    if (message.item.grouped<D>()) {
      const KeyRange range = message.range;
      const u32 stages = (range.end_block - range.first_block) * message.item.num_heads;
#pragma unroll 1
      for (u32 i = 0; i < stages; ++i) {
        ptx::barrier_wait(ptx::shared_address(&control.empty[stage.slot]), stage.phase ^ 1);
        ptx::barrier_arrive(ptx::shared_address(&control.full[stage.slot]));
        stage.advance(p.ring_stages);
      }
      sent = 0;
    } else {
      for_each_stage(p, message.item, message.range, message.pages[lane % ITEM_PAGES], lane,
                     [&](const StageSource& from, u32 head) {
                       if (fills(++number, thread)) {
                         wait_for_producer(control, number - p.ring_stages);
                         ptx::barrier_wait(ptx::shared_address(&control.empty[stage.slot]),
                                           stage.phase ^ 1);
                         const u32 full = ptx::shared_address(&control.full[stage.slot]);
                         if (sent == 0) {
                           copy_share<D>(p, ring + stage.slot * S::stage_bytes, full, from, head,
                                         policy, thread);
                         } else {
                           ptx::barrier_arrive(full);
                           --sent;
                         }
                       }
                       stage.advance(p.ring_stages);
                     });
    }
    __syncwarp();
    if (lane < ptx::ARRIVING_LANES) {
      ptx::barrier_arrive(ptx::shared_address(&control.item_empty[slot.slot]));
    }
    slot.advance(ITEM_SLOTS);
  }
}

}  // namespace chunkcache::tpp
