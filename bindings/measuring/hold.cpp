#include "measuring/hold.h"

#include <condition_variable>
#include <cstring>
#include <mutex>

#include "fitter.h"
#include "guard.h"

namespace {

// What load_tensors says before it looks at devices and overrides.
constexpr char placing[] = "load_tensors: loading model tensors";

struct hold {
    std::mutex              mutex;
    std::condition_variable changed;
    bool                    reached  = false;
    bool                    released = false;
    void (*called)(void)             = nullptr;
};

thread_local hold * held = nullptr;

}  // namespace

void fitter::wait_if_held(const char * text) {
    if (!held || std::strncmp(text, placing, sizeof(placing) - 1) != 0) {
        return;
    }
    std::unique_lock<std::mutex> lock(held->mutex);
    held->reached = true;
    if (held->called) {
        // not while it is locked: a fork would have it locked for ever
        auto * const called = held->called;
        lock.unlock();
        called();
        return;
    }
    held->changed.wait(lock, [] { return held->released; });
}

void * fitter_hold_new(void) {
    return fitter::guarded<void *>(nullptr, [] { return new hold; });
}

void fitter_hold_use(void * pointer) {
    fitter::guarded([&] { held = static_cast<hold *>(pointer); });
}

void fitter_hold_release(void * pointer) {
    fitter::guarded([&] {
        auto *                      released = static_cast<hold *>(pointer);
        std::lock_guard<std::mutex> lock(released->mutex);
        released->released = true;
        released->changed.notify_all();
    });
}

void fitter_hold_call(void * pointer, void (*function)(void)) {
    fitter::guarded([&] { static_cast<hold *>(pointer)->called = function; });
}

bool fitter_hold_reached(void * pointer) {
    return fitter::guarded(false, [&] {
        auto *                      asked = static_cast<hold *>(pointer);
        std::lock_guard<std::mutex> lock(asked->mutex);
        return asked->reached;
    });
}

void fitter_hold_free(void * pointer) {
    fitter::guarded([&] { delete static_cast<hold *>(pointer); });
}
