#include "virtual/computing.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

namespace {

// Never freed: graphs may be computed while the process ends.
ggml_backend_t cpu() {
    static ggml_backend_t backend = []() -> ggml_backend_t {
        ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        ggml_backend_t     made   = device == nullptr ? nullptr : ggml_backend_dev_init(device, nullptr);
        if (made != nullptr) {
            const auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
                ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"));
            if (set_threads != nullptr) {
                set_threads(made, static_cast<int>(std::thread::hardware_concurrency()));
            }
        }
        return made;
    }();
    return backend;
}

}  // namespace

bool fitter::computes() {
    static const bool is_asked = [] {
        const char * text = std::getenv("FITTER_COMPUTES");
        return text != nullptr && std::strcmp(text, "1") == 0;
    }();
    return is_asked;
}

ggml_status fitter::compute(ggml_cgraph * graph) {
    static std::mutex           mutex;
    std::lock_guard<std::mutex> lock(mutex);
    return cpu() == nullptr ? GGML_STATUS_FAILED : ggml_backend_graph_compute(cpu(), graph);
}
