// What a later libstdc++ has, and what its std::filesystem wants of a later glibc.

#include <new>

#define HIDDEN(name) __asm__(name) __attribute__((visibility("hidden")))

extern "C" {
extern char single_threaded HIDDEN("__libc_single_threaded");
void        throw_bad_array_new_length() HIDDEN("_ZSt28__throw_bad_array_new_lengthv");
double      entropy(const void * random_device) HIDDEN("_ZNKSt13random_device13_M_getentropyEv");

char single_threaded = 0;

void throw_bad_array_new_length() {
    throw std::bad_alloc();
}

// The system's numbers are as random as their bits are many.
double entropy(const void *) {
    return 32;
}
}
