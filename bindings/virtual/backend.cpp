// The virtual-device backend: a ggml backend whose devices exist only as a description. llama.cpp plans on them as on
// the real ones; nothing is computed, and a buffer is a reserved range of addresses.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "builds/buffer_type.h"
#include "builds/build.h"
#include "builds/graph_optimize.h"
#include "builds/operations.h"
#include "virtual/computing.h"
#include "virtual/describe.h"
#include "fitter.h"
// internal: the interfaces that a backend of one's own fills in; upstream may change it at any time
#include "ggml-backend-impl.h"
#include "guard.h"
#include "platform/platform.h"
#include "virtual/host_layouts.h"
#include "virtual/profile.h"
#include "virtual/rules/vulkan_limits.h"

namespace {

using fitter::description;
using fitter::max_devices;
using fitter::profile;
namespace vulkan = fitter::vulkan;

// A device of the registry. ggml keeps pointers to it, so what it describes can change but it stays where it is.
struct slot {
    description              described   = {};
    std::string              id          = {};
    ggml_backend_device      device      = {};
    fitter::buffer_type      buffer_type = {};
};

struct host_buffer_type {
    fitter::buffer_type buffer_type = {};
    const profile *     kind        = nullptr;
};

constexpr size_t recorder_index = max_devices;

struct backend_state {
    std::array<slot, max_devices + 1>           slots      = {};
    std::map<const profile *, host_buffer_type> hosts      = {};
    size_t                                      n_used     = 0;      // slots that are described
    bool                                        configured = false;  // by a program, not by the environment
    bool                                        ready      = false;  // slots and registration are built
    // What the recorder behaves as, and that without the sizes that a driver allows: it tells how large a tensor would be.
    const profile *  recorded        = nullptr;
    profile          recorder        = {};
    vulkan::limits   recorder_limits = {};
    ggml_backend_reg                            registration = {};

    std::mutex           record_mutex   = {};
    int                  record_mode    = 0;
    std::string          record_texts   = {};
    std::vector<int64_t> record_numbers = {};
};

// Never destroyed: the registry keeps pointers into it until the process has ended.
backend_state & state() {
    static backend_state * instance = new backend_state;
    return *instance;
}

slot & slot_of(ggml_backend_dev_t device) { return *static_cast<slot *>(device->context); }

void log_error(const char * text) {
    ggml_log_callback callback  = nullptr;
    void *            user_data = nullptr;
    ggml_log_get(&callback, &user_data);
    if (callback != nullptr) {
        callback(GGML_LOG_LEVEL_ERROR, text, user_data);
    }
}

// ---- recorder

enum record_mode { record_off = 0, record_allocated = 1, record_sized = 2 };

void record(int mode, ggml_backend_buffer_type_t buffer_type, const ggml_tensor * tensor, size_t bytes) {
    backend_state & backend = state();
    if (backend.record_mode != mode) {
        return;
    }
    const bool is_weight = tensor->buffer != nullptr && tensor->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;

    std::lock_guard<std::mutex> lock(backend.record_mutex);
    backend.record_texts.append(ggml_backend_buft_name(buffer_type)).push_back('\0');
    backend.record_texts.append(tensor->name).push_back('\0');
    const int64_t row_size = static_cast<int64_t>(ggml_row_size(tensor->type, tensor->ne[0]));
    backend.record_numbers.insert(backend.record_numbers.end(), {static_cast<int64_t>(bytes), is_weight ? 1 : 0, row_size,
                                                                 tensor->ne[1], tensor->ne[2]});
}

// ---- buffers of a device

struct reserved_range {
    void * base;
    size_t size;
    bool   is_owned = true;
};

reserved_range & range_of(ggml_backend_buffer_t buffer) { return *static_cast<reserved_range *>(buffer->context); }

void buffer_free(ggml_backend_buffer_t buffer) {
    if (range_of(buffer).is_owned) {
        fitter::platform::release(range_of(buffer).base, range_of(buffer).size);
    }
    delete &range_of(buffer);
}

void * buffer_get_base(ggml_backend_buffer_t buffer) { return range_of(buffer).base; }

ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    if (tensor->view_src == nullptr && state().record_mode == record_allocated) {
        const slot & owner = slot_of(ggml_backend_buft_get_device(buffer->buft));
        record(record_allocated, buffer->buft, tensor, owner.described.profile->alloc_size(owner.described, tensor));
    }
    return GGML_STATUS_SUCCESS;
}

