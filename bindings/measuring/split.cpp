// What each device takes of tensors that are split over several. A load without memory leaves the splitting out: here ggml's
// own code splits copies of the tensors, over buffer types that write down what they are asked for and give nothing.

#include "measuring/split.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>

#include "builds/lookup.h"
#include "builds/operations.h"
// internal: the functions of a buffer type that are replaced; upstream may change it at any time
#include "ggml-backend-impl.h"

namespace fitter {

namespace {

using alloc_size_function = decltype(buffer_type_functions::get_alloc_size);
using alloc_function      = decltype(ggml_backend_buffer_type_i::alloc_buffer);
using max_size_function   = decltype(buffer_type_functions::get_max_size);

// What is going on in the one place where this may go on; all functions of a buffer type are plain ones.
struct split_state {
    std::map<ggml_backend_buffer_type_t, alloc_size_function> own_sizes = {};
    std::map<ggml_backend_buffer_type_t, alloc_function>      own_allocs = {};
    std::map<ggml_backend_buffer_type_t, max_size_function>   own_maxima = {};
    ggml_backend_buffer_type_t                                first = nullptr;
    std::vector<const ggml_tensor *>                          seen = {};
    std::map<ggml_backend_buffer_type_t, size_t>              taken = {};
    std::map<std::string, int64_t>                            whole_columns = {};
    std::set<std::string>                                     split_by_columns = {};
    std::set<const ggml_tensor *>                             elsewhere = {};  // what the CPU's buffer type was asked for
};

split_state & state() {
    static split_state * instance = new split_state;
    return *instance;
}

size_t noted_size(ggml_backend_buffer_type_t type, const ggml_tensor * tensor) {
    if (type == state().first) {
        state().seen.push_back(tensor);
    } else if (ggml_backend_buft_is_host(type)) {
        state().elsewhere.insert(tensor);
    }
    const alloc_size_function own = state().own_sizes[type];
    return own != nullptr ? own(type, tensor) : ggml_nbytes(tensor);
}

// A multiple of every alignment.
void * some_base(ggml_backend_buffer_t /*buffer*/) { return reinterpret_cast<void *>(uintptr_t{1} << 40); }

ggml_status note_slice(ggml_backend_buffer_t /*buffer*/, ggml_tensor * slice) {
    const auto whole = state().whole_columns.find(slice->name);
    if (whole != state().whole_columns.end() && whole->second != slice->ne[0]) {
        state().split_by_columns.insert(slice->name);
    }
    return GGML_STATUS_SUCCESS;
}

ggml_backend_buffer_t take_nothing(ggml_backend_buffer_type_t type, size_t size) {
    state().taken[type] += size;
    ggml_backend_buffer_i interface = {};
    interface.get_base              = some_base;
    interface.init_tensor           = note_slice;
    return ggml_backend_buffer_init(type, interface, nullptr, size);
}

// What is allocated is counted by owner. A handful of models and contexts are there at a time, and an address that comes back is
// counted anew.
using allocations = std::map<ggml_backend_buffer_type_t, std::vector<size_t>>;

struct watch_state {
    std::map<ggml_backend_buffer_type_t, alloc_function>               own_allocs  = {};
    allocations                                                        taken       = {};
    std::map<const void *, allocations>                                of          = {};
    bool                                                               is_computed = false;
};

watch_state & watch() {
    static watch_state * instance = new watch_state;
    return *instance;
}

ggml_backend_buffer_t alloc_watched(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = watch().own_allocs[type](type, size);
    if (buffer != nullptr && !watch().is_computed) {
        watch().taken[type].push_back(size);
    }
    return buffer;
}

// A meta device's buffer type allocates compute buffers, and splits all else by itself.
ggml_backend_buffer_t alloc_compute(ggml_backend_buffer_type_t type, size_t size) {
    watch().is_computed          = true;
    ggml_backend_buffer_t buffer = watch().own_allocs[type](type, size);
    watch().is_computed          = false;
    return buffer;
}

void watch_type(ggml_backend_buffer_type_t type, alloc_function replacement) {
    if (type != nullptr && watch().own_allocs.emplace(type, type->iface.alloc_buffer).second) {
        type->iface.alloc_buffer = replacement;
    }
}

class taking_nothing {
  public:
    explicit taking_nothing(const std::vector<ggml_backend_dev_t> & devices) {
        state().taken.clear();
        for (ggml_backend_dev_t device : devices) {
            ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
            if (state().own_allocs.emplace(type, type->iface.alloc_buffer).second) {
                type->iface.alloc_buffer = take_nothing;
                // Where several buffers hold what is split, ggml looks for the slices of the tensor itself, and finds none: those
                // are its copy's. All of it in one has as many bytes.
                state().own_maxima.emplace(type, max_size_of(type));
                max_size_of(type) = nullptr;
            }
        }
    }
    ~taking_nothing() {
        for (const auto & [type, own] : state().own_allocs) {
            type->iface.alloc_buffer = own;
            max_size_of(type)        = state().own_maxima[type];
        }
        state().own_allocs.clear();
        state().own_maxima.clear();
    }
    taking_nothing(const taking_nothing &) = delete;
    taking_nothing & operator=(const taking_nothing &) = delete;
};

struct context_free {
    void operator()(ggml_context * context) const { ggml_free(context); }
};

constexpr size_t some_bytes = 1;

// Puts tensors of a graph that has none into a buffer, and takes them out again.
class in_buffer {
  public:
    explicit in_buffer(ggml_backend_buffer_t buffer) : buffer_(buffer) {}
    ~in_buffer() {
        for (ggml_tensor * tensor : placed_) {
            tensor->buffer = nullptr;
            tensor->data   = nullptr;
        }
    }
    in_buffer(const in_buffer &) = delete;
    in_buffer & operator=(const in_buffer &) = delete;

