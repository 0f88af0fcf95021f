// Functions of llama.cpp's that some builds do not have, and what does the same there.

#pragma once

#include <cstdint>

#include "ggml.h"

struct gguf_context;
struct llama_model;

namespace fitter {

// gguf_get_tensor_ne: the dimensions of a tensor, from b10068 on. Before, they are only in the ggml_context that is
// made along with the header, which has to be asked for where the header is opened.
class tensor_shapes {
   public:
    // To be given to gguf_init_params; nullptr where nothing has to be asked for.
    ggml_context ** wanted() { return is_needed() ? &context_ : nullptr; }

    // Keeps what was made for this header until it is forgotten.
    void keep_for(const gguf_context * gguf);

    static const int64_t * of(const gguf_context * gguf, int64_t tensor);
    static void            forget(const gguf_context * gguf);

   private:
    static bool is_needed();

    ggml_context * context_ = nullptr;
};

// llama_model_n_layer without the next-token-prediction layers, and llama_model_n_layer_nextn.
struct layers {
    int32_t n_layer;
    int32_t n_layer_nextn;
};

layers layers_of(const llama_model * model);

}  // namespace fitter