void buffer_memset_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    if (fitter::computes()) {
        std::memset(static_cast<char *>(tensor->data) + offset, value, size);
    }
}

void write(ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    if (fitter::computes()) {
        std::memcpy(static_cast<char *>(tensor->data) + offset, data, size);
    }
}

void read(const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    if (fitter::computes()) {
        std::memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
    } else {
        std::memset(data, 0, size);
    }
}

void buffer_set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    write(tensor, data, offset, size);
}

void buffer_get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    read(tensor, data, offset, size);
}

bool is_virtual(ggml_backend_buffer_type_t buffer_type);

bool buffer_cpy_tensor(ggml_backend_buffer_t, const ggml_tensor * source, ggml_tensor * target) {
    if (!fitter::computes()) {
        return true;
    }
    if (!is_virtual(source->buffer->buft) && !ggml_backend_buffer_is_host(source->buffer)) {
        return false;
    }
    std::memcpy(target->data, source->data, ggml_nbytes(source));
    return true;
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    if (fitter::computes()) {
        const reserved_range & range = range_of(buffer);
        // pages that nothing was written to stay without memory
        if (value != 0 || !range.is_owned || !fitter::platform::forget(range.base, range.size)) {
            std::memset(range.base, value, range.size);
        }
    }
}

const ggml_backend_buffer_i buffer_interface = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_get_base,
    /* .init_tensor   = */ buffer_init_tensor,
    /* .memset_tensor = */ buffer_memset_tensor,
    /* .set_tensor    = */ buffer_set_tensor,
    /* .get_tensor    = */ buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ buffer_cpy_tensor,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

// ---- buffer types of a device

const char * buffer_type_get_name(ggml_backend_buffer_type_t buffer_type) {
    return slot_of(ggml_backend_buft_get_device(buffer_type)).described.name.c_str();
}

bool is_virtual(ggml_backend_buffer_type_t buffer_type) { return buffer_type->iface.get_name == buffer_type_get_name; }

ggml_backend_buffer_t buffer_type_alloc(ggml_backend_buffer_type_t buffer_type, size_t size) {
    const description & owner = slot_of(ggml_backend_buft_get_device(buffer_type)).described;
    if (owner.profile->largest_buffer != nullptr && size > owner.profile->largest_buffer(owner)) {
        return nullptr;
    }
    void * base = fitter::platform::reserve(size, fitter::computes() ? fitter::platform::use::by_pages
                                                                    : fitter::platform::use::never);
    if (base == nullptr) {
        const std::string text = "fitter: cannot reserve " + std::to_string(size) + " bytes of addresses for " +
                                 ggml_backend_buft_name(buffer_type) + "\n";
        log_error(text.c_str());
        return nullptr;
    }
    return ggml_backend_buffer_init(buffer_type, buffer_interface, new reserved_range{base, size, true}, size);
}

size_t buffer_type_get_alignment(ggml_backend_buffer_type_t buffer_type) {
    return slot_of(ggml_backend_buft_get_device(buffer_type)).described.profile->alignment;
}

size_t buffer_type_get_max_size(ggml_backend_buffer_type_t buffer_type) {
    const description & owner = slot_of(ggml_backend_buft_get_device(buffer_type)).described;
    return owner.profile->max_size == nullptr ? SIZE_MAX : owner.profile->max_size(owner);
}

size_t buffer_type_get_alloc_size(ggml_backend_buffer_type_t buffer_type, const ggml_tensor * tensor) {
    const slot & owner = slot_of(ggml_backend_buft_get_device(buffer_type));
    const size_t size  = owner.described.profile->alloc_size(owner.described, tensor);
    record(record_sized, buffer_type, tensor, size);
    return size;
}

const fitter::buffer_type_functions buffer_type_interface = {
    /* .get_name       = */ buffer_type_get_name,
    /* .alloc_buffer   = */ buffer_type_alloc,
    /* .get_alignment  = */ buffer_type_get_alignment,
    /* .get_max_size   = */ buffer_type_get_max_size,
    /* .get_alloc_size = */ buffer_type_get_alloc_size,
    /* .is_host        = */ nullptr,
};

// ---- pinned host memory: the CPU's buffer type under another name

const char * host_get_name(ggml_backend_buffer_type_t buffer_type) {
    return static_cast<host_buffer_type *>(fitter::context_of(buffer_type))->kind->host_buffer_type;
}

ggml_backend_buffer_t host_alloc(ggml_backend_buffer_type_t buffer_type, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (buffer != nullptr && static_cast<host_buffer_type *>(fitter::context_of(buffer_type))->kind->pins_host_memory()) {
        buffer->buft = buffer_type;
    }
    return buffer;
}

