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
        const int n_unknown                = fitter::number_operations(build->n_ops, build->last_op);
        state().graph_optimize_has_params = build->graph_optimize_has_params;
        state().larger_alone              = build->larger_alone;
        return n_unknown;
    });
}
