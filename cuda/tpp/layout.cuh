// Sizes and the shared memory of a two-phase attention block.
#pragma once

#include "../common/element.cuh"
#include "../common/softmax.cuh"

namespace chunkcache::tpp {

constexpr u32 MAX_CONSUMER_WARPS = 8;
// Warps beside the producer; together they share the copies by cp.async. The tensor copy engine needs
// one thread but holds too few bytes in flight for the memory of an H200: it brings K while cp.async
// brings V. Where warpgroups multiply it brings both: what cp.async wrote they would see only behind
// a fence, which waits for all copies that are on their way.
#if defined(CHUNKCACHE_TMA)
constexpr bool TMA = true;
#else
constexpr bool TMA = false;
#endif
// K/V of one byte an element (e4m3), which become f16 in registers, whatever the type of q.
#if defined(CHUNKCACHE_KV)
constexpr bool FP8 = true;
#else
constexpr bool FP8 = false;
#endif
constexpr u32 KV_BYTES = FP8 ? 1 : 2;
constexpr u32 HELPERS = 3;
constexpr u32 COPY_THREADS = (1 + HELPERS) * 32;
// Those that fill one stage by cp.async. One of fp8 is short for what a warp has to do to find it, so
// that the warps take turns.
constexpr u32 STAGE_THREADS = FP8 ? 32 : COPY_THREADS;
constexpr u32 KEYS = 32;            // keys of one ring stage
constexpr u32 STEP = 2;             // stages of one K/V head that follow each other
constexpr u32 ROWS = 16;            // query rows of one warp
constexpr u32 COLUMN_BYTES = 128;   // width of one swizzled box
constexpr u32 BOX_BYTES = KEYS * COLUMN_BYTES;
constexpr u32 MAX_STAGES = 24;
constexpr u32 ITEM_SLOTS = 4;
// Stages of an item left to copy when the next is taken, and when its row is asked for: early enough
// to be there in time, late enough that a block does not hold work that others wait for.
constexpr u32 TAKE_NEXT_AT = 20;
constexpr u32 LOAD_NEXT_AT = 10;
// Stages that a block sends before all else, one step's where warpgroups multiply. Not more: q is
// loaded at the same time, and comes after them.
constexpr u32 START_STAGES = 4;

template <u32 D>
struct Shape {
  static_assert(D % 16 == 0 && D >= 16 && D <= 256, "head_dim");
  static constexpr u32 head_dim = D;
  static constexpr u32 row_bytes = D * 2;             // of q
  static constexpr u32 kv_row_bytes = D * KV_BYTES;   // of K, or of V
  static constexpr u32 boxes = (kv_row_bytes + COLUMN_BYTES - 1) / COLUMN_BYTES;
  static constexpr u32 k_bytes = boxes * BOX_BYTES;
  static constexpr u32 stage_bytes = 2 * k_bytes;
  // Nine to twelve warps leave a thread 168 registers, up to eight 255: wide heads need those.
  static constexpr u32 consumer_warps = D <= 128 ? 8 : 4;
  static constexpr u32 threads = (consumer_warps + 1 + HELPERS) * 32;
  // 256 columns of q beside 256 columns of accumulators do not fit into the registers, nor 128 beside
  // what fp8 is converted to.
  static constexpr bool q_in_shared = D > (FP8 ? 112 : 192);
  // Warpgroup products: whole boxes, q in registers.
  static constexpr bool can_group = TMA && D % 64 == 0 && !q_in_shared;
  static constexpr u32 q_bytes = q_in_shared ? consumer_warps * ROWS * row_bytes : 0;
};

__device__ __forceinline__ u32 log2_of(u32 power) { return 31 - __clz(power); }

// The part of an item that one warp takes. Warps are numbered row tile first, then head, then key
// group: ((key_group * num_heads) + head) * row_tiles + row_tile.
struct Role {
  u8 active;
  u8 row_tile;
  u8 head;
  u8 key_group;

  template <class I>
  __device__ __forceinline__ static Role of(const I& item, u32 warp) {
    const u32 rest = warp >> log2_of(item.row_tiles);
    u32 key_group = 0;
#pragma unroll
    for (u32 i = 1; i < MAX_CONSUMER_WARPS; ++i) key_group += rest >= i * item.num_heads;
    Role role;
    role.row_tile = static_cast<u8>(warp & (item.row_tiles - 1));
    role.head = static_cast<u8>(rest - key_group * item.num_heads);
    role.key_group = static_cast<u8>(key_group);
    role.active = key_group < item.key_groups;
    return role;
  }
};

// The head of an item without its page ids.
struct Item {
  u32 ids_begin, num_keys, start_pos, kv_head, num_heads, tok_begin, num_tok, slot_begin;
  u32 seq, first_query, row_tiles, key_groups, bounded, reserved[3];

  __device__ __forceinline__ u32 rows(const TppParams& p) const { return num_tok * p.group; }

  // Whether its row tiles are those of whole warpgroups.
  template <u32 D>
  __device__ __forceinline__ bool grouped() const {
    return Shape<D>::can_group && row_tiles % 4 == 0;
  }
};
static_assert(sizeof(Item) == ITEM_HEAD_WORDS * 4, "ItemRow");

// Keys of a slice that some row of the tile may see: blocks [first_block, end_block).
struct KeyRange {
  u32 first_block;
  u32 end_block;
  u32 num_keys;
};

// What the producer tells the consumers about one item. The range comes later than the rest.
struct ItemMessage {
  Item item;
  u32 pages[ITEM_PAGES];
  Role roles[MAX_CONSUMER_WARPS];
  u32 first_stage;    // stages of the items before it, over the whole launch
  u32 last;           // 1: there are no more items
  KeyRange range;
  u32 padding[3];
};

struct Control {
  u64 full[MAX_STAGES];
  u64 empty[MAX_STAGES];
  u64 item_full[ITEM_SLOTS];
  u64 item_empty[ITEM_SLOTS];
  u64 range_full[ITEM_SLOTS];
  u64 claim_known;
  u64 merge_known;
  u32 issued;                      // stages that the producer has begun to fill, over the launch
  u32 taken[MAX_CONSUMER_WARPS];   // items that each warp has finished
  u32 sent;                        // stages of the first item whose copies went out at the start
  u32 stolen;                      // 1: another block has this block's first item
  u32 num_merge_items;             // of the launch, and this block's first
  MergeItem merge_item;
  ItemMessage items[ITEM_SLOTS];
  int2 limits[MAX_CONSUMER_WARPS * ROWS];   // keys a row sees, first and last
  int4 keys[MAX_CONSUMER_WARPS];            // first and last that all rows of a warp see, first of
                                            // the range, end of the range
  float row[8 * 128];                       // a row of accumulators for each consumer warp
};
static_assert(sizeof(Control) <= 8192, "CONTROL_BYTES in chunkcache/kernels/tpp.py");

// A position in a ring of stages.
struct RingPosition {
  u32 slot;
  u32 phase;

  __device__ __forceinline__ void advance(u32 size) {
    if (++slot == size) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// Byte of 16-byte piece `piece` of row `row` inside one 128-byte-wide box: pieces are permuted so
// that a column of eight rows touches every bank once (the pattern of CU_TENSOR_MAP_SWIZZLE_128B).
__device__ __forceinline__ u32 swizzled(u32 row, u32 piece) {
  return row * COLUMN_BYTES + ((piece ^ (row & 7)) << 4);
}

}  // namespace chunkcache::tpp
