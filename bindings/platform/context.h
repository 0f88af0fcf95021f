// What llama.cpp has in C++ only and hands over in classes, whose layout is the compiler's that it was built with.

#pragma once

#include <cstddef>
#include <map>

#include "ggml-backend.h"
#include "llama.h"
// staging: memory by buffer type; upstream may change it at any time
#include "llama-ext.h"
#include "mtmd.h"

struct llama_cparams;

namespace fitter::platform {

// Calls a function with data. Where llama.cpp throws in it, false, if what it throws is of another C++ library than that of
// these bindings, so that no catch of theirs takes it; what was on the way stays as it is.
bool call(void (*function)(void *), void * data);

llama_memory_breakdown breakdown_of(const llama_context * context);

// The scheduler of a context, nullptr where it has none, and its parameters.
ggml_backend_sched_t  sched_of(const llama_context * context);
const llama_cparams & cparams_of(const llama_context * context);

// mtmd_get_memory_usage of the libmtmd of this handle, and whether it has one.
bool has_mtmd_usage(void * library);

std::map<ggml_backend_dev_t, size_t> mtmd_usage(void * library, const char * path, const mtmd_context_params & params);

}  // namespace fitter::platform
