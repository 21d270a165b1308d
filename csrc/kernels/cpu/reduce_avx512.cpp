// cmake/kernels.cmake sets the flags of this file on x86; elsewhere the table is empty.
#include "kernels/cpu/reduce_table.h"
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "kernels/cpu/reduce_impl.h"
#define PYCOLL_TABLE make_reduce_table()
#else
#define PYCOLL_TABLE \
  {}
#endif

namespace pycoll {
constinit const ReduceTable reduce_table_avx512 = PYCOLL_TABLE;
}  // namespace pycoll
