// The cells of a KV cache, without their memory. llama.cpp keeps 52 bytes a token (48 in older builds) in host memory for
// them, and writes to all of them when it makes a cache, whether it allocates that or not. In a dummy load each cell stays
// as it was made, so that one small piece of memory can stand for all: its pages are mapped again and again over the
// addresses of the whole.
//
// This library has an operator new and an operator delete of its own. They are those of the whole process where it is opened
// before libllama, with its symbols for all; where another library's come first nothing is different from without it.

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>

#include "fitter.h"

namespace {

constexpr size_t page = 4096;

// The arrays of llama_kv_cells in the order in which they are resized, bytes per cell: pos, ext, shift and seq.
constexpr size_t kinds[] = {4, 12, 4, 32};
constexpr int    n_kinds = 4;

constexpr int    ext       = 1;
constexpr size_t older_ext = 8;  // until b10434, where cells know no tokens

// Starts with a cell wherever it is repeated: a multiple of every size of a cell, and of a page.
constexpr size_t window = 64 * page * 3;

constexpr uint64_t least_cells = 1 << 13;  // below that there is little to gain
constexpr size_t   most_pieces = 30000;    // the system lets a process have 65530 mappings
constexpr size_t   own_pieces  = 2000;     // of one array: a larger one has larger windows

struct range {
    size_t length;
    size_t pieces;
};

struct allocations {
    std::mutex               mutex  = {};
    std::map<void *, range>  ranges = {};
    size_t                   pieces = 0;
    int                      files[n_kinds] = {-1, -1, -1, -1};
    size_t                   sizes[n_kinds] = {};
};

// Never destroyed: what is allocated may be freed while the process ends.
allocations & state() {
    alignas(allocations) static char place[sizeof(allocations)];
    static allocations * instance = new (place) allocations;
    return *instance;
}

std::atomic<size_t> n_ranges{0};

thread_local uint64_t expected  = 0;      // cells of a cache, 0 where nothing is replaced
thread_local int      n_matched = 0;      // arrays of one cache that were allocated right before
thread_local bool     is_inside = false;  // what is allocated here is ordinary

// Arrays of the cache that was made last. Their pages are still known to be in memory, each as often as it is repeated.
thread_local void * recent[n_kinds]  = {};
thread_local size_t lengths[n_kinds] = {};

// To forget that changes nothing: what is written stays in the file.
void forget_recent() {
    for (int kind = 0; kind < n_kinds; kind++) {
        if (recent[kind] != nullptr) {
            madvise(recent[kind], lengths[kind], MADV_DONTNEED);
            recent[kind] = nullptr;
        }
    }
}

size_t padded(size_t size) { return (size + page - 1) / page * page; }

// Addresses that all mean the same window of memory; nullptr where the system does not want that.
void * repeated(int kind, size_t size) {
    allocations & all    = state();
    const size_t  length = padded(size);
    const size_t  span   = window * (length / window / own_pieces + 1);
    const size_t  pieces = (length + span - 1) / span;

    std::lock_guard<std::mutex> lock(all.mutex);
    if (all.pieces + pieces > most_pieces) {
        return nullptr;
    }
    int & file = all.files[kind];
    if (file < 0) {
        constexpr unsigned int close_on_exec = 1;
        file = static_cast<int>(syscall(SYS_memfd_create, "fitter-cells", close_on_exec));
    }
    if (file < 0 || (all.sizes[kind] < span && ftruncate(file, static_cast<off_t>(span)) != 0)) {
        return nullptr;
    }
    all.sizes[kind] = std::max(all.sizes[kind], span);
    void * base = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return nullptr;
    }
    for (size_t offset = 0; offset < length; offset += span) {
        const size_t part = std::min(span, length - offset);
        if (mmap(static_cast<char *>(base) + offset, part, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) ==
            MAP_FAILED) {
            munmap(base, length);
            return nullptr;
        }
    }
    all.ranges[base] = {length, pieces};
    all.pieces += pieces;
    n_ranges++;
    recent[kind]  = base;
    lengths[kind] = length;
    return base;
}

bool free_repeated(void * pointer) {
    if (n_ranges == 0 || reinterpret_cast<uintptr_t>(pointer) % page != 0) {
        return false;
    }
    allocations & all = state();

    std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.ranges.find(pointer);
    if (found == all.ranges.end()) {
        return false;
    }
    munmap(pointer, found->second.length);
    std::replace(std::begin(recent), std::end(recent), pointer, static_cast<void *>(nullptr));
    all.pieces -= found->second.pieces;
    is_inside = true;
    all.ranges.erase(found);
    is_inside = false;
    n_ranges--;
    return true;
}

// Memory for an array of cells, nullptr for anything else. An array is known by its size and by those before it, so the
// first one of a cache is always ordinary memory.
void * cells(size_t size) {
    const bool is_next = n_matched < n_kinds && (size == kinds[n_matched] * expected ||
                                                 (n_matched == ext && size == older_ext * expected));
    n_matched          = is_next ? n_matched + 1 : size == kinds[0] * expected ? 1 : 0;
    if (n_matched == 1) {
        forget_recent();
    }
    if (n_matched < 2) {
        return nullptr;
    }
    is_inside     = true;
    void * result = repeated(n_matched - 1, size);
    is_inside     = false;
    return result;
}

void * ordinary(size_t size) {
    while (true) {
        if (void * result = std::malloc(size == 0 ? 1 : size)) {
            return result;
        }
        const std::new_handler handler = std::get_new_handler();
        if (handler == nullptr) {
            throw std::bad_alloc();
        }
        handler();
    }
}

}  // namespace

void fitter_cells_begin(uint64_t n_cells) {
    expected  = n_cells < least_cells ? 0 : n_cells;
    n_matched = 0;
}

void fitter_cells_end(void) {
    expected = 0;
    forget_recent();
}

__attribute__((visibility("default"))) void * operator new(size_t size) {
    if (expected != 0 && !is_inside) {
        if (void * result = cells(size)) {
            return result;
        }
    }
    return ordinary(size);
}

__attribute__((visibility("default"))) void operator delete(void * pointer) noexcept {
    if (pointer != nullptr && (is_inside || !free_repeated(pointer))) {
        std::free(pointer);
    }
}

__attribute__((visibility("default"))) void operator delete(void * pointer, size_t) noexcept { operator delete(pointer); }
