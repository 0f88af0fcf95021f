// What ggml-vulkan does to a graph before its memory is planned (graph_optimize): independent nodes are brought together
// so that they can run at once, groups of nodes that a fused shader computes stay together, and what some of those
// shaders read stays alive until they have written.

#include <algorithm>
#include <array>
#include <cstdlib>
#include <unordered_set>
#include <vector>

// internal: the nodes of a graph, and whether some of them can be fused; upstream may change it at any time
#include "ggml-impl.h"
#include "virtual/rules/vulkan.h"

namespace fitter::vulkan {

namespace {

// How far ahead of a node others are looked for that can run beside it.
constexpr int num_to_check = 20;
// How far behind a node its consumer is looked for that a shader fuses with it.
constexpr int num_to_check_consumer = 15;

enum class lifetime {
    usual,
    pattern,            // what the nodes read lives until the last of them
    pattern_and_scale,  // the same, or until the SCALE right behind them
};

// Operations in a row that one shader computes.
struct fusion {
    std::vector<ggml_op> ops;
    lifetime             sources = lifetime::usual;
};

constexpr auto UNARY    = GGML_OP_UNARY;
constexpr auto SQRT     = GGML_OP_SQRT;
constexpr auto RESHAPE  = GGML_OP_RESHAPE;
constexpr auto VIEW     = GGML_OP_VIEW;
constexpr auto PERMUTE  = GGML_OP_PERMUTE;
constexpr auto ADD      = GGML_OP_ADD;
constexpr auto MUL      = GGML_OP_MUL;
constexpr auto DIV      = GGML_OP_DIV;
constexpr auto ARGSORT  = GGML_OP_ARGSORT;
constexpr auto GET_ROWS = GGML_OP_GET_ROWS;
constexpr auto SET_ROWS = GGML_OP_SET_ROWS;
constexpr auto SUM_ROWS = GGML_OP_SUM_ROWS;
constexpr auto CLAMP    = GGML_OP_CLAMP;
constexpr auto SOFT_MAX = GGML_OP_SOFT_MAX;
constexpr auto RMS_NORM = GGML_OP_RMS_NORM;
constexpr auto ROPE     = GGML_OP_ROPE;
constexpr auto SCALE    = GGML_OP_SCALE;

// Nodes of this one are protected from the search from any of its nodes on, those of the others only as a whole.
const fusion topk_qsa = {{GET_ROWS, PERMUTE, GGML_OP_CONT, GGML_OP_CPY, RESHAPE, ADD, GGML_OP_TOP_K}};

// In the order in which they are tried.
const std::vector<fusion> & fusions() {
    static const std::vector<fusion> all = {
        // topk_moe_early_softmax_norm
        {{SOFT_MAX, RESHAPE, ARGSORT, VIEW, GET_ROWS, RESHAPE, SUM_ROWS, CLAMP, DIV, RESHAPE},
         lifetime::pattern_and_scale},
        // topk_moe_sigmoid_norm_bias
        {{UNARY, RESHAPE, ADD, ARGSORT, VIEW, GET_ROWS, RESHAPE, SUM_ROWS, CLAMP, DIV, RESHAPE},
         lifetime::pattern_and_scale},
        // topk_moe_sqrt_softplus_norm_bias
        {{UNARY, SQRT, RESHAPE, ADD, ARGSORT, VIEW, GET_ROWS, RESHAPE, SUM_ROWS, CLAMP, DIV, RESHAPE},
         lifetime::pattern_and_scale},
        // topk_moe_early_softmax
        {{SOFT_MAX, RESHAPE, ARGSORT, VIEW, GET_ROWS}, lifetime::pattern_and_scale},
        // topk_moe_late_softmax
        {{ARGSORT, VIEW, GET_ROWS, RESHAPE, SOFT_MAX, RESHAPE}, lifetime::pattern_and_scale},
        // snake_pattern
        {{MUL, GGML_OP_SIN, GGML_OP_SQR, MUL, ADD}},
        topk_qsa,
        // rms_norm_mul_add_mul_pattern
        {{RMS_NORM, MUL, ADD, MUL}},
        // rms_norm_mul_add_pattern
        {{RMS_NORM, MUL, ADD}},
        // rms_norm_mul_rope_view_set_rows_pattern
        {{RMS_NORM, MUL, ROPE, VIEW, SET_ROWS}},
        // rms_norm_view_set_rows_pattern
        {{RMS_NORM, VIEW, SET_ROWS}},
        // rope_view_set_rows_pattern
        {{ROPE, VIEW, SET_ROWS}},
        // hc_post_gate_pattern
        {{SCALE, UNARY, SCALE, GGML_OP_DSV4_HC_POST}, lifetime::pattern},
    };
    return all;
}

// A node and the one right behind it that a shader fuses, so that the second one need not wait for the first.
constexpr std::array<std::array<ggml_op, 2>, 6> adjacent_pairs = {{
    {GGML_OP_MUL_MAT, GGML_OP_ADD},
    {GGML_OP_MUL_MAT_ID, GGML_OP_ADD_ID},
    {GGML_OP_MUL_MAT_ID, GGML_OP_MUL},
    {GGML_OP_ADD, GGML_OP_ADD},
    {GGML_OP_SSM_CONV, GGML_OP_ADD},
    {GGML_OP_SSM_CONV, GGML_OP_UNARY},
}};

// The same where nodes between the two cost nothing or are taken already.
constexpr std::array<std::array<ggml_op, 2>, 2> near_pairs = {{
    {GGML_OP_RMS_NORM, GGML_OP_MUL},
    {GGML_OP_UNARY, GGML_OP_MUL},
}};

template <size_t N>
bool is_one_of(const std::array<std::array<ggml_op, 2>, N> & pairs, const ggml_tensor * first,
               const ggml_tensor * second) {
    return std::any_of(pairs.begin(), pairs.end(),
                       [&](const auto & pair) { return pair[0] == op_of(first) && pair[1] == op_of(second); });
}

bool is_empty(const ggml_tensor * node) { return ggml_op_is_empty(op_of(node)); }

const ggml_tensor * base(const ggml_tensor * tensor) { return tensor->view_src ? tensor->view_src : tensor; }

// Whether dst has to stay behind src: it reads src, or one writes the storage that the other reads or writes.
bool is_src_of(const ggml_tensor * dst, const ggml_tensor * src) {
    const bool computed = !is_empty(dst) && !is_empty(src);
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (dst->src[i] == src || (computed && dst->src[i] != nullptr && base(dst->src[i]) == base(src)) ||
            (computed && src->src[i] != nullptr && base(src->src[i]) == base(dst))) {
            return true;
        }
    }
    return base(dst) == base(src);
}

bool can_fuse_unary_mul(const ggml_tensor * unary, const ggml_tensor * mul) {
    switch (ggml_get_unary_op(unary)) {
        case GGML_UNARY_OP_GELU:
        case GGML_UNARY_OP_SIGMOID:
        case GGML_UNARY_OP_SILU:
        case GGML_UNARY_OP_SOFTPLUS: break;
        default: return false;
    }
    const bool          is_first = mul->src[0] == unary;
    const ggml_tensor * other    = mul->src[is_first ? 1 : 0];
    if ((unary->type != GGML_TYPE_F32 && unary->type != GGML_TYPE_F16) || mul->type != unary->type ||
        other == nullptr || other->type != unary->type) {
        return false;
    }
    return ggml_is_contiguous_1(other) && ggml_is_contiguous_1(unary->src[0]) &&
           (is_first ? ggml_can_repeat(other, unary) : ggml_can_repeat(unary, other));
}

class reordering {
   public:
    reordering(ggml_cgraph * graph, const keep_alive & keep) :
        graph_(graph),
        keep_(keep),
        n_(graph->n_nodes),
        used_(static_cast<size_t>(graph->n_nodes), false) {}

