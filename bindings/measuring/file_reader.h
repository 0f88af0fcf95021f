// Reading a header from its file in few, large pieces.

#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace fitter {

// A file read in large pieces. ggml asks for a few bytes at a time, millions of times for a large vocabulary.
class file_reader {
   public:
    explicit file_reader(const char * path) : fd(open(path, O_RDONLY | O_CLOEXEC)) {
        struct stat status = {};
        if (fd >= 0 && fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) {
            length = static_cast<uint64_t>(status.st_size);
        }
    }
    file_reader(const file_reader &)             = delete;
    file_reader & operator=(const file_reader &) = delete;
    ~file_reader() {
        if (fd >= 0) {
            close(fd);
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
        const ssize_t n = pread(fd, buffer.data(), buffer.size(), static_cast<off_t>(offset));
        start           = offset;
        filled          = n > 0 ? static_cast<size_t>(n) : 0;
        return filled > 0;
    }

    int               fd;
    uint64_t          length = 0;
    std::vector<char> buffer = std::vector<char>(piece);
    uint64_t          start  = 0;
    size_t            filled = 0;
};

}  // namespace fitter
