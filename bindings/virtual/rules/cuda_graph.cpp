// What ggml-cuda does to a graph before its memory is planned (graph_optimize): tensors that a fused kernel reads stay
// alive until it has written, and with GGML_CUDA_GRAPH_OPT=1 the branches of attention are interleaved.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <vector>

#include "builds/build.h"
#include "virtual/rules/cuda.h"
// internal: the nodes of a graph, and whether some of them can be fused; upstream may change it at any time
#include "ggml-impl.h"

namespace fitter::cuda {

namespace {

// A node of the graph, nullptr past its end.
ggml_tensor * node_at(const ggml_cgraph * graph, int index) {
    return index < graph->n_nodes ? graph->nodes[index] : nullptr;
}

bool is_op(const ggml_tensor * node, ggml_op op) { return node != nullptr && op_of(node) == op; }

bool is_contiguous_f32(const ggml_tensor * tensor) {
    return tensor != nullptr && tensor->type == GGML_TYPE_F32 && ggml_is_contiguous(tensor);
}

// Whether nothing of a row of nodes is used elsewhere but its outputs.
bool can_fuse_row(const ggml_cgraph * graph, int start, const std::vector<ggml_op> & ops, const int * outputs, int n_outputs) {
    std::vector<int> nodes(ops.size());
    std::iota(nodes.begin(), nodes.end(), start);
    return can_fuse_nodes(graph, nodes.data(), static_cast<int>(nodes.size()), ops.data(), outputs, n_outputs);
}

// ---- experts * weights, summed over the experts

// The fused kernel is written for this many experts per token at most.
constexpr int64_t moe_weighted_reduction_max_experts = 15;

struct moe_weighted_reduction {
    ggml_tensor * experts      = nullptr;
    ggml_tensor * expert_scale = nullptr;  // a second factor, may be absent
    ggml_tensor * weights      = nullptr;
    ggml_tensor * dst          = nullptr;
    int           node_count   = 0;
};

// A product of all experts' rows with one number each, in either order.
struct weighting {
    ggml_tensor * full;
    ggml_tensor * numbers;
};

std::optional<weighting> weighting_of(const ggml_tensor * mul) {
    const auto is_full = [mul](const ggml_tensor * source) {
        return is_contiguous_f32(source) && ggml_are_same_shape(source, mul);
    };
    const auto is_numbers = [mul](const ggml_tensor * source) {
        return is_contiguous_f32(source) && source->ne[0] == 1 &&
               std::equal(source->ne + 1, source->ne + GGML_MAX_DIMS, mul->ne + 1);
    };
    ggml_tensor * const a = mul->src[0];
    ggml_tensor * const b = mul->src[1];
    if (is_full(a) && is_numbers(b)) {
        return weighting{a, b};
    }
    if (is_full(b) && is_numbers(a)) {
        return weighting{b, a};
    }
    return std::nullopt;
}

bool is_contiguous_mul(const ggml_tensor * node) { return is_op(node, GGML_OP_MUL) && is_contiguous_f32(node); }

// One expert's rows of all tokens.
bool is_view_of_expert(const ggml_tensor * view, const ggml_tensor * weighted, size_t expert, int64_t n_tokens) {
    return view->src[0] == weighted && view->view_src == weighted && view->type == GGML_TYPE_F32 &&
           view->ne[0] == weighted->ne[0] && view->ne[1] == n_tokens && view->ne[2] == 1 && view->ne[3] == 1 &&
           view->nb[0] == weighted->nb[0] && view->nb[1] == weighted->nb[2] &&
           view->view_offs == expert * weighted->nb[1];
}

std::optional<moe_weighted_reduction> match_moe_weighted_reduction(const ggml_cgraph * graph, int start) {
    const ggml_tensor * first = node_at(graph, start);
    if (!is_contiguous_mul(first)) {
        return std::nullopt;
    }

    moe_weighted_reduction match;
    const ggml_tensor *    weighted = first;
    int                    n_muls   = 1;

    const std::optional<weighting> inner  = weighting_of(first);
    const ggml_tensor *            second = node_at(graph, start + 1);
    if (!inner) {
        return std::nullopt;
    }
    match.experts = inner->full;
    match.weights = inner->numbers;
    if (is_contiguous_mul(second)) {
        const std::optional<weighting> outer = weighting_of(second);
        if (outer && outer->full == first) {
            match.expert_scale = inner->numbers;
            match.weights      = outer->numbers;
            weighted           = second;
            n_muls             = 2;
        }
    }

    const int64_t n_experts = weighted->ne[1];
    const int64_t n_tokens  = weighted->ne[2] * weighted->ne[3];
    if (n_experts < 2 || n_experts > moe_weighted_reduction_max_experts || n_tokens <= 0) {
        return std::nullopt;
    }

    // After the products: a view of each expert, and the sum of the first two, of that and the third, and so on. A sum
    // may come as soon as its views are there.
    match.node_count = n_muls + static_cast<int>(2 * n_experts) - 1;
    std::vector<ggml_op>             ops(static_cast<size_t>(n_muls), GGML_OP_MUL);
    std::vector<const ggml_tensor *> views;
    const ggml_tensor *              sum    = nullptr;
    size_t                           n_adds = 0;
    for (int i = n_muls; i < match.node_count; i++) {
        ggml_tensor * node = node_at(graph, start + i);
        if (is_op(node, GGML_OP_VIEW)) {
            if (views.size() == static_cast<size_t>(n_experts) ||
                !is_view_of_expert(node, weighted, views.size(), n_tokens)) {
                return std::nullopt;
            }
            views.push_back(node);
        } else if (is_op(node, GGML_OP_ADD)) {
            if (n_adds + 1 >= views.size() || node->src[0] != (sum ? sum : views[0]) ||
                node->src[1] != views[n_adds + 1] || node->type != GGML_TYPE_F32) {
                return std::nullopt;
            }
            sum = match.dst = node;
            n_adds++;
        } else {
            return std::nullopt;
        }
        ops.push_back(op_of(node));
    }
    if (views.size() != static_cast<size_t>(n_experts) || n_adds + 1 != views.size() || !ggml_is_contiguous(sum) ||
        sum->ne[0] != weighted->ne[0] || sum->ne[1] != n_tokens || sum->ne[2] != 1 || sum->ne[3] != 1) {
        return std::nullopt;
    }
    const int last = start + match.node_count - 1;
    if (!can_fuse_row(graph, start, ops, &last, 1)) {
        return std::nullopt;
    }
    match.dst = graph->nodes[last];
    return match;
}

// ---- which experts: activation of the logits, the largest of them, their weights

struct topk_moe {
    std::vector<ggml_op> ops;  // the nodes, one after another
    int                  ids;  // index of the experts' ids among them
};

// Follows a graph node by node. Each step must be the given operation on the given source.
class chain {
   public:
    chain(const ggml_cgraph * graph, int start) : graph_(graph), start_(start) {}

