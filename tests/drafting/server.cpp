// What upstream's own code says that llama-server takes with these arguments: a line for each device and the host, name,
// bytes of model, context and compute buffers. First the main model's, after an empty line those of what drafts: the
// draft model, or the second context of the model itself, whose weights are counted already.
//
//   server ARGUMENT...

#include "arg.h"
#include "common.h"
#include "fit.h"
#include "speculative.h"

#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>

static void print(const common_params & of, const llama_model_params & model, const llama_context_params & context,
                  bool shares_model) {
    std::vector<ggml_backend_dev_t> devices;
    uint32_t n_layer, n_ctx_train, n_expert;
    const auto rows = common_get_device_memory_data(of.model.path.c_str(), &model, &context, devices, n_layer,
                                                    n_ctx_train, n_expert, GGML_LOG_LEVEL_ERROR);
    for (size_t i = 0; i < rows.size(); i++) {
        const char * name = i < devices.size() ? ggml_backend_dev_name(devices[i]) : "host";
        printf("%s %zu %zu %zu\n", name, shares_model ? 0 : rows[i].model, rows[i].context, rows[i].compute);
    }
}

int main(int argc, char ** argv) {
    common_params params;
    if (!common_params_parse(argc, argv, params, LLAMA_EXAMPLE_SERVER)) {
        return 1;
    }
    const auto & types = params.speculative.types;
    const bool is_mtp = std::find(types.begin(), types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_MTP) != types.end();
    const bool is_simple = std::find(types.begin(), types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE) != types.end();
    const auto model = common_model_params_to_llama(params);
    print(params, model, common_context_params_to_llama(params), false);
    if (params.speculative.has_dft() ? is_simple : is_mtp) {
        common_params drafting = common_base_params_to_speculative(params);
        const auto model_of_draft = common_model_params_to_llama(drafting);
        auto context = common_context_params_to_llama(drafting);
        context.ctx_type = is_mtp ? LLAMA_CONTEXT_TYPE_MTP : context.ctx_type;
        context.n_rs_seq = 0;
        printf("\n");
        print(drafting, model_of_draft, context, !params.speculative.has_dft());
    }
    return 0;
}
