// The rules of ggml-vulkan that decide bytes and graph splits, on tensors that are never computed.
//
// Each function is named after the one of ggml-vulkan that it answers for, without its prefix (ggml_vk_ or
// ggml_backend_vk_): where that one changes, this one has to.

#pragma once

#include <cstddef>
#include <cstdint>

#include "profile.h"

namespace fitter::vulkan {

// What ggml-vulkan asks a driver for and lets decide, named as in Vulkan.
struct limits {
    size_t   minStorageBufferOffsetAlignment;
    size_t   minMemoryMapAlignment;
    size_t   maxStorageBufferRange;
    size_t   maxMemoryAllocationSize;
    size_t   maxBufferSize;
    size_t   maxComputeSharedMemorySize;
    uint32_t maxComputeWorkGroupInvocations;
    uint32_t subgroupSize;
    bool     subgroup_operations;   // basic, vote, arithmetic, shuffle and ballot
    bool     computeFullSubgroups;
    bool     vulkanMemoryModel;
    bool     shaderFloat16;         // and 16-bit storage
    bool     bufferDeviceAddress;   // and 64-bit integers
};

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