    bool step(ggml_op op) { return step(op, last()); }

    bool step(ggml_op op, const ggml_tensor * source) {
        const ggml_tensor * node = node_at(graph_, start_ + size());
        if (!is_op(node, op) || (size() > 0 && node->src[0] != source)) {
            return false;
        }
        ops_.push_back(op);
        return true;
    }

    // All of the operations or none.
    bool steps(std::initializer_list<ggml_op> ops) {
        const size_t before = ops_.size();
        for (const ggml_op op : ops) {
            if (!step(op)) {
                ops_.resize(before);
                return false;
            }
        }
        return true;
    }

    ggml_tensor *        last() const { return size() > 0 ? graph_->nodes[start_ + size() - 1] : nullptr; }
    ggml_tensor *        back(int steps) const { return graph_->nodes[start_ + size() - 1 - steps]; }
    int                  size() const { return static_cast<int>(ops_.size()); }
    std::vector<ggml_op> take() { return std::move(ops_); }

   private:
    const ggml_cgraph *  graph_;
    int                  start_;
    std::vector<ggml_op> ops_ = {};
};

// The activation of the gate: softmax, sigmoid, or the square root of softplus.
bool step_activation(chain & nodes, const ggml_tensor * gate) {
    if (op_of(gate) == GGML_OP_SOFT_MAX) {
        return nodes.step(GGML_OP_SOFT_MAX);
    }
    if (op_of(gate) != GGML_OP_UNARY) {
        return false;
    }
    switch (ggml_get_unary_op(gate)) {
        case GGML_UNARY_OP_SIGMOID: return nodes.step(GGML_OP_UNARY);
        case GGML_UNARY_OP_SOFTPLUS: return nodes.step(GGML_OP_UNARY) && nodes.step(GGML_OP_SQRT);
        default: return false;
    }
}

// Weights normalized by their sum. The division comes two nodes after what it divides.
void step_norm(chain & nodes) {
    chain ahead = nodes;
    if (!ahead.steps({GGML_OP_RESHAPE, GGML_OP_SUM_ROWS, GGML_OP_CLAMP})) {
        return;
    }
    const ggml_tensor * clamped = ahead.last();
    if (ahead.step(GGML_OP_DIV, ahead.back(2)) && ahead.last()->src[1] == clamped && ahead.step(GGML_OP_RESHAPE)) {
        nodes = ahead;
    }
}

std::optional<topk_moe> topk_moe_fusion(const ggml_cgraph * graph, int start) {
    const ggml_tensor * gate = graph->nodes[start];
    chain               nodes(graph, start);
    if (!step_activation(nodes, gate)) {
        return std::nullopt;
    }
    const ggml_tensor * probs = nodes.last();
    if (!nodes.step(GGML_OP_RESHAPE)) {
        return std::nullopt;
    }
    const ggml_tensor * reshaped = nodes.last();
    const ggml_tensor * ranked   = nodes.step(GGML_OP_ADD, probs) ? nodes.last() : probs;
    if (!nodes.step(GGML_OP_ARGSORT, ranked) || !nodes.step(GGML_OP_VIEW)) {
        return std::nullopt;
    }
    const ggml_tensor * chosen = nodes.last();
    const int           ids    = nodes.size() - 1;
    if (!nodes.step(GGML_OP_GET_ROWS, reshaped) || nodes.last()->src[1] != chosen) {
        return std::nullopt;
    }

    // A normalization that is not complete ends the pattern; what would follow it does not belong to it.
    const bool may_be_norm = is_op(node_at(graph, start + nodes.size()), GGML_OP_RESHAPE);
    const int  before      = nodes.size();
    if (may_be_norm) {
        step_norm(nodes);
    }
    if (!may_be_norm || nodes.size() > before) {
        nodes.step(GGML_OP_SCALE);
    }
    return topk_moe{nodes.take(), ids};
}

bool should_use_topk_moe(const ggml_tensor * gate, const ggml_tensor * weights, const ggml_tensor * ids) {
    const size_t n_expert        = ids->nb[1] / ids->nb[0];
    const bool   is_power_of_two = (n_expert & (n_expert - 1)) == 0;
    if (!(is_power_of_two && n_expert <= 512) && n_expert != 288 && n_expert != 576) {
        return false;
    }
    const ggml_tensor * logits = gate->src[0];
    if (!ggml_is_contiguous(weights) || !ggml_is_contiguous(logits)) {
        return false;
    }
    if (op_of(gate) == GGML_OP_SOFT_MAX) {
        const float scale    = ggml_get_op_params_f32(gate, 0);
        const float max_bias = ggml_get_op_params_f32(gate, 1);
        const bool  is_plain = gate->src[1] == nullptr && gate->src[2] == nullptr;
        return scale == 1.0f && max_bias == 0.0f && is_plain;
    }
    return true;
}

// ---- the chosen experts and the shared one

// Two products with weights and the gate that joins them, in a row.
struct gated {
    const ggml_tensor * gate;
    const ggml_tensor * up;
    const ggml_tensor * joined;

