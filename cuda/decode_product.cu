// -DCHUNKCACHE_TYPE=F16|BF16 -DCHUNKCACHE_ROWS=8|16|32|64|96 -DCHUNKCACHE_NAME=symbol
#include "decode/product.cuh"

#ifndef CHUNKCACHE_TEAM
#define CHUNKCACHE_TEAM (CHUNKCACHE_ROWS < 32 ? 1 : 2)
#endif
constexpr chunkcache::u32 TEAM = CHUNKCACHE_TEAM;

extern "C" __global__ void __cluster_dims__(TEAM, 1, 1) __launch_bounds__(288, 1)
    CHUNKCACHE_NAME(const __grid_constant__ chunkcache::decode::ProductParams p) {
  chunkcache::decode::multiply<chunkcache::CHUNKCACHE_TYPE, CHUNKCACHE_ROWS, TEAM>(p);
}
