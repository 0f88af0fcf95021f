// A library of Windows 10 that wine 8 lacks: Rust's standard library takes its random numbers from it.

#include <stddef.h>

int __stdcall SystemFunction036(void * buffer, unsigned long size);

__declspec(dllexport) int __stdcall ProcessPrng(unsigned char * buffer, size_t size) {
    return SystemFunction036(buffer, (unsigned long) size);
}

// Without the C library, which zig would compile for a minute, this is what Windows calls.
int __stdcall DllMainCRTStartup(void * instance, unsigned long reason, void * reserved) {
    (void) instance, (void) reason, (void) reserved;
    return 1;
}