    const ggml_tensor * weights() const { return up->src[0]; }
    const ggml_tensor * gate_weights() const { return gate->src[0]; }
    const ggml_tensor * input() const { return up->src[1]; }
};

std::optional<gated> match_gated(const ggml_cgraph * graph, int start, ggml_op product) {
    const ggml_tensor * first  = node_at(graph, start);
    const ggml_tensor * second = node_at(graph, start + 1);
    const ggml_tensor * joined = node_at(graph, start + 2);
    if (!is_op(first, product) || !is_op(second, product) || !is_op(joined, GGML_OP_GLU)) {
        return std::nullopt;
    }
    const gated found{joined->src[0], joined->src[1], joined};
    if (!(found.gate == first && found.up == second) && !(found.gate == second && found.up == first)) {
        return std::nullopt;
    }
    constexpr ggml_glu_op fused[]    = {GGML_GLU_OP_SWIGLU, GGML_GLU_OP_GEGLU, GGML_GLU_OP_SWIGLU_OAI, GGML_GLU_OP_SWIGLU_CLAMP};
    const bool            is_swapped = ggml_get_op_params_i32(joined, 1) != 0;
    if (is_swapped || std::find(std::begin(fused), std::end(fused), ggml_get_glu_op(joined)) == std::end(fused)) {
        return std::nullopt;
    }
    const bool is_alike = found.weights()->type == found.gate_weights()->type &&
                          ggml_are_same_shape(found.weights(), found.gate_weights()) &&
                          ggml_are_same_stride(found.weights(), found.gate_weights());
    // the ids of the chosen experts, absent in a plain product
    const bool has_same_sources = found.input() == found.gate->src[1] && found.up->src[2] == found.gate->src[2];
    return is_alike && has_same_sources ? std::optional(found) : std::nullopt;
}

bool is_matrix_in_memory(const ggml_tensor * weights) {
    return op_of(weights) == GGML_OP_NONE && ggml_is_contiguous(weights);
}

// Whether one kernel computes the chosen experts from ``routed`` on and the shared expert from ``shared`` on.
bool can_compute_together(const ggml_cgraph * graph, int routed, int shared) {
    const int     nodes[]   = {routed, routed + 1, routed + 2, shared, shared + 1, shared + 2};
    const ggml_op ops[]     = {GGML_OP_MUL_MAT_ID, GGML_OP_MUL_MAT_ID, GGML_OP_GLU, GGML_OP_MUL_MAT, GGML_OP_MUL_MAT, GGML_OP_GLU};
    const int     outputs[] = {routed + 2, shared + 2};

    const std::optional<gated> chosen = match_gated(graph, routed, GGML_OP_MUL_MAT_ID);
    const std::optional<gated> always = match_gated(graph, shared, GGML_OP_MUL_MAT);
    if (!chosen || !always || !can_fuse_nodes(graph, nodes, 6, ops, outputs, 2)) {
        return false;
    }
    const ggml_tensor * weights = chosen->weights();
    const ggml_tensor * matrix  = always->weights();
    const ggml_tensor * rows    = chosen->input();
    const bool          is_same_input =
        op_of(rows) == GGML_OP_RESHAPE && rows->src[0] == always->input() && rows->ne[1] == 1 && rows->ne[3] == 1 &&
        ggml_is_contiguous(rows) && ggml_is_contiguous(always->input()) && ggml_is_matrix(always->input());
    const bool has_same_rows = weights->type == matrix->type && weights->ne[0] == matrix->ne[0] &&
                               weights->ne[1] == matrix->ne[1] && weights->nb[1] == matrix->nb[1] &&
                               weights->ne[3] == 1 && ggml_is_matrix(matrix);
    const bool has_same_gate =
        ggml_get_glu_op(chosen->joined) == ggml_get_glu_op(always->joined) &&
        ggml_get_op_params_f32(chosen->joined, 3) == ggml_get_op_params_f32(always->joined, 3);
    return weights->buffer != nullptr && ggml_is_quantized(weights->type) && is_same_input && has_same_rows &&
           has_same_gate && is_matrix_in_memory(matrix) && is_matrix_in_memory(always->gate_weights()) &&
           ggml_is_contiguous(chosen->joined) && ggml_is_contiguous(always->joined);
}

// Moves the shared expert behind the chosen ones that are computed with it; what the kernel reads stays allocated.
void group_shared_experts(ggml_cgraph * graph, const keep_alive & keep) {
    for (int i = 0; i + 5 < graph->n_nodes; i++) {
        if (!is_op(node_at(graph, i), GGML_OP_MUL_MAT_ID)) {
            continue;
        }
        for (int j = i + 3; j + 2 < graph->n_nodes; j++) {
            if (is_op(node_at(graph, j), GGML_OP_MUL_MAT_ID) && is_op(node_at(graph, j + 1), GGML_OP_MUL_MAT_ID)) {
                break;
            }
            if (!can_compute_together(graph, i, j)) {
                continue;
            }
            std::rotate(graph->nodes + i + 3, graph->nodes + j, graph->nodes + j + 3);
            const ggml_tensor * up = graph->nodes[i + 2]->src[1];
            keep(up->src[1], graph->nodes[i + 5]);
            keep(up->src[2], graph->nodes[i + 5]);
            i += 5;
            break;
        }
    }
}

// ---- lifetimes

void keep_topk_moe(ggml_cgraph * graph, int start, int count, const keep_alive & keep) {
    // The node after the pattern, which in a split of a larger graph may be the first one of the next split.
    ggml_tensor * until = graph->nodes[start + count];
    for (int i = start; i < start + count; i++) {
        keep(graph->nodes[i], until);
        for (ggml_tensor * source : graph->nodes[i]->src) {
            if (source != nullptr) {
                keep(source, until);
            }
        }
    }
}

void keep_for_fusion(ggml_cgraph * graph, const keep_alive & keep) {
    const bool keeps_topk = loaded_build().cuda_keeps_topk_moe;
    for (int i = 0; i < graph->n_nodes; i++) {
        if (const std::optional<moe_weighted_reduction> match = match_moe_weighted_reduction(graph, i)) {
            keep(match->experts, match->dst);
            keep(match->weights, match->dst);
            if (match->expert_scale != nullptr) {
                keep(match->expert_scale, match->dst);
            }
            i += match->node_count - 1;
            continue;
        }
        std::optional<topk_moe> match = keeps_topk ? topk_moe_fusion(graph, i) : std::nullopt;
        if (!match) {
            continue;
        }
        const int count      = static_cast<int>(match->ops.size());
        const int outputs[2] = {i + match->ids, i + count - 1};
        if (can_fuse_row(graph, i, match->ops, outputs, 2) &&
            should_use_topk_moe(graph->nodes[i], graph->nodes[outputs[1]], graph->nodes[outputs[0]])) {
            keep_topk_moe(graph, i, count, keep);
            i += count - 1;
        }
    }
}

// ---- branches that run on streams of their own (GGML_CUDA_GRAPH_OPT=1)

bool is_noop(const ggml_tensor * node) { return ggml_op_is_empty(op_of(node)) || ggml_is_empty(node); }

bool depends_on(const ggml_tensor * node, const ggml_tensor * other) {
    const auto storage = [](const ggml_tensor * tensor) { return tensor->view_src ? tensor->view_src : tensor; };
    return std::find(std::begin(node->src), std::end(node->src), other) != std::end(node->src) ||
           storage(node) == storage(other);
}

using branch = std::vector<ggml_tensor *>;

bool depends_on_branch(const ggml_tensor * node, const branch & nodes) {
    return std::any_of(nodes.begin(), nodes.end(), [node](const ggml_tensor * other) { return depends_on(node, other); });
}

// Assigns the nodes after a fork to its branches; returns the index of the node that joins two of them, or n_nodes.
int follow_branches(const ggml_cgraph * graph, int fork, std::vector<branch> & branches) {
    for (int i = fork + 1; i < graph->n_nodes; i++) {
        ggml_tensor *         node = graph->nodes[i];
        std::vector<branch *> owners;
        for (branch & candidate : branches) {
            if (depends_on_branch(node, candidate)) {
                owners.push_back(&candidate);
            }
        }
        if (owners.size() >= 2) {
            return i;
        }
        if (owners.empty() && is_noop(node)) {
            branches[0].push_back(node);
        } else if (!owners.empty() && std::find(owners[0]->begin(), owners[0]->end(), node) == owners[0]->end()) {
            owners[0]->push_back(node);
        }
    }
    return graph->n_nodes;
}

// One node of each branch in turn, with the no-ops that follow it.
void interleave(ggml_cgraph * graph, int start, const std::vector<branch> & branches) {
    std::vector<size_t> next(branches.size(), 0);
    size_t              left = 0;
    for (const branch & nodes : branches) {
        left += nodes.size();
    }
    for (size_t turn = 0; left > 0; turn = (turn + 1) % branches.size()) {
        const branch & nodes    = branches[turn];
        size_t &       position = next[turn];
        for (bool first = true; position < nodes.size() && (first || is_noop(nodes[position])); first = false) {
            graph->nodes[start++] = nodes[position++];
            left--;
        }
    }
}

void run_branches_concurrently(ggml_cgraph * graph) {
    constexpr int n_branches = 3;  // Q, K and V

    std::unordered_map<const ggml_tensor *, int> uses;
    std::unordered_map<const ggml_tensor *, int> indices;
    std::vector<ggml_tensor *>                   used;
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_tensor * node = graph->nodes[i];
        indices[node]      = i;
        if (is_noop(node) || ggml_nrows(node) > 1) {
            continue;
        }
        for (ggml_tensor * source : node->src) {
            if (++uses[source] == 1 && source != nullptr) {
                used.push_back(source);
            }
        }
    }
    // ggml-cuda counts absent sources as one that is used, too, and asks for its name.
    if (uses[nullptr] == n_branches) {
        GGML_ABORT("ggml-cuda would crash on this graph with GGML_CUDA_GRAPH_OPT=1");
    }

