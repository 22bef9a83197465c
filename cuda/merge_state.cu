// -DCHUNKCACHE_TYPE=F32|F16|BF16 -DCHUNKCACHE_NAME=symbol
#include "merge_state.cuh"

extern "C" __global__ void __launch_bounds__(256)
    CHUNKCACHE_NAME(const __grid_constant__ chunkcache::MergeStateParams p) {
  chunkcache::merge_state<chunkcache::CHUNKCACHE_TYPE>(p);
}
