#include "builds/buffer_type.h"

#include "builds/build.h"

namespace fitter {

namespace {

bool has_functions_for_lists() { return loaded_build().backend_api >= 3; }

}  // namespace

void buffer_type::set(const buffer_type_functions & functions, ggml_backend_dev_t device, void * context) {
    if (!has_functions_for_lists()) {
        memory_.two = {functions, device, context};
        return;
    }
    memory_.three = {functions.get_name,     functions.alloc_buffer,   nullptr, functions.get_alignment,
                     functions.get_max_size, functions.get_alloc_size, nullptr, functions.is_host,
                     device,                 context};
}

void buffer_type::set_device(ggml_backend_dev_t device) {
    (has_functions_for_lists() ? memory_.three.device : memory_.two.device) = device;
}

ggml_backend_dev_t buffer_type::device() {
    return has_functions_for_lists() ? memory_.three.device : memory_.two.device;
}

void * context_of(ggml_backend_buffer_type_t type) {
    const auto * bytes = reinterpret_cast<const void *>(type);
    return has_functions_for_lists() ? static_cast<const buffer_type::version_3 *>(bytes)->context
                                     : static_cast<const buffer_type::version_2 *>(bytes)->context;
}

decltype(buffer_type_functions::get_alloc_size) & alloc_size_of(ggml_backend_buffer_type_t type) {
    auto * bytes = reinterpret_cast<void *>(type);
    return has_functions_for_lists() ? static_cast<buffer_type::version_3 *>(bytes)->get_alloc_size
                                     : static_cast<buffer_type::version_2 *>(bytes)->functions.get_alloc_size;
}

decltype(buffer_type_functions::get_max_size) & max_size_of(ggml_backend_buffer_type_t type) {
    auto * bytes = reinterpret_cast<void *>(type);
    return has_functions_for_lists() ? static_cast<buffer_type::version_3 *>(bytes)->get_max_size
                                     : static_cast<buffer_type::version_2 *>(bytes)->functions.get_max_size;
}

}  // namespace fitter
