// libllama and these bindings have the same C++ library.

#include "platform/context.h"
#include "platform/platform.h"
// internal: the scheduler of a context and its parameters; upstream may change it at any time
#include "llama-context.h"

namespace fitter::platform {

namespace {

constexpr const char * usage_name = "_Z21mtmd_get_memory_usagePKc19mtmd_context_params";

// From b11434 (ggml 0.26) on mtmd_get_memory_usage returns more behind the sizes, whatever the header here has.
struct memory_usage {
    std::map<ggml_backend_dev_t, size_t> sizes;
    char                                 room[256];
};

}  // namespace

bool call(void (*function)(void *), void * data) {
    function(data);
    return true;
}

llama_memory_breakdown breakdown_of(const llama_context * context) { return llama_get_memory_breakdown(context); }

ggml_backend_sched_t sched_of(const llama_context * context) { return context->get_sched(); }

const llama_cparams & cparams_of(const llama_context * context) { return context->get_cparams(); }

bool has_mtmd_usage(void * library) { return symbol_of(library, usage_name) != nullptr; }

std::map<ggml_backend_dev_t, size_t> mtmd_usage(void * library, const char * path, const mtmd_context_params & params) {
    using function = memory_usage (*)(const char *, mtmd_context_params);
    return reinterpret_cast<function>(symbol_of(library, usage_name))(path, params).sizes;
}

}  // namespace fitter::platform
