# One kernel source compiled once an instruction set; kernels/dispatch.cpp picks at run time.
# Paths from here, not from the includer: tests/native builds the same sources.
cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH PYCOLL_ROOT)
set(PYCOLL_KERNELS ${PYCOLL_ROOT}/csrc/kernels/cpu)
file(GLOB PYCOLL_KERNEL_SOURCES CONFIGURE_DEPENDS ${PYCOLL_KERNELS}/*.cpp)

# Nobody reads the floating-point exception flags, and without this gcc does not vectorise the
# float16 conversions. Results are the same.
set_property(SOURCE ${PYCOLL_KERNEL_SOURCES} APPEND PROPERTY COMPILE_OPTIONS -fno-trapping-math)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  file(GLOB PYCOLL_AVX2_SOURCES CONFIGURE_DEPENDS ${PYCOLL_KERNELS}/*_avx2.cpp)
  set_property(SOURCE ${PYCOLL_AVX2_SOURCES} APPEND PROPERTY COMPILE_OPTIONS -mavx2 -mf16c -mfma)
  file(GLOB PYCOLL_AVX512_SOURCES CONFIGURE_DEPENDS ${PYCOLL_KERNELS}/*_avx512.cpp)
  set_property(SOURCE ${PYCOLL_AVX512_SOURCES} APPEND PROPERTY COMPILE_OPTIONS
    -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c -mfma -mprefer-vector-width=512)
endif()
