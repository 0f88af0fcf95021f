// Flash attention of ggml-cuda (fattn.cu): what it supports, and the room that its kernels want.

#include <algorithm>
#include <cstring>

#include "builds/build.h"
#include "virtual/rules/cuda.h"

namespace fitter::cuda {

namespace {

enum class fattn_kernel { none, tile, vec, mma_f16 };

// Kernels that read K in whole steps of this many rows are only used on a cache of a multiple of it.
constexpr int64_t kq_stride = 256;

struct head_size {
    int64_t k;
    int64_t v;
    bool    only_gqa;        // has only kernels that handle several heads of Q together
    int64_t heads_together;  // and that many of them
};

constexpr head_size head_sizes[] = {
    {40, 40, false, 1},   {64, 64, false, 1},   {72, 72, false, 1},    {80, 80, false, 1},
    {96, 96, false, 1},   {112, 112, false, 1}, {128, 128, false, 1},  {256, 256, false, 1},
    {192, 128, true, 8},  {320, 256, true, 32}, {512, 512, true, 1},   {576, 512, true, 1},
};

bool fattn_kv_type_supported(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q8_0: return true;
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1: return loaded_build().cuda_attention_of_any_types;
        default: return false;
    }
}

bool fattn_kv_types_supported(ggml_type type_k, ggml_type type_v) {
    return fattn_kv_type_supported(type_k) && fattn_kv_type_supported(type_v) &&
           (type_k == type_v || loaded_build().cuda_attention_of_any_types);
}

// The vector kernels that are compiled by default (GGML_CUDA_FA_QUANTS), for the head sizes that may use one.
bool has_fattn_vec_case(ggml_type type_k, ggml_type type_v) {
    const auto read_as = [](ggml_type type) { return type == GGML_TYPE_F32 ? GGML_TYPE_F16 : type; };
    switch (read_as(type_k)) {
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q8_0: return read_as(type_k) == read_as(type_v);
        default: return false;
    }
}

float op_param_f32(const ggml_tensor * op, size_t index) {
    float value;
    std::memcpy(&value, op->op_params + index, sizeof(value));
    return value;
}

// An operation as the choice of its kernel sees it.
struct attention {
    const ggml_tensor * op;
    const ggml_tensor * q    = op->src[0];
    const ggml_tensor * k    = op->src[1];
    const ggml_tensor * v    = op->src[2];
    const ggml_tensor * mask = op->src[3];

