// Functions that only some builds of llama.cpp have, looked up in the one that is loaded.

#pragma once

#include "platform/platform.h"

namespace fitter {

// nullptr where no library of the process has it.
template <typename Function> Function loaded(const char * name) {
    return reinterpret_cast<Function>(platform::symbol(name));
}

}  // namespace fitter