const profile & profile_of_host(ggml_backend_buffer_type_t buffer_type) {
    return *static_cast<host_buffer_type *>(fitter::context_of(buffer_type))->kind;
}

size_t host_get_alignment(ggml_backend_buffer_type_t buffer_type) {
    const size_t own = profile_of_host(buffer_type).host_alignment;
    return own != 0 ? own : ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
}

size_t host_get_max_size(ggml_backend_buffer_type_t buffer_type) {
    const profile & kind = profile_of_host(buffer_type);
    return kind.max_size == nullptr ? SIZE_MAX : kind.max_size(slot_of(ggml_backend_buft_get_device(buffer_type)).described);
}

size_t host_get_alloc_size(ggml_backend_buffer_type_t buffer_type, const ggml_tensor * tensor) {
    const size_t size = ggml_backend_buft_get_alloc_size(ggml_backend_cpu_buffer_type(), tensor);
    record(record_sized, buffer_type, tensor, size);
    return size;
}

bool host_is_host(ggml_backend_buffer_type_t) { return true; }

const fitter::buffer_type_functions host_buffer_type_interface = {
    /* .get_name       = */ host_get_name,
    /* .alloc_buffer   = */ host_alloc,
    /* .get_alignment  = */ host_get_alignment,
    /* .get_max_size   = */ host_get_max_size,
    /* .get_alloc_size = */ host_get_alloc_size,
    /* .is_host        = */ host_is_host,
};

// ---- streams

const char * stream_get_name(ggml_backend_t backend) { return slot_of(backend->device).described.name.c_str(); }

void stream_free(ggml_backend_t backend) { delete backend; }

void stream_set_tensor_async(ggml_backend_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    write(tensor, data, offset, size);
}

void stream_get_tensor_async(ggml_backend_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    read(tensor, data, offset, size);
}

void stream_synchronize(ggml_backend_t) {}

ggml_status stream_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    if (fitter::computes()) {
        return fitter::compute(graph);
    }
    const std::string text = "fitter: " + std::string(stream_get_name(backend)) +
                             " is a virtual device: it holds no data and computes nothing\n";
    log_error(text.c_str());
    return GGML_STATUS_FAILED;
}

void stream_event_record(ggml_backend_t, ggml_backend_event_t) {}

void stream_event_wait(ggml_backend_t, ggml_backend_event_t) {}

void stream_graph_optimize(ggml_backend_t backend, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    const description & self = slot_of(backend->device).described;
    if (self.profile->graph_optimize != nullptr) {
        self.profile->graph_optimize(self, graph, fitter::keep_alive_of(params, __builtin_frame_address(0)));
    }
}

const ggml_backend_i stream_interface = {
    /* .get_name            = */ stream_get_name,
    /* .free                = */ stream_free,
    /* .set_tensor_async    = */ stream_set_tensor_async,
    /* .get_tensor_async    = */ stream_get_tensor_async,
    /* .set_tensor_2d_async = */ nullptr,
    /* .get_tensor_2d_async = */ nullptr,
    /* .cpy_tensor_async    = */ nullptr,
    /* .synchronize         = */ stream_synchronize,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */ stream_graph_compute,
    /* .event_record        = */ stream_event_record,
    /* .event_wait          = */ stream_event_wait,
    /* .graph_optimize      = */ stream_graph_optimize,
};

ggml_guid_t backend_guid() {
    static ggml_guid guid = {0x66, 0x69, 0x74, 0x74, 0x65, 0x72, 0x2d, 0x76, 0x69, 0x72, 0x74, 0x75, 0x61, 0x6c, 0x00, 0x01};
    return &guid;
}

// ---- devices

const char * device_get_name(ggml_backend_dev_t device) { return slot_of(device).described.name.c_str(); }

const char * device_get_description(ggml_backend_dev_t device) { return slot_of(device).described.text.c_str(); }

void device_get_memory(ggml_backend_dev_t device, size_t * free, size_t * total) {
    *free  = slot_of(device).described.free;
    *total = slot_of(device).described.total;
}

enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void device_get_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    const slot & self  = slot_of(device);
    props->name        = device_get_name(device);
    props->description = device_get_description(device);
    props->type        = device_get_type(device);
    props->device_id   = self.id.c_str();
    props->caps        = self.described.profile->caps;

    props->caps.host_buffer = props->caps.host_buffer && self.described.profile->pins_host_memory();
    device_get_memory(device, &props->memory_free, &props->memory_total);
}

