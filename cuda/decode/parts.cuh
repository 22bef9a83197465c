// How the products of a decode step are shared out, and the sums of their parts.
//
// A product's work is cut into units: a tile of 128 weight rows times 64 columns. The units of all tiles,
// one tile after the other, go to the blocks in equal runs. So a tile may be the work of several blocks,
// each of which leaves its part of the sums, float32 [num_rows, 128]; the kernel that comes next adds the
// parts, in the order of the blocks.
#pragma once

#include "common/element.cuh"

namespace chunkcache::decode {

constexpr u32 TILE = 128;

// How a product is shared out.
struct Cut {
  u32 num_units;
  u32 num_blocks;
  u32 tile_units;

  __device__ __forceinline__ u32 begin_of(u32 block) const { return block * num_units / num_blocks; }

  __device__ __forceinline__ u32 block_of(u32 unit) const {
    return ((unit + 1) * num_blocks - 1) / num_units;
  }
};

// Parts of one product: [tile][max_parts][num_rows][128].
struct Parts {
  float* data;
  Cut cut;
  u32 max_parts;
  u32 num_rows;
  u32 unused;

  __device__ __forceinline__ float* part(u32 tile, u32 index, u32 row) const {
    return data + (static_cast<u64>(tile * max_parts + index) * num_rows + row) * TILE;
  }
};

// Where the parts of one tile are, and how many; known before they are written.
struct TileParts {
  const float* data;
  u64 stride;
  u32 count;

  __device__ __forceinline__ TileParts(const Parts& p, u32 tile, u32 row)
      : data(p.part(tile, 0, row)), stride(static_cast<u64>(p.num_rows) * TILE) {
    const u32 first = tile * p.cut.tile_units;
    count = p.cut.block_of(first + p.cut.tile_units - 1) - p.cut.block_of(first) + 1;
  }
};

__device__ __forceinline__ void add4(float4& to, float4 x) {
  to.x += x.x;
  to.y += x.y;
  to.z += x.z;
  to.w += x.w;
}

// Four columns of a tile: the first N parts are loaded at once, so that several sums wait together.
template <u32 N>
struct PartSum {
  float4 x[N];

  __device__ __forceinline__ void load(const TileParts& parts, u32 column) {
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
      x[i] = i < parts.count
                 ? *reinterpret_cast<const float4*>(parts.data + i * parts.stride + column)
                 : make_float4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ float4 total(const TileParts& parts, u32 column) const {
    float4 sum = x[0];
#pragma unroll
    for (u32 i = 1; i < N; ++i) add4(sum, x[i]);
    for (u32 i = N; i < parts.count; ++i) {
      add4(sum, *reinterpret_cast<const float4*>(parts.data + i * parts.stride + column));
    }
    return sum;
  }
};

// Four elements side by side.
template <class E>
__device__ __forceinline__ float4 unpack4(uint2 x) {
  return make_float4(E::to_float(x.x & 0xffff), E::to_float(x.x >> 16), E::to_float(x.y & 0xffff),
                     E::to_float(x.y >> 16));
}

template <class E>
__device__ __forceinline__ float4 load4(const u16* from) {
  return unpack4<E>(*reinterpret_cast<const uint2*>(from));
}

template <class E>
__device__ __forceinline__ void store4(u16* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = make_uint2(E::pack(x.x, x.y), E::pack(x.z, x.w));
}

}  // namespace chunkcache::decode
