// Loaded before llama-server: writes each memory breakdown that its own fit asks for, in bytes, then what its fit decided, and ends
// the process there, before anything is loaded. What it writes goes to the file that FITTER_SPY names, a record on each line.

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "fit.h"
#include "llama-ext.h"
#include "llama.h"
#include "mtmd.h"

namespace {

struct context_of {
    std::string path;
    llama_context_params params;
};

std::map<const llama_model *, std::string> paths;
std::map<const llama_context *, context_of> contexts;

FILE * out() {
    static FILE * file = std::fopen(std::getenv("FITTER_SPY"), "a");
    return file;
}

template <typename F> F next(const char * name) {
    void * found = dlsym(RTLD_NEXT, name);
    if (found == nullptr) {
        std::fprintf(out(), "missing\t%s\n", name);
        std::fflush(out());
        _exit(3);
    }
    return reinterpret_cast<F>(found);
}

// The parameters that decide about memory, by their names in llama_context_params.
void write_params(const llama_context_params & c) {
    std::fprintf(out(),
        "n_ctx=%u\tn_batch=%u\tn_ubatch=%u\tn_seq_max=%u\tn_rs_seq=%u\tn_outputs_max=%u\tn_outputs_max_per_seq=%u\tctx_type=%d\t"
        "pooling_type=%d\tembeddings=%d\tkv_unified=%d\tn_samplers=%d\n",
        c.n_ctx, c.n_batch, c.n_ubatch, c.n_seq_max, c.n_rs_seq, c.n_outputs_max, c.n_outputs_max_per_seq, (int) c.ctx_type,
        (int) c.pooling_type, (int) c.embeddings, (int) c.kv_unified, (int) c.n_samplers);
}

void write_decision(const char * path, const llama_model_params & m, const llama_context_params & c) {
    std::fprintf(out(), "decided\tpath=%s\tn_gpu_layers=%d\ttensor_split=", path, m.n_gpu_layers);
    for (size_t i = 0; m.tensor_split != nullptr && i < llama_max_devices(); i++) {
        std::fprintf(out(), "%s%g", i == 0 ? "" : ",", (double) m.tensor_split[i]);
    }
    std::fprintf(out(), "\toverride_tensor=");
    const llama_model_tensor_buft_override * each = m.tensor_buft_overrides;
    for (bool is_first = true; each != nullptr && each->pattern != nullptr; each++, is_first = false) {
        std::fprintf(out(), "%s%s=%s", is_first ? "" : ",", each->pattern, ggml_backend_buft_name(each->buft));
    }
    std::fprintf(out(), "\t");
    write_params(c);
}

[[noreturn]] void end() {
    std::fflush(out());
    _exit(0);
}

} // namespace

extern "C" llama_model * llama_model_load_from_file(const char * path, llama_model_params params) {
    if (!params.no_alloc) {
        std::fprintf(out(), "loads\tpath=%s\n", path);
        end();
    }
    llama_model * model = next<decltype(&llama_model_load_from_file)>("llama_model_load_from_file")(path, params);
    paths[model] = path;
    return model;
}

extern "C" llama_context * llama_init_from_model(llama_model * model, llama_context_params params) {
    llama_context * context = next<decltype(&llama_init_from_model)>("llama_init_from_model")(model, params);
    contexts[context] = {paths[model], params};
    return context;
}

llama_memory_breakdown llama_get_memory_breakdown(const llama_context * context) {
    using function = llama_memory_breakdown (*)(const llama_context *);
    llama_memory_breakdown found = next<function>("_Z26llama_get_memory_breakdownPK13llama_context")(context);
    const auto known = contexts.find(context);
    if (known == contexts.end()) {
        return found;
    }
    // asked for twice: by the fit, and for the log
    std::fprintf(out(), "measured\tpath=%s\t", known->second.path.c_str());
    write_params(known->second.params);
    contexts.erase(known);
    for (const auto & [buft, bytes] : found) {
        const ggml_backend_dev_t device = ggml_backend_buft_get_device(buft);
        std::fprintf(out(), "row\t%s\t%s\t%d\t%zu\t%zu\t%zu\n", ggml_backend_buft_name(buft),
            device == nullptr ? "" : ggml_backend_dev_name(device), (int) ggml_backend_buft_is_host(buft), bytes.model, bytes.context,
            bytes.compute);
    }
    return found;
}

std::map<ggml_backend_dev_t, size_t> mtmd_get_memory_usage(const char * path, mtmd_context_params params) {
    using function = std::map<ggml_backend_dev_t, size_t> (*)(const char *, mtmd_context_params);
    auto found = next<function>("_Z21mtmd_get_memory_usagePKc19mtmd_context_params")(path, params);
    for (const auto & [device, bytes] : found) {
        std::fprintf(out(), "projector\t%s\t%zu\n", ggml_backend_dev_name(device), bytes);
    }
    return found;
}

common_params_fit_status common_fit_params(const char * path, llama_model_params * m, llama_context_params * c, float * split,
    llama_model_tensor_buft_override * overrides, size_t * margins, uint32_t n_ctx_min, const common_fit_extra_model * extra,
    ggml_log_level level) {
    using function = decltype(&common_fit_params);
    const auto status = next<function>(
        "_Z17common_fit_paramsPKcP18llama_model_paramsP20llama_context_paramsPfP32llama_model_tensor_buft_overridePmjPK22common_fit_"
        "extra_model14ggml_log_level")(path, m, c, split, overrides, margins, n_ctx_min, extra, level);
    std::fprintf(out(), "status\t%d\n", (int) status);
    write_decision(path, *m, *c);
    end();
}
