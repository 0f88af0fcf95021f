// How a virtual device behaves. A profile answers for one real ggml backend; adding a backend is adding a profile.

#pragma once

#include <cstddef>
#include <string>

#include "ggml-backend.h"
#include "ggml.h"

namespace fitter {

struct profile;

// A device as it is described.
struct description {
    const fitter::profile * profile            = nullptr;
    std::string             name               = {};
    std::string             text               = {};
    int                     compute_capability = 0;  // major*100 + minor*10
    size_t                  total              = 0;
    size_t                  free               = 0;
};

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
};

extern const profile cuda_profile;

}  // namespace fitter
