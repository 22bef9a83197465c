// A plain read of a buffer: the floor that the benchmarks stand beside.
// Grid: one block per 64 KB, 256 threads of sixteen 16-byte loads each.
#include "params.h"

struct ReadParams {
  const uint4* data;
  unsigned long long num_vectors;
  unsigned int* out;
};

extern "C" __global__ void __launch_bounds__(256) read_pages(const __grid_constant__ ReadParams p) {
  const unsigned long long first = blockIdx.x * 4096ull + threadIdx.x;
  uint4 value[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const unsigned long long at = first + i * 256;
    value[i] = make_uint4(0, 0, 0, 0);
    if (at < p.num_vectors) {
      asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(value[i].x), "=r"(value[i].y), "=r"(value[i].z), "=r"(value[i].w)
                   : "l"(p.data + at));
    }
  }
  unsigned int all = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) all ^= value[i].x ^ value[i].y ^ value[i].z ^ value[i].w;
  if (all == 0x12345678u) *p.out = all;
}
