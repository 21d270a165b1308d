#include "transport/tcp/frame.h"

#include <sstream>

#include "core/error.h"

namespace pycoll::tcp {

std::string OpenBody::to_text() const {
  return concat(key.group, " ", key.local, " ", key.remote, " ", number);
}

bool OpenBody::parse(const std::string& text, OpenBody& body) {
  std::istringstream in(text);
  in >> body.key.group >> body.key.local >> body.key.remote >> body.number;
  return static_cast<bool>(in) && body.key.group.size() <= 256;
}

}  // namespace pycoll::tcp
