// -DCHUNKCACHE_FROM=F32|F16|BF16 -DCHUNKCACHE_TYPE=F16|BF16|E4M3 -DCHUNKCACHE_NAME=symbol
#include "write_kv.cuh"

extern "C" __global__ void __launch_bounds__(128)
    CHUNKCACHE_NAME(const __grid_constant__ chunkcache::WriteKvParams p) {
  chunkcache::write_kv<chunkcache::CHUNKCACHE_FROM, chunkcache::CHUNKCACHE_TYPE>(p);
}