    std::vector<std::pair<int, int>> done;
    for (const ggml_tensor * root : used) {
        if (uses[root] != n_branches || std::strstr(root->name, "attn_norm") == nullptr) {
            continue;
        }
        const int fork = indices[root];
        if (std::any_of(done.begin(), done.end(), [fork](auto range) { return fork >= range.first && fork <= range.second; })) {
            continue;
        }
        std::vector<branch> branches;
        for (int i = fork + 1; i < graph->n_nodes; i++) {
            if (!is_noop(graph->nodes[i]) && depends_on(graph->nodes[i], root)) {
                branches.push_back({graph->nodes[i]});
            }
        }
        GGML_ASSERT(branches.size() == n_branches);

        const int join = follow_branches(graph, fork, branches);
        size_t    size = 0;
        for (const branch & nodes : branches) {
            size += nodes.size();
        }
        if (join < graph->n_nodes && size == static_cast<size_t>(join - fork - 1)) {
            interleave(graph, fork + 1, branches);
            done.emplace_back(fork, join);
        }
    }
}

bool is_on(const char * variable) {
    const char * value = std::getenv(variable);
    return value != nullptr && std::atoi(value) != 0;
}

}  // namespace

void graph_optimize(const description & device, ggml_cgraph * graph, const keep_alive & keep) {
    static const bool disable_fusion = is_on("GGML_CUDA_DISABLE_FUSION");
    static const bool disable_graphs = std::getenv("GGML_CUDA_DISABLE_GRAPHS") != nullptr;
    static const bool use_streams    = [] {
        const char * value = std::getenv("GGML_CUDA_GRAPH_OPT");
        return value != nullptr && std::atoi(value) == 1;
    }();

    if (!disable_fusion) {
        if (loaded_build().cuda_groups_shared_experts) {
            group_shared_experts(graph, keep);
        }
        keep_for_fusion(graph, keep);
    }
    const bool may_branch = device.n_alike == 1 || loaded_build().cuda_branches_on_many_devices;
    if (use_streams && !disable_graphs && may_branch && device.compute_capability >= cc_volta) {
        run_branches_concurrently(graph);
    }
}

}  // namespace fitter::cuda
