// The memory of a model and its context. The only file that knows llama-ext.h beside quantize.cpp, which has its rule of types.

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "builds/build.h"
#include "builds/symbols.h"
#include "fitter.h"
// internal: the function of a buffer type that is replaced while graphs are reserved; upstream may change it at any time
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "guard.h"
// internal: the parameters of a context; upstream may change it at any time
#include "llama-cparams.h"
// staging: memory by buffer type, the devices of a model, reserving a graph; upstream may change it at any time
#include "llama-ext.h"
#include "llama.h"
#include "measuring/split.h"
#include "platform/context.h"

bool fitter_model_info(const void * model, fitter_model_info_t * out) {
    return fitter::guarded(false, [&] {
        const auto * m     = static_cast<const llama_model *>(model);
        *out               = {};
        const auto layers  = fitter::layers_of(m);
        out->n_layer       = layers.n_layer;
        out->n_layer_nextn = layers.n_layer_nextn;
        out->n_ctx_train   = llama_model_n_ctx_train(m);
        out->n_embd        = llama_model_n_embd(m);
        out->n_head        = llama_model_n_head(m);
        out->n_head_kv     = llama_model_n_head_kv(m);
        out->n_swa         = llama_model_n_swa(m);
        out->n_expert      = llama_model_n_expert(m);
        out->n_vocab       = llama_vocab_n_tokens(llama_model_get_vocab(m));
        out->n_devices     = llama_model_n_devices(m);
        out->n_params      = llama_model_n_params(m);
        out->size          = llama_model_size(m);
        out->has_encoder   = llama_model_has_encoder(m);
        out->is_recurrent  = llama_model_is_recurrent(m);
        out->is_hybrid     = llama_model_is_hybrid(m);
        return true;
    });
}

const char * fitter_model_device(const void * model, int32_t i) {
    return fitter::guarded<const char *>(nullptr, [&]() -> const char * {
        const auto * m = static_cast<const llama_model *>(model);
        if (i < 0 || i >= llama_model_n_devices(m)) {
            return nullptr;
        }
        return ggml_backend_dev_name(llama_model_get_device(m, i));
    });
}

namespace {

// Place of a buffer type's device among the model's devices, their number for host memory.
int32_t device_rank(const llama_model * model, ggml_backend_buffer_type_t buffer_type) {
    const int32_t n = llama_model_n_devices(model);
    // A host buffer type of a device (CUDA_Host) is tied to that device, but its memory is the host's.
    if (ggml_backend_buft_is_host(buffer_type)) {
        return n;
    }
    ggml_backend_dev_t device = ggml_backend_buft_get_device(buffer_type);
    for (int32_t i = 0; device != nullptr && i < n; i++) {
        if (llama_model_get_device(model, i) == device) {
            return i;
        }
    }
    return n;
}

// llama.cpp's own measurement (ggml_backend_sched_reserve_size) forgets which backend a graph's builder chose for a node,
// and looks at the first graph alone. Here the scheduler reserves as it does for a real load, while the buffer types that
// it asks for memory give it none.

const char * nothing = "";

void * unused_base(ggml_backend_buffer_t /*buffer*/) {
    return const_cast<char *>(nothing);
}

ggml_backend_buffer_t allocate_nothing(ggml_backend_buffer_type_t buffer_type, size_t size) {
    ggml_backend_buffer_i interface = {};
    interface.get_base = unused_base;
    return ggml_backend_buffer_init(buffer_type, interface, nullptr, size);
}

class without_memory {
  public:
    explicit without_memory(ggml_backend_sched_t sched) {
        for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
            auto * type = ggml_backend_sched_get_buffer_type(sched, ggml_backend_sched_get_backend(sched, i));
            if (type->iface.alloc_buffer != allocate_nothing) {
                replaced_.emplace_back(type, type->iface.alloc_buffer);
                type->iface.alloc_buffer = allocate_nothing;
            }
        }
    }
    ~without_memory() {
        for (const auto & [type, alloc_buffer] : replaced_) {
            type->iface.alloc_buffer = alloc_buffer;
        }
    }
    without_memory(const without_memory &) = delete;
    without_memory & operator=(const without_memory &) = delete;

  private:
    using alloc_buffer_t = decltype(ggml_backend_buffer_type_i::alloc_buffer);
    std::vector<std::pair<ggml_backend_buffer_type_t, alloc_buffer_t>> replaced_;
};

bool is_larger_alone(const llama_model * model) {
    char architecture[64] = "";
    llama_model_meta_val_str(model, "general.architecture", architecture, sizeof(architecture));
    return fitter::loaded_build().larger_alone.find(std::string(architecture) + " ") != std::string::npos;
}

