// What ggml-metal does to a graph before its memory is planned (graph_optimize): nodes are moved ahead so that they can
// run beside others, groups of nodes that a fused kernel computes stay together, and what such a group may read stays
// alive until its end.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <set>
#include <vector>

#include "builds/build.h"
// internal: the nodes of a graph, and whether some of them can be fused; upstream may change it at any time
#include "ggml-impl.h"
#include "virtual/rules/metal.h"

namespace fitter::metal {

namespace {

// The most nodes that stay together.
constexpr int fusion_max = 16;
// How far ahead of a node others are looked for that can run beside those before it.
constexpr int n_forward = 64;

constexpr auto ADD      = GGML_OP_ADD;
constexpr auto MUL      = GGML_OP_MUL;
constexpr auto VIEW     = GGML_OP_VIEW;
constexpr auto RESHAPE  = GGML_OP_RESHAPE;
constexpr auto SCALE    = GGML_OP_SCALE;
constexpr auto NORM     = GGML_OP_NORM;
constexpr auto RMS_NORM = GGML_OP_RMS_NORM;

bool is_empty(const ggml_tensor * node) { return ggml_op_is_empty(op_of(node)); }

// ---- fused kernels

// The nodes of a graph that a pattern is compared with: those that are computed, by their index in the graph.
struct match {
    const ggml_cgraph * graph;
    const int *         indices;

