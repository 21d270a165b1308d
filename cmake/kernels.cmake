# One kernel source compiled once an instruction set; kernels/dispatch.cpp picks at run time.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set_source_files_properties(csrc/kernels/cpu/reduce_avx2.cpp PROPERTIES
    COMPILE_OPTIONS "-mavx2;-mf16c;-mfma")
  set_source_files_properties(csrc/kernels/cpu/reduce_avx512.cpp PROPERTIES
    COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mf16c;-mfma;-mprefer-vector-width=512")
endif()
