#include "kernels/cpu/codec_impl.h"
#include "kernels/cpu/codec_table.h"

namespace pycoll {
constinit const CodecKernels codec_kernels_baseline = kCodecKernels;
}  // namespace pycoll