ggml_backend_t device_init_backend(ggml_backend_dev_t device, const char *) {
    return new ggml_backend{backend_guid(), stream_interface, device, nullptr};
}

ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t device) {
    return slot_of(device).buffer_type.get();
}

ggml_backend_buffer_type_t device_get_host_buffer_type(ggml_backend_dev_t device) {
    const profile * own   = slot_of(device).described.profile;
    const auto      found = state().hosts.find(own == &state().recorder ? state().recorded : own);
    return found == state().hosts.end() ? nullptr : found->second.buffer_type.get();
}

// A model's file in the device's own memory, where the profile's caps promise that.
ggml_backend_buffer_t device_buffer_from_host_ptr(ggml_backend_dev_t device, void * data, size_t size, size_t) {
    return ggml_backend_buffer_init(slot_of(device).buffer_type.get(), buffer_interface, new reserved_range{data, size, false},
                                    size);
}

bool device_supports_op(ggml_backend_dev_t device, const ggml_tensor * op) {
    const description & self = slot_of(device).described;
    if (fitter::op_of(op) == fitter::unknown_op) {
        return false;
    }
    for (const ggml_tensor * source : op->src) {
        if (self.profile->own_sources_only && source != nullptr && source->buffer != nullptr &&
            is_virtual(source->buffer->buft) && ggml_backend_buft_get_device(source->buffer->buft) != device) {
            return false;
        }
    }
    return self.profile->supports_op(self, op);
}

bool device_supports_buffer_type(ggml_backend_dev_t device, ggml_backend_buffer_type_t buffer_type) {
    return is_virtual(buffer_type) && ggml_backend_buft_get_device(buffer_type) == device;
}

bool device_offload_op(ggml_backend_dev_t device, const ggml_tensor * op) {
    const description & self = slot_of(device).described;
    return self.profile->offload_op(self, op);
}

ggml_backend_event_t device_event_new(ggml_backend_dev_t device) { return new ggml_backend_event{device, nullptr}; }

void device_event_free(ggml_backend_dev_t, ggml_backend_event_t event) { delete event; }

void device_event_synchronize(ggml_backend_dev_t, ggml_backend_event_t) {}

const ggml_backend_device_i device_interface = {
    /* .get_name             = */ device_get_name,
    /* .get_description      = */ device_get_description,
    /* .get_memory           = */ device_get_memory,
    /* .get_type             = */ device_get_type,
    /* .get_props            = */ device_get_props,
    /* .init_backend         = */ device_init_backend,
    /* .get_buffer_type      = */ device_get_buffer_type,
    /* .get_host_buffer_type = */ device_get_host_buffer_type,
    /* .buffer_from_host_ptr = */ device_buffer_from_host_ptr,
    /* .supports_op          = */ device_supports_op,
    /* .supports_buft        = */ device_supports_buffer_type,
    /* .offload_op           = */ device_offload_op,
    /* .event_new            = */ device_event_new,
    /* .event_free           = */ device_event_free,
    /* .event_synchronize    = */ device_event_synchronize,
};

// ---- registration

const char * registration_get_name(ggml_backend_reg_t) { return "fitter"; }

size_t registration_get_device_count(ggml_backend_reg_t) {
    return state().configured ? state().slots.size() : state().n_used;
}

ggml_backend_dev_t registration_get_device(ggml_backend_reg_t, size_t index) {
    return index < state().slots.size() ? &state().slots[index].device : nullptr;
}

size_t sum_memory(ggml_backend_dev_t * devices, size_t n) {
    std::vector<const description *> described;
    for (size_t i = 0; i < n; i++) {
        if (!fitter_virtual_owns(devices[i]) || slot_of(devices[i]).described.profile != slot_of(devices[0]).described.profile) {
            return 0;
        }
        described.push_back(&slot_of(devices[i]).described);
    }
    const auto own = described.empty() ? nullptr : described[0]->profile->sum_memory;
    return own == nullptr ? 0 : own(described);
}

void * registration_get_proc_address(ggml_backend_reg_t, const char * name) {
    return std::strcmp(name, "fitter_sum_memory") == 0 ? reinterpret_cast<void *>(sum_memory) : nullptr;
}

