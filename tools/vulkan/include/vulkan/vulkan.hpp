// Vulkan's C++ header, with what ggml-vulkan needs of VK_EXT_layer_settings where the installed headers are older than
// 1.3.272. It names those types in a path that only validation builds take.

#pragma once
#pragma GCC system_header

#include_next <vulkan/vulkan.hpp>

#if VK_HEADER_VERSION < 272

namespace vk {

enum class LayerSettingTypeEXT { eBool32 };

struct LayerSettingEXT {
    const char *        pLayerName;
    const char *        pSettingName;
    LayerSettingTypeEXT type;
    uint32_t            valueCount;
    const void *        pValues;
};

struct LayerSettingsCreateInfoEXT {
    template <typename Settings>
    explicit LayerSettingsCreateInfoEXT(const Settings & settings) :
        settingCount(static_cast<uint32_t>(settings.size())),
        pSettings(settings.data()) {}

    VkStructureType         sType = static_cast<VkStructureType>(1000496000);
    const void *            pNext = nullptr;
    uint32_t                settingCount;
    const LayerSettingEXT * pSettings;
};

}  // namespace vk

#endif
