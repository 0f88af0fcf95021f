// Counts what llama.cpp's libraries allocate, and can keep them from doing it: for the time of a question every buffer
// type of ggml's registry allocates through here, or the CPU's alone.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "fitter.h"
// internal: the functions of a buffer type that are replaced; upstream may change it at any time
#include "ggml-backend-impl.h"
#include "guard.h"
#include "platform/platform.h"

namespace {

using alloc_function = ggml_backend_buffer_t (*)(ggml_backend_buffer_type_t, size_t);
using free_function  = void (*)(ggml_backend_buffer_t);

struct kinds {
    uint64_t weights = 0;
    uint64_t compute = 0;
};

using fitter::platform::use;
using usage = std::map<ggml_backend_buffer_type_t, kinds>;

struct allocation {
    ggml_backend_buffer_type_t buffer_type = nullptr;
    size_t                     size        = 0;
    free_function              free        = nullptr;  // the buffer's own
    bool                       is_counted  = true;     // not any more once the counting has ended
};

struct allocation_state {
    std::mutex                                           mutex     = {};
    bool                                                 really    = false;
    std::map<ggml_backend_buffer_type_t, alloc_function> replaced  = {};
    std::map<ggml_backend_buffer_t, allocation>          live      = {};
    usage                                                most      = {};
    uint64_t                                             most_size = 0;
};

// Never destroyed: buffers may be freed while the process ends.
allocation_state & state() {
    static allocation_state * instance = new allocation_state;
    return *instance;
}

// What a buffer is for is said after it is allocated, so this is asked before one is freed and at the end.
void note(allocation_state & all) {
    uint64_t size = 0;
    for (const auto & [buffer, entry] : all.live) {
        size += entry.is_counted ? entry.size : 0;
    }
    if (size < all.most_size) {
        return;
    }
    all.most_size = size;
    all.most.clear();
    for (const auto & [buffer, entry] : all.live) {
        if (!entry.is_counted) {
            continue;
        }
        kinds & found = all.most[entry.buffer_type];
        (buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE ? found.compute : found.weights) += entry.size;
    }
}

void free_counted(ggml_backend_buffer_t buffer) {
    free_function own = nullptr;
    {
        allocation_state &          all = state();
        std::lock_guard<std::mutex> lock(all.mutex);
        if (!all.replaced.empty() && !all.really) {
            note(all);
        }
        const auto found = all.live.find(buffer);
        own              = found->second.free;
        all.live.erase(found);
    }
    if (own != nullptr) {
        own(buffer);
    }
}

// ---- buffers that are no more than addresses; host code may write to those of the host

struct range {
    void * base;
    size_t size;
};

void range_free(ggml_backend_buffer_t buffer) {
    range * held = static_cast<range *>(buffer->context);
    fitter::platform::release(held->base, held->size);
    delete held;
}

void * range_base(ggml_backend_buffer_t buffer) { return static_cast<range *>(buffer->context)->base; }

void range_memset(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {}

void range_set(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {}

void range_get(ggml_backend_buffer_t, const ggml_tensor *, void * data, size_t, size_t size) {
    std::memset(data, 0, size);
}

bool range_copy(ggml_backend_buffer_t, const ggml_tensor *, ggml_tensor *) { return true; }

void range_clear(ggml_backend_buffer_t, uint8_t) {}

const ggml_backend_buffer_i range_interface = {
    /* .free_buffer   = */ range_free,
    /* .get_base      = */ range_base,
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ range_memset,
    /* .set_tensor    = */ range_set,
    /* .get_tensor    = */ range_get,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ range_copy,
    /* .clear         = */ range_clear,
    /* .reset         = */ nullptr,
};

ggml_backend_buffer_t alloc_range(ggml_backend_buffer_type_t buffer_type, size_t size) {
    const auto used = ggml_backend_buft_is_host(buffer_type) ? use::by_pages : use::never;
    void *     base = fitter::platform::reserve(size, used);
    if (base == nullptr) {
        return nullptr;
    }
    return ggml_backend_buffer_init(buffer_type, range_interface, new range{base, size}, size);
}

ggml_backend_buffer_t alloc_counted(ggml_backend_buffer_type_t buffer_type, size_t size) {
    allocation_state & all = state();
    alloc_function     own = nullptr;
    {
        std::lock_guard<std::mutex> lock(all.mutex);
        own = all.replaced[buffer_type];
    }
    if (all.really) {
        // Backends know their buffers by the function that frees them, so that one stays: nothing is known of frees.
        ggml_backend_buffer_t buffer = own(buffer_type, size);
        if (buffer != nullptr && buffer->buft == buffer_type) {
            std::lock_guard<std::mutex> lock(all.mutex);
            all.most[buffer_type].weights += size;
        }
        return buffer;
    }
    // A virtual device knows by itself how large a buffer it has, and has no memory.
    const bool is_virtual = !ggml_backend_buft_is_host(buffer_type) && fitter_virtual_owns(ggml_backend_buft_get_device(buffer_type));

    ggml_backend_buffer_t buffer = is_virtual ? own(buffer_type, size) : alloc_range(buffer_type, size);
    if (buffer != nullptr) {
        std::lock_guard<std::mutex> lock(all.mutex);
        all.live[buffer]          = {buffer_type, size, buffer->iface.free_buffer, true};
        buffer->iface.free_buffer = free_counted;
    }
    return buffer;
}

void replace(allocation_state & all, ggml_backend_buffer_type_t buffer_type) {
    if (buffer_type != nullptr && all.replaced.count(buffer_type) == 0) {
        all.replaced[buffer_type]        = buffer_type->iface.alloc_buffer;
        buffer_type->iface.alloc_buffer = alloc_counted;
    }
}

// ---- buffers of the CPU that take no memory until something other than zeros is written to them

// llama.cpp clears what it has allocated, which for an ordinary buffer is to take all of its memory.
void untouched_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    range * held = static_cast<range *>(buffer->context);
    if (value != 0 || !fitter::platform::forget(held->base, held->size)) {
        std::memset(held->base, value, held->size);
    }
}

void untouched_memset(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    std::memset(static_cast<char *>(tensor->data) + offset, value, size);
}

void untouched_set(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    std::memcpy(static_cast<char *>(tensor->data) + offset, data, size);
}

void untouched_get(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    std::memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
}

bool untouched_copy(ggml_backend_buffer_t, const ggml_tensor * from, ggml_tensor * to) {
    if (!ggml_backend_buffer_is_host(from->buffer)) {
        return false;
    }
    std::memcpy(to->data, from->data, ggml_nbytes(from));
    return true;
}

const ggml_backend_buffer_i untouched_interface = {
    /* .free_buffer   = */ range_free,
    /* .get_base      = */ range_base,
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ untouched_memset,
    /* .set_tensor    = */ untouched_set,
    /* .get_tensor    = */ untouched_get,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ untouched_copy,
    /* .clear         = */ untouched_clear,
    /* .reset         = */ nullptr,
};

ggml_backend_buffer_t alloc_untouched(ggml_backend_buffer_type_t buffer_type, size_t size) {
    void * base = fitter::platform::reserve(size, use::by_pages);
    if (base == nullptr) {
        return nullptr;
    }
    return ggml_backend_buffer_init(buffer_type, untouched_interface, new range{base, size}, size);
}

alloc_function cpu_alloc = nullptr;  // the CPU's own, while it is replaced

}  // namespace

bool fitter_host_untouched_begin(void) {
    return fitter::guarded(false, [&] {
        ggml_backend_buffer_type_t cpu = ggml_backend_cpu_buffer_type();
        if (cpu_alloc != nullptr) {
            return false;
        }
        cpu_alloc               = cpu->iface.alloc_buffer;
        cpu->iface.alloc_buffer = alloc_untouched;
        return true;
    });
}

void fitter_host_untouched_end(void) {
    fitter::guarded([&] {
        if (cpu_alloc != nullptr) {
            ggml_backend_cpu_buffer_type()->iface.alloc_buffer = cpu_alloc;
            cpu_alloc                                          = nullptr;
        }
    });
}

bool fitter_allocations_begin(bool really) {
    return fitter::guarded(false, [&] {
        allocation_state &          all = state();
        std::lock_guard<std::mutex> lock(all.mutex);
        if (!all.replaced.empty()) {
            return false;
        }
        all.really    = really;
        all.most_size = 0;
        all.most.clear();
        for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
            ggml_backend_dev_t device = ggml_backend_dev_get(i);
            replace(all, ggml_backend_dev_buffer_type(device));
            replace(all, ggml_backend_dev_host_buffer_type(device));
        }
        return true;
    });
}

