// What Vulkan drivers allow, as far as ggml-vulkan lets it decide. On its own, so that the real ggml-vulkan can be shown
// the same on another device (tools/vulkan/driver.cpp).

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace fitter::vulkan {

// Named as in Vulkan.
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

constexpr size_t uint32_max = std::numeric_limits<uint32_t>::max();

// AMD with Mesa's RADV: radv_get_physical_device_properties in Mesa 23, RADV_MAX_MEMORY_ALLOCATION_SIZE in
// radv_constants.h; cards since GFX7.
inline constexpr limits radv = {
    /* .minStorageBufferOffsetAlignment = */ 4,
    /* .minMemoryMapAlignment           = */ 4096,
    /* .maxStorageBufferRange           = */ uint32_max,
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

// NVIDIA's own driver from Turing on: the limits of VkPhysicalDeviceLimits as vulkaninfo prints them in public bug
// reports. The two sizes are not from a card of ours; that buffers may be larger than maxMemoryAllocationSize says
// ggml-org/llama.cpp pull request 16354. Only their being above 1 GiB and 4 GiB decides anything.
inline constexpr limits nvidia = {
    /* .minStorageBufferOffsetAlignment = */ 16,
    /* .minMemoryMapAlignment           = */ 64,
    /* .maxStorageBufferRange           = */ uint32_max,
    /* .maxMemoryAllocationSize         = */ 0xFFE00000,
    /* .maxBufferSize                   = */ size_t{1} << 40,
    /* .maxComputeSharedMemorySize      = */ 49152,
    /* .maxComputeWorkGroupInvocations  = */ 1024,
    /* .subgroupSize                    = */ 32,
    /* .subgroup_operations             = */ true,
    /* .computeFullSubgroups            = */ true,
    /* .vulkanMemoryModel               = */ true,
    /* .shaderFloat16                   = */ true,
    /* .bufferDeviceAddress             = */ true,
};

// Intel with Mesa's ANV: ANV_SSBO_ALIGNMENT in anv_constants.h, max_buffer_size in isl.c since Skylake; its
// maxMemoryAllocationSize is at least 2 GiB (vulkaninfo of Mesa 23).
inline constexpr limits anv = {
    /* .minStorageBufferOffsetAlignment = */ 4,
    /* .minMemoryMapAlignment           = */ 4096,
    /* .maxStorageBufferRange           = */ uint32_max,
    /* .maxMemoryAllocationSize         = */ size_t{1} << 31,
    /* .maxBufferSize                   = */ size_t{1} << 32,
    /* .maxComputeSharedMemorySize      = */ 65536,
    /* .maxComputeWorkGroupInvocations  = */ 1024,
    /* .subgroupSize                    = */ 32,
    /* .subgroup_operations             = */ true,
    /* .computeFullSubgroups            = */ true,
    /* .vulkanMemoryModel               = */ true,
    /* .shaderFloat16                   = */ true,
    /* .bufferDeviceAddress             = */ true,
};

// Mesa's software device, as vulkaninfo shows it with Mesa 22.3.6: what tools/vulkan compares with.
inline constexpr limits lavapipe = {
    /* .minStorageBufferOffsetAlignment = */ 16,
    /* .minMemoryMapAlignment           = */ 64,
    /* .maxStorageBufferRange           = */ size_t{1} << 27,
    /* .maxMemoryAllocationSize         = */ size_t{1} << 31,
    /* .maxBufferSize                   = */ uint32_max,
    /* .maxComputeSharedMemorySize      = */ 32768,
    /* .maxComputeWorkGroupInvocations  = */ 1024,
    /* .subgroupSize                    = */ 8,
    /* .subgroup_operations             = */ true,
    /* .computeFullSubgroups            = */ true,
    /* .vulkanMemoryModel               = */ true,
    /* .shaderFloat16                   = */ true,
    /* .bufferDeviceAddress             = */ true,
};

}  // namespace fitter::vulkan
