// The producer warps: one takes items, bounds them by what their rows see and sends the copies of
// K/V; helpers, where there are any, follow it and bring their share. Together they keep the ring
// full across items.
#pragma once

#include "stages.cuh"

namespace chunkcache::tpp {

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
