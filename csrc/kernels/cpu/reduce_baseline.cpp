#include "kernels/cpu/reduce_impl.h"

namespace pycoll {
constinit const ReduceTable reduce_table_baseline = make_reduce_table();
}  // namespace pycoll
