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
    bool                                    is_left_out  = false;
    list_of_types                           own_list     = nullptr;
    decltype(ggml_backend_reg_i::get_proc_address) own_lookup = nullptr;
    std::vector<ggml_backend_buffer_type_t> common       = {};
} host;

bool is_common(ggml_backend_buffer_type_t type) { return std::strcmp(ggml_backend_buft_name(type), "CPU_REPACK") == 0; }

ggml_backend_buffer_type_t * offered_types(ggml_backend_dev_t device) {
    ggml_backend_buffer_type_t * own = host.own_list(device);
    if (own == nullptr || !(host.is_described || host.is_left_out)) {
        return own;
    }
    host.common.clear();
    for (; *own != nullptr; own++) {
        if (is_common(*own)) {
            host.common.push_back(*own);
        }
    }
    host.common.push_back(nullptr);
    return host.common.data();
}

void * look_up(ggml_backend_reg_t registration, const char * name) {
    return std::strcmp(name, name_of_list) == 0 ? reinterpret_cast<void *>(offered_types)
                                                : host.own_lookup(registration, name);
}

ggml_backend_dev_t processor() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

list_of_types list_of(ggml_backend_dev_t device) {
    ggml_backend_reg_t registration = device == nullptr ? nullptr : ggml_backend_dev_backend_reg(device);
    return registration == nullptr
               ? nullptr
               : reinterpret_cast<list_of_types>(ggml_backend_reg_get_proc_address(registration, name_of_list));
}

// Puts offered_types in the place of the CPU backend's own list.
void take_over() {
    ggml_backend_dev_t device = processor();
    list_of_types      own    = host.own_lookup == nullptr ? list_of(device) : nullptr;
    if (own == nullptr) {
        return;
    }
    ggml_backend_reg_t registration      = ggml_backend_dev_backend_reg(device);
    host.own_list                        = own;
    host.own_lookup                      = registration->iface.get_proc_address;
    registration->iface.get_proc_address = look_up;
}

}  // namespace

namespace fitter {

void host_is_described(bool is_described) {
    host.is_described = is_described;
    if (is_described) {
        take_over();
    }
}

bool has_own_layouts() {
    ggml_backend_dev_t           device = processor();
    list_of_types                list   = list_of(device);
    ggml_backend_buffer_type_t * type   = list == nullptr ? nullptr : list(device);
    for (; type != nullptr && *type != nullptr; type++) {
        if (!is_common(*type)) {
            return true;
        }
    }
    return false;
}

void leave_out_own_layouts() {
    host.is_left_out = true;
    take_over();
}

}  // namespace fitter