    void run() {
        while (first_unused_ < n_) {
            if (!keep_pattern()) {
                set_ = {first_unused_};
                add_computed();
                if (op(set_.back()) != GGML_OP_ADD) {  // else what follows is fused with it
                    add_views();
                }
                for (const int i : set_) {
                    take(i);
                }
            }
            while (first_unused_ < n_ && used(first_unused_)) {
                first_unused_++;
            }
        }
        std::copy_n(order_.begin(), n_, graph_->nodes);
    }

   private:
    ggml_tensor * node(int i) const { return graph_->nodes[i]; }
    ggml_op       op(int i) const { return op_of(node(i)); }
    bool          used(int i) const { return used_[static_cast<size_t>(i)]; }

    bool in_set(int i) const { return std::find(set_.begin(), set_.end(), i) != set_.end(); }

    void take(int i) {
        order_.push_back(node(i));
        taken_.insert(node(i));
        used_[static_cast<size_t>(i)] = true;
    }

    // Into the set, and out of reach of the rest of the search.
    void pull(int i) {
        set_.push_back(i);
        used_[static_cast<size_t>(i)] = true;
    }

    // ---- patterns

    bool match_pattern(const fusion & pattern, int start) const {
        const int size = static_cast<int>(pattern.ops.size());
        if (start < 0 || start + size > n_) {
            return false;
        }
        for (int i = 0; i < size; i++) {
            if (op(start + i) != pattern.ops[static_cast<size_t>(i)] || used(start + i)) {
                return false;
            }
        }
        return true;
    }

