// The rules of ggml-metal that decide bytes and graph splits, on tensors that are never computed.
//
// Each function is named after the one of ggml-metal that it answers for, without its prefix (ggml_metal_ or
// ggml_backend_metal_): where that one changes, this one has to. The GPU is one of an Apple M: the family (Apple7 or
// later) has reductions and matrices in a SIMD group, bfloat, and 32 KiB of memory per threadgroup.

#pragma once

#include <cstddef>

#include "virtual/profile.h"

namespace fitter::metal {

constexpr size_t max_threadgroup_memory_size = 32768;

// Whether bfloat is not switched off.
bool has_bfloat();

// metal_ops.cpp
size_t buffer_type_get_alloc_size(const description & device, const ggml_tensor * tensor);
bool   device_supports_op(const description & device, const ggml_tensor * op);

// metal_graph.cpp
void graph_optimize(const description & device, ggml_cgraph * graph, const keep_alive & keep);

}  // namespace fitter::metal
