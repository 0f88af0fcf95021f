// The profile of ggml-hip: ggml-cuda compiled for AMD's cards. Its own rules are where those of ggml-cuda are.

#include "virtual/rules/cuda.h"

const fitter::profile fitter::rocm_profile = {
    /* .name             = */ "rocm",
    /* .host_buffer_type = */ "ROCm_Host",
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