void build() {
    backend_state & backend = state();
    if (backend.ready) {
        return;
    }
    backend.registration = {
        /* .api_version = */ fitter::loaded_build().backend_api,
        /* .iface       = */
        {registration_get_name, registration_get_device_count, registration_get_device, registration_get_proc_address},
        /* .context     = */ nullptr,
    };
    for (size_t i = 0; i < backend.slots.size(); i++) {
        slot & entry      = backend.slots[i];
        entry.id          = "virtual:" + std::to_string(i);
        entry.device      = {device_interface, &backend.registration, &entry};
        entry.buffer_type.set(buffer_type_interface, &entry.device, nullptr);
    }
    backend.ready = true;
}

void describe(const std::vector<description> & devices) {
    build();
    backend_state & backend = state();
    backend.recorded                = devices.empty() ? &fitter::cuda_profile : devices[0].profile;
    backend.recorder                = *backend.recorded;
    backend.recorder.largest_buffer = nullptr;
    if (backend.recorded->vulkan != nullptr) {
        backend.recorder_limits                       = *backend.recorded->vulkan;
        backend.recorder_limits.maxStorageBufferRange = SIZE_MAX;
        backend.recorder_limits.maxBufferSize         = SIZE_MAX;
        backend.recorder.vulkan                       = &backend.recorder_limits;
    }
    for (size_t i = 0; i < backend.slots.size(); i++) {
        description unused;
        unused.profile = i == recorder_index ? &backend.recorder : backend.recorded;
        unused.name    = i == recorder_index ? "Recorder" : "unused" + std::to_string(i);
        // Some profiles' largest buffer is a share of the memory, and the recorder has to hold any model whole.
        unused.total = unused.free = uint64_t{1} << 50;

        backend.slots[i].described = i < devices.size() ? devices[i] : unused;
    }
    backend.n_used = devices.size();

    // The host buffer type of a real backend belongs to its first device.
    for (auto & [kind, host] : backend.hosts) {
        host.buffer_type.set_device(nullptr);
    }
    for (slot & entry : backend.slots) {
        const profile * kind = entry.described.profile;
        if (kind == &backend.recorder) {
            kind = backend.recorded;
        }
        if (kind->host_buffer_type == nullptr) {
            continue;
        }
        host_buffer_type & host = backend.hosts[kind];
        if (host.buffer_type.device() == nullptr) {
            host.kind = kind;
            host.buffer_type.set(host_buffer_type_interface, &entry.device, &host);
        }
    }
}

}  // namespace

// ---- what the library offers

int32_t fitter_virtual_configure(const char * text) {
    return fitter::guarded<int32_t>(-1, [&]() -> int32_t {
        const std::vector<description> devices = fitter::parse_descriptions(text);
        state().configured                     = true;
        describe(devices);
        fitter::host_is_described(!devices.empty());
        return static_cast<int32_t>(devices.size());
    });
}

void fitter_virtual_host_is_described(bool is_described) {
    fitter::guarded([&] { fitter::host_is_described(is_described); });
}

bool fitter_virtual_has_own_layouts(void) {
    return fitter::guarded(false, [] { return fitter::has_own_layouts(); });
}

void fitter_virtual_leave_out_own_layouts(void) {
    fitter::guarded([] { fitter::leave_out_own_layouts(); });
}

const char * fitter_virtual_error(void) { return fitter::last_error().c_str(); }

const char * fitter_virtual_build_difference(void) { return fitter::graph_optimize_difference(); }

void * fitter_virtual_device(int32_t i) {
    return fitter::guarded<void *>(nullptr, [&]() -> void * {
        backend_state & backend = state();
        return i >= 0 && static_cast<size_t>(i) < backend.n_used ? &backend.slots[static_cast<size_t>(i)].device : nullptr;
    });
}

void * fitter_virtual_recorder(void) {
    return fitter::guarded<void *>(nullptr, []() -> void * {
        return state().configured ? &state().slots[recorder_index].device : nullptr;
    });
}

bool fitter_virtual_owns(const void * device) {
    return fitter::guarded(false, [&] {
        for (const slot & entry : state().slots) {
            if (&entry.device == device) {
                return true;
            }
        }
        return false;
    });
}

int32_t fitter_virtual_loaded_api_version(void) {
    return fitter::guarded<int32_t>(-1, [] {
        return ggml_backend_reg_count() == 0 ? -1 : ggml_backend_reg_get(0)->api_version;
    });
}