    void put(ggml_tensor * tensor) {
        const bool is_view = tensor->view_src != nullptr && tensor->view_src->buffer != nullptr;
        tensor->buffer     = is_view ? tensor->view_src->buffer : buffer_;
        tensor->data       = ggml_backend_buffer_get_base(buffer_);
        placed_.push_back(tensor);
        if (ggml_backend_buffer_init_tensor(tensor->buffer, tensor) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error(std::string("ggml cannot split ") + tensor->name);
        }
    }

  private:
    ggml_backend_buffer_t      buffer_;
    std::vector<ggml_tensor *> placed_ = {};
};

const ggml_tensor * root_of(const ggml_tensor * tensor) {
    while (tensor->view_src != nullptr) {
        tensor = tensor->view_src;
    }
    return tensor;
}

// What a copy that the scheduler made is of (ggml_backend_sched_split_graph: backend#name#number); nullptr for other tensors.
ggml_tensor * original_of(const ggml_tensor * copy, const std::map<std::string, ggml_tensor *> & by_name) {
    const std::string name  = copy->name;
    const size_t      begin = name.find('#');
    const size_t      end   = name.rfind('#');
    if (begin == end) {
        return nullptr;
    }
    const auto found = by_name.find(name.substr(begin + 1, end - begin - 1));
    return found != by_name.end() && ggml_are_same_shape(found->second, copy) ? found->second : nullptr;
}

}  // namespace

void split_watch_begin(ggml_backend_buffer_type_t meta) {
    watch().taken.clear();
    watch().is_computed = false;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        watch_type(ggml_backend_dev_buffer_type(ggml_backend_dev_get(i)), alloc_watched);
    }
    watch_type(meta, alloc_compute);
}

void split_watch_end(const void * owner) {
    for (const auto & [type, own] : watch().own_allocs) {
        type->iface.alloc_buffer = own;
    }
    watch().own_allocs.clear();
    if (owner != nullptr) {
        watch().of[owner] = watch().taken;
        // what an earlier context at this address computed
        watch().of.erase(static_cast<const char *>(owner) + 1);
    }
}

