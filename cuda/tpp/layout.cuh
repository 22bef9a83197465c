// Sizes and the shared memory of a two-phase attention block.
#pragma once

#include "../common/element.cuh"
#include "../common/softmax.cuh"

namespace chunkcache::tpp {

constexpr u32 MAX_CONSUMER_WARPS = 8;
// Warps beside the producer that copy K/V, and all warps that share the copies by cp.async. The
// tensor copy engine needs one thread but holds too few bytes in flight for the memory of an H200:
// it brings K while the helpers bring V.
#if defined(CHUNKCACHE_TMA)
constexpr bool TMA = true;
constexpr u32 HELPERS = 3;
constexpr u32 COPY_WARPS = 3;
#else
constexpr bool TMA = false;
constexpr u32 HELPERS = 3;
constexpr u32 COPY_WARPS = 4;
#endif
constexpr u32 KEYS = 32;            // keys of one ring stage
constexpr u32 ROWS = 16;            // query rows of one warp
constexpr u32 COLUMN_BYTES = 128;   // width of one swizzled box
constexpr u32 BOX_BYTES = KEYS * COLUMN_BYTES;
constexpr u32 MAX_STAGES = 24;
constexpr u32 ITEM_SLOTS = 4;
constexpr u32 TAKE_NEXT_AT = 8;      // copies of an item left when the next is taken

template <u32 D>
struct Shape {
  static_assert(D % 16 == 0 && D >= 16 && D <= 256, "head_dim");
  static constexpr u32 head_dim = D;
  static constexpr u32 row_bytes = D * 2;
  static constexpr u32 boxes = (row_bytes + COLUMN_BYTES - 1) / COLUMN_BYTES;   // of K, or of V
  static constexpr u32 k_bytes = boxes * BOX_BYTES;
  static constexpr u32 stage_bytes = 2 * k_bytes;
  // Nine to twelve warps leave a thread 168 registers, up to eight 255: wide heads need those.
  static constexpr u32 consumer_warps = D <= 128 ? 8 : 4;
  static constexpr u32 threads = (consumer_warps + 1 + HELPERS) * 32;
  // Stages that an item with key groups takes after its keys, as room for the block reduction: two
  // fragments of 16 rows in f32 each.
  static constexpr u32 reduce_stages = consumer_warps / 2;
  static constexpr u32 reduce_pitch = boxes * 64;
  // 256 columns of q beside 256 columns of accumulators do not fit into the registers.
  static constexpr bool q_in_shared = D > 192;
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
  u32 seq, first_query, row_tiles, key_groups, bounded, owner, num_owners, reserved;
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
  u32 reductions;     // items with key groups before it
  KeyRange range;
  u32 padding[2];
};

struct Control {
  u64 full[MAX_STAGES];
  u64 empty[MAX_STAGES];
  u64 item_full[ITEM_SLOTS];
  u64 item_empty[ITEM_SLOTS];
  u64 range_full[ITEM_SLOTS];
  u32 issued;                      // stages that the producer has begun to fill, over the launch
  u32 taken[MAX_CONSUMER_WARPS];   // items that each warp has finished
  u32 padding[1];
  ItemMessage items[ITEM_SLOTS];
  int2 limits[MAX_CONSUMER_WARPS * ROWS];          // keys a row sees, first and last
  int4 keys[MAX_CONSUMER_WARPS];                   // first and last that all rows of a warp see,
                                                   // first of the range, end of the range
  float2 reduce_state[2][MAX_CONSUMER_WARPS * ROWS];  // max and sum of a warp's rows
};
static_assert(sizeof(Control) <= 6144, "CONTROL_BYTES in chunkcache/kernels/tpp.py");

// A position in a ring of stages.
struct RingPosition {
  u32 slot;
  u32 phase;

  __device__ __forceinline__ void advance(u32 steps, u32 size) {
    slot += steps;
    while (slot >= size) {
      slot -= size;
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
