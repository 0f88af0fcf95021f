// A device like the one of ggml-blas, without BLAS: it shares the CPU's buffer type and is asked before the CPU.
// It computes nothing, so that every operation stays with the CPU.

#include "ggml-backend-impl.h"

namespace {

const char * name(ggml_backend_dev_t) {
    return "ACCEL";
}

void memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free = *total = 0;
}

enum ggml_backend_dev_type type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

void properties(ggml_backend_dev_t device, ggml_backend_dev_props * found) {
    *found             = {};
    found->name        = name(device);
    found->description = name(device);
    found->type        = type(device);
}

const char * backend_name(ggml_backend_t) {
    return "ACCEL";
}

void free_backend(ggml_backend_t backend) {
    delete backend;
}

enum ggml_status compute(ggml_backend_t, ggml_cgraph *) {
    return GGML_STATUS_SUCCESS;
}

ggml_guid guid = {0xac, 0xce, 0x1e, 0x7a, 0x70, 0x7a, 0x11, 0x13, 0x13, 0x11, 0x7a, 0x70, 0x7a, 0x1e, 0xce, 0xac};

ggml_backend_t start(ggml_backend_dev_t device, const char *) {
    ggml_backend_i interface = {};
    interface.get_name       = backend_name;
    interface.free           = free_backend;
    interface.graph_compute  = compute;
    return new ggml_backend{&guid, interface, device, nullptr};
}

ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t) {
    return ggml_backend_cpu_buffer_type();
}

bool supports(ggml_backend_dev_t, const ggml_tensor *) {
    return false;
}

bool supports_buffer_type(ggml_backend_dev_t, ggml_backend_buffer_type_t other) {
    return ggml_backend_buft_is_host(other);
}

const char * registry_name(ggml_backend_reg_t) {
    return "ACCEL";
}

size_t count(ggml_backend_reg_t) {
    return 1;
}

ggml_backend_dev_t device_at(ggml_backend_reg_t registry, size_t) {
    static ggml_backend_device device = [registry] {
        ggml_backend_device_i interface = {};
        interface.get_name              = name;
        interface.get_description       = name;
        interface.get_memory            = memory;
        interface.get_type              = type;
        interface.get_props             = properties;
        interface.init_backend          = start;
        interface.get_buffer_type       = buffer_type;
        interface.supports_op           = supports;
        interface.supports_buft         = supports_buffer_type;
        return ggml_backend_device{interface, registry, nullptr};
    }();
    return &device;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
    static ggml_backend_reg registry = {GGML_BACKEND_API_VERSION, {registry_name, count, device_at, nullptr}, nullptr};
    return &registry;
}