    const ggml_tensor * operator[](int i) const { return graph->nodes[indices[i]]; }
};

struct fusion {
    std::vector<ggml_op> ops_all;  // in a row in the graph, views and all
    bool                 chain;    // each node reads the one before it, and only the last one is read elsewhere
    bool (*check)(const fusion & self, const match & nodes);
    std::vector<ggml_op> ops = {};  // without those that nothing is computed for
};

bool check_norm(const fusion & self, const match & nodes) {
    if (self.ops[1] == SCALE) {
        return nodes[1]->src[0] == nodes[0] && nodes[1]->src[1] == nullptr && nodes[1]->type == GGML_TYPE_F32;
    }
    for (int i = 1; i < static_cast<int>(self.ops.size()); i++) {
        const ggml_tensor * factor = nodes[i]->src[1];
        if (nodes[i]->src[0] != nodes[i - 1] || factor->ne[0] != nodes[0]->ne[0] || !ggml_is_contiguous_rows(factor) ||
            nodes[i]->type != GGML_TYPE_F32) {
            return false;
        }
    }
    return true;
}

bool are_same_layout(const ggml_tensor * a, const ggml_tensor * b) {
    return a->type == b->type && std::equal(a->ne, a->ne + GGML_MAX_DIMS, b->ne) &&
           std::equal(a->nb, a->nb + GGML_MAX_DIMS, b->nb);
}

bool check_add_chain(const fusion & self, const match & nodes) {
    for (int i = 1; i < static_cast<int>(self.ops.size()); i++) {
        if (nodes[i]->src[0] != nodes[i - 1] || !are_same_layout(nodes[i]->src[1], nodes[i - 1]->src[1])) {
            return false;
        }
    }
    return true;
}

bool check_snake(const fusion &, const match & nodes) {
    const ggml_tensor * mul   = nodes[0];
    const ggml_tensor * x     = ggml_are_same_shape(mul, mul->src[0]) ? mul->src[0] : mul->src[1];
    const ggml_tensor * a     = x == mul->src[0] ? mul->src[1] : mul->src[0];
    const ggml_tensor * inv_b = nodes[3]->src[0] == nodes[2] ? nodes[3]->src[1] : nodes[3]->src[0];
    const ggml_tensor * add   = nodes[4];
    const ggml_tensor * again = add->src[0] == nodes[3] ? add->src[1] : add->src[0];

    const auto is_flat = [](const ggml_tensor * t) { return t->ne[2] == 1 && t->ne[3] == 1 && ggml_is_contiguous(t); };
    for (int i = 0; i < 5; i++) {
        if (nodes[i]->type != x->type) {
            return false;
        }
    }
    return (x->type == GGML_TYPE_F32 || x->type == GGML_TYPE_F16 || x->type == GGML_TYPE_BF16) &&
           a->type == GGML_TYPE_F32 && inv_b->type == GGML_TYPE_F32 && ggml_are_same_shape(a, inv_b) && a->ne[0] == 1 &&
           a->ne[1] == x->ne[1] && is_flat(x) && is_flat(add) && is_flat(a) && is_flat(inv_b) && again == x;
}

bool check_gdn_cache(const fusion &, const match & nodes) {
    const ggml_tensor * gdn = nodes[0];
    const ggml_tensor * cpy = nodes[1];
    if (gdn->type != GGML_TYPE_F32 || ((gdn->flags | cpy->flags) & GGML_TENSOR_FLAG_OUTPUT) != 0) {
        return false;
    }
    const ggml_tensor * v         = gdn->src[2];
    const int64_t       state     = v->ne[0] * v->ne[0] * v->ne[1];
    const int64_t       n_written = std::min<int64_t>(v->ne[2], gdn->op_params[0]);
    const ggml_tensor * tail      = cpy->src[0];
    const ggml_tensor * cache     = cpy->src[1];
    const int64_t       shape[]   = {state, v->ne[3], n_written, 1};
    return op_of(tail) == VIEW && tail->view_src == gdn && ggml_is_contiguous(tail) &&
           tail->view_offs == ggml_row_size(GGML_TYPE_F32, ggml_nelements(v)) && cache->type == GGML_TYPE_F32 &&
           std::equal(shape, shape + GGML_MAX_DIMS, cache->ne) && cache->nb[0] == sizeof(float) &&
           cache->nb[1] == ggml_row_size(GGML_TYPE_F32, state);
}

bool check_ssm_conv_silu(const fusion &, const match & nodes) {
    const ggml_tensor * conv = nodes[0];
    const ggml_tensor * silu = nodes[1];
    return silu->src[0] == conv && silu->src[1] == nullptr && ggml_get_unary_op(silu) == GGML_UNARY_OP_SILU &&
           conv->type == GGML_TYPE_F32 && silu->type == GGML_TYPE_F32 && ggml_is_contiguous_rows(silu);
}

// A bias or another weight, whose buffer is marked before a graph is optimized.
bool is_weight(const ggml_tensor * tensor) {
    const ggml_tensor * base = tensor->view_src != nullptr ? tensor->view_src : tensor;
    return base->buffer != nullptr && ggml_backend_buffer_get_usage(base->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

bool check_mul_mat_add(const fusion &, const match & nodes) {
    const ggml_tensor * product = nodes[0];
    const ggml_tensor * sum     = nodes[1];
    if ((sum->src[0] == product) == (sum->src[1] == product)) {
        return false;
    }
    const ggml_tensor * other = sum->src[0] == product ? sum->src[1] : sum->src[0];
    const ggml_type     type  = product->src[0]->type;
    return other->type == GGML_TYPE_F32 && sum->type == GGML_TYPE_F32 && !is_weight(other) &&
           product->src[1]->type == GGML_TYPE_F32 && type != GGML_TYPE_NVFP4 && type != GGML_TYPE_TQ1_0 &&
           (ggml_is_quantized(type) || type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16);
}

// Whether the pattern stands in the graph from a node on, views and all.
bool match_raw_pattern(const fusion & self, const ggml_cgraph * graph, int start) {
    const int count = static_cast<int>(self.ops_all.size());
    return start + count <= graph->n_nodes && std::equal(self.ops_all.begin(), self.ops_all.end(), graph->nodes + start,
                                                         [](ggml_op op, const ggml_tensor * node) { return op_of(node) == op; });
}

// Whether nothing of a row of nodes is used elsewhere but its outputs.
bool can_fuse_subgraph(const fusion & self, const ggml_cgraph * graph, int start, std::vector<int> outputs) {
    std::vector<int> indices;
    for (size_t i = 0; i < self.ops_all.size(); i++) {
        indices.push_back(start + static_cast<int>(i));
    }
    return can_fuse_nodes(graph, indices.data(), static_cast<int>(indices.size()), self.ops_all.data(),
                                      outputs.data(), static_cast<int>(outputs.size()));
}

// SOFT_MAX, RESHAPE, ARGSORT, VIEW, GET_ROWS, with the weights scaled or not and their sum made one or not.
bool check_topk_moe(const fusion & self, const match & nodes) {
    constexpr int64_t max_experts = 1024;
    const int         n_ops       = static_cast<int>(self.ops.size());
    const bool        with_norm   = n_ops >= 6;
    const bool        with_scale  = n_ops == 4 || n_ops == 7;
    const int         start       = nodes.indices[0];
    int               end         = nodes.indices[n_ops - 1];
    ggml_tensor **    raw         = nodes.graph->nodes + start;
    if (with_norm && !with_scale) {
        end++;
        if (end >= nodes.graph->n_nodes || nodes.graph->nodes[end]->src[0] != nodes.graph->nodes[end - 1]) {
            return false;
        }
    }
    if (end - start + 1 != static_cast<int>(self.ops_all.size()) || !match_raw_pattern(self, nodes.graph, start)) {
        return false;
    }
    const ggml_tensor * softmax = raw[0];
    const ggml_tensor * argsort = raw[2];
    const ggml_tensor * ids     = raw[3];
    const ggml_tensor * weights = raw[4];
    const ggml_tensor * out     = nodes.graph->nodes[end];
    const ggml_tensor * logits  = softmax->src[0];

    float scale    = 1.0f;
    float max_bias = 0.0f;
    std::memcpy(&scale, softmax->op_params, sizeof(scale));
    std::memcpy(&max_bias, softmax->op_params + 1, sizeof(max_bias));
    if (scale != 1.0f || max_bias != 0.0f || softmax->src[1] != nullptr || softmax->src[2] != nullptr ||
        logits->type != GGML_TYPE_F32 || softmax->type != GGML_TYPE_F32 || out->type != GGML_TYPE_F32 ||
        ids->type != GGML_TYPE_I32) {
        return false;
    }
    const int64_t n_expert = logits->ne[0];
    const int64_t n_tokens = logits->ne[1];
    const int64_t n_used   = ids->ne[0];
    if (n_used <= 0 || n_used > n_expert || n_expert > max_experts || logits->ne[2] != 1 || logits->ne[3] != 1 ||
        ids->ne[1] != n_tokens || ids->ne[2] != 1 || ids->ne[3] != 1 || out->ne[0] != 1 || out->ne[1] != n_used ||
        out->ne[2] != n_tokens || out->ne[3] != 1 || !ggml_is_contiguous(logits) || !ggml_is_contiguous(out) ||
        ids->nb[0] != sizeof(int32_t) || ids->nb[1] != sizeof(int32_t) * static_cast<size_t>(n_expert)) {
        return false;
    }
    if (raw[1]->src[0] != softmax || argsort->src[0] != softmax || ids->src[0] != argsort || weights->src[0] != raw[1] ||
        weights->src[1] != ids) {
        return false;
    }
    if (with_norm && (raw[5]->src[0] != weights || raw[6]->src[0] != raw[5] || raw[7]->src[0] != raw[6] ||
                      raw[8]->src[0] != raw[5] || raw[8]->src[1] != raw[7] || raw[9]->src[0] != raw[8])) {
        return false;
    }
    if (with_scale && out->src[0] != (with_norm ? raw[9] : weights)) {
        return false;
    }
    return can_fuse_subgraph(self, nodes.graph, start, {start + 3, end});
}

// MUL, a VIEW per expert, and one ADD less.
bool check_moe_reduce(const fusion & self, const match & nodes) {
    const int     n_used = static_cast<int>(self.ops.size());
    const int     start  = nodes.indices[0];
    const int     end    = start + static_cast<int>(self.ops_all.size()) - 1;
    ggml_tensor ** raw   = nodes.graph->nodes + start;
    if (!match_raw_pattern(self, nodes.graph, start) || nodes.indices[n_used - 1] != end) {
        return false;
    }
    const ggml_tensor * mul     = raw[0];
    const ggml_tensor * experts = mul->src[0];
    const ggml_tensor * weights = mul->src[1];
    const ggml_tensor * out     = nodes.graph->nodes[end];
    for (const ggml_tensor * tensor : {mul, experts, weights, out}) {
        if (tensor->type != GGML_TYPE_F32 || (tensor != mul && !ggml_is_contiguous(tensor))) {
            return false;
        }
    }
    const int64_t n_embd   = experts->ne[0];
    const int64_t n_tokens = experts->ne[2];
    const int64_t shapes[3][GGML_MAX_DIMS] = {{n_embd, n_used, n_tokens, 1}, {1, n_used, n_tokens, 1}, {n_embd, n_tokens, 1, 1}};
    if (n_embd <= 0 || !std::equal(shapes[0], shapes[0] + GGML_MAX_DIMS, experts->ne) ||
        !std::equal(shapes[1], shapes[1] + GGML_MAX_DIMS, weights->ne) ||
        !std::equal(shapes[2], shapes[2] + GGML_MAX_DIMS, out->ne)) {
        return false;
    }
    for (int i = 0; i < n_used; i++) {
        const ggml_tensor * view = raw[1 + i];
        if (view->view_src != mul || view->src[0] != mul || view->view_offs != static_cast<size_t>(i) * mul->nb[1] ||
            view->ne[0] != n_embd || view->ne[1] != n_tokens || view->nb[1] != mul->nb[2]) {
            return false;
        }
    }
    for (int i = 1; i < n_used; i++) {
        const ggml_tensor * add = raw[n_used + i];
        if (add->src[0] != (i == 1 ? raw[1] : raw[n_used + i - 1]) || add->src[1] != raw[1 + i]) {
            return false;
        }
    }
    return can_fuse_subgraph(self, nodes.graph, start, {end});
}

// In the order in which they are tried; of several the one that computes most nodes wins, and then the first.
const std::vector<fusion> & fusions() {
    static const std::vector<fusion> all = [] {
        const std::vector<ggml_op> topk  = {GGML_OP_SOFT_MAX, RESHAPE, GGML_OP_ARGSORT, VIEW, GGML_OP_GET_ROWS};
        std::vector<ggml_op>       scale = topk;
        std::vector<ggml_op>       norm  = topk;
        scale.push_back(SCALE);
        norm.insert(norm.end(), {RESHAPE, GGML_OP_SUM_ROWS, GGML_OP_CLAMP, GGML_OP_DIV, RESHAPE});
        std::vector<ggml_op> norm_scale = norm;
        norm_scale.push_back(SCALE);

        std::vector<fusion> made;
        for (const ggml_op op : {NORM, RMS_NORM}) {
            made.push_back({{op, MUL}, true, check_norm});
            made.push_back({{op, MUL, ADD}, true, check_norm});
            made.push_back({{op, SCALE}, true, check_norm});
        }
        for (size_t n = 2; n <= 7; n++) {
            made.push_back({std::vector<ggml_op>(n, ADD), true, check_add_chain});
        }
        made.push_back({{MUL, GGML_OP_SIN, GGML_OP_SQR, MUL, ADD}, true, check_snake});
        made.push_back({{GGML_OP_GATED_DELTA_NET, GGML_OP_CPY}, false, check_gdn_cache});
        for (const auto & ops : {topk, scale, norm, norm_scale}) {
            made.push_back({ops, false, check_topk_moe});
        }
        for (size_t n = 2; n <= 8; n++) {
            std::vector<ggml_op> ops = {MUL};
            ops.insert(ops.end(), n, VIEW);
            ops.insert(ops.end(), n - 1, ADD);
            made.push_back({ops, false, check_moe_reduce});
        }
        made.push_back({{GGML_OP_SSM_CONV, GGML_OP_UNARY}, true, check_ssm_conv_silu});
        if (loaded_build().metal_adds_to_products) {
            made.push_back({{GGML_OP_MUL_MAT, ADD}, true, check_mul_mat_add});
        }
        for (fusion & each : made) {
            std::copy_if(each.ops_all.begin(), each.ops_all.end(), std::back_inserter(each.ops),
                         [](ggml_op op) { return !ggml_op_is_empty(op); });
        }
        return made;
    }();
    return all;
}

bool is_chain(const fusion & self, const match & nodes) {
    const int count = static_cast<int>(self.ops.size());
    for (int i = 1; i < count; i++) {
        if ((nodes[i]->src[0] != nodes[i - 1] && nodes[i]->src[1] != nodes[i - 1]) ||
            !ggml_are_same_shape(nodes[i], nodes[i - 1])) {
            return false;
        }
    }
    return can_fuse_nodes(nodes.graph, nodes.indices, count, self.ops.data(), &nodes.indices[count - 1], 1);
}

// How many of these nodes one kernel computes, 1 if none is fused.
int fusion_next(const match & nodes, int available) {
    int best = 1;
    for (const fusion & candidate : fusions()) {
        const int count = static_cast<int>(candidate.ops.size());
        if (count <= best || count > available) {
            continue;
        }
        bool same = true;
        for (int i = 0; i < count && same; i++) {
            same = op_of(nodes[i]) == candidate.ops[static_cast<size_t>(i)];
        }
        if (same && (!candidate.chain || is_chain(candidate, nodes)) && candidate.check(candidate, nodes)) {
            best = count;
        }
    }
    return best;
}

// How many nodes of the graph stay together from one on: kernels that follow each other, with the views among them.
int fusion_span(const ggml_cgraph * graph, int start) {
    if (is_empty(graph->nodes[start])) {
        return 1;
    }
    std::vector<int> computed;
    for (int i = start; i < graph->n_nodes && static_cast<int>(computed.size()) < fusion_max; i++) {
        if (!is_empty(graph->nodes[i])) {
            computed.push_back(i);
        }
    }
    const int available = static_cast<int>(computed.size());
    int       taken     = 0;
    while (taken < available) {
        const int count = fusion_next({graph, computed.data() + taken}, available - taken);
        if (count == 1 || taken + count > fusion_max) {
            break;
        }
        taken += count;
    }
    return taken == 0 ? 1 : std::min(fusion_max, computed[static_cast<size_t>(taken) - 1] - start + 1);
}

// What a row of nodes reads lives until its last one, wherever the operations are those of a fused kernel.
void add_alloc_deps(const ggml_cgraph * graph, const keep_alive & keep) {
    for (int i = 0; i < graph->n_nodes; i++) {
        int count = 0;
        for (const fusion & candidate : fusions()) {
            const int length = static_cast<int>(candidate.ops_all.size());
            if (length > count && match_raw_pattern(candidate, graph, i)) {
                count = length;
            }
        }
        if (count == 0) {
            continue;
        }
        std::set<const ggml_tensor *> seen;
        for (int j = i; j < i + count; j++) {
            for (ggml_tensor * source : graph->nodes[j]->src) {
                if (source != nullptr && seen.insert(source).second) {
                    keep(source, graph->nodes[i + count - 1]);
                }
            }
            seen.insert(graph->nodes[j]);
        }
        i += count - 1;
    }
}

// ---- order

// Memory that a node reads or writes: addresses in a buffer, or the tensor itself while it has none.
struct range {
    const void * place;
    uint64_t     begin;
    uint64_t     end;
    bool         is_written;
};

range range_of(const ggml_tensor * tensor, bool is_written) {
    if (tensor->view_src != nullptr) {
        tensor = tensor->view_src;
    }
    if (tensor->buffer == nullptr) {
        return {tensor, 0, 1024, is_written};
    }
    const auto   begin = reinterpret_cast<uint64_t>(tensor->data);
    const size_t size  = ggml_backend_buft_get_alloc_size(ggml_backend_buffer_get_type(tensor->buffer), tensor);
    return {tensor->buffer, begin, begin + size, is_written};
}

// Nodes that stay together.
struct group {
    std::vector<ggml_tensor *> nodes;
    std::vector<range>         ranges;

    explicit group(std::vector<ggml_tensor *> members) : nodes(std::move(members)) {
        for (const ggml_tensor * node : nodes) {
            for (const ggml_tensor * source : node->src) {
                if (source != nullptr && std::find(nodes.begin(), nodes.end(), source) == nodes.end()) {
                    ranges.push_back(range_of(source, false));
                }
            }
        }
        for (const ggml_tensor * node : nodes) {
            ranges.push_back(range_of(node, true));
        }
    }

    bool is_empty() const { return metal::is_empty(nodes[0]); }
};

// What may run at once.
struct range_set {
    std::vector<range> ranges = {};

    void add(const group & other) { ranges.insert(ranges.end(), other.ranges.begin(), other.ranges.end()); }

    bool has_room_for(const group & other) const {
        return std::none_of(other.ranges.begin(), other.ranges.end(), [this](const range & a) {
            return std::any_of(ranges.begin(), ranges.end(), [&a](const range & b) {
                return a.place == b.place && (a.is_written || b.is_written) && a.begin < b.end && a.end >= b.begin;
            });
        });
    }
};

// Operations that others are looked for behind.
bool is_safe(const ggml_tensor * node) {
    switch (op_of(node)) {
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID:
        case GGML_OP_ROPE:
        case GGML_OP_NORM:
        case GGML_OP_RMS_NORM:
        case GGML_OP_GROUP_NORM:
        case GGML_OP_L2_NORM:
        case GGML_OP_SUM_ROWS:
        case GGML_OP_SSM_CONV:
        case GGML_OP_SSM_SCAN:
        case GGML_OP_CLAMP:
        case GGML_OP_TRI:
        case GGML_OP_DIAG:
        case GGML_OP_MUL:
        case GGML_OP_ADD:
        case GGML_OP_SUB:
        case GGML_OP_DIV:
        case GGML_OP_GLU:
        case GGML_OP_SCALE:
        case GGML_OP_UNARY:
        case GGML_OP_GET_ROWS:
        case GGML_OP_SET_ROWS:
        case GGML_OP_SET:
        case GGML_OP_CPY:
        case GGML_OP_CONT:
        case GGML_OP_REPEAT: return true;
        default: return is_empty(node);
    }
}

std::vector<size_t> graph_optimize_reorder(const std::vector<group> & groups) {
    std::vector<size_t> order;
    std::vector<bool>   used(groups.size(), false);
    range_set           running;
    for (size_t i = 0; i < groups.size(); i++) {
        if (used[i]) {
            continue;
        }
        if (!groups[i].is_empty() && !running.has_room_for(groups[i])) {
            range_set waiting;
            waiting.add(groups[i]);
            for (size_t j = i + 1; j < std::min(i + n_forward, groups.size()); j++) {
                if (used[j]) {
                    continue;
                }
                if (!is_safe(groups[j].nodes[0])) {
                    break;
                }
                if ((groups[j].is_empty() || running.has_room_for(groups[j])) && waiting.has_room_for(groups[j])) {
                    running.add(groups[j]);
                    order.push_back(j);
                    used[j] = true;
                } else {
                    waiting.add(groups[j]);
                }
            }
            running.ranges.clear();
        }
        running.add(groups[i]);
        order.push_back(i);
    }
    return order;
}

}  // namespace

void graph_optimize(const description &, ggml_cgraph * graph, const keep_alive & keep) {
    add_alloc_deps(graph, keep);
    static const bool disabled = std::getenv("GGML_METAL_GRAPH_OPTIMIZE_DISABLE") != nullptr;
    if (disabled) {
        return;
    }
    std::vector<group> groups;
    for (int i = 0; i < graph->n_nodes;) {
        const int span = fusion_span(graph, i);
        groups.emplace_back(std::vector<ggml_tensor *>(graph->nodes + i, graph->nodes + i + span));
        i += span;
    }
    ggml_tensor ** next = graph->nodes;
    for (const size_t i : graph_optimize_reorder(groups)) {
        next = std::copy(groups[i].nodes.begin(), groups[i].nodes.end(), next);
    }
}

}  // namespace fitter::metal
