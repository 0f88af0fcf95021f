// Which build of llama.cpp the library that this is compiled into goes by.

#pragma once

#include <string>

#include "fitter.h"

namespace fitter {

struct build {
    bool        graph_optimize_has_params = true;
    std::string larger_alone              = "kimi-linear minimax-01 ";
};

// The build of the headers that this was compiled with, until another one is configured.
const build & loaded_build();

}  // namespace fitter
