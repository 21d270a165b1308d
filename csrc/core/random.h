// Names that nobody can guess.
#pragma once

#include <string>

namespace pycoll {

// 128 bits from the kernel's generator, in hexadecimal.
std::string random_name();

}  // namespace pycoll
