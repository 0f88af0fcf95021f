// What llama-quantize would make of a model: the type of each tensor by llama.cpp's own rule, and a header with those types.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "builds/lookup.h"
#include "builds/symbols.h"
#include "fitter.h"
#include "ggml.h"
#include "gguf.h"
#include "guard.h"
// staging: the rule of llama-quantize; upstream may change it at any time
#include "llama-ext.h"
#include "llama.h"
#include "platform/context.h"
#include "platform/platform.h"

namespace {

struct file_type {
    llama_ftype  ftype;
    const char * name;
};

// Those of llama.h, in its order; ALL_F32 is F32 to llama-quantize.
constexpr file_type file_types[] = {
#include "file_types.inc"
};

// A number that no llama.h gives to a file type.
constexpr auto no_file_type = static_cast<llama_ftype>(1023);

// The rule of the llama.cpp that is loaded. Its functions have C++ names, so nothing is linked to them.
struct rule {
    decltype(&llama_quant_init)                       init;
    decltype(&llama_quant_free)                       free;
    decltype(&llama_quant_model_from_metadata)        model;
    decltype(&llama_quant_tensor_allows_quantization) allows;
    decltype(&llama_quant_compute_types)              compute;
    decltype(&llama_ftype_get_default_type)           default_type;
    void *                                            default_params;

    bool is_complete() const {
        return init != nullptr && free != nullptr && model != nullptr && allows != nullptr && compute != nullptr &&
               default_type != nullptr && default_params != nullptr;
    }
};

const rule & loaded_rule() {
    using fitter::loaded;
    static const rule found = {
        loaded<decltype(rule::init)>("_Z16llama_quant_initPK11llama_modelPK27llama_model_quantize_params"),
        loaded<decltype(rule::free)>("_Z16llama_quant_freeP19quantize_state_impl"),
        loaded<decltype(rule::model)>("_Z31llama_quant_model_from_metadataPK22llama_quant_model_desc"),
        loaded<decltype(rule::allows)>(
            "_Z38llama_quant_tensor_allows_quantizationPK19quantize_state_implPK11ggml_tensor"),
        loaded<decltype(rule::compute)>(
            "_Z25llama_quant_compute_typesP19quantize_state_impl11llama_ftypePP11ggml_tensorP9ggml_typem"),
        loaded<decltype(rule::default_type)>("_Z28llama_ftype_get_default_type11llama_ftype"),
        loaded<void *>("llama_model_quantize_default_params"),
    };
    return found;
}

std::string string_at(const gguf_context * gguf, const std::string & key) {
    const int64_t id = gguf_find_key(gguf, key.c_str());
    return id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_STRING ? gguf_get_val_str(gguf, id) : "";
}

// The number at the key, of an array its first one, as that of the first layer; otherwise where there is none.
uint32_t number_at(const gguf_context * gguf, const std::string & key, uint32_t otherwise = 0) {
    const int64_t id = gguf_find_key(gguf, key.c_str());
    if (id < 0) {
        return otherwise;
    }
    const bool        is_array = gguf_get_kv_type(gguf, id) == GGUF_TYPE_ARRAY;
    const gguf_type   type     = is_array ? gguf_get_arr_type(gguf, id) : gguf_get_kv_type(gguf, id);
    const bool        is_whole = type == GGUF_TYPE_UINT32 || type == GGUF_TYPE_INT32;
    if (!is_whole || (is_array && gguf_get_arr_n(gguf, id) == 0)) {
        return otherwise;
    }
    const void * data = is_array ? gguf_get_arr_data(gguf, id) : gguf_get_val_data(gguf, id);
    return *static_cast<const uint32_t *>(data);
}

// llama.cpp reads the tensors of a model in this order.
bool comes_before(const ggml_tensor * a, const ggml_tensor * b) {
    const auto layer = [](const ggml_tensor * tensor) {
        int found = -1;
        return std::sscanf(tensor->name, "blk.%d.", &found) == 1 ? found : -1;
    };
    const int layer_a = layer(a);
    const int layer_b = layer(b);
    return layer_a != layer_b ? layer_a < layer_b : std::strcmp(a->name, b->name) < 0;
}

void set_type(ggml_tensor & tensor, ggml_type type) {
    tensor.type = type;
    size_t nb   = ggml_type_size(type);
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        tensor.nb[i] = nb;
        nb *= static_cast<size_t>(i == 0 ? tensor.ne[0] / ggml_blck_size(type) : tensor.ne[i]);
    }
}