void fitter_allocations_end(void) {
    fitter::guarded([&] {
        allocation_state &          all = state();
        std::lock_guard<std::mutex> lock(all.mutex);
        if (!all.really) {
            note(all);
        }
        for (const auto & [buffer_type, own] : all.replaced) {
            buffer_type->iface.alloc_buffer = own;
        }
        all.replaced.clear();
        for (auto & [buffer, entry] : all.live) {
            entry.is_counted = false;
        }
    });
}

int32_t fitter_allocations_rows(fitter_row_t * rows, int32_t n) {
    return fitter::guarded<int32_t>(-1, [&]() -> int32_t {
        allocation_state &          all = state();
        std::lock_guard<std::mutex> lock(all.mutex);

        std::vector<fitter_row_t> found;
        for (const auto & [buffer_type, size] : all.most) {
            ggml_backend_dev_t device  = ggml_backend_buft_get_device(buffer_type);
            const bool         is_host = ggml_backend_buft_is_host(buffer_type) || device == nullptr ||
                                 ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
            found.push_back({ggml_backend_buft_name(buffer_type), is_host ? nullptr : ggml_backend_dev_name(device), is_host,
                             size.weights, 0, size.compute});
        }
        std::sort(found.begin(), found.end(), [](const fitter_row_t & a, const fitter_row_t & b) {
            return a.is_host != b.is_host ? b.is_host : std::strcmp(a.buffer_type, b.buffer_type) < 0;
        });
        std::copy_n(found.begin(), std::min(found.size(), static_cast<size_t>(std::max(n, 0))), rows);
        return static_cast<int32_t>(found.size());
    });
}
