// The profiles of ggml-vulkan, one per driver: what the driver allows decides where ggml-vulkan says no.

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>

#include "vulkan.h"

namespace fitter::vulkan {

namespace {

constexpr size_t gib    = size_t{1} << 30;
constexpr size_t uint32 = std::numeric_limits<uint32_t>::max();

// AMD with Mesa's RADV: radv_physical_device.c of Mesa 23 to 25, RADV_MAX_MEMORY_ALLOCATION_SIZE in radv_constants.h.
constexpr limits radv = {
    /* .minStorageBufferOffsetAlignment = */ 4,
    /* .minMemoryMapAlignment           = */ 4096,
    /* .maxStorageBufferRange           = */ uint32,
    /* .maxMemoryAllocationSize         = */ 0xFFFFFFFC,
    /* .maxBufferSize                   = */ 0xFFFFFFFC,
    /* .maxComputeSharedMemorySize      = */ 65536,
    /* .maxComputeWorkGroupInvocations  = */ 1024,
    /* .subgroupSize                    = */ 64,
    /* .subgroup_operations             = */ true,
    /* .computeFullSubgroups            = */ true,
    /* .vulkanMemoryModel               = */ true,
    /* .shaderFloat16                   = */ true,
    /* .bufferDeviceAddress             = */ true,
};

// NVIDIA's own driver from Turing on, as vulkaninfo shows it in bug reports and gpuinfo.org collects it. Its buffers may
// be larger than an allocation is sure to be (ggml-org/llama.cpp pull request 16354).
constexpr limits nvidia = {
    /* .minStorageBufferOffsetAlignment = */ 16,
    /* .minMemoryMapAlignment           = */ 64,
    /* .maxStorageBufferRange           = */ uint32,
    /* .maxMemoryAllocationSize         = */ 0xFFE00000,
    /* .maxBufferSize                   = */ 1024 * gib,
    /* .maxComputeSharedMemorySize      = */ 49152,
    /* .maxComputeWorkGroupInvocations  = */ 1024,
    /* .subgroupSize                    = */ 32,
    /* .subgroup_operations             = */ true,
    /* .computeFullSubgroups            = */ true,
    /* .vulkanMemoryModel               = */ true,
    /* .shaderFloat16                   = */ true,
    /* .bufferDeviceAddress             = */ true,
};

// Intel with Mesa's ANV: ANV_SSBO_ALIGNMENT in anv_constants.h, max_buffer_size of isl.c since Skylake,
// MAX_MEMORY_ALLOCATION_SIZE of anv_private.h.
constexpr limits anv = {
    /* .minStorageBufferOffsetAlignment = */ 4,
    /* .minMemoryMapAlignment           = */ 4096,
    /* .maxStorageBufferRange           = */ uint32,
    /* .maxMemoryAllocationSize         = */ 2 * gib,
    /* .maxBufferSize                   = */ 4 * gib,
    /* .maxComputeSharedMemorySize      = */ 65536,
    /* .maxComputeWorkGroupInvocations  = */ 1024,
    /* .subgroupSize                    = */ 32,
    /* .subgroup_operations             = */ true,
    /* .computeFullSubgroups            = */ true,
    /* .vulkanMemoryModel               = */ true,
    /* .shaderFloat16                   = */ true,
    /* .bufferDeviceAddress             = */ true,
};

// Mesa's software device, as vulkaninfo shows it with Mesa 22.3.6: what tests/vulkan compares with.
constexpr limits lavapipe = {
    /* .minStorageBufferOffsetAlignment = */ 16,
    /* .minMemoryMapAlignment           = */ 64,
    /* .maxStorageBufferRange           = */ size_t{1} << 27,
    /* .maxMemoryAllocationSize         = */ 2 * gib,
    /* .maxBufferSize                   = */ uint32,
    /* .maxComputeSharedMemorySize      = */ 32768,
    /* .maxComputeWorkGroupInvocations  = */ 1024,
    /* .subgroupSize                    = */ 8,
    /* .subgroup_operations             = */ true,
    /* .computeFullSubgroups            = */ true,
    /* .vulkanMemoryModel               = */ true,
    /* .shaderFloat16                   = */ true,
    /* .bufferDeviceAddress             = */ true,
};

// The number that an environment variable holds, or what there is without it.
size_t size_from(const char * variable, size_t otherwise) {
    const char * value = std::getenv(variable);
    return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
}

}  // namespace

size_t max_memory_allocation_size(const limits & limits) {
    return size_from("GGML_VK_FORCE_MAX_ALLOCATION_SIZE", std::min(limits.maxMemoryAllocationSize, limits.maxBufferSize));
}

size_t max_buffer_size(const limits & limits) {
    static const char * const forced = std::getenv("GGML_VK_FORCE_MAX_BUFFER_SIZE");
    return forced == nullptr ? limits.maxBufferSize : std::strtoull(forced, nullptr, 10);
}

size_t suballocation_block_size(const limits & limits) {
    return std::min(size_from("GGML_VK_SUBALLOCATION_BLOCK_SIZE", gib), max_memory_allocation_size(limits));
}

bool fp16(const limits & limits) {
    static const bool disabled = std::getenv("GGML_VK_DISABLE_F16") != nullptr;
    return limits.shaderFloat16 && !disabled;
}

namespace {

size_t buffer_type_get_alloc_size(const description &, const ggml_tensor * tensor) { return ggml_nbytes(tensor); }

size_t buffer_type_get_max_size(const description & device) { return suballocation_block_size(*device.profile->vulkan); }

size_t largest_buffer(const description & device) { return max_buffer_size(*device.profile->vulkan); }

// Rows that an operation multiplies a weight with: below a certain number, fetching the weight costs more than it saves.
int64_t get_op_batch_size(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_GET_ROWS: return 0;
        case GGML_OP_MUL_MAT: return op->ne[1];
        case GGML_OP_MUL_MAT_ID:
        case GGML_OP_ROPE:
        case GGML_OP_ROPE_BACK: return op->ne[2];
        default: return ggml_nrows(op);
    }
}

bool device_offload_op(const description &, const ggml_tensor * op) {
    static const int64_t min_batch_size = [] {
        const char * value = std::getenv("GGML_OP_OFFLOAD_MIN_BATCH");
        return value ? std::atoi(value) : 32;
    }();
    return get_op_batch_size(op) >= min_batch_size;
}

bool pins_host_memory() { return true; }

profile of(const char * name, const limits & driver) {
    profile result = {
        /* .name             = */ name,
        /* .host_buffer_type = */ "Vulkan_Host",
        /* .alignment        = */ driver.minStorageBufferOffsetAlignment,
        /* .caps             = */
        {
            /* .async                = */ true,
            /* .host_buffer          = */ true,
            /* .buffer_from_host_ptr = */ false,
            /* .events               = */ true,
            /* .mmap_support         = */ true,
        },
        /* .alloc_size       = */ buffer_type_get_alloc_size,
        /* .supports_op      = */ device_supports_op,
        /* .offload_op       = */ device_offload_op,
        /* .graph_optimize   = */ graph_optimize,
        /* .pins_host_memory = */ pins_host_memory,
    };
    result.max_size         = buffer_type_get_max_size;
    result.largest_buffer   = largest_buffer;
    result.host_alignment   = driver.minMemoryMapAlignment;
    result.own_sources_only = false;
    result.vulkan           = &driver;
    return result;
}

}  // namespace

}  // namespace fitter::vulkan

const std::vector<fitter::profile> & fitter::vulkan_profiles() {
    static const std::vector<profile> profiles = {
        vulkan::of("vulkan", vulkan::radv),       vulkan::of("vulkan-radv", vulkan::radv),
        vulkan::of("vulkan-anv", vulkan::anv),    vulkan::of("vulkan-nvidia", vulkan::nvidia),
        vulkan::of("vulkan-lavapipe", vulkan::lavapipe),
    };
    return profiles;
}