// The tensors of all files, in the order in which llama.cpp reads them.
std::vector<ggml_tensor> tensors_of(void * const * gguf, int32_t n) {
    std::vector<ggml_tensor>        found;
    std::unordered_set<std::string> names;
    for (int32_t file = 0; file < n; file++) {
        const auto * part = static_cast<const gguf_context *>(gguf[file]);
        for (int64_t i = 0; i < gguf_get_n_tensors(part); i++) {
            ggml_tensor tensor = {};
            ggml_set_name(&tensor, gguf_get_tensor_name(part, i));
            if (!names.insert(tensor.name).second) {
                throw std::invalid_argument("tensor '" + std::string(tensor.name) + "' is in two of its files");
            }
            const int64_t * ne = fitter::tensor_shapes::of(part, i);
            std::copy(ne, ne + GGML_MAX_DIMS, tensor.ne);
            set_type(tensor, gguf_get_tensor_type(part, i));
            found.push_back(tensor);
        }
    }
    std::sort(found.begin(), found.end(), [](const ggml_tensor & a, const ggml_tensor & b) { return comes_before(&a, &b); });
    return found;
}

using gguf_pointer = std::unique_ptr<gguf_context, decltype(&gguf_free)>;

// The header that llama-quantize writes for these tensors.
gguf_pointer header_of(const gguf_context * first, const std::vector<ggml_tensor> & tensors, int32_t ftype) {
    gguf_pointer made(gguf_init_empty(), gguf_free);
    gguf_set_kv(made.get(), first);
    gguf_set_val_u32(made.get(), "general.quantization_version", GGML_QNT_VERSION);
    gguf_set_val_u32(made.get(), "general.file_type", static_cast<uint32_t>(ftype));
    for (const char * key : {"split.no", "split.count", "split.tensors.count"}) {
        gguf_remove_key(made.get(), key);
    }
    for (const ggml_tensor & tensor : tensors) {
        gguf_add_tensor(made.get(), &tensor);
    }
    return made;
}

// A model to be quantized, and the state of llama.cpp's rule for it.
class quantizing {
   public:
    quantizing(void * const * gguf, int32_t n) : first_(static_cast<const gguf_context *>(gguf[0])), tensors_(tensors_of(gguf, n)) {
        if (!loaded_rule().is_complete()) {
            throw std::runtime_error("it does not tell which tensor gets which type");
        }
        const std::string      architecture = string_at(first_, "general.architecture");
        const std::string      prefix       = architecture + ".";
        llama_quant_model_desc desc         = {};
        desc.architecture                   = architecture.c_str();
        desc.n_embd                         = number_at(first_, prefix + "embedding_length");
        desc.n_ff                           = number_at(first_, prefix + "feed_forward_length");
        desc.n_layer                        = number_at(first_, prefix + "block_count");
        desc.n_head                         = number_at(first_, prefix + "attention.head_count");
        desc.n_head_kv                      = number_at(first_, prefix + "attention.head_count_kv", desc.n_head);
        desc.n_expert                       = number_at(first_, prefix + "expert_count");
        desc.n_embd_head_k                  = number_at(first_, prefix + "attention.key_length");
        desc.n_embd_head_v                  = number_at(first_, prefix + "attention.value_length");
        // llama.cpp aborts where there are more than its LLAMA_MAX_LAYERS, as few as in its oldest build with the rule.
        if (desc.n_layer == 0 || desc.n_layer > 512) {
            throw std::runtime_error("it cannot have " + std::to_string(desc.n_layer) + " layers");
        }
        fitter_probe(loaded_rule().default_params, params_, sizeof(params_));
        model_ = loaded_rule().model(&desc);
        // The struct is only passed on: it is laid out as the loaded llama.cpp has it.
        state_ = loaded_rule().init(model_, reinterpret_cast<const llama_model_quantize_params *>(params_));
        for (ggml_tensor & tensor : tensors_) {
            if (loaded_rule().allows(state_, &tensor)) {
                quantized_.push_back(&tensor);
            }
        }
    }
    quantizing(const quantizing &)             = delete;
    quantizing & operator=(const quantizing &) = delete;
    ~quantizing() {
        if (state_ != nullptr) {
            loaded_rule().free(state_);
        }
        llama_model_free(model_);
    }

