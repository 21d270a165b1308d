// Memory that other processes can find: a memfd, named by process, descriptor and content.
//
// A name is valid for as long as its maker keeps the descriptor open, and nothing is left of it
// when the maker is killed. Descriptor numbers are used again, so the name says which file it
// means.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/fd.h"

namespace pycoll::sim::cuda {

struct FileName {
  int32_t process = 0;
  int32_t descriptor = -1;
  uint64_t inode = 0;
  uint64_t nonce = 0;  // against an inode number that was used again
};

struct SharedFile {
  UniqueFd fd;
  FileName name;
};

// Empty descriptor: errno says why.
SharedFile create_shared_file(size_t bytes);
// Empty if its maker has closed it or is gone.
UniqueFd open_shared_file(const FileName& name);

}  // namespace pycoll::sim::cuda
