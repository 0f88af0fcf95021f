// Nothing here was run: there was no Mac.

#include <pthread.h>
#include <sys/mman.h>

#include "platform/platform.h"
#include "platform/posix.h"

namespace fitter::platform {

// Fresh pages over the old ones, which madvise would leave as they are.
bool forget(void * base, size_t size) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap(base, size, PROT_READ | PROT_WRITE, flags, -1, 0) == base;
}

uintptr_t top_of_stack() { return reinterpret_cast<uintptr_t>(pthread_get_stackaddr_np(pthread_self())); }

int memory_file() { return -1; }

}  // namespace fitter::platform
