// The door of the C interface: nothing throws across it. Each library has its own message.

#pragma once

#include <exception>
#include <string>
#include <utility>

namespace fitter {

// Message of the last failure in this thread.
inline std::string & last_error() {
    thread_local std::string message;
    return message;
}

inline void set_error(const char * message) noexcept {
    try {
        last_error() = message;
    } catch (...) {
        last_error().clear();  // no memory for it
    }
}

// Runs body; an exception becomes last_error() and the result is failure.
template <typename Result, typename Body>
Result guarded(Result failure, Body && body) noexcept {
    try {
        return std::forward<Body>(body)();
    } catch (const std::exception & error) {
        set_error(error.what());
    } catch (...) {
        set_error("unknown C++ exception");
    }
    return failure;
}

// The same for a body without a result.
template <typename Body>
void guarded(Body && body) noexcept {
    guarded(false, [&body] {
        std::forward<Body>(body)();
        return true;
    });
}

}  // namespace fitter
