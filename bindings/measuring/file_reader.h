// Reading a header from its file in few, large pieces.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "platform/platform.h"

namespace fitter {

// ggml makes room for every length in a header that the file has room for, which is too much in one of hundreds of GiB.
// As LONGEST of fitter/model/files/header_length.py.
constexpr uint64_t longest_header = 64 << 20;

// A file read in large pieces. ggml asks for a few bytes at a time, millions of times for a large vocabulary.
class file_reader {
   public:
    explicit file_reader(const char * path) : fd(platform::open_file(path)), length(fd >= 0 ? platform::length_of(fd) : 0) {}
    file_reader(const file_reader &)             = delete;
    file_reader & operator=(const file_reader &) = delete;
    ~file_reader() {
        if (fd >= 0) {
            platform::close_file(fd);
        }
    }

    // Bytes of the file; 0 where it is none that can be read this way.
    uint64_t size() const { return length; }

    static size_t read(void * self, void * output, uint64_t offset, size_t n) {
        return static_cast<file_reader *>(self)->read_at(static_cast<char *>(output), offset, n);
    }

   private:
    static constexpr size_t piece = 1 << 18;

    size_t read_at(char * output, uint64_t offset, size_t n) {
        size_t done = 0;
        while (done < n) {
            const uint64_t at = offset + done;
            if (at < start || at >= start + filled) {
                if (!fill(at)) {
                    break;
                }
            }
            const size_t skipped = static_cast<size_t>(at - start);
            const size_t count   = std::min(n - done, filled - skipped);
            std::memcpy(output + done, buffer.data() + skipped, count);
            done += count;
        }
        return done;
    }

    bool fill(uint64_t offset) {
        filled = platform::read_at(fd, buffer.data(), buffer.size(), offset);
        start  = offset;
        return filled > 0;
    }

    int               fd;
    uint64_t          length;
    std::vector<char> buffer = std::vector<char>(piece);
    uint64_t          start  = 0;
    size_t            filled = 0;
};

}  // namespace fitter
