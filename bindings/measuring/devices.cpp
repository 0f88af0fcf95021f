// Devices as ggml's public interface shows them, and the versions of what is loaded.

#include "fitter.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "guard.h"

const char * fitter_loaded_ggml_version(void) {
    return fitter::guarded<const char *>(nullptr, [] { return ggml_version(); });
}

const char * fitter_loaded_ggml_commit(void) {
    return fitter::guarded<const char *>(nullptr, [] { return ggml_commit(); });
}

namespace {

// Whether the device takes a tensor of so many bytes that is in its memory, such as one of a cache. Where it does not,
// llama.cpp ends the process.
bool takes_tensor(ggml_backend_dev_t device, uint64_t size) {
    ggml_tensor  tensor = {};
    const size_t unit   = ggml_type_size(GGML_TYPE_F16);
    tensor.type         = GGML_TYPE_F16;
    tensor.op           = GGML_OP_NONE;
    tensor.ne[0]        = static_cast<int64_t>(size / unit);
    tensor.nb[0]        = unit;
    for (int i = 1; i < GGML_MAX_DIMS; i++) {
        tensor.ne[i] = 1;
        tensor.nb[i] = tensor.nb[i - 1] * static_cast<size_t>(tensor.ne[i - 1]);
    }
    return ggml_backend_dev_supports_op(device, &tensor);
}

uint64_t largest_tensor(ggml_backend_dev_t device) {
    constexpr uint64_t least = 64, most = uint64_t{1} << 50;
    if (!takes_tensor(device, least) || takes_tensor(device, most)) {
        return 0;
    }
    uint64_t low = least, high = most;
    while (high - low > ggml_type_size(GGML_TYPE_F16)) {
        const uint64_t middle = (low + high) / 4 * 2;
        (takes_tensor(device, middle) ? low : high) = middle;
    }
    return low;
}

}  // namespace

int32_t fitter_device_count(void) {
    return fitter::guarded<int32_t>(-1, [] { return static_cast<int32_t>(ggml_backend_dev_count()); });
}

bool fitter_device_get(int32_t i, fitter_device_t * out) {
    return fitter::guarded(false, [&] {
        if (i < 0 || static_cast<size_t>(i) >= ggml_backend_dev_count()) {
            return false;
        }
        ggml_backend_dev_t     device = ggml_backend_dev_get(static_cast<size_t>(i));
        ggml_backend_dev_props props;
        ggml_backend_dev_get_props(device, &props);
        ggml_backend_buffer_type_t buffer_type = ggml_backend_dev_buffer_type(device);

        *out                  = {};
        out->device           = device;
        out->name             = props.name;
        out->description      = props.description;
        out->device_id        = props.device_id;
        out->backend          = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));
        out->type             = props.type;
        out->total            = props.memory_total;
        out->free             = props.memory_free;
        out->buffer_type      = buffer_type;
        out->buffer_type_name = buffer_type ? ggml_backend_buft_name(buffer_type) : nullptr;
        out->largest_tensor   = props.type == GGML_BACKEND_DEVICE_TYPE_CPU ? 0 : largest_tensor(device);
        return true;
    });
}

bool fitter_backend_load(const char * path) {
    return fitter::guarded(false, [&] {
        if (ggml_backend_load(path) == nullptr) {
            fitter::set_error("ggml refused the backend");
            return false;
        }
        return true;
    });
}
