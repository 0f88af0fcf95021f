// What upstream's own code, as llama-server calls it, reads: from its arguments and its environment, or from a preset.
//
//   reader params [ARGUMENT...]   the parameters, one a line: name, tab, value
//   reader preset FILE            the name of every preset, and tab and argument for each of its arguments

#include "arg.h"
#include "preset.h"
#include "speculative.h"

#include "ggml-backend.h"
#include "llama.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

static void print(const char * name, const std::string & value) { printf("%s\t%s\n", name, value.c_str()); }

static const char * name_of(llama_split_mode mode) {
    switch (mode) {
        case LLAMA_SPLIT_MODE_NONE:  return "none";
        case LLAMA_SPLIT_MODE_LAYER: return "layer";
        case LLAMA_SPLIT_MODE_ROW:   return "row";
        default:                     return "tensor";
    }
}

static std::string names_of(const std::vector<ggml_backend_dev_t> & devices) {
    std::string names;
    for (ggml_backend_dev_t device : devices) {
        names += (names.empty() ? "" : ",") + std::string(device ? ggml_backend_dev_name(device) : "none");
    }
    return names;
}

// what is loaded beside the model, and what the program keeps
static void print_beside(const common_params & params) {
    const auto & draft = params.speculative.draft;
    print("beside model_draft", draft.mparams.path);
    print("beside devices_draft", names_of(draft.devices));
    print("beside n_gpu_layers_draft", std::to_string(draft.n_gpu_layers));
    print("beside type_k_draft", ggml_type_name(draft.cache_type_k));
    print("beside type_v_draft", ggml_type_name(draft.cache_type_v));
    print("beside n_max_draft", std::to_string(draft.n_max));
    print("beside spec_type", common_speculative_type_name_str(params.speculative.types));
    print("beside mmproj", params.mmproj.path);
    print("beside mmproj_use_gpu", std::to_string(params.mmproj_use_gpu));
    print("beside mmproj_device", params.mmproj_device ? ggml_backend_dev_name(params.mmproj_device) : "");
    print("beside image_max_tokens", std::to_string(params.image_max_tokens));
    for (const auto & adapter : params.lora_adapters) {
        print("beside lora", adapter.path + " " + std::to_string(adapter.scale));
    }
    print("beside load_mode", std::to_string(params.load_mode));
    print("beside pooling_type", std::to_string(params.pooling_type));
    print("beside cache_ram", std::to_string(params.cache_ram_mib));
    print("beside n_ctx_checkpoints", std::to_string(params.n_ctx_checkpoints));
    print("beside kv_unified_per_slot", std::to_string(params.kv_unified_per_slot));
}

static int print_params(int argc, char ** argv) {
    common_params params;
    if (!common_params_parse(argc, argv, params, LLAMA_EXAMPLE_SERVER)) {
        return 1;
    }
    int n_split = sizeof(params.tensor_split) / sizeof(params.tensor_split[0]);
    while (n_split > 0 && params.tensor_split[n_split - 1] == 0) {
        n_split--;
    }
    print("model", params.model.path);
    print("n_ctx", std::to_string(params.n_ctx));
    print("n_gpu_layers", std::to_string(params.n_gpu_layers));
    for (int i = 0; i < n_split; i++) {
        char value[32];
        snprintf(value, sizeof(value), "%.9g", params.tensor_split[i]);
        print("tensor_split", value);
    }
    for (const auto & override : params.tensor_buft_overrides) {
        if (override.pattern) {
            print("override_tensor", std::string(override.pattern) + "=" + ggml_backend_buft_name(override.buft));
        }
    }
    print("n_batch", std::to_string(params.n_batch));
    print("n_ubatch", std::to_string(params.n_ubatch));
    print("n_seq_max", std::to_string(params.n_parallel));
    print("kv_unified", std::to_string(params.kv_unified));
    print("type_k", ggml_type_name(params.cache_type_k));
    print("type_v", ggml_type_name(params.cache_type_v));
    print("flash_attn", llama_flash_attn_type_name(params.flash_attn_type));
    print("offload_kqv", std::to_string(!params.no_kv_offload));
    print("op_offload", std::to_string(!params.no_op_offload));
    print("swa_full", std::to_string(params.swa_full));
    print("embeddings", std::to_string(params.embedding));
    print("split_mode", name_of(params.split_mode));
    print("main_gpu", std::to_string(params.main_gpu));
    print("devices", names_of(params.devices));
    print("fit", std::to_string(params.fit_params));
    print_beside(params);
    return 0;
}

static int print_presets(const char * path) {
    common_preset_context context(LLAMA_EXAMPLE_SERVER);
    common_preset global;
    for (const auto & [name, preset] : context.load_from_ini(path, global)) {
        printf("%s\n", name.c_str());
        for (const auto & argument : preset.to_args()) {
            printf("\t%s\n", argument.c_str());
        }
    }
    return global.options.empty() ? 0 : 1;
}

int main(int argc, char ** argv) {
    if (argc >= 2 && strcmp(argv[1], "params") == 0) {
        return print_params(argc - 1, argv + 1);
    }
    if (argc == 3 && strcmp(argv[1], "preset") == 0) {
        return print_presets(argv[2]);
    }
    fprintf(stderr, "usage: reader params [ARGUMENT...] | reader preset FILE\n");
    return 2;
}
