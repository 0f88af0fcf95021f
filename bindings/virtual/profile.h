// How a virtual device behaves. A profile answers for one real ggml backend; adding a backend is adding a profile.

#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "builds/operations.h"
#include "ggml-backend.h"
#include "ggml.h"

namespace fitter {

struct profile;

namespace vulkan {
struct limits;
}

// A device as it is described.
struct description {
    const fitter::profile * profile            = nullptr;
    std::string             name               = {};
    std::string             text               = {};
    int                     compute_capability = 0;  // as ggml counts it: major*100 + minor*10, or AMD's number
    size_t                  total              = 0;
    size_t                  free               = 0;
    size_t                  n_alike            = 1;  // devices of this profile that are described, with this one
};

// Says that the memory of a tensor must not be given to another one before a later node of the graph is computed.
using keep_alive = std::function<void(ggml_tensor * tensor, ggml_tensor * until)>;

struct profile {
    const char *          name;
    const char *          host_buffer_type;  // name of the pinned host buffer type, or nullptr
    size_t                alignment;
    ggml_backend_dev_caps caps;

    // Bytes that a tensor takes in the device's memory, without alignment.
    size_t (*alloc_size)(const description & device, const ggml_tensor * tensor);
    // Whether the device computes an operation whose sources are within its reach.
    bool (*supports_op)(const description & device, const ggml_tensor * op);
    // Whether the device takes over an operation whose weights are in host memory.
    bool (*offload_op)(const description & device, const ggml_tensor * op);
    // What the backend does to a graph before its memory is planned, or nullptr.
    void (*graph_optimize)(const description & device, ggml_cgraph * graph, const keep_alive & keep);
    // Whether host memory can be pinned; where it cannot, the host buffer type's buffers are the CPU's.
    bool (*pins_host_memory)();

    // Bytes that llama.cpp puts into one buffer at most, and those of the largest buffer there can be; nullptr: no limit.
    size_t (*max_size)(const description & device)       = nullptr;
    size_t (*largest_buffer)(const description & device) = nullptr;
    // Alignment of the pinned host buffer type; 0: the CPU's.
    size_t host_alignment = 0;
    // Whether an operation is refused because a source is in another device's memory.
    bool own_sources_only = true;
    // Bytes that the backend takes on each of several devices of its own that a model's tensors are split over, to add up
    // what each has computed; nullptr: none.
    size_t (*sum_memory)(const std::vector<const description *> & devices) = nullptr;
    // What a profile of ggml-vulkan goes by.
    const vulkan::limits * vulkan = nullptr;
};

extern const profile cuda_profile;
extern const profile rocm_profile;
extern const profile metal_profile;

// ggml-vulkan on each driver that is known; the first one stands for all.
const std::vector<profile> & vulkan_profiles();

}  // namespace fitter
