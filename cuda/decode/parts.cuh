// How the products of a decode step are shared out, and the sums of their parts.
//
// A product's work is cut into units: a tile of 128 weight rows (two side by side for a team of two
// blocks) times 64 columns. The units of all tiles, one tile after the other, go to the teams in equal
// runs. So a tile may be the work of several teams in turn, each of which leaves its part of the sums,
// float32 [num_rows, 128]; the kernel that comes next adds the parts, in the order of the teams.
#pragma once

#include "common/element.cuh"

namespace chunkcache::decode {

constexpr u32 TILE = 128;

// Parts of one product: [tile][max_parts][num_rows][128].
struct Parts {
  float* data;
  u32 num_units;
  u32 num_teams;
  u32 team_blocks;    // tiles side by side
  u32 tile_units;     // units of a tile
  u32 max_parts;
  u32 num_rows;

  __device__ __forceinline__ u32 begin_of(u32 team) const { return team * num_units / num_teams; }

  __device__ __forceinline__ u32 team_of(u32 unit) const {
    return ((unit + 1) * num_teams - 1) / num_units;
  }

  __device__ __forceinline__ float* part(u32 tile, u32 index, u32 row) const {
    return data + (static_cast<u64>(tile * max_parts + index) * num_rows + row) * TILE;
  }
};

// The parts of one tile, as found before they are written.
struct TileParts {
  const Parts& parts;
  u32 tile;
  u32 count;

  __device__ __forceinline__ TileParts(const Parts& p, u32 tile_) : parts(p), tile(tile_) {
    const u32 first_unit = tile / p.team_blocks * p.tile_units;
    count = p.team_of(first_unit + p.tile_units - 1) - p.team_of(first_unit) + 1;
  }

  // The sum at four columns of a row. Four parts are under way at a time.
  __device__ __forceinline__ float4 sum(u32 row, u32 column) const {
    const float* from = parts.part(tile, 0, row) + column;
    const u64 stride = static_cast<u64>(parts.num_rows) * TILE;
    float4 total = make_float4(0, 0, 0, 0);
    for (u32 i = 0; i < count; i += 4) {
      float4 x[4];
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        x[j] = i + j < count ? *reinterpret_cast<const float4*>(from + (i + j) * stride)
                             : make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        total.x += x[j].x;
        total.y += x[j].y;
        total.z += x[j].z;
        total.w += x[j].w;
      }
    }
    return total;
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
