// -DCHUNKCACHE_TYPE=F16|BF16 -DCHUNKCACHE_NAME=symbol
#include "decode/rows.cuh"

extern "C" __global__ void __cluster_dims__(chunkcache::decode::NORM_BLOCKS, 1, 1) __launch_bounds__(256)
    CHUNKCACHE_NAME(const __grid_constant__ chunkcache::decode::NormParams p) {
  chunkcache::decode::normalize<chunkcache::CHUNKCACHE_TYPE>(p);
}
