// The first launch of a step: lengths advance, changed words of the tables are overwritten, and each
// row of q learns its position and the slot that its K/V goes to.
//
// Grid: one block; the next launch waits for its end, so that all of the step sees these tables.
// Memory: the image of tables and its header are described in rust/core/src/plan/image.rs, a patch
// in rust/core/src/plan/diff.rs. A patch begins with the number of the step that it is for; a step
// that finds another number there has no patch, and its lengths advance: nothing was copied for it.
#include "params.h"

namespace chunkcache {

struct ApplyTablesParams {
  u32* image;
  const u32* patch;      // number of the step, advance, number of ranges, ranges, values
  u32* state;            // {steps so far, rows that the last one wrote}
  i64* positions;        // [max_rows] token position of each row of q; 0 for padding
  i64* slot_mapping;     // [max_rows] page * page_size + offset; -1 for rows that write nothing
  u32 max_rows;
  u32 unused;
};

// Words of the image's header.
enum Header : u32 {
  PAGE_SIZE = 1,
  NUM_QO_ROWS = 2,
  NUM_SEQUENCES = 3,
  ORDER = 5,
  SEQUENCES = 6,
  SEGMENTS = 8,
  PAGE_IDS = 9,
  TOKENS = 17,
  NUM_TOKENS = 23,
};

// One segment of the step (rust/core/src/plan/view.rs, SegmentRow).
struct SegmentRow {
  u32 parent;
  u32 seq_begin;
  u32 seq_end;
  u32 start_pos;
  u32 num_pages;
  u32 ids_begin;
};

// Words of a patch before its ranges, and of each range: first word of the image, number of words,
// index of the first value. Indices count from the word after the number of the step.
constexpr u32 PATCH_HEADER = 2;
constexpr u32 PATCH_RANGE = 3;

}  // namespace chunkcache

extern "C" __global__ void __launch_bounds__(1024)
    apply_tables(const __grid_constant__ chunkcache::ApplyTablesParams p) {
  using namespace chunkcache;
  const u32 thread = threadIdx.x;
  const u32 warp = thread / 32;
  const u32 lane = thread % 32;
  const u32 step = p.state[0] + 1;
  const u32 rows_before = p.state[1];
  const bool patched = p.patch[0] == step;
  const u32* patch = p.patch + 1;
  u32* image = p.image;
  __syncthreads();

  if (!patched || patch[0] != 0) {
    SequenceRow* sequences = reinterpret_cast<SequenceRow*>(image + image[SEQUENCES]);
    const u32* order = image + image[ORDER];
    const u32 num_sequences = image[NUM_SEQUENCES];
    for (u32 i = thread; i < num_sequences; i += blockDim.x) {
      SequenceRow& row = sequences[order[i]];
      row.kv_len += row.qo_len;
    }
  }
  __syncthreads();

  if (patched) {
    const u32 num_ranges = patch[1];
    for (u32 i = warp; i < num_ranges; i += blockDim.x / 32) {
      const u32* range = patch + PATCH_HEADER + i * PATCH_RANGE;
      // A long range is shared by all warps below.
      if (range[1] > 4096) continue;
      for (u32 j = lane; j < range[1]; j += 32) image[range[0] + j] = patch[range[2] + j];
    }
    for (u32 i = 0; i < num_ranges; ++i) {
      const u32* range = patch + PATCH_HEADER + i * PATCH_RANGE;
      if (range[1] <= 4096) continue;
      for (u32 j = thread; j < range[1]; j += blockDim.x) image[range[0] + j] = patch[range[2] + j];
    }
  }
  __syncthreads();

  const u32 rows = min(image[NUM_QO_ROWS], p.max_rows);
  for (u32 row = thread; row < max(rows, rows_before); row += blockDim.x) {
    p.positions[row] = 0;
    p.slot_mapping[row] = -1;
  }
  __syncthreads();

  const TokenRow* tokens = reinterpret_cast<const TokenRow*>(image + image[TOKENS]);
  const SequenceRow* sequences = reinterpret_cast<const SequenceRow*>(image + image[SEQUENCES]);
  const SegmentRow* segments = reinterpret_cast<const SegmentRow*>(image + image[SEGMENTS]);
  const u32* page_ids = image + image[PAGE_IDS];
  const u32 page_size = image[PAGE_SIZE];
  const u32 num_tokens = image[NUM_TOKENS];
  for (u32 i = thread; i < num_tokens; i += blockDim.x) {
    const u32 row = tokens[i].q_row;
    const SequenceRow sequence = sequences[tokens[i].seq];
    const u32 query = row - sequence.qo_begin;
    if (row >= rows || query + sequence.kv_len < sequence.qo_len) continue;
    const u32 position = sequence.kv_len - sequence.qo_len + query;
    p.positions[row] = position;
    if (query < sequence.num_cached_rows || sequence.leaf == NONE) continue;
    SegmentRow segment = segments[sequence.leaf];
    while (segment.start_pos > position && segment.parent != NONE) segment = segments[segment.parent];
    const u32 offset = position - segment.start_pos;
    const i64 page = page_ids[segment.ids_begin + offset / page_size];
    p.slot_mapping[row] = page * page_size + offset % page_size;
  }
  if (thread == 0) {
    p.state[0] = step;
    p.state[1] = rows;
  }
}
