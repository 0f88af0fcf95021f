#include "builds/operations.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "builds/lookup.h"
// internal: whether nodes can be fused; upstream may change it at any time
#include "ggml-impl.h"

namespace fitter {

namespace {

struct named_op {
    ggml_op      op;
    const char * name;
};

// Each operation of ggml.h and what ggml_op_name says of it; CMake makes the list of ggml.h.
constexpr named_op named_ops[] = {
#include "operations.inc"
};

std::array<ggml_op, most_ops> same_numbers() {
    std::array<ggml_op, most_ops> numbers;
    for (size_t i = 0; i < most_ops; i++) {
        numbers[i] = i < GGML_OP_COUNT ? static_cast<ggml_op>(i) : unknown_op;
    }
    return numbers;
}

bool is_name(const char * text) {
    if (text == nullptr || *text == '\0') {
        return false;
    }
    for (; *text != '\0'; text++) {
        if (std::isupper(static_cast<unsigned char>(*text)) == 0 && std::isdigit(static_cast<unsigned char>(*text)) == 0 &&
            *text != '_') {
            return false;
        }
    }
    return true;
}

const std::unordered_map<std::string, ggml_op> & by_name() {
    static const std::unordered_map<std::string, ggml_op> found = [] {
        std::unordered_map<std::string, ggml_op> all;
        for (const named_op & each : named_ops) {
            all.emplace(each.name, each.op);
        }
        return all;
    }();
    return found;
}

}  // namespace

std::array<ggml_op, most_ops> ops_here = same_numbers();

int number_operations(int n, const char * last) {
    if (n < 1 || static_cast<size_t>(n) > most_ops) {
        throw std::runtime_error("ggml cannot have " + std::to_string(n) + " operations");
    }
    std::array<ggml_op, most_ops> here;
    here.fill(unknown_op);

    std::unordered_set<std::string> names;
    int                             n_unknown = 0;
    for (int i = 0; i < n; i++) {
        const char * name = ggml_op_name(static_cast<ggml_op>(i));
        // A list that is shorter than n goes on with other texts: its end is told by the last name.
        if (!is_name(name) || !names.insert(name).second || (std::string(name) == last) != (i == n - 1)) {
            throw std::runtime_error("operation " + std::to_string(i) + " of ggml's " + std::to_string(n) +
                                     " is not where it was expected");
        }
        const auto found = by_name().find(name);
        if (found == by_name().end()) {
            n_unknown++;
            continue;
        }
        here[static_cast<size_t>(i)] = found->second;
    }
    if (here[0] != GGML_OP_NONE) {
        throw std::runtime_error("the first of ggml's operations is not NONE");
    }
    ops_here = here;
    return n_unknown;
}

bool are_operations_the_same() {
    for (const named_op & each : named_ops) {
        // Stops at the first that differs, so that a shorter list is not read past its end.
        if (std::string(each.name) != ggml_op_name(each.op)) {
            return false;
        }
    }
    return true;
}

bool can_fuse_nodes(const ggml_cgraph * graph, const int * nodes, int n_nodes, const ggml_op * ops, const int * outputs,
                    int n_outputs) {
    std::vector<ggml_op> there;
    for (int i = 0; i < n_nodes; i++) {
        const auto found = std::find(ops_here.begin(), ops_here.end(), ops[i]);
        if (ops[i] == unknown_op || found == ops_here.end()) {
            return false;
        }
        there.push_back(static_cast<ggml_op>(found - ops_here.begin()));
    }
    return ggml_can_fuse_subgraph_ext(graph, nodes, n_nodes, there.data(), outputs, n_outputs);
}

// What counts is that the first three dimensions follow one another without a gap.
bool is_contiguous_to_3(const ggml_tensor * tensor) {
    static const auto theirs = loaded<decltype(&ggml_is_contiguous_to_3)>("ggml_is_contiguous_to_3");
    if (theirs != nullptr) {
        return theirs(tensor);
    }
    ggml_tensor first_three = *tensor;
    first_three.ne[3]       = 1;
    return ggml_is_contiguous(&first_three);
}

}  // namespace fitter
