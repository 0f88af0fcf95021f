// The operations that ggml-cuda computes (device_supports_op), one rule each. What is not in the table runs on the CPU.

#include <array>
#include <cstring>
#include <initializer_list>

#include "builds/build.h"
#include "virtual/rules/cuda.h"
#include "virtual/rules/types.h"

namespace fitter::cuda {

namespace {

using rule = bool (*)(const description & device, const ggml_tensor * op);

// ---- what the rules are made of

constexpr types f32_i32{GGML_TYPE_F32, GGML_TYPE_I32};

// Elements of a block that k-quants and their like are made of.
constexpr int64_t super_block = 256;

ggml_type type_of(const ggml_tensor * op, int source) { return op->src[source]->type; }

bool always(const description &, const ggml_tensor *) { return true; }

// The result and the first N sources are all f32.
template <int N> bool all_f32(const description &, const ggml_tensor * op) {
    for (int i = 0; i < N; i++) {
        if (op->src[i] != nullptr && op->src[i]->type != GGML_TYPE_F32) {
            return false;
        }
    }
    return op->type == GGML_TYPE_F32;
}

// The first N sources are contiguous.
template <int N> bool contiguous(const description &, const ggml_tensor * op) {
    for (int i = 0; i < N; i++) {
        if (!ggml_is_contiguous(op->src[i])) {
            return false;
        }
    }
    return true;
}

bool contiguous_rows(const description &, const ggml_tensor * op) { return ggml_is_contiguous_rows(op->src[0]); }

// ---- one operation each

bool unary(const description &, const ggml_tensor * op) {
    const ggml_unary_op kind = ggml_get_unary_op(op);
    if (kind > GGML_UNARY_OP_TRUNC || (kind == GGML_UNARY_OP_XIELU && type_of(op, 0) == GGML_TYPE_BF16)) {
        return false;
    }
    return loaded_build().cuda_unary_of_any_strides ? floats.hold(type_of(op, 0)) : ggml_is_contiguous(op->src[0]);
}

bool glu(const description &, const ggml_tensor * op) {
    const ggml_glu_op kind   = ggml_get_glu_op(op);
    const bool        no_bf16 = kind == GGML_GLU_OP_SWIGLU_OAI || kind == GGML_GLU_OP_SWIGLU_CLAMP;
    if (kind > GGML_GLU_OP_SWIGLU_CLAMP || (no_bf16 && type_of(op, 0) == GGML_TYPE_BF16)) {
        return false;
    }
    return ggml_is_contiguous_1(op->src[0]);
}

// A multiplication with a Hadamard matrix, which is computed without the matrix.
bool op_mul_mat_use_fwht(const ggml_tensor * op) {
    const ggml_tensor * a    = op->src[0];
    const ggml_tensor * b    = op->src[1];
    const int32_t       hint = op->op_params[1];
    return op_of(op) == GGML_OP_MUL_MAT && hint == GGML_HINT_SRC0_IS_HADAMARD && a->type == GGML_TYPE_F32 &&
           op->type == GGML_TYPE_F32 && f32_f16.hold(b->type) && ggml_is_contiguous(b) && ggml_is_contiguous(op) &&
           ggml_are_same_shape(b, op);
}

constexpr types mul_mat_weights{
    GGML_TYPE_F32,     GGML_TYPE_F16,     GGML_TYPE_BF16,   GGML_TYPE_Q1_0,   GGML_TYPE_Q2_0,  GGML_TYPE_Q4_0,
    GGML_TYPE_Q4_1,    GGML_TYPE_Q5_0,    GGML_TYPE_Q5_1,   GGML_TYPE_Q8_0,   GGML_TYPE_MXFP4, GGML_TYPE_NVFP4,
    GGML_TYPE_Q2_K,    GGML_TYPE_Q3_K,    GGML_TYPE_Q4_K,   GGML_TYPE_Q5_K,   GGML_TYPE_Q6_K,  GGML_TYPE_Q8_K,
    GGML_TYPE_IQ1_M,   GGML_TYPE_IQ1_S,   GGML_TYPE_IQ2_S,  GGML_TYPE_IQ2_XS, GGML_TYPE_IQ3_S, GGML_TYPE_IQ2_XXS,
    GGML_TYPE_IQ3_XXS, GGML_TYPE_IQ4_NL,  GGML_TYPE_IQ4_XS,
};

bool mul_mat(const description &, const ggml_tensor * op) {
    const ggml_tensor * a = op->src[0];
    const ggml_tensor * b = op->src[1];
    for (const ggml_tensor * source : {a, b}) {
        if (source->nb[0] != ggml_element_size(source)) {
            return false;
        }
    }
    if (b->type == GGML_TYPE_F16 && a->type != GGML_TYPE_F16 && !op_mul_mat_use_fwht(op)) {
        return false;
    }
    if (op_of(op) == GGML_OP_MUL_MAT_ID && op->op_params[3] == GGML_PREC_F32) {
        return false;
    }
    return mul_mat_weights.hold(a->type);
}

bool get_rows(const description &, const ggml_tensor * op) {
    constexpr types always{GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_I32,  GGML_TYPE_Q1_0, GGML_TYPE_Q2_0,
                           GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0};
    constexpr types super_blocks{GGML_TYPE_Q2_K,  GGML_TYPE_Q3_K,  GGML_TYPE_Q4_K,    GGML_TYPE_Q5_K,   GGML_TYPE_Q6_K,
                                 GGML_TYPE_IQ1_M, GGML_TYPE_IQ1_S, GGML_TYPE_IQ2_XXS, GGML_TYPE_IQ2_XS, GGML_TYPE_IQ2_S,
                                 GGML_TYPE_IQ3_S, GGML_TYPE_IQ4_XS, GGML_TYPE_IQ3_XXS};
    constexpr types whole_super_blocks{GGML_TYPE_IQ4_NL, GGML_TYPE_MXFP4};

    const ggml_type type = type_of(op, 0);
    if (always.hold(type) || !loaded_build().cuda_gets_rows_of_super_blocks) {
        return always.hold(type);
    }
    return super_blocks.hold(type) || (whole_super_blocks.hold(type) && op->src[0]->ne[0] % super_block == 0);
}

bool get_rows_back(const description &, const ggml_tensor * op) {
    return op->type == GGML_TYPE_F32 && type_of(op, 0) == GGML_TYPE_F32 && op->ne[2] == 1 && op->ne[3] == 1;
}

bool set_rows(const description &, const ggml_tensor * op) {
    constexpr types from_f32{GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q4_0,   GGML_TYPE_Q4_1,
                             GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_IQ4_NL};
    constexpr types indices{GGML_TYPE_I32, GGML_TYPE_I64};

    const bool from_f16 = type_of(op, 0) == GGML_TYPE_F16 && op->type == GGML_TYPE_F16;
    return ((type_of(op, 0) == GGML_TYPE_F32 && from_f32.hold(op->type)) || from_f16) && indices.hold(type_of(op, 1));
}

bool set(const description &, const ggml_tensor * op) {
    return f32_i32.hold(op->type) && type_of(op, 0) == op->type && type_of(op, 1) == op->type;
}

bool cpy(const description &, const ggml_tensor * op) {
    constexpr types from_f32{GGML_TYPE_I32,  GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,  GGML_TYPE_Q5_0,
                             GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_IQ4_NL};
    constexpr types to_f32{GGML_TYPE_I32, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0};

    const ggml_type from = type_of(op, 0);
    const ggml_type to   = type_of(op, 1);
    if ((floats.hold(from) && floats.hold(to)) || (from == GGML_TYPE_F32 && from_f32.hold(to)) ||
        (to == GGML_TYPE_F32 && to_f32.hold(from)) || (from == GGML_TYPE_I32 && to == GGML_TYPE_I32)) {
        return true;
    }
    return from == to && ggml_is_contiguous(op->src[0]) && ggml_is_contiguous(op->src[1]);
}

bool repeat(const description &, const ggml_tensor * op) { return f32_f16.hold(type_of(op, 0)); }

bool repeat_back(const description &, const ggml_tensor * op) {
    return op->type == GGML_TYPE_F32 && op->src[0]->ne[2] * op->src[0]->ne[3] <= 1 << 15;
}

bool concat(const description &, const ggml_tensor * op) {
    const ggml_type type = op->type;
    if (type_of(op, 0) != type || type_of(op, 1) != type) {
        return false;
    }
    if (!ggml_is_quantized(type)) {
        const size_t size = ggml_type_size(type);
        return ggml_blck_size(type) == 1 && (size == 1 || size == 2 || size == 4 || size == 8);
    }
    const bool along_last = op->op_params[0] == 3;
    for (const ggml_tensor * source : {op->src[0], op->src[1]}) {
        if (!(along_last ? ggml_is_contiguous(source) : is_contiguous_to_3(source)) ||
            source->ne[0] % ggml_blck_size(type) != 0) {
            return false;
        }
    }
    return true;
}

bool conv_transpose_1d(const description &, const ggml_tensor * op) {
    return type_of(op, 0) == GGML_TYPE_F32 && type_of(op, 1) == GGML_TYPE_F32;
}

bool col2im_1d(const description &, const ggml_tensor * op) {
    return floats.hold(op->type) && type_of(op, 0) == op->type && ggml_is_contiguous(op->src[0]) &&
           ggml_is_contiguous(op);
}

// A kernel of f16 or f32 on f32.
bool conv_2d_dw(const description &, const ggml_tensor * op) {
    return f32_f16.hold(type_of(op, 0)) && type_of(op, 1) == GGML_TYPE_F32 && op->type == GGML_TYPE_F32;
}

bool conv_3d(const description & device, const ggml_tensor * op) {
    return conv_2d_dw(device, op) && contiguous<2>(device, op) && ggml_is_contiguous(op);
}

// Without CUB a row is sorted in a block's shared memory, filled up to a power of two.
bool argsort(const description & device, const ggml_tensor * op) {
    if (!is_amd(device.compute_capability)) {
        return true;
    }
    const int64_t shared_memory = device.compute_capability == cc_cdna4 ? 160 << 10 : 64 << 10;
    int64_t       padded        = 1;
    while (padded < op->src[0]->ne[0]) {
        padded *= 2;
    }
    return padded * static_cast<int64_t>(sizeof(int32_t)) <= shared_memory;
}

bool contiguous_f32(const description &, const ggml_tensor * op) {
    return type_of(op, 0) == GGML_TYPE_F32 && ggml_is_contiguous(op->src[0]);
}

bool scale(const description &, const ggml_tensor * op) {
    constexpr types scaled{GGML_TYPE_F32, GGML_TYPE_BF16};
    return scaled.hold(op->type) && type_of(op, 0) == op->type;
}

// bf16 only with bf16, except that the second operand may be f32.
bool arithmetic(const description &, const ggml_tensor * op) {
    constexpr types second_of_bf16{GGML_TYPE_BF16, GGML_TYPE_F32};
    if (op->type == GGML_TYPE_BF16 && type_of(op, 0) == GGML_TYPE_BF16) {
        return second_of_bf16.hold(type_of(op, 1));
    }
    return f32_f16.hold(op->type) && f32_f16.hold(type_of(op, 0)) && f32_f16.hold(type_of(op, 1));
}

bool ssm_scan(const description &, const ggml_tensor * op) {
    const ggml_tensor * state       = op->src[0];
    const int64_t       d_state     = state->ne[0];
    const int32_t       n_snapshots = op->op_params[0];
    const bool          is_mamba2   = op->src[3]->ne[0] == 1;
    if (is_mamba2) {
        return (d_state == 96 || d_state == 128 || d_state == 256) && state->ne[1] % 16 == 0;
    }
    const int64_t n_group = op->src[4]->ne[1];
    return n_snapshots <= 1 && d_state == 16 && state->ne[1] == 1 && state->ne[2] % 128 == 0 && n_group == 1;
}

bool ssm_conv(const description &, const ggml_tensor * op) { return op->src[0]->ne[1] % 128 == 0; }

bool soft_max_back(const description &, const ggml_tensor * op) {
    float max_bias;
    std::memcpy(&max_bias, op->op_params + 1, sizeof(max_bias));
    return max_bias == 0.0f;
}

bool rope(const description &, const ggml_tensor * op) {
    return op->src[0]->nb[0] == ggml_type_size(type_of(op, 0)) && ggml_is_contiguous_2(op->src[0]);
}

bool f32_rows(const description &, const ggml_tensor * op) {
    return op->type == GGML_TYPE_F32 && type_of(op, 0) == GGML_TYPE_F32 && ggml_is_contiguous_rows(op->src[0]);
}

bool flash_attn_ext(const description & device, const ggml_tensor * op) {
    return flash_attn_ext_supported(device.compute_capability, op);
}

bool lightning_indexer(const description &, const ggml_tensor * op) {
    constexpr types keys{GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q4_0,
                         GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0};

    const ggml_tensor * q = op->src[0];
    const ggml_tensor * k = op->src[1];
    if (q->ne[0] != 128 || (q->ne[1] != 32 && q->ne[1] != 64) || !keys.hold(k->type)) {
        return false;
    }
    for (const ggml_tensor * tensor : {q, k}) {
        for (int i = 1; i < GGML_MAX_DIMS && !ggml_is_quantized(tensor->type); i++) {
            if (tensor->nb[i] % 16 != 0) {
                return false;
            }
        }
    }
    return true;
}

// ---- the table, in the order of ggml.h

struct entry {
    ggml_op op;
    rule    supported;
};

constexpr entry entries[] = {
    {GGML_OP_NONE, always},
    {GGML_OP_DUP, always},
    {GGML_OP_ADD, arithmetic},
    {GGML_OP_ADD_ID, always},
    {GGML_OP_ADD1, always},
    {GGML_OP_ACC, contiguous<2>},
    {GGML_OP_SUB, arithmetic},
    {GGML_OP_MUL, arithmetic},
    {GGML_OP_DIV, arithmetic},
    {GGML_OP_SQR, always},
    {GGML_OP_SQRT, always},
    {GGML_OP_LOG, always},
    {GGML_OP_SIN, always},
    {GGML_OP_COS, always},
    {GGML_OP_SUM, contiguous_rows},
    {GGML_OP_SUM_ROWS, f32_rows},
    {GGML_OP_CUMSUM, always},
    {GGML_OP_MEAN, f32_rows},
    {GGML_OP_ARGMAX, always},
    {GGML_OP_COUNT_EQUAL, always},
    {GGML_OP_REPEAT, repeat},
    {GGML_OP_REPEAT_BACK, repeat_back},
    {GGML_OP_CONCAT, concat},
    {GGML_OP_SILU_BACK, contiguous_f32},
    {GGML_OP_NORM, contiguous_rows},
    {GGML_OP_RMS_NORM, contiguous_rows},
    {GGML_OP_RMS_NORM_BACK, contiguous<1>},
    {GGML_OP_GROUP_NORM, contiguous<1>},
    {GGML_OP_L2_NORM, contiguous_rows},
    {GGML_OP_MUL_MAT, mul_mat},
    {GGML_OP_MUL_MAT_ID, mul_mat},
    {GGML_OP_OUT_PROD, all_f32<2>},
    {GGML_OP_SCALE, scale},
    {GGML_OP_SET, set},
    {GGML_OP_CPY, cpy},
    {GGML_OP_CONT, always},
    {GGML_OP_RESHAPE, always},
    {GGML_OP_VIEW, always},
    {GGML_OP_PERMUTE, always},
    {GGML_OP_TRANSPOSE, always},
    {GGML_OP_GET_ROWS, get_rows},
    {GGML_OP_GET_ROWS_BACK, get_rows_back},
    {GGML_OP_SET_ROWS, set_rows},
    {GGML_OP_DIAG, always},
    {GGML_OP_DIAG_MASK_INF, always},
    {GGML_OP_SOFT_MAX, always},
    {GGML_OP_SOFT_MAX_BACK, soft_max_back},
    {GGML_OP_ROPE, rope},
    {GGML_OP_ROPE_BACK, rope},
    {GGML_OP_CLAMP, always},
    {GGML_OP_CONV_TRANSPOSE_1D, conv_transpose_1d},
    {GGML_OP_IM2COL, contiguous<2>},
    {GGML_OP_IM2COL_3D, contiguous<2>},
    {GGML_OP_COL2IM_1D, col2im_1d},
    {GGML_OP_CONV_2D, contiguous<2>},
    {GGML_OP_CONV_3D, conv_3d},
    {GGML_OP_CONV_2D_DW, conv_2d_dw},
    {GGML_OP_CONV_TRANSPOSE_2D, always},
    {GGML_OP_POOL_1D, always},
    {GGML_OP_POOL_2D, always},
    {GGML_OP_UPSCALE, always},
    {GGML_OP_PAD, always},
    {GGML_OP_PAD_REFLECT_1D, always},
    {GGML_OP_ROLL, contiguous_f32},
    {GGML_OP_ARANGE, always},
    {GGML_OP_TIMESTEP_EMBEDDING, always},
    {GGML_OP_ARGSORT, argsort},
    {GGML_OP_TOP_K, always},
    {GGML_OP_LEAKY_RELU, always},
    {GGML_OP_TRI, always},
    {GGML_OP_FILL, always},
    {GGML_OP_FLASH_ATTN_EXT, flash_attn_ext},
    {GGML_OP_SSM_CONV, ssm_conv},
    {GGML_OP_SSM_SCAN, ssm_scan},
    {GGML_OP_RWKV_WKV6, always},
    {GGML_OP_GATED_LINEAR_ATTN, always},
    {GGML_OP_RWKV_WKV7, always},
    {GGML_OP_SOLVE_TRI, always},
    {GGML_OP_GATED_DELTA_NET, always},
    {GGML_OP_LIGHTNING_INDEXER, lightning_indexer},
    {GGML_OP_DSV4_HC_COMB, all_f32<3>},
    {GGML_OP_DSV4_HC_PRE, all_f32<2>},
    {GGML_OP_DSV4_HC_POST, all_f32<4>},
    {GGML_OP_UNARY, unary},
    {GGML_OP_CROSS_ENTROPY_LOSS, always},
    {GGML_OP_CROSS_ENTROPY_LOSS_BACK, always},
    {GGML_OP_OPT_STEP_ADAMW, always},
    {GGML_OP_OPT_STEP_SGD, always},
    {GGML_OP_GLU, glu},
};

std::array<rule, GGML_OP_COUNT> by_op() {
    std::array<rule, GGML_OP_COUNT> rules = {};
    for (const entry & known : entries) {
        rules[known.op] = known.supported;
    }
    return rules;
}

}  // namespace

bool device_supports_op(const description & device, const ggml_tensor * op) {
    static const std::array<rule, GGML_OP_COUNT> rules = by_op();

    const rule supported = rules[op_of(op)];
    return supported != nullptr && supported(device, op);
}

}  // namespace fitter::cuda
