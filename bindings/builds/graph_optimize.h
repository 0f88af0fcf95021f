// graph_optimize of a backend has an argument more from v0.4.0 on: where to say which tensors stay allocated for how long.
// Nothing but a call tells which of the two it is, so each call is looked at.

#pragma once

#include "virtual/profile.h"

struct ggml_backend_graph_optimize_params;

namespace fitter {

// What a backend's graph_optimize was given, used or not as the configured build has it. Without the argument nothing can be
// kept. A call that is not the build's own changes nothing and is remembered for graph_optimize_difference().
keep_alive keep_alive_of(ggml_backend_graph_optimize_params * argument, const void * frame);

// nullptr, or in which way the calls were other ones than those of the configured build.
const char * graph_optimize_difference();

}  // namespace fitter
