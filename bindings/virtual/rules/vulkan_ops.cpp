// The operations that ggml-vulkan computes (device_supports_op). What is not here runs on the CPU.

#include <algorithm>
#include <array>
#include <initializer_list>

#include "virtual/rules/types.h"
#include "virtual/rules/vulkan.h"

namespace fitter::vulkan {

namespace {

// ---- what the rules are made of

constexpr types blocks_of_32{GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0,
                             GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_IQ4_NL};

// Types with a shader that quantizes.
constexpr types written = floats + blocks_of_32 + types{GGML_TYPE_Q1_0, GGML_TYPE_Q2_0};
// Types with a shader that reads them as a matrix.
constexpr types weights =
    written + types{GGML_TYPE_Q2_K,  GGML_TYPE_Q3_K,  GGML_TYPE_Q4_K,    GGML_TYPE_Q5_K,   GGML_TYPE_Q6_K,
                    GGML_TYPE_IQ1_S, GGML_TYPE_IQ1_M, GGML_TYPE_IQ2_XXS, GGML_TYPE_IQ2_XS, GGML_TYPE_IQ2_S,
                    GGML_TYPE_IQ3_S, GGML_TYPE_IQ4_XS, GGML_TYPE_IQ3_XXS, GGML_TYPE_MXFP4,  GGML_TYPE_NVFP4,
                    GGML_TYPE_TQ1_0, GGML_TYPE_TQ2_0};
constexpr types flash_attention = floats + blocks_of_32;

ggml_type type_of(const ggml_tensor * op, int source) { return op->src[source]->type; }

bool is_f32(const ggml_tensor * tensor) { return tensor->type == GGML_TYPE_F32; }

bool is_contiguous_f32(const ggml_tensor * tensor) { return is_f32(tensor) && ggml_is_contiguous(tensor); }

// The first source is f32 or f16, and the result is what it is.
bool same_f32_f16(const ggml_tensor * op) { return f32_f16.hold(type_of(op, 0)) && op->type == type_of(op, 0); }

bool dim01_contiguous(const ggml_tensor * tensor) {
    const size_t block = static_cast<size_t>(ggml_blck_size(tensor->type));
    const size_t row   = tensor->nb[0] * static_cast<size_t>(tensor->ne[0]) / block;
    return tensor->nb[0] == ggml_type_size(tensor->type) && tensor->nb[1] == row &&
           (tensor->ne[3] == 1 || tensor->nb[3] == tensor->nb[2] * static_cast<size_t>(tensor->ne[2]));
}

// ---- the rules

bool is_computed(ggml_unary_op op) {
    switch (op) {
        case GGML_UNARY_OP_EXP:
        case GGML_UNARY_OP_EXPM1:
        case GGML_UNARY_OP_ELU:
        case GGML_UNARY_OP_GELU:
        case GGML_UNARY_OP_GELU_ERF:
        case GGML_UNARY_OP_GELU_QUICK:
        case GGML_UNARY_OP_SILU:
        case GGML_UNARY_OP_RELU:
        case GGML_UNARY_OP_XIELU:
        case GGML_UNARY_OP_NEG:
        case GGML_UNARY_OP_TANH:
        case GGML_UNARY_OP_SIGMOID:
        case GGML_UNARY_OP_HARDSIGMOID:
        case GGML_UNARY_OP_HARDSWISH:
        case GGML_UNARY_OP_ABS:
        case GGML_UNARY_OP_SOFTPLUS:
        case GGML_UNARY_OP_STEP:
        case GGML_UNARY_OP_ROUND:
        case GGML_UNARY_OP_CEIL:
        case GGML_UNARY_OP_FLOOR:
        case GGML_UNARY_OP_TRUNC:
        case GGML_UNARY_OP_SGN: return true;
        default: return false;
    }
}

bool is_computed(ggml_glu_op op) {
    switch (op) {
        case GGML_GLU_OP_GEGLU:
        case GGML_GLU_OP_REGLU:
        case GGML_GLU_OP_SWIGLU:
        case GGML_GLU_OP_SWIGLU_OAI:
        case GGML_GLU_OP_SWIGLU_CLAMP:
        case GGML_GLU_OP_GEGLU_ERF:
        case GGML_GLU_OP_GEGLU_QUICK: return true;
        default: return false;
    }
}

// Bytes of the table that a shader keeps in shared memory to read a type.
size_t lut_size(ggml_type type) {
    switch (type) {
        case GGML_TYPE_IQ1_S:
        case GGML_TYPE_IQ1_M: return 2 * 2048;
        case GGML_TYPE_IQ2_XXS: return 8 * 256;
        case GGML_TYPE_IQ2_XS: return 8 * 512;
        case GGML_TYPE_IQ2_S: return 8 * 1024;
        case GGML_TYPE_IQ3_XXS: return 4 * 256;
        case GGML_TYPE_IQ3_S: return 4 * 512;
        case GGML_TYPE_IQ4_NL:
        case GGML_TYPE_IQ4_XS:
        case GGML_TYPE_MXFP4: return 4 * 16;
        case GGML_TYPE_NVFP4: return 4 * 16 + 4 * 128;
        default: return 0;
    }
}

// Whether the smallest tile of MUL_MAT_ID fits into shared memory. It is larger with matrix cores, but so is the memory.
bool matmul_shmem_support(const limits & limits, ggml_type type) {
    constexpr size_t rows = 32, columns = 32, depth = 32, bank_conflict_offset = 1;

    const size_t lanes  = std::max<size_t>(limits.subgroupSize, 32);
    const size_t warps  = lanes / std::max<size_t>(limits.subgroupSize, 8);
    const size_t number = fp16(limits) ? 2 : 4;
    const size_t tiles  = (rows + columns) * (depth + bank_conflict_offset) * number;
    return tiles + columns * 2 * 2 + warps * 4 * 4 + lut_size(type) <= limits.maxComputeSharedMemorySize;
}

bool mul_mat(const limits & limits, const ggml_tensor * op) {
    const ggml_tensor * a = op->src[0];
    const ggml_tensor * b = op->src[1];
    if (!weights.hold(a->type)) {
        return false;
    }
    if (op_of(op) == GGML_OP_MUL_MAT_ID) {
        if (!matmul_shmem_support(limits, a->type) || op->op_params[3] == GGML_PREC_F32 || op->src[2]->ne[3] != b->ne[3]) {
            return false;
        }
    } else if (a->ne[3] != b->ne[3]) {
        return false;
    }
    if ((!dim01_contiguous(a) && !floats.hold(a->type)) || (!dim01_contiguous(b) && !f32_f16.hold(b->type))) {
        return false;
    }
    return a->type == GGML_TYPE_BF16 ? b->type != GGML_TYPE_F16 : b->type != GGML_TYPE_BF16;
}

bool flash_attn_ext(const limits & limits, const ggml_tensor * op) {
    const ggml_tensor * k     = op->src[1];
    const ggml_tensor * v     = op->src[2];
    const ggml_tensor * mask  = op->src[3];
    const ggml_tensor * sinks = op->src[4];
    return k->ne[0] % 8 == 0 && v->ne[0] % 8 == 0 && is_f32(op) && is_f32(op->src[0]) &&
           (mask == nullptr || mask->type == GGML_TYPE_F16) && (sinks == nullptr || is_f32(sinks)) &&
           flash_attention.hold(k->type) && flash_attention.hold(v->type) &&
           (k->type == GGML_TYPE_BF16) == (v->type == GGML_TYPE_BF16) && limits.subgroup_operations;
}

bool set_rows(const ggml_tensor * op) {
    return f32_f16.hold(type_of(op, 0)) && types{GGML_TYPE_I32, GGML_TYPE_I64}.hold(type_of(op, 1)) &&
           written.hold(op->type);
}

bool copy(const ggml_tensor * op) {
    const ggml_type from = type_of(op, 0);
    const ggml_type to   = op->src[1] != nullptr ? type_of(op, 1) : from;
    if ((from == GGML_TYPE_F32 && (written.hold(to) || to == GGML_TYPE_I32)) ||
        (to == GGML_TYPE_F32 && (written.hold(from) || from == GGML_TYPE_I32))) {
        return true;
    }
    // Bytes are copied two at a time.
    return from == to && ggml_type_size(from) % 2 == 0 &&
           (!ggml_is_quantized(from) || (ggml_is_contiguous(op->src[0]) && ggml_is_contiguous(op)));
}

bool concat(const ggml_tensor * op) {
    if (type_of(op, 0) != op->type || type_of(op, 1) != op->type) {
        return false;
    }
    if (ggml_is_quantized(op->type)) {
        return ggml_is_contiguous_rows(op->src[0]) && ggml_is_contiguous_rows(op->src[1]) && ggml_is_contiguous_rows(op);
    }
    const size_t size = ggml_type_size(op->type);
    return size == 1 || size == 2 || size == 4 || size == 8;
}

uint32_t log2_of(size_t number) {
    uint32_t log2 = 0;
    while (number >>= 1) {
        log2++;
    }
    return log2;
}

bool argsort(const limits & limits, const ggml_tensor * op) {
    constexpr uint32_t largest_pipeline = 10;

    const int64_t most = int64_t{1} << std::min(log2_of(limits.maxComputeWorkGroupInvocations), largest_pipeline);
    return ggml_is_contiguous(op) && ggml_is_contiguous(op->src[0]) && (limits.vulkanMemoryModel || op->ne[0] <= most);
}

bool dsv4_hc(const limits & limits, const ggml_tensor * op) {
    constexpr int64_t n_streams = 4;
    for (const ggml_tensor * source : op->src) {
        if (source != nullptr && !is_f32(source)) {
            return false;
        }
    }
    if (!is_f32(op)) {
        return false;
    }
    switch (op_of(op)) {
        case GGML_OP_DSV4_HC_PRE: return op->src[0]->ne[1] == n_streams;
        case GGML_OP_DSV4_HC_POST: return op->src[1]->ne[1] == n_streams;
        default: return limits.subgroup_operations && limits.computeFullSubgroups && limits.subgroupSize >= 16;
    }
}

bool solve_tri(const limits & limits, const ggml_tensor * op) {
    const size_t n = static_cast<size_t>(op->src[0]->ne[0]);
    const size_t k = static_cast<size_t>(op->src[1]->ne[0]);
    return is_f32(op) && is_f32(op->src[0]) && k <= size_t{1} << log2_of(limits.maxComputeWorkGroupInvocations) &&
           (n + k) * sizeof(float) <= limits.maxComputeSharedMemorySize;
}

// Whether it starts where a shader can bind it and has strides of whole elements.
bool is_bindable(const limits & limits, const ggml_tensor * tensor) {
    const ggml_tensor * owner  = tensor->view_src ? tensor->view_src : tensor;
    const size_t        offset = reinterpret_cast<size_t>(owner->data) + tensor->view_offs;
    const size_t        size   = ggml_type_size(tensor->type);
    return tensor->nb[0] == size && offset % limits.minStorageBufferOffsetAlignment == 0 &&
           std::all_of(tensor->nb + 1, tensor->nb + GGML_MAX_DIMS, [size](size_t stride) { return stride % size == 0; });
}

bool lightning_indexer(const limits & limits, const ggml_tensor * op) {
    const std::array<const ggml_tensor *, 5> tensors = {op->src[0], op->src[1], op->src[2], op->src[3], op};
    return flash_attention.hold(type_of(op, 1)) && fp16(limits) && op->src[0]->ne[0] == 128 &&
           std::all_of(tensors.begin(), tensors.end(), [&](const ggml_tensor * t) { return is_bindable(limits, t); });
}

bool gated_delta_net(const ggml_tensor * op) {
    const int64_t head = op->src[2]->ne[0];
    return (head == 16 || head == 32 || head == 64 || head == 128) && is_f32(op) &&
           std::all_of(op->src, op->src + 6, [](const ggml_tensor * source) { return source != nullptr && is_f32(source); });
}

bool ssm_scan(const limits & limits, const ggml_tensor * op) {
    for (int i = 0; i < 6; i++) {
        if (op->src[i] != nullptr && ggml_is_quantized(op->src[i]->type)) {
            return false;
        }
    }
    const ggml_tensor * a        = op->src[3];
    const ggml_tensor * ids      = op->src[6];
    const bool          is_mamba2 = a != nullptr && a->nb[1] == sizeof(float);
    const int64_t       d_state  = op->src[0]->ne[0];
    const int64_t       head_dim = op->src[0]->ne[1];
    return is_mamba2 && is_f32(op) && is_f32(op->src[0]) && (ids == nullptr || ids->type == GGML_TYPE_I32) &&
           (d_state == 128 || d_state == 256) && head_dim % 16 == 0 && limits.subgroup_operations &&
           static_cast<size_t>(d_state) * sizeof(float) <= limits.maxComputeSharedMemorySize;
}

bool conv_2d(const ggml_tensor * op) {
    const bool          transpose = op_of(op) == GGML_OP_CONV_TRANSPOSE_2D;
    const ggml_tensor * kernel    = op->src[0];
    const int64_t       n_out     = kernel->ne[transpose ? 2 : 3];
    const int64_t       n_in      = kernel->ne[transpose ? 3 : 2];
    return f32_f16.hold(kernel->type) && ggml_is_contiguous(kernel) && is_contiguous_f32(op->src[1]) &&
           is_contiguous_f32(op) && n_out == op->ne[2] && n_in == op->src[1]->ne[2];
}

// Whether a shader can be given the whole of it. Builds with the newest headers, on drivers that have
// VK_EXT_shader_64bit_indexing, are not held to maxStorageBufferRange; those are not answered for.
bool tensor_size_supported(const limits & limits, const ggml_tensor * op, const ggml_tensor * tensor) {
    // These take an address instead.
    const bool uses_bda = (op_of(op) == GGML_OP_IM2COL || op_of(op) == GGML_OP_IM2COL_3D) && limits.bufferDeviceAddress;
    const size_t size   = ggml_nbytes(tensor);
    return size <= max_buffer_size(limits) && (uses_bda || size <= limits.maxStorageBufferRange);
}

bool supports(const limits & limits, const ggml_tensor * op) {
    switch (op_of(op)) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
        case GGML_OP_RMS_NORM:
        case GGML_OP_ROPE_BACK:
        case GGML_OP_RWKV_WKV6:
        case GGML_OP_RWKV_WKV7: return true;

        case GGML_OP_UNARY: return is_computed(ggml_get_unary_op(op)) && same_f32_f16(op);
        case GGML_OP_GLU:
            return is_computed(ggml_get_glu_op(op)) && same_f32_f16(op) &&
                   (op->src[1] == nullptr || type_of(op, 1) == op->type);
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID: return mul_mat(limits, op);
        case GGML_OP_FLASH_ATTN_EXT: return flash_attn_ext(limits, op);
        case GGML_OP_GET_ROWS: return weights.hold(type_of(op, 0)) || type_of(op, 0) == GGML_TYPE_I32;
        case GGML_OP_SET_ROWS: return set_rows(op);
        case GGML_OP_CONT:
        case GGML_OP_CPY:
        case GGML_OP_DUP: return copy(op);
        case GGML_OP_REPEAT: {
            const size_t size = ggml_type_size(op->type);
            return size == ggml_type_size(type_of(op, 0)) && (size == 4 || size == 2);
        }
        case GGML_OP_ROPE: return ggml_is_contiguous_rows(op) && ggml_is_contiguous_rows(op->src[0]);
        case GGML_OP_GROUP_NORM: return ggml_is_contiguous(op->src[0]);
        case GGML_OP_GET_ROWS_BACK:
        case GGML_OP_REPEAT_BACK:
        case GGML_OP_NORM:
        case GGML_OP_L2_NORM: return is_f32(op) && is_f32(op->src[0]);
        case GGML_OP_ADD:
        case GGML_OP_SUB:
        case GGML_OP_MUL:
        case GGML_OP_DIV: return f32_f16.hold(type_of(op, 0)) && f32_f16.hold(type_of(op, 1)) && f32_f16.hold(op->type);
        case GGML_OP_ADD_ID:
            return is_f32(op) && is_f32(op->src[0]) && is_f32(op->src[1]) && type_of(op, 2) == GGML_TYPE_I32;
        case GGML_OP_ADD1:
            return f32_f16.hold(type_of(op, 0)) && f32_f16.hold(type_of(op, 1)) &&
                   (is_f32(op->src[1]) || type_of(op, 0) == GGML_TYPE_F16);
        case GGML_OP_ACC: return is_f32(op) && is_f32(op->src[0]) && is_f32(op->src[1]);
        case GGML_OP_SET:
            return type_of(op, 0) == op->type && type_of(op, 1) == op->type &&
                   types{GGML_TYPE_F32, GGML_TYPE_I32}.hold(op->type);
        case GGML_OP_SQR:
        case GGML_OP_SQRT:
        case GGML_OP_SIN:
        case GGML_OP_COS:
        case GGML_OP_CLAMP:
        case GGML_OP_LEAKY_RELU:
        case GGML_OP_LOG:
        case GGML_OP_TRI:
        case GGML_OP_DIAG: return same_f32_f16(op);
        case GGML_OP_SCALE:
        case GGML_OP_DIAG_MASK_INF:
        case GGML_OP_ARGMAX:
        case GGML_OP_POOL_1D:
        case GGML_OP_POOL_2D:
        case GGML_OP_SILU_BACK:
        case GGML_OP_RMS_NORM_BACK:
        case GGML_OP_OPT_STEP_ADAMW:
        case GGML_OP_OPT_STEP_SGD: return is_contiguous_f32(op->src[0]);
        case GGML_OP_SOFT_MAX:
            return is_contiguous_f32(op->src[0]) && (op->src[1] == nullptr || f32_f16.hold(type_of(op, 1)));
        case GGML_OP_SOFT_MAX_BACK: return is_contiguous_f32(op->src[0]) && is_contiguous_f32(op->src[1]);
        case GGML_OP_OUT_PROD: return is_contiguous_f32(op->src[0]) && is_contiguous_f32(op->src[1]) && is_f32(op);
        case GGML_OP_SUM:
        case GGML_OP_SUM_ROWS:
        case GGML_OP_MEAN: return is_f32(op->src[0]) && ggml_is_contiguous_rows(op->src[0]);
        case GGML_OP_CUMSUM:
            return limits.subgroup_operations && limits.computeFullSubgroups && is_f32(op->src[0]) &&
                   ggml_is_contiguous_rows(op->src[0]);
        case GGML_OP_ARGSORT: return argsort(limits, op);
        case GGML_OP_TOP_K: return ggml_is_contiguous(op) && ggml_is_contiguous(op->src[0]);
        case GGML_OP_CONCAT: return concat(op);
        case GGML_OP_ARANGE: return is_f32(op);
        case GGML_OP_FILL: return f32_f16.hold(op->type);
        case GGML_OP_UPSCALE:
            return is_f32(op->src[0]) && ((op->op_params[0] & GGML_SCALE_FLAG_ANTIALIAS) == 0 ||
                                          (op->op_params[0] & 0xFF) == GGML_SCALE_MODE_BILINEAR);
        case GGML_OP_PAD:
        case GGML_OP_PAD_REFLECT_1D:
        case GGML_OP_ROLL:
        case GGML_OP_TIMESTEP_EMBEDDING:
        case GGML_OP_SSM_CONV: return is_f32(op->src[0]);
        case GGML_OP_DSV4_HC_COMB:
        case GGML_OP_DSV4_HC_PRE:
        case GGML_OP_DSV4_HC_POST: return dsv4_hc(limits, op);
        case GGML_OP_SOLVE_TRI: return solve_tri(limits, op);
        case GGML_OP_GATED_LINEAR_ATTN: return is_f32(op) && is_f32(op->src[0]) && op->src[0]->ne[0] == 64;
        case GGML_OP_LIGHTNING_INDEXER: return lightning_indexer(limits, op);
        case GGML_OP_GATED_DELTA_NET: return gated_delta_net(op);
        case GGML_OP_SSM_SCAN: return ssm_scan(limits, op);
        case GGML_OP_CROSS_ENTROPY_LOSS:
            return is_contiguous_f32(op->src[0]) && is_contiguous_f32(op->src[1]) &&
                   ggml_are_same_shape(op->src[0], op->src[1]) && is_contiguous_f32(op) && ggml_is_scalar(op);
        case GGML_OP_CROSS_ENTROPY_LOSS_BACK:
            return is_contiguous_f32(op->src[0]) && ggml_is_scalar(op->src[0]) && is_contiguous_f32(op->src[1]) &&
                   is_contiguous_f32(op->src[2]) && is_contiguous_f32(op) &&
                   ggml_are_same_shape(op->src[1], op->src[2]) && ggml_are_same_shape(op->src[1], op);
        case GGML_OP_COUNT_EQUAL:
            return ggml_is_contiguous(op->src[0]) && type_of(op, 0) == GGML_TYPE_I32 && ggml_is_contiguous(op->src[1]) &&
                   type_of(op, 1) == GGML_TYPE_I32;
        case GGML_OP_IM2COL: return is_contiguous_f32(op->src[1]) && f32_f16.hold(op->type);
        case GGML_OP_IM2COL_3D: return is_f32(op->src[1]) && f32_f16.hold(op->type);
        case GGML_OP_COL2IM_1D:
            return floats.hold(op->type) && type_of(op, 0) == op->type && ggml_is_contiguous(op->src[0]) &&
                   ggml_is_contiguous(op);
        case GGML_OP_CONV_2D:
        case GGML_OP_CONV_TRANSPOSE_2D: return conv_2d(op);
        case GGML_OP_CONV_2D_DW: return f32_f16.hold(type_of(op, 0)) && is_f32(op->src[1]);
        case GGML_OP_CONV_3D:
            return f32_f16.hold(type_of(op, 0)) && ggml_is_contiguous(op->src[0]) && is_contiguous_f32(op->src[1]) &&
                   is_contiguous_f32(op);
        case GGML_OP_CONV_TRANSPOSE_1D: return is_f32(op->src[0]) && is_f32(op->src[1]);
        default: return false;
    }
}

}  // namespace

bool device_supports_op(const description & device, const ggml_tensor * op) {
    const limits & limits = *device.profile->vulkan;
    for (const ggml_tensor * source : op->src) {
        if (source != nullptr && !tensor_size_supported(limits, op, source)) {
            return false;
        }
    }
    return tensor_size_supported(limits, op, op) && supports(limits, op);
}

}  // namespace fitter::vulkan
