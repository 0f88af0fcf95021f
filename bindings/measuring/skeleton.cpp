// A model's header alone, without its tokenizer, as a private file that llama.cpp loads in place of the model's own.

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include "builds/symbols.h"
#include "fitter.h"
#include "ggml.h"
#include "gguf.h"
#include "guard.h"
#include "measuring/skeleton.h"
#include "platform/platform.h"

namespace {

constexpr const char * key_tokenizer    = "tokenizer.ggml.model";
constexpr const char * key_token_types  = "tokenizer.ggml.token_type_count";  // the first dimension of BERT's type_embd
constexpr const char * no_tokenizer     = "no_vocab";
constexpr const char * tokenizer_keys   = "tokenizer.";

bool starts_with(const std::string & text, const char * start) { return text.rfind(start, 0) == 0; }

// The string at key, "" where there is none.
std::string string_at(const gguf_context * gguf, const char * key) {
    const int64_t id = gguf_find_key(gguf, key);
    return id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_STRING ? gguf_get_val_str(gguf, id) : "";
}

bool has_no_tokenizer(const gguf_context * gguf) {
    const std::string tokenizer = string_at(gguf, key_tokenizer);
    return tokenizer == no_tokenizer || tokenizer == "none";
}

std::string vocab_size_key(const gguf_context * gguf) { return string_at(gguf, fitter::key_architecture) + ".vocab_size"; }

// Replaces the tokens by their number, which is all that the shapes of a model depend on.
void replace_tokens(gguf_context * gguf, int64_t n_tokens) {
    if (has_no_tokenizer(gguf) || string_at(gguf, key_tokenizer).empty() || string_at(gguf, fitter::key_architecture).empty()) {
        return;
    }
    if (n_tokens <= UINT32_MAX) {
        gguf_set_val_u32(gguf, vocab_size_key(gguf).c_str(), static_cast<uint32_t>(n_tokens));
        gguf_set_val_str(gguf, key_tokenizer, no_tokenizer);
    }
}

void remove_keys(gguf_context * gguf, const char * start) {
    for (int64_t i = gguf_get_n_kv(gguf) - 1; i >= 0; i--) {
        const std::string key = gguf_get_key(gguf, i);
        if (starts_with(key, start) && key != key_tokenizer && key != key_token_types) {
            gguf_remove_key(gguf, key.c_str());
        }
    }
}

// Appends the tensors of `from`. A name that is there already would abort.
void add_tensors(gguf_context * to, const gguf_context * from, std::unordered_set<std::string> & names) {
    for (int64_t i = 0; i < gguf_get_n_tensors(from); i++) {
        const char * name = gguf_get_tensor_name(from, i);
        if (!names.insert(name).second) {
            throw std::invalid_argument("tensor '" + std::string(name) + "' is in two of its files");
        }
        ggml_tensor tensor = {};
        ggml_set_name(&tensor, name);
        tensor.type        = gguf_get_tensor_type(from, i);
        const int64_t * ne = fitter::tensor_shapes::of(from, i);
        size_t          nb = ggml_type_size(tensor.type);
        for (int j = 0; j < GGML_MAX_DIMS; j++) {
            tensor.ne[j] = ne[j];
            tensor.nb[j] = nb;
            nb *= static_cast<size_t>(j == 0 ? ne[0] / ggml_blck_size(tensor.type) : ne[j]);
        }
        gguf_add_tensor(to, &tensor);
    }
}

uint64_t data_size(const gguf_context * gguf) {
    const int64_t n = gguf_get_n_tensors(gguf);
    return n == 0 ? 0 : gguf_get_tensor_offset(gguf, n - 1) + GGML_PAD(gguf_get_tensor_size(gguf, n - 1),
                                                                      gguf_get_alignment(gguf));
}

// ---- the file

[[noreturn]] void fail(const char * what) { throw std::runtime_error(std::string(what) + ": " + std::strerror(errno)); }

struct descriptor {
    int fd;

    explicit descriptor(int opened) : fd(opened) {}
    descriptor(const descriptor &)             = delete;
    descriptor & operator=(const descriptor &) = delete;
    ~descriptor() {
        if (fd >= 0) {
            fitter::platform::close_file(fd);
        }
    }
    int release() {
        const int kept = fd;
        fd             = -1;
        return kept;
    }
};

int write_file(const gguf_context * gguf) {
    std::vector<char> meta(gguf_get_meta_size(gguf));
    gguf_get_meta_data(gguf, meta.data());

    descriptor file(fitter::platform::create_private_file());
    if (file.fd < 0) {
        fail("no temporary file can be created for a copy of its header (set TMPDIR to another directory)");
    }
    if (!fitter::platform::write_all(file.fd, meta.data(), meta.size())) {
        fail("the copy of its header cannot be written");
    }
    // llama.cpp looks whether the tensors' data is there, and does not read it.
    if (!fitter::platform::lengthen(file.fd, meta.size() + data_size(gguf))) {
        fail("the copy of its header cannot be as long as the model");
    }
    return file.release();
}

}  // namespace

bool fitter::is_tokenizer_key(const std::string & key) { return starts_with(key, tokenizer_keys); }

void fitter::strip(gguf_context * gguf, int64_t n_tokens) {
    if (n_tokens >= 0) {
        replace_tokens(gguf, n_tokens);
    }
    remove_keys(gguf, tokenizer_keys);
}

void fitter_skeleton_strip(void * gguf, int64_t n_tokens) {
    fitter::guarded(false, [&] {
        auto *        ctx    = static_cast<gguf_context *>(gguf);
        const int64_t tokens = gguf_find_key(ctx, fitter::key_tokens);
        if (n_tokens < 0 && tokens >= 0 && gguf_get_kv_type(ctx, tokens) == GGUF_TYPE_ARRAY) {
            n_tokens = static_cast<int64_t>(gguf_get_arr_n(ctx, tokens));
        }
        fitter::strip(ctx, n_tokens);
        return true;
    });
}

int32_t fitter_skeleton_write(void * const * gguf, int32_t n) {
    return fitter::guarded<int32_t>(-1, [&] {
        auto * first = static_cast<gguf_context *>(n > 0 ? gguf[0] : nullptr);
        if (first == nullptr) {
            throw std::invalid_argument("no file is given");
        }
        if (!has_no_tokenizer(first) || gguf_find_key(first, vocab_size_key(first).c_str()) < 0) {
            throw std::invalid_argument("its header does not say how many tokens it has");
        }
        remove_keys(first, "split.");
        std::unordered_set<std::string> names;
        for (int64_t i = 0; i < gguf_get_n_tensors(first); i++) {
            names.insert(gguf_get_tensor_name(first, i));
        }
        for (int32_t i = 1; i < n; i++) {
            add_tensors(first, static_cast<const gguf_context *>(gguf[i]), names);
        }
        return write_file(first);
    });
}
