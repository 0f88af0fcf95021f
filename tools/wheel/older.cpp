// What a later libstdc++ has, and what its std::filesystem wants of a later glibc.

#include <new>
#include <random>

#define HIDDEN __attribute__((visibility("hidden")))

extern "C" HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace std {
HIDDEN void __throw_bad_array_new_length();

void __throw_bad_array_new_length() {
    throw bad_alloc();
}

// The system's numbers are as random as their bits are many.
HIDDEN double random_device::_M_getentropy() const noexcept {
    return 32;
}
}  // namespace std
