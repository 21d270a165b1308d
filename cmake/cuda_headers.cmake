# PYCOLL_CUDA_INCLUDE: the directories of CUDA's headers; empty where there are none. No CUDA needs to
# be installed: for the simulator, pip's nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl
# are enough.
#
# As a script (cmake -P) this file prints them.
#
# Set it, or CUDA_HOME in the environment, to choose. Else the toolkit of /usr/local/cuda or of the
# nvcc on PATH, or the packages of PYCOLL_PYTHON (or python3): the first that has everything.

# One header of each part; packages put the parts in different places.
set(PYCOLL_CUDA_HEADERS cuda_runtime_api.h crt/host_defines.h nv/target)

# Where those headers are below the given directories; empty if one is missing.
function(pycoll_cuda_headers_below out)
  set(found "")
  foreach(header ${PYCOLL_CUDA_HEADERS})
    set(place "")
    foreach(root ${ARGN})
      foreach(include ${root}/include ${root}/include/cccl)
        if(NOT place AND EXISTS ${include}/${header})
          set(place ${include})
        endif()
      endforeach()
    endforeach()
    if(NOT place)
      set(${out} "" PARENT_SCOPE)
      return()
    endif()
    list(APPEND found ${place})
  endforeach()
  list(REMOVE_DUPLICATES found)
  set(${out} ${found} PARENT_SCOPE)
endfunction()

function(pycoll_find_cuda_headers out)
  set(toolkits $ENV{CUDA_HOME} /usr/local/cuda)
  find_program(nvcc nvcc NO_CACHE)
  if(nvcc)
    file(REAL_PATH ${nvcc} nvcc)
    list(APPEND toolkits ${nvcc}/../..)
  endif()
  foreach(toolkit ${toolkits})
    pycoll_cuda_headers_below(found ${toolkit})
    if(found)
      set(${out} ${found} PARENT_SCOPE)
      return()
    endif()
  endforeach()

  set(python python3)
  if(PYCOLL_PYTHON)
    set(python ${PYCOLL_PYTHON})
  endif()
  # CUDA 13's packages share nvidia/cu13; those of 12 have a directory each.
  execute_process(COMMAND ${python} -c "import glob, sys
print(*(d for name in ('cu[0-9]*', 'cuda_*') for path in sys.path
        for d in sorted(glob.glob(f'{path}/nvidia/{name}'))), sep=';')"
    OUTPUT_VARIABLE packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  pycoll_cuda_headers_below(found ${packages})
  set(${out} ${found} PARENT_SCOPE)
endfunction()

if(NOT PYCOLL_CUDA_INCLUDE)
  pycoll_find_cuda_headers(PYCOLL_CUDA_INCLUDE)
endif()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  message("${PYCOLL_CUDA_INCLUDE}")
endif()
