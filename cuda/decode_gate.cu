// -DCHUNKCACHE_TYPE=F16|BF16 -DCHUNKCACHE_NAME=symbol
#include "decode/rows.cuh"

extern "C" __global__ void __launch_bounds__(256)
    CHUNKCACHE_NAME(const __grid_constant__ chunkcache::decode::GateParams p) {
  chunkcache::decode::gate<chunkcache::CHUNKCACHE_TYPE>(p);
}
