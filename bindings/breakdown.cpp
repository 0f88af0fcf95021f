// The memory of a model and its context. The only file that knows llama-ext.h, which upstream may change at any time.

#include <algorithm>
#include <cstring>
#include <vector>

#include "fitter.h"
#include "ggml-backend.h"
#include "guard.h"
#include "llama-ext.h"
#include "llama.h"

bool fitter_model_info(const void * model, fitter_model_info_t * out) {
    return fitter::guarded(false, [&] {
        const auto * m     = static_cast<const llama_model *>(model);
        *out               = {};
        out->n_layer       = llama_model_n_layer(m);
        out->n_layer_nextn = llama_model_n_layer_nextn(m);
        out->n_ctx_train   = llama_model_n_ctx_train(m);
        out->n_embd        = llama_model_n_embd(m);
        out->n_head        = llama_model_n_head(m);
        out->n_head_kv     = llama_model_n_head_kv(m);
        out->n_swa         = llama_model_n_swa(m);
        out->n_expert      = llama_model_n_expert(m);
        out->n_vocab       = llama_vocab_n_tokens(llama_model_get_vocab(m));
        out->n_devices     = llama_model_n_devices(m);
        out->n_params      = llama_model_n_params(m);
        out->size          = llama_model_size(m);
        out->has_encoder   = llama_model_has_encoder(m);
        out->is_recurrent  = llama_model_is_recurrent(m);
        out->is_hybrid     = llama_model_is_hybrid(m);
        return true;
    });
}

const char * fitter_model_device(const void * model, int32_t i) {
    return fitter::guarded<const char *>(nullptr, [&]() -> const char * {
        const auto * m = static_cast<const llama_model *>(model);
        if (i < 0 || i >= llama_model_n_devices(m)) {
            return nullptr;
        }
        return ggml_backend_dev_name(llama_model_get_device(m, i));
    });
}

namespace {

// Place of a buffer type's device among the model's devices, their number for host memory.
int32_t device_rank(const llama_model * model, ggml_backend_buffer_type_t buffer_type) {
    const int32_t n = llama_model_n_devices(model);
    // A host buffer type of a device (CUDA_Host) is tied to that device, but its memory is the host's.
    if (ggml_backend_buft_is_host(buffer_type)) {
        return n;
    }
    ggml_backend_dev_t device = ggml_backend_buft_get_device(buffer_type);
    for (int32_t i = 0; device != nullptr && i < n; i++) {
        if (llama_model_get_device(model, i) == device) {
            return i;
        }
    }
    return n;
}

}  // namespace

int32_t fitter_breakdown(const void * context, fitter_row_t * rows, int32_t n) {
    return fitter::guarded<int32_t>(-1, [&] {
        const auto *        ctx       = static_cast<const llama_context *>(context);
        const llama_model * model     = llama_get_model(ctx);
        const int32_t       host_rank = llama_model_n_devices(model);

        struct ranked {
            int32_t      rank;
            fitter_row_t row;
        };
        std::vector<ranked> all;
        for (const auto & [buffer_type, memory] : llama_get_memory_breakdown(ctx)) {
            ggml_backend_dev_t device = ggml_backend_buft_get_device(buffer_type);
            const int32_t      rank   = device_rank(model, buffer_type);
            all.push_back({rank,
                           {ggml_backend_buft_name(buffer_type), device ? ggml_backend_dev_name(device) : nullptr,
                            rank == host_rank, memory.model, memory.context, memory.compute}});
        }
        std::sort(all.begin(), all.end(), [](const ranked & a, const ranked & b) {
            return a.rank != b.rank ? a.rank < b.rank : std::strcmp(a.row.buffer_type, b.row.buffer_type) < 0;
        });
        for (size_t i = 0; i < all.size() && i < static_cast<size_t>(std::max(n, 0)); i++) {
            rows[i] = all[i].row;
        }
        return static_cast<int32_t>(all.size());
    });
}