bool fitter_virtual_adopt(const char * path) {
    return fitter::guarded(false, [&] {
        // Stays open: the registry keeps pointers into it.
        std::string why     = "no ggml_backend_cuda_reg";
        void *      library = fitter::platform::open_library(path, why);
        void *      found   = library ? fitter::platform::symbol_of(library, "ggml_backend_cuda_reg") : nullptr;
        if (found == nullptr) {
            fitter::set_error(why.c_str());
            return false;
        }
        ggml_backend_reg_t registration = reinterpret_cast<ggml_backend_reg_t (*)()>(found)();
        if (registration == nullptr || registration->api_version != fitter::loaded_build().backend_api) {
            fitter::set_error("it is of another version of ggml");
            return false;
        }
        ggml_backend_register(registration);
        return true;
    });
}

void fitter_virtual_record(int32_t mode) {
    fitter::guarded([&] { state().record_mode = mode; });
}

void fitter_virtual_record_clear(void) {
    fitter::guarded([&] {
        std::lock_guard<std::mutex> lock(state().record_mutex);
        state().record_texts.clear();
        state().record_numbers.clear();
    });
}

bool fitter_virtual_records(fitter_columns_t * out) {
    return fitter::guarded(false, [&] {
        const backend_state & backend = state();
        *out = {backend.record_texts.data(), backend.record_texts.size(), backend.record_numbers.data(),
                backend.record_numbers.size()};
        return true;
    });
}

uint64_t fitter_virtual_alignment(void) {
    return fitter::guarded<uint64_t>(0, [&]() -> uint64_t {
        const profile * kind = state().slots[recorder_index].described.profile;
        return kind ? kind->alignment : 0;
    });
}

namespace {

// FITTER_BUILD describes one other build by its version of ggml: version;last operation;whether graph_optimize has
// parameters;architectures that are reserved alone;rules, separated by ','. See fitter_build_t.
bool is_known_build() {
    const char * text = std::getenv("FITTER_BUILD");
    if (text != nullptr) {
        std::vector<std::string> fields(1);
        for (; *text != '\0'; text++) {
            if (*text == ';') {
                fields.emplace_back();
            } else {
                fields.back() += *text;
            }
        }
        if (fields.size() == 5 && fields[0] == ggml_version()) {
            const auto has = [&](const char * rule) { return ("," + fields[4] + ",").find("," + std::string(rule) + ",") != std::string::npos; };
            static const std::pair<int, const char *> operations[] = {
#include "operations.inc"
            };
            const auto is_last = [&](const std::pair<int, const char *> & each) { return fields[1] == each.second; };
            if (std::none_of(std::begin(operations), std::end(operations), is_last)) {
                return false;
            }
            int32_t n_ops = 0;
            while (n_ops < static_cast<int32_t>(fitter::most_ops) && fields[1] != ggml_op_name(static_cast<ggml_op>(n_ops))) {
                n_ops++;
            }
            const bool is_newer = fitter::platform::symbol("ggml_backend_buft_alloc_buffer_n") != nullptr;
            fitter_build_t build = {n_ops + 1, fields[1].c_str(), is_newer ? 3 : 2, std::atoi(fields[2].c_str()), fields[3].c_str(),
                                    has("cuda_gets_rows_of_super_blocks"), has("cuda_attention_has_room"),
                                    has("cuda_attention_of_any_types"), has("cuda_keeps_topk_moe"),
                                    has("cuda_branches_on_many_devices"), has("cuda_groups_shared_experts"),
                                    has("cuda_unary_of_any_strides"), has("metal_adds_to_products"),
                                    has("metal_attends_by_size")};
            return fitter_configure_build(&build) >= 0;
        }
    }
    return std::strcmp(ggml_version(), FITTER_GGML_VERSION) == 0 && fitter::are_operations_the_same();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    try {
        backend_state & backend = state();
        if (!backend.configured && !backend.ready) {
            std::vector<description> devices;
            const char *             text = std::getenv("FITTER_DEVICES");
            if (text == nullptr) {
                std::fprintf(stderr, "fitter: FITTER_DEVICES is not set, so there are no virtual devices\n");
            } else if (!is_known_build()) {
                std::fprintf(stderr, "fitter: this is not the build of llama.cpp that fitter was compiled for, nor one that "
                                     "fitter backend was told of: start the program itself with fitter backend; there are no "
                                     "virtual devices\n");
            } else {
                try {
                    devices = fitter::parse_descriptions(text);
                } catch (const std::exception & error) {
                    std::fprintf(stderr, "fitter: FITTER_DEVICES: %s, so there are no virtual devices\n", error.what());
                }
            }
            describe(devices);
        }
        return &backend.registration;
    } catch (...) {
        return nullptr;
    }
}
