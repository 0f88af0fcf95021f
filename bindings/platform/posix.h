// What posix.cpp wants of linux.cpp or macos.cpp.

#pragma once

namespace fitter::platform {

// A file of memory. -1 where the system has none.
int memory_file();

}  // namespace fitter::platform
