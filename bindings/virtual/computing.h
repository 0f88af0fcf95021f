// Virtual devices that compute: on the CPU, in memory that their buffers get by pages.

#pragma once

#include "ggml-backend.h"

namespace fitter {

// Whether they do: where FITTER_COMPUTES is 1, for programs that run models.
bool computes();

// Computes a graph whose tensors are in virtual or host buffers.
ggml_status compute(ggml_cgraph * graph);

}  // namespace fitter
