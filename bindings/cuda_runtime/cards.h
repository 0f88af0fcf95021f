// The cards of a runtime that has none, and what it hands out for memory, streams and events: the same for CUDA and, in
// tools/oracle, for HIP. Each is one library, so that all of this is its own.
//
// FITTER_CUDART_DEVICES describes the devices as FITTER_DEVICES does:
// name,profile,compute capability (major*100 + minor*10, or ggml's number of an AMD architecture),total bytes,free bytes,
// description; separated by semicolons.

#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace {

struct card {
    int         capability = 0;
    size_t      total      = 0;
    size_t      free       = 0;
    std::string name       = {};
};

card parse(const std::string & text) {
    std::stringstream fields(text);
    std::string       name, profile, capability, total, free, description;
    std::getline(fields, name, ',');
    std::getline(fields, profile, ',');
    std::getline(fields, capability, ',');
    std::getline(fields, total, ',');
    std::getline(fields, free, ',');
    std::getline(fields, description);
    return {std::stoi(capability), std::stoull(total), std::stoull(free), description};
}

std::vector<card> described() {
    std::vector<card> cards;
    const char *      text = std::getenv("FITTER_CUDART_DEVICES");
    std::stringstream devices(text ? text : "");
    for (std::string device; std::getline(devices, device, ';');) {
        try {
            cards.push_back(parse(device));
        } catch (const std::exception &) {
            std::fprintf(stderr,
                         "fitter: error: FITTER_CUDART_DEVICES: '%s' does not describe a device: write "
                         "name,profile,compute_capability,total_bytes,free_bytes,description\n",
                         device.c_str());
            std::exit(2);
        }
    }
    return cards;
}

const std::vector<card> & cards() {
    static const std::vector<card> all = described();
    return all;
}

thread_local int current = 0;

bool is_card(int device) { return device >= 0 && static_cast<size_t>(device) < cards().size(); }

// Address ranges by their start: sizes are needed to give them back. Those that code on the host cannot write to are a card's.
struct range {
    size_t size;
    int    device;
};

std::mutex                mutex;
std::map<void *, range> & ranges() {
    static auto * all = new std::map<void *, range>;
    return *all;
}

// Whether there was room for it.
bool reserved(void ** pointer, size_t size, int protection) {
    void * base = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return false;
    }
    std::lock_guard<std::mutex> lock(mutex);
    ranges()[base] = {size, protection == PROT_NONE ? current : -1};
    *pointer       = base;
    return true;
}

void release(void * pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto                  found = ranges().find(pointer);
    if (found != ranges().end()) {
        munmap(pointer, found->second.size);
        ranges().erase(found);
    }
}

// Bytes that a card holds, for who compares.
[[maybe_unused]] size_t taken_of(int device) {
    std::lock_guard<std::mutex> lock(mutex);
    size_t                      sum = 0;
    for (const auto & [base, held] : ranges()) {
        sum += held.device == device ? held.size : 0;
    }
    return sum;
}

// Streams and events only have to differ from nothing.
template <typename handle> void make(handle * out) {
    static uintptr_t next = 1;
    *out                  = reinterpret_cast<handle>(next++);
}

}  // namespace