    bool in_pattern(int i) const {
        for (int behind = 0; behind < static_cast<int>(topk_qsa.ops.size()); behind++) {
            if (match_pattern(topk_qsa, i - behind)) {
                return true;
            }
        }
        return std::any_of(fusions().begin(), fusions().end(),
                           [&](const fusion & pattern) { return match_pattern(pattern, i); });
    }

    bool keep_pattern() {
        for (const fusion & pattern : fusions()) {
            if (match_pattern(pattern, first_unused_)) {
                add_pattern_alloc_deps(pattern);
                for (size_t i = 0; i < pattern.ops.size(); i++) {
                    take(first_unused_ + static_cast<int>(i));
                }
                return true;
            }
        }
        return false;
    }

    void add_pattern_alloc_deps(const fusion & pattern) {
        if (pattern.sources == lifetime::usual) {
            return;
        }
        const int size = static_cast<int>(pattern.ops.size());
        int       last = first_unused_ + size - 1;
        if (pattern.sources == lifetime::pattern_and_scale && last + 1 < n_ && op(last + 1) == GGML_OP_SCALE) {
            last++;
        }
        std::unordered_set<const ggml_tensor *> seen;
        for (int i = first_unused_; i < first_unused_ + size; i++) {
            for (ggml_tensor * source : node(i)->src) {
                if (source != nullptr && seen.insert(source).second) {
                    keep_(source, node(last));
                }
            }
            seen.insert(node(i));
        }
    }

    // ---- nodes beside the first one

    bool empty_or_scheduled_between(int begin, int end) const {
        for (int i = begin; i < end; i++) {
            if (!used(i) && !is_empty(node(i))) {
                return false;
            }
        }
        return true;
    }

    // Whether a shader computes both, so that the second may be in the set of the first.
    bool fuses(int first, int second) const {
        if (first != set_.back()) {
            return false;
        }
        return (is_one_of(near_pairs, node(first), node(second)) && empty_or_scheduled_between(first + 1, second)) ||
               (second == first + 1 && is_one_of(adjacent_pairs, node(first), node(second)));
    }

    bool can_run_beside(int i) const {
        for (int before = first_unused_; before < i; before++) {
            if (!used(before) && is_src_of(node(i), node(before)) && !fuses(before, i)) {
                return false;
            }
        }
        return true;
    }

    void add_computed() {
        const int end = std::min(first_unused_ + num_to_check, n_);
        for (int i = first_unused_ + 1; i < end; i++) {
            if (used(i) || is_empty(node(i)) || in_pattern(i) || !can_run_beside(i)) {
                continue;
            }
            set_.push_back(i);
            const int rope = pull_rope(i);
            pull_set_rows(rope);
            pull_result(i, GGML_OP_MUL_MAT_ID, GGML_OP_ADD_ID, GGML_OP_MUL);
            pull_result(i, GGML_OP_MUL_MAT, GGML_OP_ADD, GGML_OP_ADD);
            pull_ssm_conv_unary(i);
            pull_unary_mul(i);
        }
    }

    void add_views() {
        const int end = std::min(first_unused_ + num_to_check, n_);
        for (int i = first_unused_ + 1; i < end; i++) {
            if (used(i) || !is_empty(node(i))) {
                continue;
            }
            bool ready = true;
            for (int before = first_unused_; ready && before < i; before++) {
                ready = used(before) || !is_src_of(node(i), node(before)) || in_set(before);
            }
            if (ready) {
                set_.push_back(i);
            }
        }
    }

    // ---- consumers that a shader fuses, brought forward

    // A weight or an input, or computed by then.
    bool is_available(const ggml_tensor * tensor) const {
        return op_of(tensor) == GGML_OP_NONE || taken_.count(tensor) != 0;
    }

