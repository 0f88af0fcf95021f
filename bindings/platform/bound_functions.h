// The functions of llama.cpp that are called, written down by bound_functions.py. For Windows.

#pragma once

#include <cstddef>

namespace fitter::platform {

struct bound_function {
    const char * name;
    const void * jump;    // what is called
    void **      target;  // where it jumps to
};

struct bound_list {
    const bound_function * first;
    size_t                 n;

    const bound_function * begin() const { return first; }
    const bound_function * end() const { return first + n; }
};

bound_list bound_functions();

}  // namespace fitter::platform
