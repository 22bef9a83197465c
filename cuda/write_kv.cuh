// K/V of new tokens into their slots, converted to the pages' type.
//
// Grid: one block a row; a thread takes eight columns of one head at a time. Rows whose slot is
// negative are left out: padding, and tokens that are there already. Memory: k and v
// [rows, num_kv_heads, head_dim] by strides; pages by base and strides of page, head and token.
// Pages of e4m3 hold x / scale, with a scale for each head.
#pragma once

#include "common/element.cuh"

namespace chunkcache {

struct WriteKvParams {
  const void* k;
  const void* v;
  i64 k_row, k_head, v_row, v_head;                     // elements
  u8* k_pages;
  u8* v_pages;
  i64 k_page_bytes, k_head_bytes, k_token_bytes;
  i64 v_page_bytes, v_head_bytes, v_token_bytes;
  const i64* slot_mapping;                              // [rows], page * page_size + offset
  const float* k_scale;                                 // e4m3: [num_kv_heads], or null for 1
  const float* v_scale;
  u32 num_kv_heads;
  u32 head_dim;                                         // a multiple of 8
  u32 page_size;
  u32 unused;
};

// Writes columns [column, column + 8) of one head.
template <class From, class To>
__device__ __forceinline__ void write_columns(u8* to, const typename From::Storage* from, u32 column,
                                              const float* scale) {
  from += column;
  if constexpr (From::id == To::id) {
    *reinterpret_cast<uint4*>(to + column * 2) = *reinterpret_cast<const uint4*>(from);
  } else {
    float x[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) x[i] = From::to_float(from[i]);
    if constexpr (To::id == E4M3::id) {
      if (scale != nullptr) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) x[i] = __fdiv_rn(x[i], *scale);
      }
      const auto four = [&](u32 i) {
        return To::pack(x[i], x[i + 1]) | static_cast<u32>(To::pack(x[i + 2], x[i + 3])) << 16;
      };
      *reinterpret_cast<uint2*>(to + column) = make_uint2(four(0), four(4));
    } else {
      *reinterpret_cast<uint4*>(to + column * 2) =
          make_uint4(To::pack(x[0], x[1]), To::pack(x[2], x[3]), To::pack(x[4], x[5]),
                     To::pack(x[6], x[7]));
    }
  }
}

template <class From, class To>
__device__ __forceinline__ void write_kv(const WriteKvParams& p) {
  const u64 row = blockIdx.x;
  const i64 slot = p.slot_mapping[row];
  if (slot < 0) return;
  const i64 page = slot / p.page_size;
  const i64 offset = slot - page * p.page_size;
  const u32 pieces = p.head_dim / 8;
  using Storage = typename From::Storage;
  const Storage* k = static_cast<const Storage*>(p.k) + row * p.k_row;
  const Storage* v = static_cast<const Storage*>(p.v) + row * p.v_row;
  u8* k_to = p.k_pages + page * p.k_page_bytes + offset * p.k_token_bytes;
  u8* v_to = p.v_pages + page * p.v_page_bytes + offset * p.v_token_bytes;
  for (u32 i = threadIdx.x; i < p.num_kv_heads * pieces; i += blockDim.x) {
    const u32 head = i / pieces;
    const u32 column = (i - head * pieces) * 8;
    write_columns<From, To>(k_to + head * p.k_head_bytes, k + head * p.k_head, column,
                            p.k_scale == nullptr ? nullptr : p.k_scale + head);
    write_columns<From, To>(v_to + head * p.v_head_bytes, v + head * p.v_head, column,
                            p.v_scale == nullptr ? nullptr : p.v_scale + head);
  }
}

}  // namespace chunkcache