bool is_split_watched(const void * owner) { return watch().of.count(owner) != 0; }

std::vector<size_t> split_watched(const void * owner, ggml_backend_dev_t device) {
    const auto found = watch().of.find(owner);
    if (found == watch().of.end()) {
        return {};
    }
    const auto taken = found->second.find(ggml_backend_dev_buffer_type(device));
    return taken == found->second.end() ? std::vector<size_t>() : taken->second;
}

size_t sum_memory(std::vector<ggml_backend_dev_t> devices) {
    // What ggml-cuda, for AMD's cards as well, takes on two cards since Volta, where it is not built with NCCL. It has no function
    // that says so. Others that sum up by themselves, such as ggml-sycl, take nothing before they compute.
    constexpr size_t of_ggml_cuda = size_t{32} << 20;

    ggml_backend_reg_t registration = devices.empty() ? nullptr : ggml_backend_dev_backend_reg(devices[0]);
    for (ggml_backend_dev_t device : devices) {
        if (ggml_backend_dev_backend_reg(device) != registration) {
            return 0;
        }
    }
    if (registration == nullptr) {
        return 0;
    }
    using function = size_t (*)(ggml_backend_dev_t *, size_t);
    const auto own = reinterpret_cast<function>(ggml_backend_reg_get_proc_address(registration, "fitter_sum_memory"));
    if (own != nullptr) {
        return own(devices.data(), devices.size());
    }
    const std::string name     = ggml_backend_reg_name(registration);
    const char *      chosen   = std::getenv("GGML_CUDA_ALLREDUCE");
    const bool        is_own   = chosen == nullptr || std::strcmp(chosen, "internal") == 0 || std::strcmp(chosen, "nccl") == 0;
    const bool        has_sums = ggml_backend_reg_get_proc_address(registration, "ggml_backend_comm_init") != nullptr;
    return (name == "CUDA" || name == "ROCm") && has_sums && is_own && devices.size() == 2 ? of_ggml_cuda : 0;
}

// ggml-rpc of b11450 and later (ggml_backend_rpc_comm_init, rpc_server::comm_allreduce): each of two servers keeps what the other
// one sends of a sum, and of a large one both parts in bf16 before that.
size_t sum_scratch(const std::vector<ggml_backend_dev_t> & devices, size_t largest) {
    constexpr size_t as_bf16_from = 32768 * sizeof(float);

    ggml_backend_reg_t registration = devices.size() == 2 ? ggml_backend_dev_backend_reg(devices[0]) : nullptr;
    if (registration == nullptr || registration != ggml_backend_dev_backend_reg(devices[1]) ||
        std::strcmp(ggml_backend_reg_name(registration), "RPC") != 0 || std::getenv("GGML_RPC_NO_COMM") != nullptr ||
        ggml_backend_reg_get_proc_address(registration, "ggml_backend_comm_init") == nullptr) {
        return 0;
    }
    // two devices of one server do not
    const std::string endpoint = ggml_backend_dev_description(devices[0]);
    if (endpoint == ggml_backend_dev_description(devices[1])) {
        return 0;
    }
    return largest < as_bf16_from ? largest : 2 * largest;
}

const char * kept_text(const std::string & text) {
    static auto * kept = new std::set<std::string>;
    return kept->insert(text).first->c_str();
}

std::vector<ggml_backend_dev_t> split_devices(ggml_backend_sched_t sched) {
    static const auto is_meta = loaded<bool (*)(ggml_backend_t)>("ggml_backend_is_meta");
    static const auto count   = loaded<size_t (*)(ggml_backend_t)>("ggml_backend_meta_n_backends");
    static const auto simple  = loaded<ggml_backend_t (*)(ggml_backend_t, size_t)>("ggml_backend_meta_simple_backend");

    std::vector<ggml_backend_dev_t> found;
    if (sched == nullptr || is_meta == nullptr || count == nullptr || simple == nullptr) {
        return found;
    }
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        for (size_t k = 0; is_meta(backend) && k < count(backend); k++) {
            found.push_back(ggml_backend_get_device(simple(backend, k)));
        }
    }
    return found;
}

