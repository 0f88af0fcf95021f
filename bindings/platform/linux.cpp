#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "platform/platform.h"

namespace fitter::platform {

bool forget(void * base, size_t size) { return madvise(base, size, MADV_DONTNEED) == 0; }

uintptr_t top_of_stack() {
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) {
        return 0;
    }
    void * lowest = nullptr;
    size_t size   = 0;
    pthread_attr_getstack(&attributes, &lowest, &size);
    pthread_attr_destroy(&attributes);
    return reinterpret_cast<uintptr_t>(lowest) + size;
}

namespace {

// A file of memory. -1 where the system has none.
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

// The same on a disk: the name is gone before anything is written.
int unlinked_file() {
    const char * directory = std::getenv("TMPDIR");
    std::string  name      = std::string(directory != nullptr && *directory != '\0' ? directory : P_tmpdir) + "/fitter-XXXXXX";
    const int    fd        = mkstemp(name.data());
    if (fd >= 0) {
        unlink(name.c_str());
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
    return fd;
}

}  // namespace

int create_private_file() {
    const int in_memory = memory_file();
    const int file      = in_memory >= 0 ? in_memory : unlinked_file();
    if (file >= 0) {
        fchmod(file, S_IRUSR | S_IWUSR);
    }
    return file;
}

}  // namespace fitter::platform
