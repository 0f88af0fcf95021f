#include "builds/build.h"

#include <stdexcept>

#include "builds/operations.h"
#include "guard.h"

namespace {

// Never destroyed: graphs may be planned while the process ends.
fitter::build & state() {
    static auto * instance = new fitter::build;
    return *instance;
}

}  // namespace

const fitter::build & fitter::loaded_build() { return state(); }

int32_t fitter_configure_build(const fitter_build_t * build) {
    return fitter::guarded<int32_t>(-1, [&]() -> int32_t {
        if (build == nullptr || build->last_op == nullptr || build->larger_alone == nullptr) {
            throw std::invalid_argument("the build is not described");
        }
        const int n_unknown = fitter::number_operations(build->n_ops, build->last_op);

        fitter::build & is                = state();
        is.backend_api                    = build->backend_api;
        is.graph_optimize_has_params      = build->graph_optimize_has_params;
        is.larger_alone                   = build->larger_alone;
        is.cuda_gets_rows_of_super_blocks = build->cuda_gets_rows_of_super_blocks;
        is.cuda_attention_has_room        = build->cuda_attention_has_room;
        is.cuda_attention_of_any_types    = build->cuda_attention_of_any_types;
        is.cuda_keeps_topk_moe            = build->cuda_keeps_topk_moe;
        is.cuda_branches_on_many_devices  = build->cuda_branches_on_many_devices;
        is.cuda_groups_shared_experts     = build->cuda_groups_shared_experts;
        is.cuda_unary_of_any_strides      = build->cuda_unary_of_any_strides;
        is.metal_adds_to_products         = build->metal_adds_to_products;
        is.metal_attends_by_size          = build->metal_attends_by_size;
        return n_unknown;
    });
}
