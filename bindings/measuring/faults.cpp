// Tells a process that ended by itself from one that was ended: its parent sees only the signal's number.

#include <csignal>
#include <unistd.h>

#include "fitter.h"
#include "guard.h"

namespace {

constexpr int of_faults[] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV};

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
    if (write(STDERR_FILENO, text, end) < 0) {
        // the parent then takes the fault for a signal that somebody sent
    }
}

void on_signal(int number, siginfo_t * info, void *) {
    // above 0 the kernel says what the process did; abort() signals its own process
    if (info->si_code > 0 || info->si_pid == getpid()) {
        write_line(getpid());
    }
    // The default action is back (SA_RESETHAND). A fault comes again by itself, a signal that was sent does not.
    if (info->si_code <= 0) {
        raise(number);
    }
}

}  // namespace

void fitter_say_faults(void) {
    fitter::guarded([] {
        struct sigaction action = {};
        action.sa_sigaction     = on_signal;
        action.sa_flags         = static_cast<int>(SA_SIGINFO | SA_RESETHAND | SA_ONSTACK);
        for (const int number : of_faults) {
            sigaction(number, &action, nullptr);
        }
    });
}
