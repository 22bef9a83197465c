// The keys of an item: the range that its rows see, its stages in the order of the ring, and the copies
// of K/V that fill them, by the tensor copy engine or by cp.async.
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

}  // namespace chunkcache::tpp
