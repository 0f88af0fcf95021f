// A Mac's GPU without a Mac: what the Objective-C part of ggml-metal would say to its C++ part, just enough for the latter to
// list devices, answer questions about them and plan on them. Nothing is computed; whatever else is called ends the
// process. supports_op.inc is cut from ggml-metal-device.m (see build.py): it is C.
//
// ORACLE_METAL_DEVICES describes the devices as FITTER_DEVICES does. GGML_METAL_DEVICES has to be their number.

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml-metal-common.h"
#include "ggml-metal-context.h"
#include "ggml-metal-device.h"
#include "ggml-metal-fusion.h"
#include "ggml-metal-impl.h"

struct ggml_metal_device {
    ggml_metal_device_props  props = {};
    size_t                   free  = 0;
    ggml_metal_fusion_info * finfo = nullptr;
};

struct ggml_metal_buffer {
    void * base;
    size_t size;
    bool   shared;
};

struct ggml_metal {
    ggml_metal_device_t dev;
};

void ggml_graph_optimize(ggml_cgraph * gf);

// Since b11549 gpu_family alone says it.
template <class props> auto set_apple7(props & self, int) -> decltype(self.supports_gpu_family_apple7, void()) {
    self.supports_gpu_family_apple7 = true;
}
template <class props> void set_apple7(props &, long) {}

extern "C" {

#include "supports_op.inc"

ggml_metal_device_t ggml_metal_device_init(int device, int) {
    const char *      text = std::getenv("ORACLE_METAL_DEVICES");
    std::stringstream devices(text ? text : "");
    std::string       described, name, profile, capability, total, free, description;
    for (int i = 0; i <= device; i++) {
        std::getline(devices, described, ';');
    }
    std::stringstream fields(described);
    for (std::string * field : {&name, &profile, &capability, &total, &free}) {
        std::getline(fields, *field, ',');
    }
    std::getline(fields, description);

    auto * dev  = new ggml_metal_device;
    auto & self = dev->props;
    self.device = self.device_virt = device;
    std::snprintf(self.name, sizeof(self.name), "MTL%d", device);
    std::snprintf(self.desc, sizeof(self.desc), "%s", description.c_str());
    dev->free                      = std::stoull(free);
    self.max_working_set_size      = std::stoull(total);
    self.max_buffer_size           = self.max_working_set_size / 4 * 3;
    self.max_theadgroup_memory_size = 32768;
    self.has_simdgroup_reduction = self.has_simdgroup_mm = self.has_unified_memory = true;
    self.has_bfloat                 = std::getenv("GGML_METAL_BF16_DISABLE") == nullptr;
    self.use_shared_buffers         = true;
    self.gpu_family                 = 7;
    set_apple7(self, 0);
    const char * min_batch          = std::getenv("GGML_OP_OFFLOAD_MIN_BATCH");
    self.op_offload_min_batch_size  = min_batch ? std::atoi(min_batch) : 32;
    dev->finfo                      = ggml_metal_fusion_info_init(std::getenv("GGML_METAL_FUSION_DISABLE") == nullptr, 0);
    return dev;
}

void ggml_metal_device_free(ggml_metal_device_t dev) { delete dev; }

const ggml_metal_device_props * ggml_metal_device_get_props(ggml_metal_device_t dev) { return &dev->props; }

ggml_metal_fusion_info * ggml_metal_device_get_fusion_info(ggml_metal_device_t dev) { return dev->finfo; }

void ggml_metal_device_get_memory(ggml_metal_device_t dev, size_t * free, size_t * total) {
    *free  = dev->free;
    *total = dev->props.max_working_set_size;
}

ggml_metal_event_t ggml_metal_device_event_init(ggml_metal_device_t) { return reinterpret_cast<ggml_metal_event_t>(1); }

void ggml_metal_device_event_free(ggml_metal_device_t, ggml_metal_event_t) {}

void ggml_metal_device_event_synchronize(ggml_metal_device_t, ggml_metal_event_t) {}

ggml_metal_buffer_t ggml_metal_buffer_init(ggml_metal_device_t dev, size_t size, bool shared) {
    void * base = nullptr;
    if (size > 0) {
        if (size > dev->props.max_buffer_size) {
            return nullptr;
        }
        base = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) {
            return nullptr;
        }
    }
    return new ggml_metal_buffer{base, size, shared};
}

void ggml_metal_buffer_free(ggml_metal_buffer_t buf) {
    if (buf->base != nullptr) {
        munmap(buf->base, buf->size);
    }
    delete buf;
}

void * ggml_metal_buffer_get_base(ggml_metal_buffer_t buf) { return buf->base; }

bool ggml_metal_buffer_is_shared(ggml_metal_buffer_t buf) { return buf->shared; }

void ggml_metal_buffer_memset_tensor(ggml_metal_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {}

void ggml_metal_buffer_clear(ggml_metal_buffer_t, uint8_t) {}

ggml_metal_t ggml_metal_init(ggml_metal_device_t dev) { return new ggml_metal{dev}; }

void ggml_metal_free(ggml_metal_t ctx) { delete ctx; }

const char * ggml_metal_get_name(ggml_metal_t ctx) { return ctx->dev->props.name; }

void ggml_metal_synchronize(ggml_metal_t) {}

void ggml_metal_set_n_cb(ggml_metal_t, int) {}

void ggml_metal_graph_optimize(ggml_metal_t, ggml_cgraph * gf) {
    if (std::getenv("GGML_METAL_GRAPH_OPTIMIZE_DISABLE") == nullptr) {
        ggml_graph_optimize(gf);
    }
}

}  // extern "C"