split_tensors::split_tensors(const std::vector<ggml_backend_dev_t> & devices) : devices_(devices) {
    split_state & all = state();
    all.seen.clear();
    all.whole_columns.clear();
    all.split_by_columns.clear();
    all.elsewhere.clear();
    all.first = devices.empty() ? nullptr : ggml_backend_dev_buffer_type(devices.front());
    std::vector<ggml_backend_buffer_type_t> types = {ggml_backend_cpu_buffer_type()};
    for (ggml_backend_dev_t device : devices) {
        types.push_back(ggml_backend_dev_buffer_type(device));
        types.push_back(ggml_backend_dev_host_buffer_type(device));
    }
    for (ggml_backend_buffer_type_t type : types) {
        if (type == nullptr) {
            continue;
        }
        if (all.own_sizes.emplace(type, alloc_size_of(type)).second) {
            replaced_.emplace_back(type, alloc_size_of(type));
            alloc_size_of(type) = noted_size;
        }
    }
}

split_tensors::~split_tensors() {
    for (const auto & [tensor, buffer] : moved_) {
        tensor->buffer = buffer;
    }
    for (ggml_backend_buffer_t buffer : buffers_) {
        ggml_backend_buffer_free(buffer);
    }
    for (const auto & [type, own] : replaced_) {
        alloc_size_of(type) = own;
        state().own_sizes.erase(type);
    }
}

std::vector<split_size> split_tensors::sizes(ggml_backend_buffer_type_t meta) {
    split_state & all = state();
    // Tensors of one buffer are placed together, in the order in which they were asked for.
    std::vector<std::pair<ggml_backend_buffer_t, std::vector<const ggml_tensor *>>> groups;
    for (const ggml_tensor * tensor : all.seen) {
        if (tensor->buffer == nullptr || tensor->buffer->buft != meta || tensor->op != GGML_OP_NONE) {
            continue;
        }
        if (groups.empty() || groups.back().first != tensor->buffer) {
            groups.push_back({tensor->buffer, {}});
        }
        groups.back().second.push_back(tensor);
        all.whole_columns[tensor->name] = tensor->ne[0];
    }
    all.seen.clear();
    {
        // for graphs, whose sizes do not matter
        taking_nothing guard(devices_);
        buffers_.push_back(ggml_backend_buft_alloc_buffer(meta, some_bytes));
        ggml_backend_buffer_set_usage(buffers_.front(), GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    }

    std::vector<split_size> found(devices_.size());
    for (const auto & [buffer, tensors] : groups) {
        place(tensors, meta, buffer->usage);
        const bool is_weight = buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
        for (size_t i = 0; i < devices_.size(); i++) {
            (is_weight ? found[i].model : found[i].context) += all.taken[ggml_backend_dev_buffer_type(devices_[i])];
        }
    }
    return found;
}

void split_tensors::place(const std::vector<const ggml_tensor *> & tensors, ggml_backend_buffer_type_t meta,
                          ggml_backend_buffer_usage usage) {
    // ggml keeps so many views of each tensor as this has room for
    constexpr size_t             views = 8;
    const ggml_init_params       params = {views * (tensors.size() + 1) * ggml_tensor_overhead(), nullptr, true};
    std::unique_ptr<ggml_context, context_free> context(ggml_init(params));
    for (const ggml_tensor * tensor : tensors) {
        ggml_set_name(ggml_new_tensor(context.get(), tensor->type, GGML_MAX_DIMS, tensor->ne), tensor->name);
    }
    taking_nothing        guard(devices_);
    ggml_backend_buffer_t split = ggml_backend_alloc_ctx_tensors_from_buft(context.get(), meta);
    if (split == nullptr) {
        throw std::runtime_error("ggml does not split the tensors over the devices");
    }
    buffers_.push_back(split);
    ggml_backend_buffer_set_usage(split, usage);
    for (const ggml_tensor * tensor : tensors) {
        auto * own = const_cast<ggml_tensor *>(tensor);
        moved_.emplace_back(own, own->buffer);
        own->buffer = split;
    }
}

void split_tensors::place_allocated(ggml_cgraph * graph, ggml_backend_buffer_type_t meta) {
    std::vector<const ggml_tensor *> found;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        for (const ggml_tensor * source : node->src) {
            const ggml_tensor * root = source == nullptr ? nullptr : root_of(source);
            const bool is_there = root != nullptr && root->buffer != nullptr && root->buffer->buft == meta;
            if (is_there && std::find(buffers_.begin(), buffers_.end(), root->buffer) == buffers_.end() &&
                std::find(found.begin(), found.end(), root) == found.end()) {
                found.push_back(root);
            }
        }
    }
    if (!found.empty()) {
        place(found, meta, GGML_BACKEND_BUFFER_USAGE_ANY);
    }
}

