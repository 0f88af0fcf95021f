// What libstdc++'s own std::filesystem wants of a later glibc and libstdc++.

#include <new>

#define HIDDEN __attribute__((visibility("hidden")))

extern "C" HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace std {
HIDDEN void __throw_bad_array_new_length();

void __throw_bad_array_new_length() {
    throw bad_alloc();
}
}  // namespace std
