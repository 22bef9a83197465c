// -DCHUNKCACHE_TYPE=F16|BF16 -DCHUNKCACHE_NAME=symbol
#include "decode/product.cuh"

extern "C" __global__ void __launch_bounds__(288, 1)
    CHUNKCACHE_NAME(const __grid_constant__ chunkcache::decode::ProductParams p) {
  chunkcache::decode::multiply<chunkcache::CHUNKCACHE_TYPE>(p);
}
