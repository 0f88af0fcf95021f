// The rules of ggml-cuda that decide bytes and graph splits, on tensors that are never computed.
//
// Each function is named after the one of ggml-cuda that it answers for, without its prefix (ggml_cuda_ or
// ggml_backend_cuda_): where that one changes, this one has to. What a build of ggml-cuda can choose is as its default
// build chooses it for the device's own compute capability, with CUDA 11.8 or later, or ROCm.
//
// ggml-hip is the same source compiled for AMD's cards: what differs is asked of the compute capability, which for those
// is a number of ggml's own (amd_offset and the architecture's digits, 0x1100 for gfx1100).

#pragma once

#include <cstddef>
#include <vector>

#include "virtual/profile.h"

namespace fitter::cuda {

constexpr size_t alignment = 128;

constexpr ggml_backend_dev_caps caps = {
    /* .async                = */ true,
    /* .host_buffer          = */ true,
    /* .buffer_from_host_ptr = */ false,
    /* .events               = */ true,
    /* .mmap_support         = */ true,
};

constexpr int cc_volta        = 700;
constexpr int cc_turing       = 750;
constexpr int cc_ada_lovelace = 890;

constexpr int amd_offset = 0x1000000;
constexpr int cc_cdna1   = amd_offset + 0x908;
constexpr int cc_gfx909  = amd_offset + 0x909;
constexpr int cc_gfx90c  = amd_offset + 0x90c;
constexpr int cc_cdna4   = amd_offset + 0x950;
constexpr int cc_rdna1   = amd_offset + 0x1010;
constexpr int cc_rdna3   = amd_offset + 0x1100;

constexpr bool is_amd(int cc) { return cc >= amd_offset; }

constexpr bool turing_mma_available(int cc) { return !is_amd(cc) && cc >= cc_turing; }

// Two of the architectures in that range are APUs' without matrix instructions.
constexpr bool amd_mfma_available(int cc) {
    return cc >= cc_cdna1 && cc < cc_rdna1 && cc != cc_gfx909 && cc != cc_gfx90c;
}

constexpr bool amd_wmma_available(int cc) { return cc >= cc_rdna3; }

// profiles/cuda.cpp
size_t alloc_size(const description & device, const ggml_tensor * tensor);
bool   offload_op(const description & device, const ggml_tensor * op);
bool   pins_host_memory();
size_t sum_memory(const std::vector<const description *> & devices);

// cuda_flash_attn.cpp
bool   flash_attn_ext_supported(int cc, const ggml_tensor * op);
size_t flash_attn_ext_get_alloc_size(int cc, const ggml_tensor * op);

// cuda_ops.cpp
bool device_supports_op(const description & device, const ggml_tensor * op);

// cuda_graph.cpp
void graph_optimize(const description & device, ggml_cgraph * graph, const keep_alive & keep);

}  // namespace fitter::cuda