// What the scheduler has reserved, where it has. Until then llama.cpp counts a buffer once for every backend that shares it,
// as it does for the CPU's where BLAS is a backend too (always on a Mac, unless a GPU has a host buffer type).
void correct_compute(const llama_context * ctx, llama_memory_breakdown & breakdown) {
    struct use {
        size_t size       = 0;
        size_t n_backends = 0;
    };
    auto * sched = fitter::platform::sched_of(ctx);
    std::map<ggml_backend_buffer_type_t, use> uses;
    size_t                                    total = 0;
    for (int i = 0; sched != nullptr && i < ggml_backend_sched_get_n_backends(sched); i++) {
        auto *       backend = ggml_backend_sched_get_backend(sched, i);
        const size_t size    = ggml_backend_sched_get_buffer_size(sched, backend);
        auto &       each    = uses[ggml_backend_sched_get_buffer_type(sched, backend)];
        each.size += size;
        each.n_backends++;
        total += size;
    }
    for (const auto & [buffer_type, each] : uses) {
        auto & compute = breakdown[buffer_type].compute;
        compute        = total > 0 ? each.size : compute / each.n_backends;
    }
}

// Reserves the graphs of a context without memory, and tells of each graph.
template <typename OnGraph> bool reserve_graphs(llama_context * ctx, OnGraph on_graph) {
    const auto &   params    = fitter::platform::cparams_of(ctx);
    const uint32_t n_seqs    = params.n_seq_max;
    const uint32_t n_tokens  = std::min(params.n_ctx, params.n_ubatch);
    const uint32_t n_outputs = std::min(n_tokens, params.n_outputs_max);
    // The parameters of a context are in no public header: here is all that is read of them but n_outputs_max.
    if (params.n_ctx != llama_n_ctx(ctx) || params.n_ctx_seq != llama_n_ctx_seq(ctx) ||
        params.n_batch != llama_n_batch(ctx) || params.n_ubatch != llama_n_ubatch(ctx) || n_seqs != llama_n_seq_max(ctx) ||
        params.n_outputs_max == 0) {
        throw std::runtime_error("llama_cparams of this build of llama.cpp is another one");
    }
    without_memory guard(fitter::platform::sched_of(ctx));
    const auto     reserve = [&](uint32_t tokens, uint32_t seqs, uint32_t outputs) {
        ggml_cgraph * graph = llama_graph_reserve(ctx, tokens, seqs, outputs);
        if (graph != nullptr) {
            on_graph(graph);
        }
        return graph != nullptr;
    };
    // As llama.cpp has it: some graphs are larger with one sequence. Others' builders abort where it is alone.
    return reserve(n_tokens, n_seqs, n_outputs) && reserve(n_seqs, n_seqs, n_seqs) &&
           (n_seqs == 1 || !is_larger_alone(llama_get_model(ctx)) || reserve(n_tokens, 1, n_outputs));
}

struct ranked {
    int32_t      rank;
    fitter_row_t row;
};

std::vector<ranked> rows_of(const llama_context * ctx, llama_memory_breakdown breakdown) {
    const llama_model * model     = llama_get_model(ctx);
    const int32_t       host_rank = llama_model_n_devices(model);
    std::vector<ranked> all;
    correct_compute(ctx, breakdown);
    for (const auto & [buffer_type, memory] : breakdown) {
        ggml_backend_dev_t device = ggml_backend_buft_get_device(buffer_type);
        const int32_t      rank   = device_rank(model, buffer_type);
        all.push_back({rank,
                       {ggml_backend_buft_name(buffer_type), device ? ggml_backend_dev_name(device) : nullptr,
                        rank == host_rank, memory.model, memory.context, memory.compute}});
    }
    return all;
}

// Room for what a device is sent of a sum over all of them, in each of the steps that one takes.
size_t sums_of(llama_context * ctx, fitter::split_tensors & tensors, ggml_backend_buffer_type_t meta, size_t n_devices) {
    size_t largest = 0;
    // a graph is checked as it was reserved
    const bool is_done = reserve_graphs(ctx, [&](ggml_cgraph * graph) {
        largest = std::max(largest, tensors.largest_sum(graph));
        tensors.check(graph, meta);
    });
    if (!is_done) {
        throw std::runtime_error("llama.cpp cannot reserve the graphs of a model whose tensors are split over devices");
    }
    size_t steps = 0;
    while ((size_t{1} << steps) < n_devices) {
        steps++;
    }
    return steps * largest;
}

size_t sum_of(const std::vector<size_t> & sizes) { return std::accumulate(sizes.begin(), sizes.end(), size_t{0}); }

// A sum that is larger than those before it gets larger buffers, all of one size, in place of theirs.
size_t sum_of_largest(const std::vector<size_t> & sizes) {
    const auto largest = std::max_element(sizes.begin(), sizes.end());
    return largest == sizes.end() ? 0 : *largest * static_cast<size_t>(std::count(sizes.begin(), sizes.end(), *largest));
}

