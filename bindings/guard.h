// How an exception becomes an error message at the C interface.

#pragma once

#include <exception>
#include <string>
#include <utility>

namespace fitter {

void set_error(std::string message) noexcept;

// Runs body; an exception becomes the message of fitter_last_error() and the result is failure.
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

}  // namespace fitter
