#include "kernels/fused.h"

namespace pycoll {

bool can_unscale(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16 ||
         dtype == DType::float64;
}

}  // namespace pycoll
