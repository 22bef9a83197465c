// Copy-on-write of chunk heads, in all layers: the first tokens of one chunk into another.
//
// Grid: (copies, layers * 2 * num_kv_heads). Memory: an arena [layer][chunk][K, V][head][token][dim]
// of any element type; the head of one (layer, chunk, K or V, head) is contiguous.
#include "params.h"

namespace chunkcache {

struct CopyRow {
  u32 src;
  u32 dst;
  u32 num_tokens;
  u32 unused;
};

struct CopyChunkParams {
  u8* arena;
  const CopyRow* copies;
  i64 layer_bytes, chunk_bytes;
  u32 head_bytes;        // of one K or V head of a chunk: chunk_size * head_dim * item size
  u32 token_bytes;       // a multiple of 16
  u32 heads;             // 2 * num_kv_heads
  u32 unused;
};

}  // namespace chunkcache

extern "C" __global__ void __launch_bounds__(128)
    copy_chunk(const __grid_constant__ chunkcache::CopyChunkParams p) {
  using namespace chunkcache;
  const CopyRow row = p.copies[blockIdx.x];
  const u32 layer = blockIdx.y / p.heads;
  const u32 head = blockIdx.y - layer * p.heads;
  u8* base = p.arena + layer * p.layer_bytes + head * static_cast<i64>(p.head_bytes);
  const uint4* from = reinterpret_cast<const uint4*>(base + row.src * p.chunk_bytes);
  uint4* to = reinterpret_cast<uint4*>(base + row.dst * p.chunk_bytes);
  const u32 vectors = row.num_tokens * p.token_bytes / 16;
  for (u32 i = threadIdx.x; i < vectors; i += blockDim.x) to[i] = from[i];
}
