// Tells a process that ended by itself from one that was ended: its parent sees only the signal's number.

#include <cstddef>

#include "fitter.h"
#include "guard.h"
#include "platform/platform.h"

namespace {

// Only what may be called in a signal handler: no allocation, no stdio.
void write_line(long pid) {
    char   text[64] = "\nfitter: fault of process ";
    size_t end      = 26;
    char   digits[20];
    size_t n = 0;
    do {
        digits[n++] = static_cast<char>('0' + pid % 10);
        pid /= 10;
    } while (pid > 0);
    while (n > 0) {
        text[end++] = digits[--n];
    }
    text[end++] = '\n';
    constexpr int standard_error = 2;
    // Where that fails the parent takes the fault for a signal that somebody sent.
    fitter::platform::write_all(standard_error, text, end);
}

}  // namespace

void fitter_say_faults(void) {
    fitter::guarded([] { fitter::platform::on_fault(write_line); });
}
