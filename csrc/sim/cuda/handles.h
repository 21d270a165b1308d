// CUDA's opaque handles. They are numbers that look like pointers and are never used twice, so a
// handle that was destroyed is known as such for ever, and reading through one crashes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

namespace pycoll::sim::cuda {

template <class Object, class Handle>
class Handles {
 public:
  Handle add(std::shared_ptr<Object> object) {
    // Non-canonical on x86-64 and aarch64: no pointer is equal to one.
    const uint64_t number = 0x5c00'0000'0000'0000 + ++last_ * 16;
    objects_.emplace(number, std::move(object));
    return reinterpret_cast<Handle>(number);
  }

  std::shared_ptr<Object> find(Handle handle) const {
    const auto found = objects_.find(reinterpret_cast<uint64_t>(handle));
    return found == objects_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Object> remove(Handle handle) {
    auto node = objects_.extract(reinterpret_cast<uint64_t>(handle));
    return node.empty() ? nullptr : std::move(node.mapped());
  }

  const std::map<uint64_t, std::shared_ptr<Object>>& all() const { return objects_; }

 private:
  uint64_t last_ = 0;
  std::map<uint64_t, std::shared_ptr<Object>> objects_;
};

}  // namespace pycoll::sim::cuda
