// Asks a backend about operations that no model may ever hold: every operation of ggml on tensors of random types, shapes,
// strides and parameters. Prints for each operation how often it was asked about, how often the answer was yes, and a digest
// of all answers; or, with another backend, each question that the two disagree about.
//
// usage: ops COUNT SEED BACKEND [OTHER], with FITTER_CUDART_DEVICES and FITTER_DEVICES describing the devices

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"

namespace {

std::mt19937_64 chance;

template <typename T> T one_of(std::initializer_list<T> list) {
    return *(list.begin() + chance() % list.size());
}

bool maybe(int percent) { return static_cast<int>(chance() % 100) < percent; }

ggml_type any_type() {
    for (;;) {
        const auto type = static_cast<ggml_type>(chance() % GGML_TYPE_COUNT);
        if (ggml_type_size(type) != 0 && ggml_blck_size(type) != 0) {
            return type;
        }
    }
}

void strides(ggml_tensor & tensor) {
    tensor.nb[0] = ggml_type_size(tensor.type);
    tensor.nb[1] = tensor.nb[0] * static_cast<size_t>(tensor.ne[0] / ggml_blck_size(tensor.type));
    tensor.nb[2] = tensor.nb[1] * static_cast<size_t>(tensor.ne[1]);
    tensor.nb[3] = tensor.nb[2] * static_cast<size_t>(tensor.ne[2]);
    if (maybe(20)) {
        tensor.nb[1] += one_of<size_t>({4, 8, 16, 32, 256}) / tensor.nb[0] * tensor.nb[0];
        tensor.nb[2] = tensor.nb[1] * static_cast<size_t>(tensor.ne[1]);
        tensor.nb[3] = tensor.nb[2] * static_cast<size_t>(tensor.ne[2]);
    }
    if (maybe(10)) {
        std::swap(tensor.nb[1], tensor.nb[2]);
    }
    if (maybe(3) && !ggml_is_quantized(tensor.type)) {
        tensor.nb[0] *= 2;
    }
}

ggml_tensor any_tensor() {
    ggml_tensor tensor = {};
    tensor.type        = maybe(50) ? one_of({GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_I32}) : any_type();
    tensor.ne[0]       = ggml_blck_size(tensor.type) * one_of<int64_t>({1, 1, 2, 3, 4, 16, 64, 96, 128, 256});
    tensor.ne[1]       = one_of<int64_t>({1, 2, 16, 32, 64, 96, 128, 200});
    tensor.ne[2]       = one_of<int64_t>({1, 1, 2, 4, 8, 32, 64, 128});
    tensor.ne[3]       = one_of<int64_t>({1, 1, 1, 2});
    strides(tensor);
    return tensor;
}

struct question {
    ggml_tensor op     = {};
    ggml_tensor src[6] = {};
};

// Attention as models have it, so that it is not always refused.
void make_attention(question & q) {
    const auto kv = [] { return one_of({GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,
                                        GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL, GGML_TYPE_Q4_K}); };
    struct head {
        int64_t k, v;
    };
    const head    size   = one_of<head>({{40, 40}, {64, 64}, {72, 72}, {80, 80}, {96, 96}, {112, 112}, {128, 128}, {256, 256},
                                         {192, 128}, {192, 192}, {320, 256}, {512, 512}, {576, 512}, {160, 160}, {128, 64}, {256, 256}});
    const int64_t n_kv   = one_of<int64_t>({256, 384, 4096, 8192, 8448, 65536, 300, 4224});
    const int64_t heads  = one_of<int64_t>({1, 2, 4, 8});
    const int64_t shared = one_of<int64_t>({1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 32, 64});
    const int64_t tokens = one_of<int64_t>({1, 1, 1, 2, 3, 4, 8, 17, 512});
    const int64_t seqs   = one_of<int64_t>({1, 1, 2});

    const auto set = [](ggml_tensor & tensor, ggml_type type, int64_t a, int64_t b, int64_t c, int64_t d) {
        tensor.type = type;
        while (a % ggml_blck_size(tensor.type) != 0) {
            tensor.type = one_of({GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_BF16, GGML_TYPE_Q8_0});
        }
        tensor.ne[0] = a, tensor.ne[1] = b, tensor.ne[2] = c, tensor.ne[3] = d;
        strides(tensor);
    };
    const ggml_type type_k = kv();
    set(q.src[0], GGML_TYPE_F32, size.k, tokens, heads * shared, seqs);
    set(q.src[1], type_k, size.k, n_kv, heads, seqs);
    const ggml_type type_v = maybe(60) ? type_k : kv();
    set(q.src[2], type_v, size.v, n_kv, heads, seqs);
    const int64_t mask_rows  = one_of<int64_t>({tokens, 64});
    const int64_t mask_heads = maybe(5) ? heads : 1;
    set(q.src[3], GGML_TYPE_F16, n_kv, mask_rows, mask_heads, seqs);
    q.op.src[3] = maybe(10) ? nullptr : &q.src[3];
    q.op.src[4] = q.op.src[5] = nullptr;
    if (maybe(10)) {
        q.src[2].view_src  = maybe(50) ? &q.src[1] : &q.src[5];
        q.src[1].view_src  = maybe(50) ? &q.src[5] : nullptr;
        q.src[2].view_offs = maybe(50) ? 64 : 0;
    }
    const float scale    = 1.0f;
    const float max_bias = maybe(10) ? 8.0f : 0.0f;
    const float softcap  = maybe(10) ? 30.0f : 0.0f;
    std::memcpy(q.op.op_params + 0, &scale, 4);
    std::memcpy(q.op.op_params + 1, &max_bias, 4);
    std::memcpy(q.op.op_params + 2, &softcap, 4);
    q.op.op_params[4] = one_of({0, 0, 512, 2048});
    q.op.type         = GGML_TYPE_F32;
    q.op.ne[0] = size.v, q.op.ne[1] = heads * shared, q.op.ne[2] = tokens, q.op.ne[3] = seqs;
    strides(q.op);
}

void make(question & q) {
    q    = {};
    q.op = any_tensor();
    for (ggml_tensor & source : q.src) {
        source = any_tensor();
        if (maybe(40)) {
            source.type = q.src[0].type;
            std::memcpy(source.ne, q.src[0].ne, sizeof(source.ne));
            strides(source);
        }
    }
    if (maybe(40)) {
        q.op.type = q.src[0].type;
        std::memcpy(q.op.ne, q.src[0].ne, sizeof(q.op.ne));
        strides(q.op);
    }
    for (int i = 0; i < 6; i++) {
        q.op.src[i] = &q.src[i];
    }
    for (int i = 0; i < 16; i++) {
        q.op.op_params[i] = static_cast<int32_t>(chance() % 5);
    }
    q.op.op = static_cast<ggml_op>(chance() % (GGML_OP_COUNT + 40));
    if (q.op.op >= GGML_OP_COUNT) {
        // What has more to it.
        q.op.op = one_of({GGML_OP_FLASH_ATTN_EXT, GGML_OP_FLASH_ATTN_EXT, GGML_OP_FLASH_ATTN_EXT, GGML_OP_FLASH_ATTN_EXT,
                          GGML_OP_CPY, GGML_OP_SET_ROWS, GGML_OP_GET_ROWS, GGML_OP_MUL_MAT, GGML_OP_MUL_MAT_ID,
                          GGML_OP_CONCAT, GGML_OP_LIGHTNING_INDEXER, GGML_OP_SSM_SCAN});
    }
    switch (q.op.op) {
        case GGML_OP_UNARY: q.op.op_params[0] = static_cast<int32_t>(chance() % GGML_UNARY_OP_COUNT); break;
        case GGML_OP_GLU: q.op.op_params[0] = static_cast<int32_t>(chance() % GGML_GLU_OP_COUNT); break;
        case GGML_OP_SET_ROWS: q.src[1].type = one_of({GGML_TYPE_I64, GGML_TYPE_I32, GGML_TYPE_F32}); break;
        case GGML_OP_FLASH_ATTN_EXT: make_attention(q); break;
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID:
            if (maybe(60)) {  // of the kind that may be a Hadamard matrix's
                q.src[0].type = GGML_TYPE_F32;
                q.src[1].type = one_of({GGML_TYPE_F16, GGML_TYPE_F32});
                strides(q.src[0]);
                std::memcpy(q.src[1].ne, q.op.ne, sizeof(q.op.ne));
                strides(q.src[1]);
                q.op.type = GGML_TYPE_F32;
                strides(q.op);
            }
            q.op.op_params[1] = maybe(70) ? GGML_HINT_SRC0_IS_HADAMARD : 0;
            q.op.op_params[3] = maybe(30) ? GGML_PREC_F32 : GGML_PREC_DEFAULT;
            break;
        case GGML_OP_GET_ROWS:
            if (maybe(20)) {
                q.src[0].type  = one_of({GGML_TYPE_IQ4_NL, GGML_TYPE_MXFP4});
                q.src[0].ne[0] = 32 * one_of<int64_t>({4, 8, 12, 16});
            }
            break;
        case GGML_OP_SSM_SCAN:
            q.src[0].ne[0] = one_of<int64_t>({16, 96, 128, 256, 64});
            q.src[3].ne[0] = one_of<int64_t>({1, 16});
            q.src[4].ne[1] = one_of<int64_t>({1, 2});
            break;
        case GGML_OP_LIGHTNING_INDEXER:
            q.src[0].ne[0] = one_of<int64_t>({128, 128, 128, 64});
            q.src[0].ne[1] = one_of<int64_t>({32, 64, 16});
            break;
        case GGML_OP_DSV4_HC_POST:
            if (maybe(50)) {
                q.op.src[3] = nullptr;
            }
            break;
        default: break;
    }
    if (q.op.op == GGML_OP_DSV4_HC_COMB || q.op.op == GGML_OP_DSV4_HC_PRE || q.op.op == GGML_OP_DSV4_HC_POST) {
        for (ggml_tensor & source : q.src) {
            source.type = maybe(85) ? GGML_TYPE_F32 : GGML_TYPE_F16;
        }
        q.op.type = GGML_TYPE_F32;
    }
}

std::string text_of(const question & q) {
    std::string text = ggml_op_name(q.op.op);
    const auto  add  = [&text](const char * name, const ggml_tensor & tensor) {
        char line[256];
        std::snprintf(line, sizeof(line), " %s=%s[%lld %lld %lld %lld](%zu %zu %zu %zu)", name, ggml_type_name(tensor.type),
                      (long long) tensor.ne[0], (long long) tensor.ne[1], (long long) tensor.ne[2], (long long) tensor.ne[3],
                      tensor.nb[0], tensor.nb[1], tensor.nb[2], tensor.nb[3]);
        text += line;
    };
    add("op", q.op);
    for (int i = 0; i < 4; i++) {
        if (q.op.src[i] != nullptr) {
            add("src", q.src[i]);
        }
    }
    for (int i = 0; i < 5; i++) {
        text += " " + std::to_string(q.op.op_params[i]);
    }
    return text;
}

struct answer {
    bool   supports;
    bool   offloads;
    size_t size;