// What llama.cpp says of its meta device holds for the tensors as a whole. Each device has its part of them, compute buffers of
// the whole size, and, for as many steps as a sum over all devices takes, room for what another one sends.
std::vector<ranked> split_rows_of(llama_context * ctx, const std::vector<ggml_backend_dev_t> & devices) {
    const llama_model *        model = llama_get_model(ctx);
    ggml_backend_buffer_type_t meta  = ggml_backend_dev_buffer_type(llama_model_get_device(model, 0));
    fitter::throwing_aborts    guard;
    fitter::split_tensors      tensors(devices);
    llama_memory_breakdown     breakdown = fitter::platform::breakdown_of(ctx);
    const auto                 sizes     = tensors.sizes(meta);
    auto                       all       = rows_of(ctx, breakdown);
    const auto   whole   = std::find_if(all.begin(), all.end(), [](const ranked & entry) { return !entry.row.is_host; });
    const size_t compute = whole == all.end() ? 0 : whole->row.compute;
    if (whole != all.end()) {
        all.erase(whole);
    }
    // A load with memory has what it needed counted, and its graphs are in use.
    const void * computed = reinterpret_cast<const char *>(ctx) + 1;
    const bool   is_real  = fitter::is_split_watched(computed);
    const size_t sums     = is_real ? 0 : sums_of(ctx, tensors, meta, devices.size());
    const size_t backends_own = fitter::sum_memory(devices);
    // experts of a token are added up on each device before they are over all (ggml_backend_meta_graph_compute: get_i_delayed)
    const size_t rows = sizeof(float) * static_cast<size_t>(llama_model_n_embd(model)) * llama_n_ubatch(ctx);
    for (auto & entry : all) {
        entry.rank        = static_cast<int32_t>(devices.size());
        entry.row.is_host = true;
    }
    for (size_t i = 0; i < devices.size(); i++) {
        const char * name = ggml_backend_buft_name(ggml_backend_dev_buffer_type(devices[i]));
        all.push_back({static_cast<int32_t>(i),
                       {name, ggml_backend_dev_name(devices[i]), false,
                        sizes[i].model + sum_of(fitter::split_watched(model, devices[i])),
                        sizes[i].context + sum_of(fitter::split_watched(ctx, devices[i])), compute}});
        const size_t own  = sums + sum_of_largest(fitter::split_watched(computed, devices[i]));
        const size_t room = own + fitter::sum_scratch(devices, std::min(own, rows));
        if (room + backends_own > 0) {
            const char * type = fitter::kept_text(std::string(name) + "_AllReduce");
            all.push_back(
                {static_cast<int32_t>(i), {type, ggml_backend_dev_name(devices[i]), false, 0, backends_own, room}});
        }
    }
    return all;
}

}  // namespace

bool fitter_reserve(void * context) {
    return fitter::guarded(false, [&] {
        auto * ctx = static_cast<llama_context *>(context);
        return reserve_graphs(ctx, [](ggml_cgraph *) {});
    });
}

const char * fitter_context_device(const void * context, int32_t i) {
    return fitter::guarded<const char *>(nullptr, [&]() -> const char * {
        const auto * ctx     = static_cast<const llama_context *>(context);
        const auto   devices = fitter::split_devices(fitter::platform::sched_of(ctx));
        if (devices.empty()) {
            return fitter_model_device(llama_get_model(ctx), i);
        }
        return i < 0 || static_cast<size_t>(i) >= devices.size() ? nullptr : ggml_backend_dev_name(devices[i]);
    });
}

void fitter_split_begin(const void * model) {
    fitter::guarded([&] {
        const auto * m = static_cast<const llama_model *>(model);
        const bool   has_device = m != nullptr && llama_model_n_devices(m) > 0;
        fitter::split_watch_begin(has_device ? ggml_backend_dev_buffer_type(llama_model_get_device(m, 0)) : nullptr);
    });
}

void fitter_split_end(const void * owner) {
    fitter::guarded([&] { fitter::split_watch_end(owner); });
}

int32_t fitter_breakdown(const void * context, fitter_row_t * rows, int32_t n) {
    return fitter::guarded<int32_t>(-1, [&] {
        const auto * ctx     = static_cast<const llama_context *>(context);
        const auto   devices = fitter::split_devices(fitter::platform::sched_of(ctx));
        auto         all     = devices.empty() ? rows_of(ctx, fitter::platform::breakdown_of(ctx))
                                               : split_rows_of(const_cast<llama_context *>(ctx), devices);
        std::sort(all.begin(), all.end(), [](const ranked & a, const ranked & b) {
            return a.rank != b.rank ? a.rank < b.rank : std::strcmp(a.row.buffer_type, b.row.buffer_type) < 0;
        });
        for (size_t i = 0; i < all.size() && i < static_cast<size_t>(std::max(n, 0)); i++) {
            rows[i] = all[i].row;
        }
        return static_cast<int32_t>(all.size());
    });
}
