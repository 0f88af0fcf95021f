// The rules of ggml-vulkan that decide bytes and graph splits, on tensors that are never computed.
//
// Each function is named after the one of ggml-vulkan that it answers for, without its prefix (ggml_vk_ or
// ggml_backend_vk_): where that one changes, this one has to.

#pragma once

#include <cstddef>
#include <cstdint>

#include "virtual/profile.h"
#include "virtual/rules/vulkan_limits.h"

namespace fitter::vulkan {

// The limits of a device after the environment variables that change them, as ggml_vk_get_device settles them.
size_t max_memory_allocation_size(const limits & limits);
size_t max_buffer_size(const limits & limits);
size_t suballocation_block_size(const limits & limits);
bool   fp16(const limits & limits);

// vulkan_ops.cpp
bool device_supports_op(const description & device, const ggml_tensor * op);

// vulkan_graph.cpp
void graph_optimize(const description & device, ggml_cgraph * graph, const keep_alive & keep);

}  // namespace fitter::vulkan
