// The profile of ggml-cuda, and what that of ggml-hip has in common with it.

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "builds/build.h"
#include "virtual/rules/cuda.h"
#include "virtual/rules/offload.h"

namespace fitter::cuda {

namespace {

// Matrix multiplication kernels read quantized rows in steps of this many elements.
constexpr int64_t row_padding = 512;

// ggml-cuda's own way of adding up, which a build without NCCL uses: two cards, none before Volta, copy parts this large.
constexpr size_t sum_room = size_t{32} << 20;

}  // namespace

size_t alloc_size(const description & device, const ggml_tensor * tensor) {
    size_t size = op_of(tensor) == GGML_OP_FLASH_ATTN_EXT && loaded_build().cuda_attention_has_room
                      ? flash_attn_ext_get_alloc_size(device.compute_capability, tensor)
                      : ggml_nbytes(tensor);
    const int64_t over = tensor->ne[0] % row_padding;
    if (ggml_is_quantized(tensor->type) && over != 0) {
        size += ggml_row_size(tensor->type, row_padding - over);
    }
    return size;
}

bool offload_op(const description &, const ggml_tensor * op) { return is_worth_fetching(op); }

bool pins_host_memory() { return std::getenv("GGML_CUDA_NO_PINNED") == nullptr; }

size_t sum_memory(const std::vector<const description *> & devices) {
    const char * chosen = std::getenv("GGML_CUDA_ALLREDUCE");
    const bool   is_own = chosen == nullptr || std::strcmp(chosen, "internal") == 0 || std::strcmp(chosen, "nccl") == 0;
    const bool   is_new = std::all_of(devices.begin(), devices.end(), [](const description * device) {
        return device->compute_capability >= cc_volta;
    });
    return devices.size() == 2 && is_own && is_new ? sum_room : 0;
}

}  // namespace fitter::cuda

const fitter::profile fitter::cuda_profile = {
    /* .name             = */ "cuda",
    /* .host_buffer_type = */ "CUDA_Host",
    /* .alignment        = */ fitter::cuda::alignment,
    /* .caps             = */ fitter::cuda::caps,
    /* .alloc_size       = */ fitter::cuda::alloc_size,
    /* .supports_op      = */ fitter::cuda::device_supports_op,
    /* .offload_op       = */ fitter::cuda::offload_op,
    /* .graph_optimize   = */ fitter::cuda::graph_optimize,
    /* .pins_host_memory = */ fitter::cuda::pins_host_memory,
    /* .max_size         = */ nullptr,
    /* .largest_buffer   = */ nullptr,
    /* .host_alignment   = */ 0,
    /* .own_sources_only = */ true,
    /* .sum_memory       = */ fitter::cuda::sum_memory,
};