    // The tensors with the types that they get.
    std::vector<ggml_tensor> as(int32_t ftype) {
        std::vector<ggml_type> types(quantized_.size());
        auto asked = [&] {
            loaded_rule().compute(state_, static_cast<llama_ftype>(ftype), quantized_.data(), types.data(), types.size());
        };
        // it throws where a tensor cannot have the type
        if (!fitter::platform::call([](void * data) { (*static_cast<decltype(asked) *>(data))(); }, &asked)) {
            throw std::runtime_error("a tensor cannot have the type that it would get");
        }
        std::vector<ggml_tensor> found = tensors_;
        for (size_t i = 0; i < types.size(); i++) {
            set_type(found[static_cast<size_t>(quantized_[i] - tensors_.data())], types[i]);
        }
        return found;
    }

    const gguf_context * first() const { return first_; }

   private:
    alignas(max_align_t) unsigned char params_[4096] = {};
    const gguf_context *       first_;
    std::vector<ggml_tensor>   tensors_;
    std::vector<ggml_tensor *> quantized_;
    llama_model *              model_ = nullptr;
    quantize_state_impl *      state_ = nullptr;
};

}  // namespace

int32_t fitter_quant_file_types(fitter_file_type_t * out, int32_t n) {
    return fitter::guarded<int32_t>(-1, [&] {
        if (!loaded_rule().is_complete()) {
            throw std::runtime_error("it does not tell which tensor gets which type");
        }
        const ggml_type none  = loaded_rule().default_type(no_file_type);
        int32_t         count = 0;
        for (const file_type & each : file_types) {
            const ggml_type type = loaded_rule().default_type(each.ftype);
            if (type == none) {
                continue;
            }
            if (count < n) {
                out[count] = {each.name, static_cast<int32_t>(each.ftype), ggml_type_name(type)};
            }
            count++;
        }
        return count;
    });
}

void * fitter_quant_new(void * const * gguf, int32_t n) {
    return fitter::guarded<void *>(nullptr, [&]() -> void * {
        if (n < 1) {
            throw std::invalid_argument("no file is given");
        }
        return new quantizing(gguf, n);
    });
}

void fitter_quant_free(void * quant) {
    fitter::guarded([&] { delete static_cast<quantizing *>(quant); });
}

bool fitter_quant_types(void * quant, int32_t ftype, fitter_columns_t * out) {
    return fitter::guarded(false, [&] {
        thread_local std::string          texts;
        thread_local std::vector<int64_t> numbers;
        texts.clear();
        numbers.clear();
        for (const ggml_tensor & tensor : static_cast<quantizing *>(quant)->as(ftype)) {
            texts.append(tensor.name).push_back('\0');
            texts.append(ggml_type_name(tensor.type)).push_back('\0');
            numbers.push_back(static_cast<int64_t>(ggml_nbytes(&tensor)));
        }
        *out = {texts.data(), texts.size(), numbers.data(), numbers.size()};
        return true;
    });
}

int64_t fitter_quant_header_bytes(void * const * gguf, int32_t n) {
    return fitter::guarded<int64_t>(-1, [&] {
        const auto made = header_of(static_cast<const gguf_context *>(gguf[0]), tensors_of(gguf, n), 0);
        return static_cast<int64_t>(gguf_get_meta_size(made.get()));
    });
}

bool fitter_quant_write(void * quant, int32_t ftype, const char * path) {
    return fitter::guarded(false, [&] {
        auto *            model = static_cast<quantizing *>(quant);
        const auto        made  = header_of(model->first(), model->as(ftype), ftype);
        std::vector<char> meta(gguf_get_meta_size(made.get()));
        gguf_get_meta_data(made.get(), meta.data());
        const int  file       = fitter::platform::create_file(path);
        const bool is_written = file >= 0 && fitter::platform::write_all(file, meta.data(), meta.size());
        if (file >= 0) {
            fitter::platform::close_file(file);
        }
        if (!is_written) {
            throw std::runtime_error(std::string(path) + " cannot be written");
        }
        return true;
    });
}
