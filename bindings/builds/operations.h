// ggml's operations have other numbers in other builds, so that rules, which are compiled with the numbers of one, read an
// operation here. Nothing else of a tensor is numbered anew: kinds of unary and GLU operations and types are only appended.

#pragma once

#include <array>
#include <cstddef>

#include "ggml.h"

struct ggml_cgraph;

namespace fitter {

// An operation that ggml.h does not have: no rule knows it.
constexpr ggml_op unknown_op = GGML_OP_COUNT;

// By the number in the ggml that is loaded; equal numbers until a build is configured.
constexpr size_t                     most_ops = 256;
extern std::array<ggml_op, most_ops> ops_here;

// The operation of a tensor of the ggml that is loaded, as ggml.h numbers it.
inline ggml_op op_of(const ggml_tensor * tensor) {
    const auto number = static_cast<size_t>(tensor->op);
    return number < most_ops ? ops_here[number] : unknown_op;
}

// Reads the names of n operations of the ggml that is loaded. Returns how many of them ggml.h does not have; throws
// std::runtime_error, and changes nothing, where they are not n operations of which this is the last one.
int number_operations(int n, const char * last);

// Whether the ggml that is loaded numbers them as ggml.h does.
bool are_operations_the_same();

// ggml_can_fuse_subgraph_ext with operations as ggml.h numbers them.
bool can_fuse_nodes(const ggml_cgraph * graph, const int * nodes, int n_nodes, const ggml_op * ops, const int * outputs,
                    int n_outputs);

// ggml_is_contiguous_to_3, which builds before b10068 do not have.
bool is_contiguous_to_3(const ggml_tensor * tensor);

}  // namespace fitter
