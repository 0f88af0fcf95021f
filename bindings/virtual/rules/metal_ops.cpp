// What ggml-metal computes, and what a tensor takes in its memory: a result is followed by the scratch memory of the
// kernels that make it.

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "builds/build.h"
#include "virtual/rules/metal.h"

namespace fitter::metal {

namespace {

size_t pad(size_t size, size_t multiple) { return (size + multiple - 1) / multiple * multiple; }

template <typename... Types> bool is_one_of(ggml_type type, Types... types) { return ((type == types) || ...); }

bool is_f32_or_f16(const ggml_tensor * tensor) { return is_one_of(tensor->type, GGML_TYPE_F32, GGML_TYPE_F16); }

bool is_f32(const ggml_tensor * tensor) { return tensor->type == GGML_TYPE_F32; }

// ---- scratch memory of attention

// Cache rows per SIMD group of the matrix kernel and of the vector kernel, and queries of the former.
constexpr int64_t flash_attn_ext_ncpsg     = 64;
constexpr int64_t flash_attn_ext_vec_ncpsg = 32;
constexpr int64_t flash_attn_ext_nqpsg     = 8;
constexpr int64_t flash_attn_ext_vec_nqpsg = 1;

constexpr size_t f16_size = sizeof(ggml_fp16_t);

bool is_simple_quant(ggml_type type) {
    return is_one_of(type, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0);
}

// Types that a KV cache can have on a Mac.
bool is_kv_type(ggml_type type) {
    return is_one_of(type, GGML_TYPE_F32, GGML_TYPE_F16) || is_simple_quant(type) ||
           (type == GGML_TYPE_BF16 && has_bfloat());
}

bool flash_attn_ext_use_vec(const ggml_tensor * op) { return op->src[0]->ne[1] < 20 && op->src[0]->ne[0] % 32 == 0; }

bool flash_attn_ext_use_kv_f16(const ggml_tensor * op) {
    return op->src[0]->ne[1] >= 32 && is_simple_quant(op->src[1]->type);
}

bool flash_attn_ext_v_is_view_of_k(const ggml_tensor * op) {
    const ggml_tensor * k = op->src[1];
    const ggml_tensor * v = op->src[2];
    return v->view_src != nullptr &&
           (v->view_src == k || (v->view_src == k->view_src && v->view_offs == k->view_offs));
}

// The last cache rows, where their number is no multiple of what a kernel takes at once.
size_t flash_attn_ext_extra_pad(const ggml_tensor * op) {
    const ggml_tensor * k    = op->src[1];
    const ggml_tensor * v    = op->src[2];
    const ggml_tensor * mask = op->src[3];
    size_t              k_row = k->nb[1];
    size_t              v_row = v->nb[1];
    if (flash_attn_ext_use_kv_f16(op)) {
        k_row = f16_size * static_cast<size_t>(k->ne[0]);
        v_row = f16_size * static_cast<size_t>(flash_attn_ext_v_is_view_of_k(op) ? k->ne[0] : v->ne[0]);
    }
    size_t rows = k_row * static_cast<size_t>(k->ne[2] * k->ne[3]) + v_row * static_cast<size_t>(v->ne[2] * v->ne[3]);
    if (mask != nullptr) {
        rows += f16_size * static_cast<size_t>(mask->ne[1] * mask->ne[2] * mask->ne[3]);
    }
    return static_cast<size_t>(flash_attn_ext_ncpsg) * rows;
}

// A byte for each block of the mask.
size_t flash_attn_ext_extra_blk(const ggml_tensor * op) {
    const ggml_tensor * mask = op->src[3];
    if (mask == nullptr) {
        return 0;
    }
    const bool    is_vec = flash_attn_ext_use_vec(op);
    const int64_t nqpsg  = is_vec ? flash_attn_ext_vec_nqpsg : flash_attn_ext_nqpsg;
    const int64_t ncpsg  = is_vec ? flash_attn_ext_vec_ncpsg : flash_attn_ext_ncpsg;
    const int64_t high   = (op->src[0]->ne[1] + nqpsg - 1) / nqpsg;
    const int64_t wide   = (mask->ne[0] + ncpsg - 1) / ncpsg;
    return pad(static_cast<size_t>(wide * high * mask->ne[2] * mask->ne[3]), 32);
}

// What each workgroup of the vector kernel finds: a row of V and two numbers.
size_t flash_attn_ext_extra_tmp(const ggml_tensor * op) {
    constexpr int64_t   workgroups = 32;
    const ggml_tensor * q          = op->src[0];
    const int64_t       rows       = std::min<int64_t>(q->ne[1], 32) * q->ne[2] * q->ne[3];
    return sizeof(float) * static_cast<size_t>(rows * workgroups * (op->src[2]->ne[0] + 2));
}

// K and V in f16, reserved whatever their type is.
size_t flash_attn_ext_extra_kv_f16(const ggml_tensor * op) {
    const size_t k = pad(f16_size * static_cast<size_t>(ggml_nelements(op->src[1])), 16);
    if (flash_attn_ext_v_is_view_of_k(op)) {
        return k;
    }
    return k + pad(f16_size * static_cast<size_t>(ggml_nelements(op->src[2])), 16);
}

// Head sizes of K and V that the vector kernel is made for.
bool has_vec_kernel(int64_t k, int64_t v) {
    constexpr int64_t sizes[][2] = {{32, 32},   {64, 64},   {96, 96},   {96, 64},   {128, 128}, {192, 128},
                                    {192, 192}, {256, 256}, {320, 256}, {512, 512}, {576, 512}};
    return std::any_of(std::begin(sizes), std::end(sizes), [&](const auto & size) { return size[0] == k && size[1] == v; });
}

// The most cache rows that a query looks at, where they are few enough to be listed; 0 otherwise.
int32_t flash_attn_ext_n_kv_max_sparse(const ggml_tensor * op) {
    const int32_t n_kv_max = op->op_params[4];
    const bool    listed   = n_kv_max > 0 && n_kv_max <= 4096 && op->src[3] != nullptr &&
                        has_vec_kernel(op->src[1]->ne[0], op->src[2]->ne[0]) &&
                        (is_kv_type(op->src[1]->type) || op->src[1]->type == GGML_TYPE_BF16);
    return listed ? n_kv_max : 0;
}

size_t flash_attn_ext_extra_idx(const ggml_tensor * op) {
    const auto n_kv_max = static_cast<size_t>(flash_attn_ext_n_kv_max_sparse(op));
    if (n_kv_max == 0) {
        return 0;
    }
    const ggml_tensor * mask = op->src[3];
    const size_t        rows = static_cast<size_t>(mask->ne[1] * mask->ne[2] * mask->ne[3]);
    return pad(sizeof(int32_t) * pad(n_kv_max, static_cast<size_t>(flash_attn_ext_vec_ncpsg)) * rows, 16);
}

// ---- scratch memory of experts: rows per expert, rows of each expert, scales of the activations

size_t mul_mat_id_extra(const ggml_tensor * op) {
    constexpr size_t npart_amax = 256;
    const size_t     n_expert   = static_cast<size_t>(op->src[0]->ne[2]);
    const size_t     n_token    = static_cast<size_t>(op->src[2]->ne[1]);
    return sizeof(int32_t) * (n_expert + n_expert * n_token) + 2 * sizeof(float) + npart_amax * sizeof(float);
}

// ---- operations

bool op_mul_mat_use_mm(const ggml_tensor * op) {
    return !ggml_is_transposed(op->src[0]) && !ggml_is_transposed(op->src[1]) && op->src[0]->ne[0] >= 64 &&
           op->src[1]->ne[1] > 8;
}

bool op_mul_mat_id_use_mm(const ggml_tensor * op) { return op->src[0]->ne[0] >= 64 && op->src[2]->ne[1] >= 32; }

bool fwht_supported_size(int64_t n) {
    switch (n) {
        case 64:
        case 128:
        case 256:
        case 512: return true;
        case 1024:
        case 2048:
        case 4096:
        case 8192: return static_cast<size_t>(n) * sizeof(float) <= max_threadgroup_memory_size;
        default: return false;
    }
}

bool op_mul_mat_use_fwht(const ggml_tensor * op) {
    return op->op_params[1] == GGML_HINT_SRC0_IS_HADAMARD && is_f32(op) && is_f32_or_f16(op->src[1]) &&
           ggml_is_contiguous(op->src[1]) && ggml_is_contiguous(op) && ggml_are_same_shape(op->src[1], op) &&
           fwht_supported_size(op->src[1]->ne[0]);
}

bool supports_mul_mat_op(const ggml_tensor * op, bool src0_f16_has_mv, bool mm_path) {
    const ggml_type weight = op->src[0]->type;
    if (is_one_of(weight, GGML_TYPE_NVFP4, GGML_TYPE_TQ1_0)) {
        return false;
    }
    if (op->src[1]->type != GGML_TYPE_F16) {
        return true;
    }
    return weight != GGML_TYPE_BF16 && ((src0_f16_has_mv && weight == GGML_TYPE_F16) || mm_path);
}

bool supports_unary(const ggml_tensor * op) {
    switch (ggml_get_unary_op(op)) {
        case GGML_UNARY_OP_TANH:
        case GGML_UNARY_OP_RELU:
        case GGML_UNARY_OP_SIGMOID:
        case GGML_UNARY_OP_GELU:
        case GGML_UNARY_OP_GELU_ERF:
        case GGML_UNARY_OP_GELU_QUICK:
        case GGML_UNARY_OP_SILU:
        case GGML_UNARY_OP_ELU:
        case GGML_UNARY_OP_NEG:
        case GGML_UNARY_OP_ABS:
        case GGML_UNARY_OP_SGN:
        case GGML_UNARY_OP_STEP:
        case GGML_UNARY_OP_HARDSWISH:
        case GGML_UNARY_OP_HARDSIGMOID:
        case GGML_UNARY_OP_EXP:
        case GGML_UNARY_OP_SOFTPLUS:
        case GGML_UNARY_OP_EXPM1:
        case GGML_UNARY_OP_FLOOR:
        case GGML_UNARY_OP_CEIL:
        case GGML_UNARY_OP_ROUND:
        case GGML_UNARY_OP_TRUNC:
        case GGML_UNARY_OP_XIELU: return ggml_is_contiguous_rows(op->src[0]) && is_f32_or_f16(op->src[0]);
        default: return false;
    }
}

bool supports_glu(const ggml_tensor * op) {
    switch (ggml_get_glu_op(op)) {
        case GGML_GLU_OP_REGLU:
        case GGML_GLU_OP_GEGLU:
        case GGML_GLU_OP_SWIGLU:
        case GGML_GLU_OP_SWIGLU_OAI:
        case GGML_GLU_OP_GEGLU_ERF:
        case GGML_GLU_OP_GEGLU_QUICK:
        case GGML_GLU_OP_SWIGLU_CLAMP: return ggml_is_contiguous_1(op->src[0]) && is_f32_or_f16(op->src[0]);
        default: return false;
    }
}

bool supports_concat(const ggml_tensor * op) {
    const ggml_type type = op->src[0]->type;
    return type == op->src[1]->type && type == op->type &&
           (is_kv_type(type) || is_one_of(type, GGML_TYPE_I8, GGML_TYPE_I16, GGML_TYPE_I32, GGML_TYPE_I64));
}

bool supports_flash_attn_ext(const ggml_tensor * op) {
    const int64_t q = op->src[0]->ne[0];
    const int64_t k = op->src[1]->ne[0];
    const int64_t v = op->src[2]->ne[0];
    switch (q) {
        case 32:
        case 40:
        case 48:
        case 64:
        case 72:
        case 80:
        case 96:
        case 112:
        case 128:
        case 192:
        case 256:
        case 320:
        case 512:
        case 576: break;
        default: return false;
    }
    if (loaded_build().metal_attends_by_size) {
        static const std::set<std::pair<int64_t, int64_t>> pairs = {{96, 64}, {128, 96}, {192, 128}, {320, 256}, {576, 512}};
        if (k != v && pairs.count({k, v}) == 0) {
            return false;
        }
    }
    return !(k == 72 && v != k) && k >= v && op->src[1]->type == op->src[2]->type && is_kv_type(op->src[1]->type);
}

bool supports_lightning_indexer(const ggml_tensor * op) {
    const bool rows = std::all_of(op->src, op->src + 4, [](const ggml_tensor * t) { return ggml_is_contiguous_rows(t); });
    const bool heads = op->src[0]->ne[1] == 64 || loaded_build().metal_attends_by_size;
    return op->src[0]->ne[0] == 128 && heads && is_f32(op->src[0]) && is_f32(op->src[2]) &&
           op->src[3]->type == GGML_TYPE_F16 && is_f32(op) && rows && is_kv_type(op->src[1]->type);
}

bool is_f32_rows(const ggml_tensor * tensor) { return is_f32(tensor) && ggml_is_contiguous_rows(tensor); }

bool supports_hc_post(const ggml_tensor * op) {
    const ggml_tensor * last = op->src[3];
    return is_f32_rows(op->src[0]) && is_f32_rows(op->src[1]) && is_f32_rows(op->src[2]) && is_f32(op) &&
           op->src[1]->ne[1] == 4 && op->src[2]->ne[0] == 4 &&
           (last == nullptr || (is_f32_rows(last) && last->ne[0] == 4 && last->ne[1] == 4));
}

bool supports_copy(ggml_type from, ggml_type to) {
    switch (from) {
        case GGML_TYPE_F32:
            return is_one_of(to, GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q1_0, GGML_TYPE_Q2_0,
                             GGML_TYPE_IQ4_NL, GGML_TYPE_TQ2_0, GGML_TYPE_I32) ||
                   is_simple_quant(to);
        case GGML_TYPE_BF16: return is_one_of(to, GGML_TYPE_F32, GGML_TYPE_BF16);
        case GGML_TYPE_F16:
        case GGML_TYPE_Q1_0:
        case GGML_TYPE_Q2_0:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_TQ2_0: return is_one_of(to, GGML_TYPE_F32, GGML_TYPE_F16);
        case GGML_TYPE_I32: return is_one_of(to, GGML_TYPE_F32, GGML_TYPE_I32);
        default: return false;
    }
}

bool supports_set_rows(const ggml_tensor * op) {
    if (op->src[0]->type == GGML_TYPE_F16) {
        return op->type == GGML_TYPE_F16;
    }
    return is_f32(op->src[0]) && (is_one_of(op->type, GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_IQ4_NL,
                                            GGML_TYPE_TQ2_0) ||
                                  is_simple_quant(op->type));
}

bool has_bf16(const ggml_tensor * op) {
    return op->type == GGML_TYPE_BF16 || std::any_of(op->src, op->src + 3, [](const ggml_tensor * source) {
               return source != nullptr && source->type == GGML_TYPE_BF16;
           });
}

}  // namespace

size_t buffer_type_get_alloc_size(const description &, const ggml_tensor * tensor) {
    const size_t size = ggml_nbytes(tensor);
    switch (op_of(tensor)) {
        case GGML_OP_MUL_MAT_ID: return size + mul_mat_id_extra(tensor);
        case GGML_OP_FLASH_ATTN_EXT:
            return size + flash_attn_ext_extra_pad(tensor) + flash_attn_ext_extra_blk(tensor) +
                   flash_attn_ext_extra_tmp(tensor) + flash_attn_ext_extra_kv_f16(tensor) +
                   flash_attn_ext_extra_idx(tensor);
        case GGML_OP_CUMSUM:
        case GGML_OP_ARGSORT: return 2 * size;
        case GGML_OP_TOP_K: return 2 * sizeof(int32_t) * static_cast<size_t>(ggml_nelements(tensor->src[0]));
        default: return size;
    }
}

bool device_supports_op(const description &, const ggml_tensor * op) {
    if (!has_bfloat() && has_bf16(op)) {
        return false;
    }
    const ggml_tensor * a = op->src[0];
    const ggml_tensor * b = op->src[1];
    switch (op_of(op)) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_TRANSPOSE:
        case GGML_OP_PERMUTE:
        case GGML_OP_REPEAT:
        case GGML_OP_CONV_TRANSPOSE_1D:
        case GGML_OP_ARGMAX:
        case GGML_OP_ROPE:
        case GGML_OP_ROPE_BACK:
        case GGML_OP_ARGSORT:
        case GGML_OP_TOP_K:
        case GGML_OP_ARANGE:
        case GGML_OP_SSM_SCAN:
        case GGML_OP_SSM_CONV:
        case GGML_OP_RWKV_WKV6:
        case GGML_OP_RWKV_WKV7:
        case GGML_OP_DIAG:
        case GGML_OP_OPT_STEP_ADAMW:
        case GGML_OP_OPT_STEP_SGD: return true;
        case GGML_OP_SCALE:
        case GGML_OP_FILL:
        case GGML_OP_CLAMP:
        case GGML_OP_SQR:
        case GGML_OP_SQRT:
        case GGML_OP_SIN:
        case GGML_OP_COS:
        case GGML_OP_LOG: return ggml_is_contiguous_rows(a) && is_f32_or_f16(a);
        case GGML_OP_UNARY: return supports_unary(op);
        case GGML_OP_SILU_BACK:
            return is_f32(a) && is_f32(b) && is_f32(op) && ggml_is_contiguous(a) && ggml_is_contiguous(b) &&
                   ggml_is_contiguous(op) && ggml_are_same_shape(a, b);
        case GGML_OP_GLU: return supports_glu(op);
        case GGML_OP_CONCAT: return supports_concat(op);
        case GGML_OP_ADD:
        case GGML_OP_SUB:
        case GGML_OP_MUL:
        case GGML_OP_DIV:
        case GGML_OP_ADD_ID:
            return ggml_is_contiguous_rows(a) && ggml_is_contiguous_rows(b) && is_f32_or_f16(a) && a->type == b->type;
        case GGML_OP_ACC: return ggml_is_contiguous_rows(a) && ggml_is_contiguous_rows(b) && is_f32(a);
        case GGML_OP_CONV_TRANSPOSE_2D:
            return ggml_is_contiguous(a) && ggml_is_contiguous(b) && is_f32_or_f16(a) && is_f32(b) && is_f32(op);
        case GGML_OP_COL2IM_1D:
            return is_one_of(a->type, GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16) && op->type == a->type &&
                   ggml_is_contiguous(a) && ggml_is_contiguous(op);
        case GGML_OP_CONV_3D: return ggml_is_contiguous(a) && ggml_is_contiguous(b) && is_f32_or_f16(a) && is_f32(b);
        case GGML_OP_SUM:
        case GGML_OP_ROLL: return ggml_is_contiguous(a);
        case GGML_OP_TRI:
        case GGML_OP_SUM_ROWS:
        case GGML_OP_CUMSUM:
        case GGML_OP_MEAN:
        case GGML_OP_SOFT_MAX:
        case GGML_OP_GROUP_NORM:
        case GGML_OP_L2_NORM:
        case GGML_OP_NORM:
        case GGML_OP_RMS_NORM: return ggml_is_contiguous_rows(a);
        case GGML_OP_COUNT_EQUAL:
            return a->type == GGML_TYPE_I32 && b->type == GGML_TYPE_I32 && op->type == GGML_TYPE_I64;
        case GGML_OP_IM2COL: return ggml_is_contiguous(b) && is_f32(b) && is_f32_or_f16(op);
        case GGML_OP_CONV_2D: return ggml_is_contiguous(a) && is_f32(b) && is_f32(op) && is_f32_or_f16(a);
        case GGML_OP_CONV_2D_DW: return is_f32(b) && is_f32(op) && is_f32_or_f16(a);
        case GGML_OP_POOL_1D: return ggml_is_contiguous(a) && is_f32(a);
        case GGML_OP_UPSCALE:
        case GGML_OP_POOL_2D:
        case GGML_OP_PAD:
        case GGML_OP_PAD_REFLECT_1D:
        case GGML_OP_TIMESTEP_EMBEDDING:
        case GGML_OP_SOLVE_TRI: return is_f32(a);
        case GGML_OP_LEAKY_RELU: return is_f32_or_f16(a);
        case GGML_OP_FLASH_ATTN_EXT: return supports_flash_attn_ext(op);
        case GGML_OP_LIGHTNING_INDEXER: return supports_lightning_indexer(op);
        case GGML_OP_DSV4_HC_COMB:
            return is_f32_rows(a) && is_f32_rows(b) && is_f32_rows(op->src[2]) && is_f32(op) && a->ne[0] == 24 &&
                   b->ne[0] >= 3 && op->src[2]->ne[0] == 24;
        case GGML_OP_DSV4_HC_PRE: return is_f32_rows(a) && is_f32_rows(b) && is_f32(op);
        case GGML_OP_DSV4_HC_POST: return supports_hc_post(op);
        case GGML_OP_GATED_DELTA_NET: return op->src[2]->ne[0] % 32 == 0;
        case GGML_OP_MUL_MAT:
            return (is_f32(a) && b->type == GGML_TYPE_F16 && op_mul_mat_use_fwht(op)) ||
                   supports_mul_mat_op(op, true, op_mul_mat_use_mm(op));
        case GGML_OP_MUL_MAT_ID: return supports_mul_mat_op(op, false, op_mul_mat_id_use_mm(op));
        case GGML_OP_SET:
        case GGML_OP_CPY:
        case GGML_OP_DUP:
        case GGML_OP_CONT: return supports_copy(a->type, op->type);
        case GGML_OP_GET_ROWS: return !is_one_of(a->type, GGML_TYPE_NVFP4, GGML_TYPE_TQ1_0);
        case GGML_OP_SET_ROWS: return supports_set_rows(op);
        default: return false;
    }
}

}  // namespace fitter::metal