    float   max_bias     = op_param_f32(op, 1);
    int64_t n_tokens     = q->ne[1];
    int64_t gqa_ratio    = q->ne[2] / k->ne[2];
    bool    is_quantized = ggml_is_quantized(k->type) || ggml_is_quantized(v->type);
};

bool strides_are_aligned(const ggml_tensor * tensor) {
    return std::all_of(tensor->nb + 1, tensor->nb + GGML_MAX_DIMS, [](size_t stride) { return stride % 16 == 0; });
}

// Whether heads of Q that share a head of K can be handled together.
bool gqa_opt_applies(const attention & a) {
    if (a.gqa_ratio < 2 || a.mask == nullptr || a.max_bias != 0.0f || a.k->ne[1] % kq_stride != 0) {
        return false;
    }
    const ggml_tensor * const tensors[] = {a.q, a.k, a.v, a.mask};
    return std::all_of(std::begin(tensors), std::end(tensors), [](const ggml_tensor * tensor) {
        return ggml_is_quantized(tensor->type) || strides_are_aligned(tensor);
    });
}

bool head_size_supported(const attention & a, bool gqa_opt) {
    for (const head_size & size : head_sizes) {
        if (size.k == a.k->ne[0] && size.v == a.v->ne[0]) {
            return !size.only_gqa || (gqa_opt && a.gqa_ratio % size.heads_together == 0);
        }
    }
    return false;
}

// Not asked: whether attention is sparse. It only is with heads of 256 of which more than 4 share one of K, and for those
// the vector kernel is not the best one anyway.
bool vec_is_best_on_turing(const attention & a, int cc, bool gqa_opt) {
    const bool ada = cc >= cc_ada_lovelace;
    if (!gqa_opt && a.n_tokens == 1) {
        return true;
    }
    if (a.is_quantized) {
        return a.n_tokens <= (ada ? 2 : 1);
    }
    const bool many_heads = a.gqa_ratio > 4 && (a.q->ne[0] >= 256 || a.k->ne[1] >= 8192);
    return ada && a.n_tokens == 1 && a.q->ne[3] == 1 && !many_heads;
}

// Columns of work per token: the largest power of two, up to what a kernel has, that divides the heads sharing one of K.
int64_t gqa_ratio_eff(const attention & a) {
    const int64_t size = a.q->ne[0];
    const int64_t most = size == 320 ? 32 : size == 576 || size == 192 ? 16 : 8;

    int64_t ratio = 1;
    while (ratio < most && a.gqa_ratio % (2 * ratio) == 0) {
        ratio *= 2;
    }
    return ratio;
}

// The matrix instructions of AMD's cards pay off from a certain number of columns on. Not asked about larger heads: they
// have no vector kernel, and the others want the same room.
bool mma_is_best_on_amd(const attention & a, int cc, bool gqa_opt) {
    const int64_t size    = a.q->ne[0];
    const int64_t columns = a.n_tokens * gqa_ratio_eff(a);
    if (size > 256) {
        return false;
    }
    if (amd_mfma_available(cc)) {
        return columns > (size <= 64 ? 8 : size <= 128 ? 16 : 64);
    }
    return amd_wmma_available(cc) && gqa_opt && columns > (size <= 128 ? 8 : 16);
}

fattn_kernel get_best_fattn_kernel(int cc, const ggml_tensor * op) {
    const attention a{op};
    GGML_ASSERT(a.q->ne[2] % a.k->ne[2] == 0);

    const bool gqa_opt = gqa_opt_applies(a);
    if (!head_size_supported(a, gqa_opt) || !fattn_kv_types_supported(a.k->type, a.v->type) ||
        (a.mask != nullptr && a.mask->ne[2] != 1)) {
        return fattn_kernel::none;
    }

    const int64_t size             = a.q->ne[0];
    const bool    has_vec          = (size == 64 || size == 128 || size == 256) && a.k->ne[1] % kq_stride == 0;
    const bool    has_tensor_cores = size != 40 && size != 72;

    if (turing_mma_available(cc) && has_tensor_cores) {
        return has_vec && vec_is_best_on_turing(a, cc, gqa_opt) ? fattn_kernel::vec : fattn_kernel::mma_f16;
    }
    if (cc == cc_volta && has_tensor_cores) {
        const int64_t columns = a.n_tokens * gqa_ratio_eff(a);
        if (has_vec && columns <= 2) {
            return fattn_kernel::vec;
        }
        return columns <= 16 ? fattn_kernel::tile : fattn_kernel::mma_f16;
    }
    if (is_amd(cc) && has_tensor_cores && mma_is_best_on_amd(a, cc, gqa_opt)) {
        return fattn_kernel::mma_f16;
    }
    const bool few_tokens = a.is_quantized ? a.n_tokens <= 2 : a.n_tokens == 1 && !gqa_opt;
    return has_vec && few_tokens ? fattn_kernel::vec : fattn_kernel::tile;
}

size_t pad(size_t size) { return (size + alignment - 1) / alignment * alignment; }

// Bytes with the f16 copies of K and V behind the result, where they are needed.
size_t flash_attn_ext_get_f16_extra_data(const ggml_tensor * op, bool need_f16_k, bool need_f16_v) {
    const ggml_tensor * k    = op->src[1];
    const ggml_tensor * v    = op->src[2];
    size_t              size = ggml_nbytes(op);

    const auto add_copy = [&size](const ggml_tensor * tensor) {
        size = pad(size) + static_cast<size_t>(ggml_nelements(tensor)) * sizeof(ggml_fp16_t);
    };
    const bool v_is_k_view = v->view_src != nullptr && (v->view_src == k || (v->view_src == k->view_src &&
                                                                             v->view_offs == k->view_offs));
    if (need_f16_k && k->type != GGML_TYPE_F16) {
        add_copy(k);
    }
    if (need_f16_v && v->type != GGML_TYPE_F16 && !v_is_k_view) {
        add_copy(v);
    }
    return size;
}

}  // namespace

bool flash_attn_ext_supported(int cc, const ggml_tensor * op) {
    return get_best_fattn_kernel(cc, op) != fattn_kernel::none;
}

size_t flash_attn_ext_get_alloc_size(int cc, const ggml_tensor * op) {
    const ggml_type type_k = op->src[1]->type;
    const ggml_type type_v = op->src[2]->type;
    switch (get_best_fattn_kernel(cc, op)) {
        case fattn_kernel::tile:
        case fattn_kernel::mma_f16: return flash_attn_ext_get_f16_extra_data(op, true, true);
        case fattn_kernel::vec: {
            const bool f16_instead = !has_fattn_vec_case(type_k, type_v);
            return flash_attn_ext_get_f16_extra_data(op, f16_instead || type_k == GGML_TYPE_F32,
                                                     f16_instead || type_v == GGML_TYPE_F32);
        }
        case fattn_kernel::none: break;
    }
    return ggml_nbytes(op);
}

}  // namespace fitter::cuda
