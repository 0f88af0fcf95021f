// A projector, through libmtmd. The only file that knows mtmd.h; its query for memory is C++ and may change at any time.

#include <cstring>
#include <string>

#include "fitter.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "guard.h"
#include "mtmd.h"
#include "platform/context.h"
#include "platform/platform.h"

namespace {

// What mtmd_context_params_default returns; another libmtmd's may be larger.
struct default_params {
    mtmd_context_params params;
    char                room[1024];
};

struct library {
    default_params (*params)()               = nullptr;
    decltype(&mtmd_default_marker)   marker  = nullptr;
    decltype(&mtmd_log_set)          log_set = nullptr;
    decltype(&mtmd_init_from_file)   init    = nullptr;
    decltype(&mtmd_free)             free    = nullptr;
    void *                           handle  = nullptr;
};

library loaded_library;

template <typename Function> bool find(void * handle, const char * name, Function & out) {
    out = reinterpret_cast<Function>(fitter::platform::symbol_of(handle, name));
    if (out == nullptr) {
        fitter::set_error((std::string("it has no ") + name).c_str());
    }
    return out != nullptr;
}

mtmd_context_params params_of(const fitter_projector_t & projector) {
    mtmd_context_params params = loaded_library.params().params;
    params.use_gpu             = projector.device != nullptr;
    params.device              = static_cast<ggml_backend_dev_t>(projector.device);
    params.print_timings       = false;
    params.warmup              = true;
    params.flash_attn_type     = static_cast<llama_flash_attn_type>(projector.flash_attn);
    params.image_min_tokens    = projector.image_min_tokens;
    params.image_max_tokens    = projector.image_max_tokens;
    return params;
}

}  // namespace

bool fitter_projector_library(void * handle) {
    return fitter::guarded(false, [&] {
        library found;
        if (!find(handle, "mtmd_context_params_default", found.params) ||
            !find(handle, "mtmd_default_marker", found.marker) || !find(handle, "mtmd_log_set", found.log_set) ||
            !find(handle, "mtmd_init_from_file", found.init) || !find(handle, "mtmd_free", found.free)) {
            return false;
        }
        found.handle = handle;
        if (!fitter::platform::has_mtmd_usage(handle)) {
            fitter::set_error("it has no mtmd_get_memory_usage");
            return false;
        }
        // Passed by value: with another order of its fields it would be read as something else.
        const mtmd_context_params params = found.params().params;
        if (params.device != nullptr || params.image_marker != nullptr || params.media_marker != found.marker() ||
            !params.warmup || params.image_min_tokens != -1 || params.image_max_tokens != -1 ||
            params.cb_eval != nullptr || params.cb_eval_user_data != nullptr || params.progress_callback != nullptr) {
            fitter::set_error("its mtmd_context_params is another one");
            return false;
        }
        ggml_log_callback callback  = nullptr;
        void *            user_data = nullptr;
        ggml_log_get(&callback, &user_data);
        found.log_set(callback, user_data);
        loaded_library = found;
        return true;
    });
}

bool fitter_projector_measure(const fitter_projector_t * projector, uint64_t * out) {
    return fitter::guarded(false, [&] {
        *out = 0;
        const auto sizes = fitter::platform::mtmd_usage(loaded_library.handle, projector->path, params_of(*projector));
        for (const auto & [device, size] : sizes) {
            *out += size;
        }
        return *out > 0;
    });
}

void * fitter_projector_load(const fitter_projector_t * projector, const void * model) {
    return fitter::guarded<void *>(nullptr, [&] {
        return loaded_library.init(projector->path, static_cast<const llama_model *>(model), params_of(*projector));
    });
}

void fitter_projector_free(void * projector) {
    fitter::guarded(false, [&] {
        loaded_library.free(static_cast<mtmd_context *>(projector));
        return true;
    });
}
