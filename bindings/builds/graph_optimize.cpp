#include "builds/graph_optimize.h"

#include <atomic>
#include <cstdint>

#include "builds/build.h"
// internal: what a backend is given before the memory of a graph is planned; upstream may change it at any time
#include "ggml-backend-impl.h"
#include "platform/platform.h"

namespace fitter {

namespace {

using add_function = decltype(ggml_backend_graph_optimize_params::add_alloc_dep);

std::atomic<const char *> difference{nullptr};
std::atomic<add_function> known{nullptr};

// The library that calls backends' graph_optimize.
const void * scheduler() {
    static const void * base = platform::library_of(reinterpret_cast<void *>(&ggml_backend_sched_get_n_backends));
    return base;
}

// The scheduler keeps the argument in the frame of a function that called this one. Where it has none, the register of
// the argument holds anything.
bool is_argument(const ggml_backend_graph_optimize_params * argument, const void * frame) {
    thread_local const uintptr_t top = platform::top_of_stack();
    const auto                   at  = reinterpret_cast<uintptr_t>(argument);
    if (at <= reinterpret_cast<uintptr_t>(frame) || at + sizeof(*argument) > top || at % alignof(void *) != 0) {
        return false;
    }
    const add_function add = argument->add_alloc_dep;
    if (add != nullptr && add == known) {
        return true;
    }
    const void * library = platform::library_of(reinterpret_cast<void *>(add));
    if (library == nullptr || library != scheduler()) {
        return false;
    }
    known = add;
    return true;
}

}  // namespace

keep_alive keep_alive_of(ggml_backend_graph_optimize_params * argument, const void * frame) {
    const int32_t known      = loaded_build().graph_optimize_has_params;
    const bool    is_there   = is_argument(argument, frame);
    const bool    has_params = known < 0 ? is_there : known != 0;
    if (has_params != is_there) {
        difference = has_params ? "graph_optimize was called without the argument for allocation dependencies"
                                : "graph_optimize was called with an argument for allocation dependencies";
        return [](ggml_tensor *, ggml_tensor *) {};
    }
    if (!has_params) {
        return [](ggml_tensor *, ggml_tensor *) {};
    }
    return [argument](ggml_tensor * tensor, ggml_tensor * until) {
        argument->add_alloc_dep(argument->user_data, tensor, until);
    };
}

const char * graph_optimize_difference() { return difference; }

}  // namespace fitter
