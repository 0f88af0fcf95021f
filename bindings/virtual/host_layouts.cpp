#include "virtual/host_layouts.h"

#include <cstring>
#include <vector>

#include "ggml-backend.h"
// internal: the interface of a registered backend; upstream may change it at any time
#include "ggml-backend-impl.h"

namespace {

using list_of_types = ggml_backend_buffer_type_t * (*)(ggml_backend_dev_t);

constexpr const char * name_of_list = "ggml_backend_dev_get_extra_bufts";

struct {
    bool                                    is_described = false;
    list_of_types                           own_list     = nullptr;
    decltype(ggml_backend_reg_i::get_proc_address) own_lookup = nullptr;
    std::vector<ggml_backend_buffer_type_t> common       = {};
} host;

ggml_backend_buffer_type_t * common_types(ggml_backend_dev_t device) {
    ggml_backend_buffer_type_t * own = host.own_list(device);
    if (!host.is_described || own == nullptr) {
        return own;
    }
    host.common.clear();
    for (; *own != nullptr; own++) {
        if (std::strcmp(ggml_backend_buft_name(*own), "CPU_REPACK") == 0) {
            host.common.push_back(*own);
        }
    }
    host.common.push_back(nullptr);
    return host.common.data();
}

void * look_up(ggml_backend_reg_t registration, const char * name) {
    return std::strcmp(name, name_of_list) == 0 ? reinterpret_cast<void *>(common_types)
                                                : host.own_lookup(registration, name);
}

}  // namespace

namespace fitter {

void host_is_described(bool is_described) {
    host.is_described = is_described;
    if (!is_described || host.own_lookup != nullptr) {
        return;
    }
    ggml_backend_dev_t cpu          = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_t registration = cpu == nullptr ? nullptr : ggml_backend_dev_backend_reg(cpu);
    void *             own = registration == nullptr ? nullptr : ggml_backend_reg_get_proc_address(registration, name_of_list);
    if (own == nullptr) {
        return;
    }
    host.own_list                        = reinterpret_cast<list_of_types>(own);
    host.own_lookup                      = registration->iface.get_proc_address;
    registration->iface.get_proc_address = look_up;
}

}  // namespace fitter
