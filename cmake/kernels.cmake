# One kernel source compiled once an instruction set; kernels/dispatch.cpp picks at run time.
file(GLOB PYCOLL_KERNEL_SOURCES CONFIGURE_DEPENDS csrc/kernels/cpu/*.cpp)

# Nobody reads the floating-point exception flags, and without this gcc does not vectorise the
# float16 conversions. Results are the same.
set_property(SOURCE ${PYCOLL_KERNEL_SOURCES} APPEND PROPERTY COMPILE_OPTIONS -fno-trapping-math)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set_property(SOURCE csrc/kernels/cpu/reduce_avx2.cpp APPEND PROPERTY
    COMPILE_OPTIONS -mavx2 -mf16c -mfma)
  set_property(SOURCE csrc/kernels/cpu/reduce_avx512.cpp APPEND PROPERTY
    COMPILE_OPTIONS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c -mfma
    -mprefer-vector-width=512)
endif()
