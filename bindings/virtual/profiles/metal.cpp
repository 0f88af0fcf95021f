// The profile of ggml-metal on a Mac with an Apple M.

#include <cstdlib>

#include "virtual/rules/metal.h"
#include "virtual/rules/offload.h"

namespace fitter::metal {

bool has_bfloat() {
    static const bool disabled = std::getenv("GGML_METAL_BF16_DISABLE") != nullptr;
    return !disabled;
}

namespace {

// Private buffers, which a Mac has only when told to, go by another name; their bytes are the same.
// Metal names no fixed largest buffer (maxBufferLength); on an Apple M it is three quarters of the working set.
size_t buffer_type_get_max_size(const description & device) { return device.total / 4 * 3; }

bool device_offload_op(const description &, const ggml_tensor * op) {
    return (op_of(op) == GGML_OP_MUL_MAT || op_of(op) == GGML_OP_MUL_MAT_ID) && is_worth_fetching(op);
}

bool pins_host_memory() { return false; }

profile make() {
    profile result = {
        /* .name             = */ "metal",
        /* .host_buffer_type = */ nullptr,
        /* .alignment        = */ 32,
        /* .caps             = */
        {
            /* .async                = */ true,
            /* .host_buffer          = */ false,
            /* .buffer_from_host_ptr = */ true,
            /* .events               = */ true,
            /* .mmap_support         = */ true,
        },
        /* .alloc_size       = */ buffer_type_get_alloc_size,
        /* .supports_op      = */ device_supports_op,
        /* .offload_op       = */ device_offload_op,
        /* .graph_optimize   = */ graph_optimize,
        /* .pins_host_memory = */ pins_host_memory,
    };
    result.max_size         = buffer_type_get_max_size;
    result.largest_buffer   = buffer_type_get_max_size;
    result.own_sources_only = false;
    return result;
}

}  // namespace

}  // namespace fitter::metal

const fitter::profile fitter::metal_profile = metal::make();
