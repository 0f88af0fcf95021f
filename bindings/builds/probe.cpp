// The layout of a struct is told by what a function that returns one writes.

#include <new>

#include "fitter.h"
#include "guard.h"

namespace {

// No register holds it, so that it is returned in memory of the caller's.
struct large {
    unsigned char bytes[4096];
};

}  // namespace

bool fitter_probe(void * function, void * buffer, size_t size) {
    return fitter::guarded(false, [&] {
        if (function == nullptr || buffer == nullptr || size < sizeof(large)) {
            fitter::set_error("a struct is returned into 4096 bytes at least");
            return false;
        }
        // The result is made where it is wanted, without a copy: the callee gets the address of the buffer.
        new (buffer) large(reinterpret_cast<large (*)()>(function)());
        return true;
    });
}
