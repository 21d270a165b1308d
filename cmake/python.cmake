# The Python modules. torch is asked for its own directory: find_package(Torch) would drag in CUDA targets.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

function(pycoll_ask_python out code)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "${code}" OUTPUT_VARIABLE answer
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(${out} "${answer}" PARENT_SCOPE)
endfunction()

pycoll_ask_python(PYCOLL_PYBIND11_INCLUDE "import pybind11; print(pybind11.get_include())")

set(PYCOLL_RPATH "$ORIGIN")
file(GLOB PYCOLL_PYTHON_SOURCES CONFIGURE_DEPENDS csrc/python/*.cpp)
Python_add_library(_core MODULE WITH_SOABI ${PYCOLL_PYTHON_SOURCES})
target_include_directories(_core SYSTEM PRIVATE ${PYCOLL_PYBIND11_INCLUDE})
target_compile_options(_core PRIVATE -Wall -Wextra)
target_link_libraries(_core PRIVATE pycoll_core)
set_target_properties(_core PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "${PYCOLL_RPATH}")
install(TARGETS _core pycoll_core LIBRARY DESTINATION pycoll)

if(PYCOLL_TORCH)
  pycoll_ask_python(PYCOLL_TORCH_FACTS
    "import os, torch; print(os.path.dirname(torch.__file__), torch.__version__, sep='|')")
  string(REPLACE "|" ";" PYCOLL_TORCH_FACTS "${PYCOLL_TORCH_FACTS}")
  list(GET PYCOLL_TORCH_FACTS 0 PYCOLL_TORCH_ROOT)
  list(GET PYCOLL_TORCH_FACTS 1 PYCOLL_TORCH_VERSION)
  string(REGEX REPLACE "^([0-9]+)\\.([0-9]+).*" "\\1_\\2" PYCOLL_TORCH_TAG "${PYCOLL_TORCH_VERSION}")
  message(STATUS "torch ${PYCOLL_TORCH_VERSION} in ${PYCOLL_TORCH_ROOT}")

  file(GLOB PYCOLL_TORCH_SOURCES CONFIGURE_DEPENDS csrc/torch/*.cpp)
  set(module _c10d_${PYCOLL_TORCH_TAG})
  Python_add_library(${module} MODULE WITH_SOABI ${PYCOLL_TORCH_SOURCES})
  target_include_directories(${module} SYSTEM PRIVATE
    ${PYCOLL_TORCH_ROOT}/include ${PYCOLL_TORCH_ROOT}/include/torch/csrc/api/include)
  target_compile_definitions(${module} PRIVATE
    PYCOLL_MODULE=${module} USE_DISTRIBUTED _GLIBCXX_USE_CXX11_ABI=1)
  target_compile_options(${module} PRIVATE -Wall -Wextra -g0)
  target_link_directories(${module} PRIVATE ${PYCOLL_TORCH_ROOT}/lib)
  target_link_libraries(${module} PRIVATE pycoll_core c10 torch_cpu torch_python)
  set_target_properties(${module} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "${PYCOLL_RPATH}")
  install(TARGETS ${module} LIBRARY DESTINATION pycoll)
endif()
