// Shared segments: memfd files, sealed, mapped once a process.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "core/fd.h"

namespace pycoll::shm {

using SharedMapping = std::shared_ptr<Mapping>;

// Makes a zero-filled file of that size that can neither shrink nor grow: a peer cannot make our
// reads fault by truncating it. Nothing appears in a file system; the memory goes when the last
// user goes, also after SIGKILL.
UniqueFd create_segment(size_t bytes);

// Maps segments. With `one_mapping_a_segment`, ranks that are threads of one process share one
// mapping of each file: ThreadSanitizer follows addresses, and is blind to races between two
// mappings.
class SegmentMapper {
 public:
  explicit SegmentMapper(bool one_mapping_a_segment = false) : share_(one_mapping_a_segment) {}

  // Throws Error(system) when the file is not a sealed segment of that size.
  SharedMapping map(const UniqueFd& fd, size_t bytes);

 private:
  using FileId = std::pair<uint64_t, uint64_t>;  // device, inode

  bool share_;
  std::mutex mutex_;
  std::map<FileId, std::weak_ptr<Mapping>> mappings_;
};

}  // namespace pycoll::shm
