# libpycoll_cuda.so: kernels, and the host side of collectives on GPUs. Everything that needs CUDA is
# in it; the modules open it when they first meet a GPU, so one build serves machines without.
#
#   PYCOLL_CUDA            AUTO (default): where there are nvcc and a torch that is built for CUDA; ON; OFF
#   CUDA_HOME              the toolkit (environment), else that of nvcc on PATH, else /usr/local/cuda,
#                          else pip's nvidia-cuda-nvcc and its companions
#   TORCH_CUDA_ARCH_LIST   architectures (environment), as torch's own extensions take them:
#                          "8.0 9.0+PTX". Default: 8.0, 9.0 and 10.0+PTX, as far as nvcc knows them
#
# nvcc is run by hand: CMake's CUDA language wants to link, against libraries that pip's toolkit
# keeps elsewhere, and the only thing to link here is the runtime.
set(PYCOLL_CUDA AUTO CACHE STRING "Build the CUDA part: AUTO, ON or OFF")

function(pycoll_find_nvcc out)
  set(homes "$ENV{CUDA_HOME}")
  pycoll_ask_python(packages "import glob, sys
print(*(d for path in sys.path for d in sorted(glob.glob(f'{path}/nvidia/cu[0-9]*'))), sep=';')")
  find_program(nvcc nvcc HINTS "$ENV{CUDA_HOME}/bin" NO_CACHE PATHS /usr/local/cuda/bin)
  foreach(package ${packages})
    if(NOT nvcc AND EXISTS ${package}/bin/nvcc)
      set(nvcc ${package}/bin/nvcc)
    endif()
  endforeach()
  set(${out} "${nvcc}" PARENT_SCOPE)
endfunction()

# Where nvcc's toolkit is. `nvcc` may be a script beside other programs, so nvcc itself is asked.
function(pycoll_find_cudart out nvcc)
  execute_process(COMMAND ${nvcc} --dryrun -x cu -E /dev/null ERROR_VARIABLE plan OUTPUT_QUIET)
  string(REGEX MATCH "TOP=([^\n]+)" found "${plan}")
  set(top ${CMAKE_MATCH_1})
  file(GLOB candidates ${top}/lib64/libcudart.so ${top}/lib/libcudart.so ${top}/lib64/libcudart.so.*
    ${top}/lib/libcudart.so.* ${top}/targets/*/lib/libcudart.so)
  list(GET candidates 0 first)
  if(NOT first)
    message(FATAL_ERROR "no libcudart.so near ${nvcc} (${top}): pip install nvidia-cuda-runtime, or set CUDA_HOME")
  endif()
  set(${out} ${first} PARENT_SCOPE)
endfunction()

# -gencode options for the architectures that are asked for, or for those of the default that nvcc knows.
function(pycoll_gencode out nvcc)
  execute_process(COMMAND ${nvcc} --list-gpu-arch OUTPUT_VARIABLE known COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "compute_[0-9]+" known "${known}")
  set(wanted "$ENV{TORCH_CUDA_ARCH_LIST}")
  if(NOT wanted)
    foreach(architecture 8.0 9.0 10.0)
      string(REPLACE "." "" number ${architecture})
      if("compute_${number}" IN_LIST known)
        list(APPEND wanted ${architecture})
      endif()
    endforeach()
    string(APPEND wanted "+PTX")  # for what comes after the newest
  endif()
  string(REGEX REPLACE "[ ,]+" ";" wanted "${wanted}")
  set(options "")
  foreach(architecture ${wanted})
    string(REGEX MATCH "^([0-9]+)\\.([0-9]+)([af]?)(\\+PTX)?$" valid "${architecture}")
    if(NOT valid)
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST: '${architecture}' is not like 9.0 or 9.0+PTX")
    endif()
    set(number ${CMAKE_MATCH_1}${CMAKE_MATCH_2}${CMAKE_MATCH_3})
    list(APPEND options -gencode arch=compute_${number},code=sm_${number})
    if(CMAKE_MATCH_4)
      list(APPEND options -gencode arch=compute_${number},code=compute_${number})
    endif()
  endforeach()
  set(${out} "${options}" PARENT_SCOPE)
endfunction()

function(pycoll_add_cuda_library nvcc)
  pycoll_gencode(gencode ${nvcc})
  pycoll_find_cudart(cudart ${nvcc})
  include(${PROJECT_SOURCE_DIR}/cmake/cuda_headers.cmake)
  message(STATUS "CUDA part: ${nvcc}, ${cudart}, ${gencode}")

  file(GLOB kernels CONFIGURE_DEPENDS csrc/kernels/cuda/*.cu)
  set(objects "")
  foreach(kernel ${kernels})
    cmake_path(GET kernel STEM name)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/cuda/${name}.o)
    # No contraction and no fast math: the bits are the CPU's.
    add_custom_command(OUTPUT ${object} DEPENDS ${kernel} DEPFILE ${object}.d
      COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_CURRENT_BINARY_DIR}/cuda
      COMMAND ${nvcc} -std=c++20 -O3 -fmad=false ${gencode} -I ${PROJECT_SOURCE_DIR}/csrc
        -Xcompiler -fPIC,-fvisibility=hidden -MD -MF ${object}.d -c ${kernel} -o ${object}
      COMMENT "nvcc ${name}.cu" VERBATIM)
    list(APPEND objects ${object})
  endforeach()

  file(GLOB hosts CONFIGURE_DEPENDS csrc/kernels/cuda/*.cpp csrc/transport/cuda_ipc/*.cpp
    csrc/runtime/device/*.cpp)
  add_library(pycoll_cuda SHARED ${hosts} ${objects})
  target_include_directories(pycoll_cuda SYSTEM PRIVATE ${PYCOLL_CUDA_INCLUDE})
  target_compile_options(pycoll_cuda PRIVATE -Wall -Wextra -ffp-contract=off)
  target_link_libraries(pycoll_cuda PRIVATE pycoll_core ${cudart})
  # The runtime that torch or CuPy has loaded already; without either that of pip's package beside us.
  set_target_properties(pycoll_cuda PROPERTIES BUILD_WITH_INSTALL_RPATH ON
    INSTALL_RPATH "$ORIGIN:$ORIGIN/../nvidia/cu13/lib:$ORIGIN/../nvidia/cuda_runtime/lib")
  install(TARGETS pycoll_cuda LIBRARY DESTINATION pycoll)

  # Checks and times the kernels alone (tests/gpu, benchmarks/cuda_kernels.py). Not in a copy without tests.
  set(tests ${PROJECT_SOURCE_DIR}/tests/gpu)
  if(EXISTS ${tests}/kernels.cpp)
    file(GLOB kernel_hosts CONFIGURE_DEPENDS csrc/kernels/cuda/*.cpp)
    add_executable(gpu_kernels EXCLUDE_FROM_ALL ${tests}/kernels.cpp ${tests}/codecs.cpp
      ${tests}/lists.cpp ${tests}/world.cpp ${tests}/group_views.cpp ${kernel_hosts} ${objects})
    target_include_directories(gpu_kernels PRIVATE ${PROJECT_SOURCE_DIR}/tests)
    add_dependencies(gpu_kernels pycoll_cuda)  # whose objects these are
    target_include_directories(gpu_kernels SYSTEM PRIVATE ${PYCOLL_CUDA_INCLUDE})
    target_compile_options(gpu_kernels PRIVATE -Wall -Wextra -ffp-contract=off)
    target_link_libraries(gpu_kernels PRIVATE pycoll_core ${cudart})
  endif()
endfunction()

if(NOT PYCOLL_CUDA STREQUAL "OFF")
  set(torch_cuda "")
  if(PYCOLL_TORCH)
    pycoll_ask_python(torch_cuda "import torch; print(torch.version.cuda or '')")
  endif()
  if(PYCOLL_CUDA STREQUAL "ON" OR torch_cuda)
    pycoll_find_nvcc(nvcc)
    if(nvcc)
      pycoll_add_cuda_library(${nvcc})
    elseif(PYCOLL_CUDA STREQUAL "ON")
      message(FATAL_ERROR "PYCOLL_CUDA=1 needs nvcc: set CUDA_HOME, or pip install nvidia-cuda-nvcc")
    else()
      message(STATUS "no nvcc: without the CUDA part, though torch has CUDA ${torch_cuda}")
    endif()
  endif()
endif()
