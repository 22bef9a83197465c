// What lies between the products of a decode step: each kernel adds the parts of the product before it
// (parts.cuh) and computes in float32.
#pragma once

#include "common/product_ptx.cuh"
#include "decode/parts.cuh"

namespace chunkcache::decode {

// The next launch may take the place of the blocks of the one before: until this one is through it
// reads nothing but weights.
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
  ptx::let_next_launch_start();
  ptx::wait_for_launches_before();
#endif
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (u32 offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// hidden += product, or hidden = embedding[token]; then out = weight * hidden / rms(hidden).
struct NormParams {
  Parts parts;
  const u16* embedding;   // [vocabulary, width], or null
  const i64* sources;     // [rows]: i >= 0 is picked[i], else the token -1 - i
  const i64* picked;
  u16* hidden;            // [rows, width]
  const u16* weight;      // [width]
  u16* out;               // [rows, width]
  u32 width;              // a multiple of 4, up to 4096 * NORM_VECTORS
  float epsilon;
};

constexpr u32 NORM_BLOCKS = 4;   // of a row: a cluster
constexpr u32 NORM_VECTORS = 2;  // of four columns, that a thread has
constexpr u32 NORM_PARTS = 6;    // that wait together

// Grid: NORM_BLOCKS for each row, of up to 256 threads.
template <class E>
__device__ __forceinline__ void normalize(const NormParams& p) {
#if __CUDA_ARCH__ >= 900
  __shared__ float warp_sums[8];
  __shared__ float block_sums[NORM_BLOCKS];
  // Shared memory of a block may be written once the block has begun.
  ptx::cluster_arrive();
  const u32 rank = ptx::cluster_rank();
  const u32 row = blockIdx.x / NORM_BLOCKS;
  u32 columns[NORM_VECTORS];
  uint2 weight[NORM_VECTORS];
#pragma unroll
  for (u32 i = 0; i < NORM_VECTORS; ++i) {
    columns[i] = ((i * NORM_BLOCKS + rank) * blockDim.x + threadIdx.x) * 4;
    if (columns[i] < p.width) weight[i] = *reinterpret_cast<const uint2*>(p.weight + columns[i]);
  }
  follow();
  u16* hidden = p.hidden + static_cast<u64>(row) * p.width;
  const u16* from = hidden;
  if (p.embedding != nullptr) {
    const i64 source = p.sources[row];
    const i64 token = source < 0 ? -1 - source : max(p.picked[source], 0ll);
    from = p.embedding + token * p.width;
  }
  float4 x[NORM_VECTORS];
  float squares = 0;
#pragma unroll
  for (u32 i = 0; i < NORM_VECTORS; ++i) {
    if (columns[i] >= p.width) continue;
    x[i] = load4<E>(from + columns[i]);
    if (p.embedding == nullptr) {
      const TileParts parts(p.parts, columns[i] / TILE, row);
      PartSum<NORM_PARTS> sum;
      sum.load(parts, columns[i] % TILE);
      add4(x[i], sum.total(parts, columns[i] % TILE));
    }
    store4<E>(hidden + columns[i], x[i]);
    // What is normalised is what is kept.
    x[i] = make_float4(E::to_float(E::from_float(x[i].x)), E::to_float(E::from_float(x[i].y)),
                       E::to_float(E::from_float(x[i].z)), E::to_float(E::from_float(x[i].w)));
    squares += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
  }
  const u32 lane = threadIdx.x % 32;
  squares = warp_sum(squares);
  if (lane == 0) warp_sums[threadIdx.x / 32] = squares;
  __syncthreads();
  ptx::cluster_wait();
  if (threadIdx.x < 32) {
    const float sum = warp_sum(lane < blockDim.x / 32 ? warp_sums[lane] : 0.0f);
    if (lane < NORM_BLOCKS) ptx::store_at(ptx::shared_address(&block_sums[rank]), lane, sum);
  }
  ptx::cluster_sync();
  float all = 0;
#pragma unroll
  for (u32 i = 0; i < NORM_BLOCKS; ++i) all += block_sums[i];
  const float scale = rsqrtf(all / p.width + p.epsilon);
  u16* out = p.out + static_cast<u64>(row) * p.width;
#pragma unroll
  for (u32 i = 0; i < NORM_VECTORS; ++i) {
    if (columns[i] >= p.width) continue;
    const float4 w = unpack4<E>(weight[i]);
    store4<E>(out + columns[i], make_float4(w.x * (x[i].x * scale), w.y * (x[i].y * scale),
                                            w.z * (x[i].z * scale), w.w * (x[i].w * scale)));
  }
#endif
}

constexpr u32 ROTATE_PARTS = 3;  // that wait together
constexpr u32 GATE_PARTS = 2;

// q, k and v of the step: bias, norm of each head, rotation of halves; k and v go into the pages.
struct RotateParams {
  Parts parts;
  const u16* bias[3];       // of q, k and v: [heads * head_dim], or null
  const u16* norm[2];       // of q and k: [head_dim], or null
  const float* cosine;      // [positions, head_dim / 2]
  const float* sine;
  const i64* positions;     // [rows]
  const i64* slot_mapping;  // [rows], page * page_size + offset; below 0: k and v are not written
  u16* q;                   // [rows, num_qo_heads, head_dim]
  u8* k_pages;
  u8* v_pages;
  i64 k_page_bytes, k_head_bytes, k_token_bytes;
  i64 v_page_bytes, v_head_bytes, v_token_bytes;
  u32 first_tile[3];        // of q, k and v
  u32 num_qo_heads;
  u32 num_kv_heads;
  u32 head_dim;             // a multiple of 8
  u32 page_size;
  float epsilon;
};

// Grid: [ceil(heads * head_dim / 8 / 256), rows]; a thread has four columns of either half of a head. With
// norms, head_dim / 8 is a power of two up to 32.
template <class E>
__device__ __forceinline__ void rotate(const RotateParams& p) {
  const u32 row = blockIdx.y;
  const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 pieces = p.head_dim / 8;
  const u32 half = p.head_dim / 2;
  const u32 num_heads = p.num_qo_heads + 2 * p.num_kv_heads;
  u32 head = index / pieces;
  const u32 column = (index - head * pieces) * 4;
  const bool idle = head >= num_heads;
  head = idle ? 0 : head;
  const u32 kind = (head >= p.num_qo_heads) + (head >= p.num_qo_heads + p.num_kv_heads);
  head -= kind == 0 ? 0 : p.num_qo_heads + (kind == 2 ? p.num_kv_heads : 0);
  const u32 at = head * p.head_dim + column;
  const TileParts low_parts(p.parts, p.first_tile[kind] + at / TILE, row);
  const TileParts high_parts(p.parts, p.first_tile[kind] + (at + half) / TILE, row);
  follow();
  PartSum<ROTATE_PARTS> low_sum, high_sum;
  low_sum.load(low_parts, at % TILE);
  high_sum.load(high_parts, (at + half) % TILE);
  float4 low = low_sum.total(low_parts, at % TILE);
  float4 high = high_sum.total(high_parts, (at + half) % TILE);
  if (p.bias[kind] != nullptr) {
    const float4 a = load4<E>(p.bias[kind] + at);
    const float4 b = load4<E>(p.bias[kind] + at + half);
    low = make_float4(low.x + a.x, low.y + a.y, low.z + a.z, low.w + a.w);
    high = make_float4(high.x + b.x, high.y + b.y, high.z + b.z, high.w + b.w);
  }
  if (p.norm[0] != nullptr) {
    float squares = low.x * low.x + low.y * low.y + low.z * low.z + low.w * low.w + high.x * high.x +
                    high.y * high.y + high.z * high.z + high.w * high.w;
    for (u32 offset = pieces / 2; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(~0u, squares, offset);
    }
    if (kind < 2) {
      const float scale = rsqrtf(squares / p.head_dim + p.epsilon);
      const float4 a = load4<E>(p.norm[kind] + column);
      const float4 b = load4<E>(p.norm[kind] + column + half);
      low = make_float4(low.x * scale * a.x, low.y * scale * a.y, low.z * scale * a.z,
                        low.w * scale * a.w);
      high = make_float4(high.x * scale * b.x, high.y * scale * b.y, high.z * scale * b.z,
                         high.w * scale * b.w);
    }
  }
  if (idle) return;
  if (kind < 2) {
    const u64 from = static_cast<u64>(p.positions[row]) * half + column;
    const float4 c = *reinterpret_cast<const float4*>(p.cosine + from);
    const float4 s = *reinterpret_cast<const float4*>(p.sine + from);
    const float4 a = low;
    const float4 b = high;
    low = make_float4(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y, a.z * c.z - b.z * s.z,
                      a.w * c.w - b.w * s.w);
    high = make_float4(b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y, b.z * c.z + a.z * s.z,
                       b.w * c.w + a.w * s.w);
  }
  u16* to;
  if (kind == 0) {
    to = p.q + (static_cast<u64>(row) * p.num_qo_heads + head) * p.head_dim;
  } else {
    const i64 slot = p.slot_mapping[row];
    if (slot < 0) return;
    const i64 page = slot / p.page_size;
    const i64 offset = slot - page * p.page_size;
    to = reinterpret_cast<u16*>(kind == 1 ? p.k_pages + page * p.k_page_bytes +
                                                offset * p.k_token_bytes + head * p.k_head_bytes
                                          : p.v_pages + page * p.v_page_bytes +
                                                offset * p.v_token_bytes + head * p.v_head_bytes);
  }
  store4<E>(to + column, low);
  store4<E>(to + column + half, high);
}

// out = silu(gate) * up.
struct GateParams {
  Parts parts;
  u16* out;           // [rows, width]
  u32 first_up_tile;
  u32 width;          // a multiple of 4
};

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

// Grid: [ceil(width / 4 / 256), rows].
template <class E>
__device__ __forceinline__ void gate(const GateParams& p) {
  const u32 row = blockIdx.y;
  const u32 column = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  const bool idle = column >= p.width;
  const u32 tile = idle ? 0 : column / TILE;
  const TileParts gate_parts(p.parts, tile, row);
  const TileParts up_parts(p.parts, p.first_up_tile + tile, row);
  follow();
  if (idle) return;
  PartSum<GATE_PARTS> gate_sum, up_sum;
  gate_sum.load(gate_parts, column % TILE);
  up_sum.load(up_parts, column % TILE);
  const float4 g = gate_sum.total(gate_parts, column % TILE);
  const float4 u = up_sum.total(up_parts, column % TILE);
  store4<E>(p.out + static_cast<u64>(row) * p.width + column,
            make_float4(silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w));
}

}  // namespace chunkcache::decode
