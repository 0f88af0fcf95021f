// A header as it is read for its skeleton: without the arrays of the tokenizer, which are most of it. ggml makes a string
// of each of their hundreds of thousands of elements; here they are stepped over.

#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "builds/symbols.h"
#include "measuring/file_reader.h"
#include "fitter.h"
#include "gguf.h"
#include "guard.h"
#include "measuring/skeleton.h"

namespace {

constexpr uint32_t oldest_version = 2;
constexpr uint32_t newest_version = GGUF_VERSION;

// Bytes of a value; 0 for a string or an array, or where there is no such type.
uint64_t size_of(uint32_t type) {
    switch (type) {
        case GGUF_TYPE_UINT8:
        case GGUF_TYPE_INT8:
        case GGUF_TYPE_BOOL: return 1;
        case GGUF_TYPE_UINT16:
        case GGUF_TYPE_INT16: return 2;
        case GGUF_TYPE_UINT32:
        case GGUF_TYPE_INT32:
        case GGUF_TYPE_FLOAT32: return 4;
        case GGUF_TYPE_UINT64:
        case GGUF_TYPE_INT64:
        case GGUF_TYPE_FLOAT64: return 8;
        default: return 0;
    }
}

// Steps through a file, never past its end.
class cursor {
   public:
    explicit cursor(fitter::file_reader & file) : file(file) {}

    uint64_t at() const { return offset; }

    void skip(uint64_t n) {
        if (n > file.size() - offset) {
            throw std::out_of_range("the header ends early");
        }
        offset += n;
    }

    void skip(uint64_t n, uint64_t size) {
        if (n > file.size() / size) {
            throw std::out_of_range("the header ends early");
        }
        skip(n * size);
    }

    template <typename Number>
    Number number() {
        Number value{};
        copy(reinterpret_cast<char *>(&value), sizeof(value));
        return value;
    }

    std::string text() {
        const auto size  = number<uint64_t>();
        const auto start = offset;
        skip(size);
        offset = start;
        std::string value(size, '\0');
        copy(value.data(), size);
        return value;
    }

    void copy(char * output, uint64_t n) {
        const uint64_t start = offset;
        skip(n);
        if (n > 0 && fitter::file_reader::read(&file, output, start, n) != n) {
            throw std::runtime_error("the file cannot be read");
        }
    }

    void back(uint64_t to) { offset = to; }

   private:
    fitter::file_reader & file;
    uint64_t              offset = 0;
};

// A file whose first `replaced` bytes are others.
struct spliced {
    fitter::file_reader & file;
    std::vector<char>     head;
    uint64_t              replaced = 0;

    uint64_t size() const { return file.size() - replaced + head.size(); }

    static size_t read(void * self, void * output, uint64_t offset, size_t n) {
        auto & from = *static_cast<spliced *>(self);
        size_t done = 0;
        if (offset < from.head.size()) {
            done = std::min<uint64_t>(n, from.head.size() - offset);
            std::memcpy(output, from.head.data() + offset, done);
        }
        if (done == n) {
            return n;
        }
        const uint64_t rest = offset + done - from.head.size() + from.replaced;
        return done + fitter::file_reader::read(&from.file, static_cast<char *>(output) + done, rest, n - done);
    }
};

struct skimmed {
    spliced stream;
    bool    has_tokens = false;
    size_t  n_tokens   = 0;
};

// Steps over an array's type, length and elements; returns how many there are.
uint64_t skip_array(cursor & in) {
    const auto type = in.number<uint32_t>();
    const auto n    = in.number<uint64_t>();
    if (type == GGUF_TYPE_STRING) {
        for (uint64_t i = 0; i < n; i++) {
            in.skip(in.number<uint64_t>());
        }
    } else if (const uint64_t size = size_of(type)) {
        in.skip(n, size);
    } else {
        throw std::runtime_error("an array of no known type");
    }
    return n;
}

// Steps over a value; returns how many elements an array has, and 1 for anything else.
uint64_t skip_value(cursor & in, uint32_t type) {
    if (type == GGUF_TYPE_ARRAY) {
        return skip_array(in);
    }
    if (type == GGUF_TYPE_STRING) {
        in.skip(in.number<uint64_t>());
    } else if (const uint64_t size = size_of(type)) {
        in.skip(size);
    } else {
        throw std::runtime_error("a value of no known type");
    }
    return 1;
}

constexpr size_t magic_and_version = 8, counts = 16;

// Steps to the first entry of the metadata; returns how many there are.
int64_t skip_to_metadata(cursor & in) {
    in.skip(4);
    const auto version = in.number<uint32_t>();
    in.skip(8);
    const auto n_kv = in.number<int64_t>();
    if (version < oldest_version || version > newest_version || n_kv < 0) {
        throw std::runtime_error("no header of a known version");
    }
    return n_kv;
}

// Everything up to the end of the metadata, without the arrays of the tokenizer.
skimmed skim(fitter::file_reader & file) {
    skimmed            result{{file, {}, 0}};
    std::vector<char> & head = result.stream.head;
    cursor             in(file);

    const int64_t n_kv = skip_to_metadata(in);
    in.back(0);
    head.resize(magic_and_version + counts);
    in.copy(head.data(), head.size());

    int64_t kept = 0;
    for (int64_t i = 0; i < n_kv; i++) {
        const uint64_t    start = in.at();
        const std::string key   = in.text();
        const auto        type  = in.number<uint32_t>();
        const uint64_t    n     = skip_value(in, type);
        if (type == GGUF_TYPE_ARRAY && fitter::is_tokenizer_key(key)) {
            result.has_tokens = result.has_tokens || key == fitter::key_tokens;
            result.n_tokens   = key == fitter::key_tokens ? n : result.n_tokens;
            continue;
        }
        const uint64_t end = in.at();
        in.back(start);
        head.resize(head.size() + (end - start));
        in.copy(head.data() + head.size() - (end - start), end - start);
        kept++;
    }
    std::memcpy(head.data() + magic_and_version + counts / 2, &kept, sizeof(kept));
    result.stream.replaced = in.at();
    return result;
}

}  // namespace

void * fitter_skeleton_open(const char * path) {
    return fitter::guarded<void *>(nullptr, [&]() -> void * {
        fitter::file_reader file(path);
        skimmed             found = skim(file);

        fitter::tensor_shapes  shapes;
        const gguf_init_params params = {/*.no_alloc =*/true, /*.ctx =*/shapes.wanted()};
        gguf_context * gguf = gguf_init_from_callback(spliced::read, &found.stream, 0, found.stream.size(), params);
        shapes.keep_for(gguf);
        if (gguf == nullptr) {
            throw std::runtime_error("not a readable GGUF file");
        }
        fitter::strip(gguf, found.has_tokens, found.n_tokens);
        return gguf;
    });
}

bool fitter_tokenizer_entries(const char * path, fitter_columns_t * out) {
    return fitter::guarded(false, [&] {
        thread_local std::vector<int64_t> numbers;

        fitter::file_reader file(path);
        cursor              in(file);
        numbers.clear();
        for (int64_t n_left = skip_to_metadata(in); n_left > 0; n_left--) {
            const uint64_t    start = in.at();
            const std::string key   = in.text();
            skip_value(in, in.number<uint32_t>());
            if (key == fitter::key_architecture || fitter::is_tokenizer_key(key)) {
                numbers.push_back(static_cast<int64_t>(start));
                numbers.push_back(static_cast<int64_t>(in.at() - start));
            }
        }
        *out = {nullptr, 0, numbers.data(), numbers.size()};
        return true;
    });
}
