// Which build of llama.cpp the library that this is compiled into goes by.

#pragma once

#include <string>

#include "fitter.h"

namespace fitter {

struct build {
    int32_t     backend_api               = FITTER_GGML_BACKEND_API_VERSION;
    int32_t     graph_optimize_has_params = 1;
    std::string larger_alone              = "kimi-linear minimax-01 ";

    bool cuda_gets_rows_of_super_blocks = true;
    bool cuda_attention_has_room        = true;
    bool cuda_attention_of_any_types    = true;
    bool cuda_keeps_topk_moe            = true;
    bool cuda_branches_on_many_devices  = true;
    bool cuda_groups_shared_experts     = false;
    bool cuda_unary_of_any_strides      = false;
    bool metal_adds_to_products         = false;
    bool metal_attends_by_size          = false;
};

// The build of the headers that this was compiled with, until another one is configured.
const build & loaded_build();

}  // namespace fitter
