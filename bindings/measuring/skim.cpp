// A header as it is read for its skeleton: without the arrays of the tokenizer, which are most of it. ggml makes a string
// of each of their hundreds of thousands of elements; here they are stepped over.

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include "builds/symbols.h"
#include "measuring/file_reader.h"
#include "fitter.h"
#include "ggml.h"
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

// Steps through the first `most` bytes of a file, never past its end.
class cursor {
   public:
    explicit cursor(fitter::file_reader & file, uint64_t most = UINT64_MAX) : file(file), end(std::min(file.size(), most)) {}

    uint64_t at() const { return offset; }

    void skip(uint64_t n) {
        if (n > end - offset) {
            throw std::out_of_range("the header ends early");
        }
        offset += n;
    }

    void skip(uint64_t n, uint64_t size) {
        if (n > end / size) {
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
    uint64_t              end;
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

struct array {
    std::string key;
    gguf_type   type;  // of an element
    uint64_t    n;
    int64_t     entry;  // its place in the metadata
};

struct skimmed {
    spliced            stream;
    std::vector<array> left_out;
    int64_t            n_tensors = 0;

    int64_t n_tokens() const {
        for (const array & each : left_out) {
            if (each.key == fitter::key_tokens) {
                return static_cast<int64_t>(each.n);
            }
        }
        return -1;
    }
};

bool is_left_out(const array & found, uint64_t most_values) {
    return fitter::is_tokenizer_key(found.key) &&
           (found.type == GGUF_TYPE_STRING || found.n > most_values || found.key == fitter::key_tokens);
}

// Steps over an array's type, length and elements.
array skip_array(cursor & in) {
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
    return {"", static_cast<gguf_type>(type), n, 0};
}

// Steps over a value; returns what there is to know of an array.
array skip_value(cursor & in, uint32_t type) {
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
    return {};
}

constexpr size_t magic_and_version = 8, counts = 16;

struct numbers_of {
    int64_t tensors;
    int64_t entries;
};

// Steps to the first entry of the metadata.
numbers_of skip_to_metadata(cursor & in) {
    in.skip(4);
    const auto version   = in.number<uint32_t>();
    const auto n_tensors = in.number<int64_t>();
    const auto n_kv      = in.number<int64_t>();
    if (version < oldest_version || version > newest_version || n_kv < 0) {
        throw std::runtime_error("no header of a known version");
    }
    return {n_tensors, n_kv};
}

// Steps over the descriptions of tensors: name, dimensions, type, offset.
void skip_tensors(cursor & in, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        in.skip(in.number<uint64_t>());
        in.skip(in.number<uint32_t>(), sizeof(int64_t));
        in.skip(sizeof(uint32_t) + sizeof(uint64_t));
    }
}

// Everything up to the end of the metadata, without the tokenizer's arrays of strings or of more than `most_values` numbers.
skimmed skim(fitter::file_reader & file, cursor & in, uint64_t most_values) {
    skimmed            result{{file, {}, 0}, {}};
    std::vector<char> & head = result.stream.head;

    const auto [n_tensors, n_kv] = skip_to_metadata(in);
    result.n_tensors             = n_tensors;
    in.back(0);
    head.resize(magic_and_version + counts);
    in.copy(head.data(), head.size());

    std::unordered_set<std::string> keys;
    int64_t                         kept = 0;
    for (int64_t i = 0; i < n_kv; i++) {
        const uint64_t    start = in.at();
        const std::string key   = in.text();
        const auto        type  = in.number<uint32_t>();
        array             found = skip_value(in, type);
        found.key               = key;
        found.entry             = i;
        if (!keys.insert(key).second) {
            throw std::runtime_error("a key twice");
        }
        if (type == GGUF_TYPE_ARRAY && is_left_out(found, most_values)) {
            result.left_out.push_back(std::move(found));
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

gguf_context * open(skimmed & found, uint64_t most) {
    fitter::tensor_shapes  shapes;
    const gguf_init_params params = {/*.no_alloc =*/true, /*.ctx =*/shapes.wanted()};
    gguf_context *         gguf   = gguf_init_from_callback(spliced::read, &found.stream, 0, most, params);
    shapes.keep_for(gguf);
    if (gguf == nullptr) {
        throw std::runtime_error("not a readable GGUF file");
    }
    return gguf;
}

}  // namespace

void * fitter_skeleton_open(const char * path) {
    return fitter::guarded<void *>(nullptr, [&]() -> void * {
        fitter::file_reader file(path);
        cursor              in(file);
        skimmed             found = skim(file, in, 0);
        gguf_context *      gguf  = open(found, found.stream.size());
        fitter::strip(gguf, found.n_tokens());
        return gguf;
    });
}

void * fitter_gguf_skim(const char * path, uint64_t most_values, fitter_columns_t * arrays, uint64_t * data_offset) {
    return fitter::guarded<void *>(nullptr, [&]() -> void * {
        thread_local std::string          texts;
        thread_local std::vector<int64_t> numbers;

        fitter::file_reader file(path);
        cursor              in(file, fitter::longest_header);
        skimmed             found = skim(file, in, most_values);
        skip_tensors(in, found.n_tensors);
        gguf_context * gguf = open(found, std::min(found.stream.size(), fitter::longest_header));
        texts.clear();
        numbers.clear();
        for (const array & each : found.left_out) {
            texts.append(each.key).push_back('\0');
            texts.append(gguf_type_name(each.type)).push_back('\0');
            numbers.insert(numbers.end(), {each.entry, static_cast<int64_t>(each.n)});
        }
        *arrays = {texts.data(), texts.size(), numbers.data(), numbers.size()};
        // ggml aligns the end only if there is data
        *data_offset = found.n_tensors > 0 ? GGML_PAD(in.at(), static_cast<uint64_t>(gguf_get_alignment(gguf))) : in.at();
        return gguf;
    });
}

bool fitter_tokenizer_entries(const char * path, fitter_columns_t * out) {
    return fitter::guarded(false, [&] {
        thread_local std::vector<int64_t> numbers;

        fitter::file_reader file(path);
        cursor              in(file, fitter::longest_header);
        numbers.clear();
        for (int64_t n_left = skip_to_metadata(in).entries; n_left > 0; n_left--) {
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
