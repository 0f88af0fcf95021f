#include "builds/symbols.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "builds/lookup.h"
#include "gguf.h"
#include "llama.h"

namespace fitter {

namespace {

struct shapes_state {
    std::mutex                                     mutex;
    std::map<const gguf_context *, ggml_context *> contexts;
};

// Never destroyed: a header may be closed while the process ends.
shapes_state & shapes() {
    static shapes_state * instance = new shapes_state;
    return *instance;
}

decltype(&gguf_get_tensor_ne) get_tensor_ne() {
    static const auto found = loaded<decltype(&gguf_get_tensor_ne)>("gguf_get_tensor_ne");
    return found;
}

// A number of the model's metadata, 0 where there is none.
int32_t number_at(const llama_model * model, const std::string & key) {
    char text[32] = "";
    return llama_model_meta_val_str(model, key.c_str(), text, sizeof(text)) > 0 ? std::atoi(text) : 0;
}

}  // namespace

bool tensor_shapes::is_needed() { return get_tensor_ne() == nullptr; }

void tensor_shapes::keep_for(const gguf_context * gguf) {
    if (context_ == nullptr) {
        return;
    }
    if (gguf == nullptr) {
        ggml_free(context_);
    } else {
        std::lock_guard<std::mutex> lock(shapes().mutex);
        shapes().contexts.emplace(gguf, context_);
    }
    context_ = nullptr;
}

const int64_t * tensor_shapes::of(const gguf_context * gguf, int64_t tensor) {
    if (!is_needed()) {
        return get_tensor_ne()(gguf, tensor);
    }
    std::lock_guard<std::mutex> lock(shapes().mutex);
    const auto                  kept  = shapes().contexts.find(gguf);
    const ggml_tensor *         found = kept == shapes().contexts.end()
                                            ? nullptr
                                            : ggml_get_tensor(kept->second, gguf_get_tensor_name(gguf, tensor));
    if (found == nullptr) {
        throw std::runtime_error("ggml does not tell the dimensions of a tensor");
    }
    return found->ne;
}

void tensor_shapes::forget(const gguf_context * gguf) {
    if (!is_needed()) {
        return;
    }
    std::lock_guard<std::mutex> lock(shapes().mutex);
    const auto                  kept = shapes().contexts.find(gguf);
    if (kept != shapes().contexts.end()) {
        ggml_free(kept->second);
        shapes().contexts.erase(kept);
    }
}

layers layers_of(const llama_model * model) {
    using function            = int32_t (*)(const llama_model *);
    static const auto n_nextn = loaded<function>("llama_model_n_layer_nextn");
    if (n_nextn != nullptr) {
        return {llama_model_n_layer(model), n_nextn(model)};
    }
    // The oldest builds count all layers together.
    char architecture[64] = "";
    llama_model_meta_val_str(model, "general.architecture", architecture, sizeof(architecture));
    const std::string prefix = architecture;
    const int32_t     nextn  = number_at(model, prefix + ".nextn_predict_layers");
    const int32_t     all    = number_at(model, prefix + ".block_count");
    return nextn > 0 && all > nextn ? layers{all - nextn, nextn} : layers{llama_model_n_layer(model), 0};
}

}  // namespace fitter
