// One instance of two-phase attention: compile with
//   -DCHUNKCACHE_TYPE=F16|BF16 -DCHUNKCACHE_HEAD_DIM=n -DCHUNKCACHE_NAME=symbol
//   [-DCHUNKCACHE_TMA] [-DCHUNKCACHE_KV=E4M3, and then -DCHUNKCACHE_TYPE=F16]
#include "tpp_attention.cuh"

extern "C" __global__ void __launch_bounds__(chunkcache::tpp::Shape<CHUNKCACHE_HEAD_DIM>::threads, 1)
    CHUNKCACHE_NAME(const __grid_constant__ chunkcache::TppParams p) {
  chunkcache::tpp::attention<chunkcache::CHUNKCACHE_TYPE, CHUNKCACHE_HEAD_DIM>(p);
}
