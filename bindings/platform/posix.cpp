// What Linux and macOS have in common.

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "platform/platform.h"
#include "platform/posix.h"

namespace fitter::platform {

void * symbol(const char * name) { return dlsym(RTLD_DEFAULT, name); }

void * symbol_of(void * library, const char * name) { return dlsym(library, name); }

void * open_library(const char * path, std::string & why) {
    void * library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char * error = dlerror();
        why                = error != nullptr ? error : "";
    }
    return library;
}

const void * library_of(const void * address) {
    Dl_info info = {};
    return dladdr(address, &info) != 0 ? info.dli_fbase : nullptr;
}

void * reserve(size_t size, use used) {
    const int access = used == use::by_pages ? PROT_READ | PROT_WRITE : PROT_NONE;
    void *    base   = mmap(nullptr, size, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? nullptr : base;
}

void release(void * base, size_t size) { munmap(base, size); }

int open_file(const char * path) { return open(path, O_RDONLY | O_CLOEXEC); }

int create_file(const char * path) { return open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666); }

namespace {

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

void close_file(int file) { close(file); }

uint64_t length_of(int file) {
    struct stat status = {};
    return fstat(file, &status) == 0 && S_ISREG(status.st_mode) ? static_cast<uint64_t>(status.st_size) : 0;
}

size_t read_at(int file, void * output, size_t n, uint64_t offset) {
    const ssize_t done = pread(file, output, n, static_cast<off_t>(offset));
    return done > 0 ? static_cast<size_t>(done) : 0;
}

bool write_all(int file, const void * data, size_t n) {
    for (size_t done = 0; done < n;) {
        const ssize_t written = write(file, static_cast<const char *>(data) + done, n - done);
        if (written < 0 && errno != EINTR) {
            return false;
        }
        done += written > 0 ? static_cast<size_t>(written) : 0;
    }
    return true;
}

bool lengthen(int file, uint64_t length) { return ftruncate(file, static_cast<off_t>(length)) == 0; }

void stop_thread() {
    // Signals are for threads that can handle them.
    sigset_t every;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, nullptr);
    for (;;) {
        pause();
    }
}

namespace {

constexpr int of_faults[] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV};

void (*called)(long) = nullptr;

void on_signal(int number, siginfo_t * info, void *) {
    // above 0 the kernel says what the process did; abort() signals its own process
    if (info->si_code > 0 || info->si_pid == getpid()) {
        called(getpid());
    }
    // The default action is back (SA_RESETHAND). A fault comes again by itself, a signal that was sent does not.
    if (info->si_code <= 0) {
        raise(number);
    }
}

}  // namespace

void on_fault(void (*function)(long)) {
    called                  = function;
    struct sigaction action = {};
    action.sa_sigaction     = on_signal;
    action.sa_flags         = static_cast<int>(SA_SIGINFO | SA_RESETHAND | SA_ONSTACK);
    for (const int number : of_faults) {
        sigaction(number, &action, nullptr);
    }
}

}  // namespace fitter::platform
