// The key-value store through which ranks find each other (c10d's Store behind an adapter, or any
// Python object with set and get).
#pragma once

#include <optional>
#include <string>

#include "core/clock.h"

namespace pycoll {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Waits for the key; nothing when it did not appear in time. May throw what the store throws.
  virtual std::optional<std::string> get(const std::string& key, Nanoseconds timeout) = 0;
  // What is there now. Waits for the store's answer, however far it is, and for nobody to set the
  // key.
  virtual std::optional<std::string> peek(const std::string& key) = 0;
  // Best effort: a store may not be able to.
  virtual void remove(const std::string& key) = 0;
};

}  // namespace pycoll
