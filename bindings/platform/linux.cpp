#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "platform/platform.h"
#include "platform/posix.h"

// glibc's, whose header is its own; other C libraries have none
extern "C" __attribute__((weak)) void * __libc_stack_end;  // NOLINT(bugprone-reserved-identifier)

namespace fitter::platform {

bool forget(void * base, size_t size) { return madvise(base, size, MADV_DONTNEED) == 0; }

uintptr_t top_of_stack() {
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) {
        // that of the first thread is read from /proc, which is not everywhere
        return reinterpret_cast<uintptr_t>(&__libc_stack_end != nullptr ? __libc_stack_end : nullptr);
    }
    void * lowest = nullptr;
    size_t size   = 0;
    pthread_attr_getstack(&attributes, &lowest, &size);
    pthread_attr_destroy(&attributes);
    return reinterpret_cast<uintptr_t>(lowest) + size;
}

int memory_file() {
#ifdef SYS_memfd_create
    // By number: the C library of older distributions does not have it.
    constexpr unsigned int close_on_exec = 1;
    constexpr unsigned int never_execute = 8;

    const auto create = [](unsigned int flags) {
        return static_cast<int>(syscall(SYS_memfd_create, "fitter-skeleton", flags));
    };
    // Some systems insist on the second flag, older ones do not know it.
    const int fd = create(close_on_exec | never_execute);
    return fd < 0 && errno == EINVAL ? create(close_on_exec) : fd;
#else
    return -1;
#endif
}

}  // namespace fitter::platform
