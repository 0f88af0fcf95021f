// GGUF headers through libggml's own reader, so that tensor sizes are ggml's.

#include <algorithm>
#include <string>
#include <vector>

#include "builds/symbols.h"
#include "measuring/file_reader.h"
#include "fitter.h"
#include "ggml.h"
#include "gguf.h"
#include "guard.h"

namespace {

const gguf_context * context(const void * gguf) { return static_cast<const gguf_context *>(gguf); }

bool in_range(int64_t index, int64_t n) { return index >= 0 && index < n; }

char kind_of(gguf_type type) {
    switch (type) {
        case GGUF_TYPE_INT8:
        case GGUF_TYPE_INT16:
        case GGUF_TYPE_INT32:
        case GGUF_TYPE_INT64: return 'i';
        case GGUF_TYPE_UINT8:
        case GGUF_TYPE_UINT16:
        case GGUF_TYPE_UINT32:
        case GGUF_TYPE_UINT64: return 'u';
        case GGUF_TYPE_FLOAT32:
        case GGUF_TYPE_FLOAT64: return 'f';
        case GGUF_TYPE_BOOL: return 'b';
        case GGUF_TYPE_STRING: return 's';
        case GGUF_TYPE_ARRAY: return 'a';
        default: return 0;
    }
}

template <typename T>
T element(const void * data, uint64_t index) {
    return static_cast<const T *>(data)[index];
}

// Reads number `index` of an array of `type` at `data` (a single value is an array of one).
void read_number(gguf_type type, const void * data, uint64_t index, fitter_gguf_kv_t * out) {
    switch (type) {
        case GGUF_TYPE_UINT8: out->u = element<uint8_t>(data, index); break;
        case GGUF_TYPE_INT8: out->i = element<int8_t>(data, index); break;
        case GGUF_TYPE_UINT16: out->u = element<uint16_t>(data, index); break;
        case GGUF_TYPE_INT16: out->i = element<int16_t>(data, index); break;
        case GGUF_TYPE_UINT32: out->u = element<uint32_t>(data, index); break;
        case GGUF_TYPE_INT32: out->i = element<int32_t>(data, index); break;
        case GGUF_TYPE_UINT64: out->u = element<uint64_t>(data, index); break;
        case GGUF_TYPE_INT64: out->i = element<int64_t>(data, index); break;
        case GGUF_TYPE_FLOAT32: out->f = static_cast<double>(element<float>(data, index)); break;
        case GGUF_TYPE_FLOAT64: out->f = element<double>(data, index); break;
        case GGUF_TYPE_BOOL: out->i = element<int8_t>(data, index) != 0; break;
        default: break;
    }
}

}  // namespace

void * fitter_gguf_open(const char * path) {
    return fitter::guarded<void *>(nullptr, [&]() -> void * {
        fitter::tensor_shapes  shapes;
        const gguf_init_params params = {/*.no_alloc =*/true, /*.ctx =*/shapes.wanted()};
        fitter::file_reader    reader(path);
        const uint64_t         most = std::min<uint64_t>(reader.size(), fitter::longest_header);
        gguf_context *         gguf = most > 0
                                          ? gguf_init_from_callback(fitter::file_reader::read, &reader, 0, most, params)
                                          : gguf_init_from_file(path, params);
        shapes.keep_for(gguf);
        if (gguf == nullptr) {
            fitter::set_error("not a readable GGUF file");
        }
        return gguf;
    });
}

void fitter_gguf_close(void * gguf) {
    fitter::guarded([&] {
        fitter::tensor_shapes::forget(context(gguf));
        gguf_free(static_cast<gguf_context *>(gguf));
    });
}

bool fitter_gguf_info(const void * gguf, fitter_gguf_info_t * out) {
    return fitter::guarded(false, [&] {
        const gguf_context * ctx = context(gguf);
        out->version             = gguf_get_version(ctx);
        out->alignment           = gguf_get_alignment(ctx);
        out->data_offset         = gguf_get_data_offset(ctx);
        out->n_kv                = gguf_get_n_kv(ctx);
        out->n_tensors           = gguf_get_n_tensors(ctx);
        return true;
    });
}

bool fitter_gguf_kv(const void * gguf, int64_t index, fitter_gguf_kv_t * out) {
    return fitter::guarded(false, [&] {
        const gguf_context * ctx = context(gguf);
        if (!in_range(index, gguf_get_n_kv(ctx))) {
            return false;
        }
        const gguf_type type = gguf_get_kv_type(ctx, index);
        *out                 = {};
        out->key             = gguf_get_key(ctx, index);
        out->kind            = kind_of(type);
        if (type == GGUF_TYPE_STRING) {
            out->s = gguf_get_val_str(ctx, index);
        } else if (type == GGUF_TYPE_ARRAY) {
            const gguf_type array_type = gguf_get_arr_type(ctx, index);
            out->array_type            = gguf_type_name(array_type);
            out->array_length          = gguf_get_arr_n(ctx, index);
            out->array_kind            = array_type == GGUF_TYPE_STRING ? 0 : kind_of(array_type);
        } else {
            read_number(type, gguf_get_val_data(ctx, index), 0, out);
        }
        return true;
    });
}

bool fitter_gguf_element(const void * gguf, int64_t index, uint64_t element, fitter_gguf_kv_t * out) {
    return fitter::guarded(false, [&] {
        const gguf_context * ctx = context(gguf);
        if (!in_range(index, gguf_get_n_kv(ctx)) || gguf_get_kv_type(ctx, index) != GGUF_TYPE_ARRAY) {
            return false;
        }
        const gguf_type type = gguf_get_arr_type(ctx, index);
        if (type == GGUF_TYPE_STRING || element >= gguf_get_arr_n(ctx, index)) {
            return false;
        }
        read_number(type, gguf_get_arr_data(ctx, index), element, out);
        return true;
    });
}

bool fitter_gguf_tensors(const void * gguf, fitter_columns_t * out) {
    return fitter::guarded(false, [&] {
        thread_local std::string          texts;
        thread_local std::vector<int64_t> numbers;

        const gguf_context * ctx = context(gguf);
        const int64_t        n   = gguf_get_n_tensors(ctx);
        texts.clear();
        numbers.clear();
        for (int64_t i = 0; i < n; i++) {
            texts.append(gguf_get_tensor_name(ctx, i)).push_back('\0');
            texts.append(ggml_type_name(gguf_get_tensor_type(ctx, i))).push_back('\0');
            const int64_t * ne = fitter::tensor_shapes::of(ctx, i);
            numbers.insert(numbers.end(), ne, ne + GGML_MAX_DIMS);
            numbers.push_back(static_cast<int64_t>(gguf_get_tensor_size(ctx, i)));
        }
        *out = {texts.data(), texts.size(), numbers.data(), numbers.size()};
        return true;
    });
}
