#include "virtual/rules/offload.h"

#include "builds/operations.h"

#include <cstdint>
#include <cstdlib>

namespace {

// Rows that an operation multiplies a weight with.
int64_t batch_size(const ggml_tensor * op) {
    switch (fitter::op_of(op)) {
        case GGML_OP_GET_ROWS: return 0;
        case GGML_OP_MUL_MAT: return op->ne[1];
        case GGML_OP_MUL_MAT_ID:
        case GGML_OP_ROPE:
        case GGML_OP_ROPE_BACK: return op->ne[2];
        default: return ggml_nrows(op);
    }
}

}  // namespace

bool fitter::is_worth_fetching(const ggml_tensor * op) {
    static const int64_t min_batch = [] {
        const char * value = std::getenv("GGML_OP_OFFLOAD_MIN_BATCH");
        return value ? std::atoi(value) : 32;
    }();
    return batch_size(op) >= min_batch;
}
