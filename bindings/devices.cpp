// Devices as ggml's public interface shows them, and the versions of what is loaded.

#include "fitter.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "guard.h"

const char * fitter_loaded_ggml_version(void) { return ggml_version(); }

const char * fitter_loaded_ggml_commit(void) { return ggml_commit(); }

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
