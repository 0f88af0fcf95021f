// The rules of ggml-cuda that decide bytes and graph splits, on tensors that are never computed.
//
// Each function is named after the one of ggml-cuda that it answers for, without its prefix (ggml_cuda_ or
// ggml_backend_cuda_): where that one changes, this one has to. What a build of ggml-cuda can choose is as its default
// build chooses it for the device's own compute capability, with CUDA 11.8 or later.

#pragma once

#include <cstddef>

#include "profile.h"

namespace fitter::cuda {

constexpr size_t alignment = 128;

constexpr int cc_volta        = 700;
constexpr int cc_turing       = 750;
constexpr int cc_ada_lovelace = 890;

// cuda_flash_attn.cpp
bool   flash_attn_ext_supported(int cc, const ggml_tensor * op);
size_t flash_attn_ext_get_alloc_size(int cc, const ggml_tensor * op);

// cuda_ops.cpp
bool device_supports_op(const description & device, const ggml_tensor * op);

// cuda_graph.cpp
void graph_optimize(const description & device, ggml_cgraph * graph, const keep_alive & keep);

}  // namespace fitter::cuda
