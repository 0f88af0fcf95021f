// What a build of llama.cpp itself says that loads take: compiled with its own headers, linked to its own libraries, and
// without anything of fitter's.
//
//     program PLUGINS [RPC_SERVER...] < loads > answers
//
// PLUGINS: the directory of backends that are loaded, or "". A line of loads has the fields that main() reads, separated
// by tabs; an answer is "NAME=MODEL/CONTEXT/COMPUTE ..." in bytes, or "FAIL".

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"
// staging: memory by buffer type
#include "llama-ext.h"
#include "llama.h"

namespace {

// Without mapping the file, which a load that allocates nothing cannot do.
template <typename params> auto read_whole(params & out, int) -> decltype(out.use_mmap, void()) { out.use_mmap = false; }

template <typename params> auto read_whole(params & out, long) -> decltype(out.load_mode, void()) {
    out.load_mode = static_cast<decltype(out.load_mode)>(0);
}

ggml_type type_named(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const char * known = ggml_type_name(static_cast<ggml_type>(i));
        if (known != nullptr && name == known) {
            return static_cast<ggml_type>(i);
        }
    }
    std::fprintf(stderr, "there is no type %s\n", name.c_str());
    std::exit(2);
}

ggml_backend_buffer_type_t buffer_type_named(const std::string & name) {
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_buffer_type_t found = ggml_backend_dev_buffer_type(ggml_backend_dev_get(i));
        if (found != nullptr && name == ggml_backend_buft_name(found)) {
            return found;
        }
    }
    std::fprintf(stderr, "there is no buffer type %s\n", name.c_str());
    std::exit(2);
}

class fields {
  public:
    explicit fields(const std::string & line) : line_(line) {}

    std::string text() {
        std::string out;
        std::getline(line_, out, '\t');
        return out;
    }

    int number() { return std::atoi(text().c_str()); }

  private:
    std::istringstream line_;
};

std::string answer(const std::string & line) {
    fields            from(line);
    const std::string path   = from.text();
    llama_model_params model_params = llama_model_default_params();
    read_whole(model_params, 0);
    model_params.no_alloc     = from.number() == 0;
    model_params.n_gpu_layers = from.number();

    const std::string                               pattern     = from.text();
    const std::string                               buffer_type = from.text();
    std::vector<llama_model_tensor_buft_override> overrides;
    if (!pattern.empty()) {
        overrides                          = {{pattern.c_str(), buffer_type_named(buffer_type)}, {nullptr, nullptr}};
        model_params.tensor_buft_overrides = overrides.data();
    }

    llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx                = from.number();
    context_params.n_batch              = from.number();
    context_params.n_ubatch             = from.number();
    context_params.n_seq_max            = from.number();
    context_params.type_k               = type_named(from.text());
    context_params.type_v               = type_named(from.text());
    context_params.flash_attn_type      = static_cast<llama_flash_attn_type>(from.number());
    context_params.kv_unified           = from.number();
    context_params.offload_kqv          = from.number();
    context_params.op_offload           = from.number();
    context_params.swa_full             = from.number();
    context_params.embeddings           = from.number();

    llama_model * model = llama_model_load_from_file(path.c_str(), model_params);
    if (model == nullptr) {
        return "FAIL";
    }
    std::string     out     = "FAIL";
    llama_context * context = llama_init_from_model(model, context_params);
    if (context != nullptr) {
        std::vector<std::string> rows;
        for (const auto & [type, bytes] : llama_get_memory_breakdown(context)) {
            std::ostringstream row;
            row << ggml_backend_buft_name(type) << '=' << bytes.model << '/' << bytes.context << '/' << bytes.compute;
            rows.push_back(row.str());
        }
        std::sort(rows.begin(), rows.end());
        out.clear();
        for (const std::string & row : rows) {
            out += (out.empty() ? "" : " ") + row;
        }
        llama_free(context);
    }
    llama_model_free(model);
    return out;
}

}  // namespace

int main(int argc, char ** argv) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    if (argc > 1 && argv[1][0] != '\0') {
        ggml_backend_load_all_from_path(argv[1]);
    }
    for (int i = 2; i < argc; i++) {
        ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
        using add_server       = ggml_backend_reg_t (*)(const char *);
        auto add = rpc ? reinterpret_cast<add_server>(ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server")) : nullptr;
        if (add == nullptr) {
            std::fprintf(stderr, "this llama.cpp knows no RPC\n");
            return 2;
        }
        ggml_backend_register(add(argv[i]));
    }
    llama_backend_init();
    std::string line;
    while (std::getline(std::cin, line)) {
        std::cout << answer(line) << std::endl;
    }
    return 0;
}
