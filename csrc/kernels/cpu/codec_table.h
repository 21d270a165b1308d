// The codecs of each instruction set.
#pragma once

#include "kernels/codec.h"

namespace pycoll {

extern const CodecKernels codec_kernels_baseline;
extern const CodecKernels codec_kernels_avx2;    // empty unless built for x86
extern const CodecKernels codec_kernels_avx512;  // empty unless built for x86

}  // namespace pycoll