void split_tensors::check(ggml_cgraph * graph, ggml_backend_buffer_type_t meta) {
    split_state &                       all = state();
    const std::set<const ggml_tensor *> asked(all.seen.begin(), all.seen.end());
    place_allocated(graph, meta);
    const ggml_init_params params = {(ggml_graph_n_nodes(graph) + 1) * ggml_tensor_overhead(), nullptr, true};
    std::unique_ptr<ggml_context, context_free> views(ggml_init(params));
    taking_nothing                              guard(devices_);
    in_buffer                                   placed(buffers_.front());
    std::set<const ggml_tensor *>               away = all.elsewhere;
    std::set<const ggml_tensor *>               viewed;
    std::map<std::string, ggml_tensor *>        placed_by_name;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        // One that takes the place of a source is not asked for: it is where its sources are.
        bool has_source = false, has_source_away = false;
        for (ggml_tensor * source : node->src) {
            if (source == nullptr) {
                continue;
            }
            if (source->buffer == nullptr && source->op == GGML_OP_NONE && asked.count(source) != 0) {
                placed.put(source);
            }
            has_source      = has_source || (source->buffer != nullptr && source->buffer->buft == meta);
            has_source_away = has_source_away || away.count(source) != 0;
        }
        const bool is_here = asked.count(node) != 0 || (has_source && !has_source_away && away.count(node) == 0);
        if (!is_here) {
            away.insert(node);
            // The scheduler has put a copy in the place of what another device reads, and adds a view of that.
            for (const ggml_tensor * source : node->src) {
                ggml_tensor * copied = source == nullptr ? nullptr : original_of(source, placed_by_name);
                if (copied != nullptr && viewed.insert(copied).second) {
                    ggml_tensor * view = ggml_view_tensor(views.get(), copied);
                    view->src[0]       = copied;
                    placed.put(view);
                }
            }
        } else if (node->buffer == nullptr) {
            placed.put(node);
        }
        if (is_here) {
            placed_by_name[node->name] = node;
        }
    }
    // The next graph is made in the same memory, where a tensor has the address of another one in this.
    all.seen.clear();
    all.elsewhere.clear();
}

throwing_aborts::throwing_aborts() {
    before_ = ggml_set_abort_callback([](const char * message) {
        if (std::uncaught_exceptions() == 0) {
            throw std::runtime_error(message);
        }
    });
}

throwing_aborts::~throwing_aborts() { ggml_set_abort_callback(before_); }

size_t split_tensors::largest_sum(ggml_cgraph * graph) const {
    size_t largest = 0;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        const ggml_op       op   = op_of(node);
        if ((op == GGML_OP_MUL_MAT || op == GGML_OP_MUL_MAT_ID) &&
            state().split_by_columns.count(root_of(node->src[0])->name) != 0) {
            largest = std::max(largest, ggml_nbytes(node));
        }
    }
    return largest;
}

}  // namespace fitter