    bool operator!=(const answer & other) const {
        return supports != other.supports || offloads != other.offloads || size != other.size;
    }
};

answer ask(ggml_backend_reg_t backend, size_t device, const ggml_tensor * op) {
    ggml_backend_dev_t         asked       = ggml_backend_reg_dev_get(backend, device);
    ggml_backend_buffer_type_t buffer_type = ggml_backend_dev_buffer_type(asked);
    // Elsewhere the size depends on types and rows only, which real tensors do not have at random.
    const bool sized = op->op == GGML_OP_FLASH_ATTN_EXT;
    return {ggml_backend_dev_supports_op(asked, op), ggml_backend_dev_offload_op(asked, op),
            sized ? ggml_backend_buft_get_alloc_size(buffer_type, op) : 0};
}

struct tally {
    long     asked     = 0;
    long     supported = 0;
    uint64_t digest    = 14695981039346656037u;  // FNV-1a

    void add(const answer & given) {
        asked++;
        supported += given.supports;
        for (const uint64_t part : {uint64_t{given.supports}, uint64_t{given.offloads}, uint64_t{given.size}}) {
            digest = (digest ^ part) * 1099511628211u;
        }
    }
};

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 4 && argc != 5) {
        std::fprintf(stderr, "usage: ops COUNT SEED BACKEND [OTHER]\n");
        return 2;
    }
    const long count = std::atol(argv[1]);
    chance.seed(static_cast<uint64_t>(std::atoll(argv[2])));
    ggml_backend_reg_t backend = ggml_backend_load(argv[3]);
    ggml_backend_reg_t other   = argc == 5 ? ggml_backend_load(argv[4]) : backend;
    if (backend == nullptr || other == nullptr || ggml_backend_reg_dev_count(backend) != ggml_backend_reg_dev_count(other)) {
        std::fprintf(stderr, "ops: a backend cannot be loaded, or the two do not have the same devices\n");
        return 2;
    }
    std::vector<tally> tallies(GGML_OP_COUNT);
    long               different = 0;
    for (long n = 0; n < count; n++) {
        question asked;
        make(asked);
        for (size_t i = 0; i < ggml_backend_reg_dev_count(backend); i++) {
            const answer one = ask(backend, i, &asked.op);
            tallies[asked.op.op].add(one);
            if (other == backend) {
                continue;
            }
            const answer two = ask(other, i, &asked.op);
            if (one != two && different++ < 20) {
                std::printf("%s on device %zu: %d %d %zu, the other %d %d %zu\n", text_of(asked).c_str(), i, one.supports,
                            one.offloads, one.size, two.supports, two.offloads, two.size);
            }
        }
    }
    if (other != backend) {
        std::printf("different: %ld\n", different);
        return different != 0;
    }
    for (int op = 0; op < GGML_OP_COUNT; op++) {
        const tally & found = tallies[static_cast<size_t>(op)];
        std::printf("%s %ld %ld %016llx\n", ggml_op_name(static_cast<ggml_op>(op)), found.asked, found.supported,
                    static_cast<unsigned long long>(found.digest));
    }
    return 0;
}
