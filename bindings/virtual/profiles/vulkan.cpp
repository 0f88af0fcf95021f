// The profiles of ggml-vulkan, one per driver: what the driver allows decides where ggml-vulkan says no.

#include <algorithm>
#include <cstdlib>
#include <string>

#include "virtual/rules/offload.h"
#include "virtual/rules/vulkan.h"

namespace fitter::vulkan {

namespace {

constexpr size_t gib = size_t{1} << 30;

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
    // Without a limit is the recorder, which is no device of Vulkan's.
    const bool is_limited = limits.maxBufferSize != SIZE_MAX;
    return forced == nullptr || !is_limited ? limits.maxBufferSize : std::strtoull(forced, nullptr, 10);
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

bool device_offload_op(const description &, const ggml_tensor * op) { return is_worth_fetching(op); }

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
