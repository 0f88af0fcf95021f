// What ggml's backends for GPUs have in common where they take over operations from the host.

#pragma once

#include "ggml.h"

namespace fitter {

// Whether an operation multiplies its weight with so many rows that fetching the weight saves more than it costs.
bool is_worth_fetching(const ggml_tensor * op);

}  // namespace fitter
