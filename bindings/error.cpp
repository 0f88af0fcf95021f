#include "fitter.h"
#include "guard.h"

namespace {
thread_local std::string last_error;
}

void fitter::set_error(std::string message) noexcept { last_error = std::move(message); }

const char * fitter_last_error(void) { return last_error.c_str(); }