    int end_of_search(int i) const { return std::min(i + num_to_check_consumer, n_); }

    // RMS_NORM, MUL, ROPE. Gives the node that SET_ROWS may follow.
    int pull_rope(int i) {
        if (op(i) != GGML_OP_MUL || op(i - 1) != GGML_OP_RMS_NORM) {
            return i;
        }
        for (int k = i + 1; k < end_of_search(i); k++) {
            const ggml_tensor * rope = node(k);
            if (op_of(rope) == GGML_OP_ROPE && rope->src[0] == node(i) && op_of(rope->src[1]) == GGML_OP_NONE &&
                (rope->src[2] == nullptr || op_of(rope->src[2]) == GGML_OP_NONE)) {
                pull(k);
                return k;
            }
        }
        return i;
    }

    // ROPE or RMS_NORM, VIEW, SET_ROWS
    void pull_set_rows(int i) {
        if (op(i) != GGML_OP_ROPE && op(i) != GGML_OP_RMS_NORM) {
            return;
        }
        int view     = -1;
        int set_rows = -1;
        for (int k = i + 1; k < end_of_search(i) && set_rows == -1; k++) {
            if (used(k)) {
                continue;
            }
            if (view == -1 && op(k) == GGML_OP_VIEW && node(k)->src[0] == node(i)) {
                view = k;
            } else if (view != -1 && op(k) == GGML_OP_SET_ROWS && node(k)->src[0] == node(view)) {
                set_rows = k;
            }
        }
        if (set_rows == -1) {
            return;
        }
        const std::array<int, 3>     indices = {i, view, set_rows};
        const std::array<ggml_op, 3> ops     = {op(i), GGML_OP_VIEW, GGML_OP_SET_ROWS};
        if (!can_fuse_nodes(graph_, indices.data(), 3, ops.data(), &set_rows, 1)) {
            return;
        }
        for (int k = i + 1; k < set_rows; k++) {
            if (!used(k) && k != view && !is_empty(node(k)) && is_src_of(node(set_rows), node(k))) {
                return;
            }
        }
        pull(view);
        pull(set_rows);
    }

    // A product, what is added to it, and what the sum is combined with.
    void pull_result(int i, ggml_op product, ggml_op sum, ggml_op result) {
        if (op(i) != sum || op(i - 1) != product) {
            return;
        }
        for (int k = i + 1; k < end_of_search(i); k++) {
            if (op(k) == result && node(k)->src[0] == node(i) && is_available(node(k)->src[1])) {
                pull(k);
                return;
            }
        }
    }

    void pull_ssm_conv_unary(int i) {
        if (op(i) != GGML_OP_ADD || op(i - 1) != GGML_OP_SSM_CONV) {
            return;
        }
        for (int k = i + 1; k < end_of_search(i); k++) {
            if (op(k) == GGML_OP_UNARY && node(k)->src[0] == node(i)) {
                pull(k);
                return;
            }
        }
    }

    void pull_unary_mul(int i) {
        if (op(i) != GGML_OP_UNARY) {
            return;
        }
        for (int k = i + 1; k < end_of_search(i); k++) {
            const ggml_tensor * mul = node(k);
            if (op_of(mul) != GGML_OP_MUL || (mul->src[0] != node(i) && mul->src[1] != node(i))) {
                continue;
            }
            const ggml_tensor * other = mul->src[mul->src[0] == node(i) ? 1 : 0];
            if (is_available(other) && can_fuse_unary_mul(node(i), mul)) {
                pull(k);
                return;
            }
        }
    }

    ggml_cgraph *                           graph_;
    const keep_alive &                      keep_;
    int                                     n_;
    int                                     first_unused_ = 0;
    std::vector<bool>                       used_;   // by index: in the new order, or pulled into the set
    std::vector<ggml_tensor *>              order_;
    std::unordered_set<const ggml_tensor *> taken_;  // what the new order holds
    std::vector<int>                        set_;    // nodes that run at once
};

}  // namespace

void graph_optimize(const description &, ggml_cgraph * graph, const keep_alive & keep) {
    static const bool disabled = std::getenv("GGML_VK_DISABLE_GRAPH_OPTIMIZE") != nullptr;
    if (!disabled) {
        reordering(graph, keep).run();
    }
}

}  // namespace fitter::vulkan
