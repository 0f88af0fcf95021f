// Devices of rpc-servers, for one load alone: ggml's registry never hears of them. Whatever else this process loads by
// default would otherwise be put on them, and listing all devices would ask servers that may be gone.

#include "fitter.h"
#include "ggml-backend.h"
#include "ggml-rpc.h"
#include "guard.h"

bool fitter_rpc_device(const char * endpoint, int32_t i, fitter_device_t * out) {
    return fitter::guarded(false, [&] {
        ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
        auto               add = reinterpret_cast<decltype(&ggml_backend_rpc_add_server)>(
            rpc ? ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server") : nullptr);
        if (add == nullptr) {
            fitter::set_error("libllama has no RPC");
            return false;
        }
        ggml_backend_reg_t server = add(endpoint);
        *out                      = {};
        if (server == nullptr || i < 0 || static_cast<size_t>(i) >= ggml_backend_reg_dev_count(server)) {
            return true;
        }
        ggml_backend_dev_t         device      = ggml_backend_reg_dev_get(server, static_cast<size_t>(i));
        ggml_backend_buffer_type_t buffer_type = ggml_backend_dev_buffer_type(device);

        out->device           = device;
        out->name             = ggml_backend_dev_name(device);
        out->description      = ggml_backend_dev_description(device);
        out->backend          = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));
        out->type             = ggml_backend_dev_type(device);
        out->buffer_type      = buffer_type;
        out->buffer_type_name = ggml_backend_buft_name(buffer_type);
        return true;
    });
}
