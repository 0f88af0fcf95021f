// The profile of ggml-cuda, and what that of ggml-hip has in common with it.

#include <cstdlib>

#include "builds/build.h"
#include "virtual/rules/cuda.h"
#include "virtual/rules/offload.h"

namespace fitter::cuda {

namespace {

// Matrix multiplication kernels read quantized rows in steps of this many elements.
constexpr int64_t row_padding = 512;

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
};
