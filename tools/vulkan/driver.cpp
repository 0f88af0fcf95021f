// Shows a Vulkan program the limits of another driver, so that the real ggml-vulkan behaves on Mesa's software device as
// on that driver. To be preloaded; FITTER_VULKAN_DRIVER names the driver, without it nothing is changed.

#include <vulkan/vulkan_core.h>

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "virtual/rules/vulkan_limits.h"

namespace {

using fitter::vulkan::limits;

const limits * shown() {
    static const std::map<std::string, const limits *> drivers = {
        {"radv", &fitter::vulkan::radv},
        {"anv", &fitter::vulkan::anv},
        {"nvidia", &fitter::vulkan::nvidia},
        {"lavapipe", &fitter::vulkan::lavapipe},
    };
    const char * name = std::getenv("FITTER_VULKAN_DRIVER");
    if (name == nullptr) {
        return nullptr;
    }
    const auto found = drivers.find(name);
    if (found == drivers.end()) {
        std::fprintf(stderr, "FITTER_VULKAN_DRIVER: unknown driver '%s'\n", name);
        std::abort();
    }
    return found->second;
}

// The properties' own types have no common one in C++.
template <typename Properties> Properties & as(VkBaseOutStructure * chain) {
    return *reinterpret_cast<Properties *>(chain);
}

void change(const limits & to, VkPhysicalDeviceLimits & limits) {
    limits.minStorageBufferOffsetAlignment = to.minStorageBufferOffsetAlignment;
    limits.minMemoryMapAlignment           = to.minMemoryMapAlignment;
    limits.maxStorageBufferRange           = static_cast<uint32_t>(to.maxStorageBufferRange);
    limits.maxComputeSharedMemorySize      = static_cast<uint32_t>(to.maxComputeSharedMemorySize);
    limits.maxComputeWorkGroupInvocations  = to.maxComputeWorkGroupInvocations;
}

PFN_vkGetPhysicalDeviceProperties2 real_properties2 = nullptr;

VKAPI_ATTR void VKAPI_CALL properties2(VkPhysicalDevice device, VkPhysicalDeviceProperties2 * properties) {
    real_properties2(device, properties);
    const limits * to = shown();
    if (to == nullptr) {
        return;
    }
    change(*to, properties->properties.limits);
    for (auto * next = static_cast<VkBaseOutStructure *>(properties->pNext); next != nullptr; next = next->pNext) {
        switch (next->sType) {
            case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES:
                as<VkPhysicalDeviceMaintenance3Properties>(next).maxMemoryAllocationSize = to->maxMemoryAllocationSize;
                break;
            case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_4_PROPERTIES:
                as<VkPhysicalDeviceMaintenance4Properties>(next).maxBufferSize = to->maxBufferSize;
                break;
            case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES:
                as<VkPhysicalDeviceSubgroupProperties>(next).subgroupSize = to->subgroupSize;
                break;
            case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES:
                as<VkPhysicalDeviceVulkan11Properties>(next).subgroupSize            = to->subgroupSize;
                as<VkPhysicalDeviceVulkan11Properties>(next).maxMemoryAllocationSize = to->maxMemoryAllocationSize;
                break;
            default: break;
        }
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr(VkInstance   instance,
                                                                                                     const char * name) {
    static const auto real = reinterpret_cast<PFN_vkGetInstanceProcAddr>(dlsym(RTLD_NEXT, "vkGetInstanceProcAddr"));

    const PFN_vkVoidFunction found = real(instance, name);
    if (found != nullptr && std::strcmp(name, "vkGetPhysicalDeviceProperties2") == 0) {
        real_properties2 = reinterpret_cast<PFN_vkGetPhysicalDeviceProperties2>(found);
        return reinterpret_cast<PFN_vkVoidFunction>(properties2);
    }
    return found;
}
