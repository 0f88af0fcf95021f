// A CUDA runtime, driver and cuBLAS without a GPU: just enough for ggml-cuda's host code to list devices, answer
// questions about them and plan on them. Nothing is launched and no memory is taken; whatever else is called ends the
// process with one line that names it.
//
// It stands in for the libraries that a libggml-cuda.so was linked to (profile "library"), and for those of the oracle in
// tools/oracle. It is made without CUDA's headers, since it must serve a library of any CUDA version.
//
// Its devices are described in FITTER_CUDART_DEVICES (cards.h).
// FITTER_CUDART_VERSION is the major version of the CUDA runtime that is asked for.

#include "cards.h"

#include <cstring>

#ifndef FITTER_CUDART_DEFAULT_VERSION
#define FITTER_CUDART_DEFAULT_VERSION 13
#endif

namespace {

enum status { success = 0, invalid_value = 1, memory_allocation = 2, no_device = 100, invalid_device = 101 };

// Where cudaDeviceProp has what ggml-cuda reads; the rest is left zero.
struct layout {
    size_t multiProcessorCount;
    size_t integrated;
    size_t pciBusID;
    size_t maxThreadsPerMultiProcessor;
    size_t sharedMemPerMultiprocessor;
    size_t regsPerMultiprocessor;
    size_t cooperativeLaunch;
    size_t sharedMemPerBlockOptin;
    size_t size;  // of the part that every minor version has
};

constexpr layout before_13 = {388, 396, 584, 624, 640, 648, 688, 696, 704};
constexpr layout since_13  = {384, 388, 568, 604, 624, 632, 668, 672, 680};

template <typename value> void put(void * properties, size_t offset, value what) {
    std::memcpy(static_cast<char *>(properties) + offset, &what, sizeof(what));
}

int fill_properties(void * properties, int device, const layout & where) {
    if (!is_card(device)) {
        return invalid_device;
    }
    const card & self = cards()[static_cast<size_t>(device)];
    std::memset(properties, 0, where.size);
    std::snprintf(static_cast<char *>(properties), 256, "%s", self.name.c_str());
    // These are where they have always been.
    put<size_t>(properties, 288, self.total);  // totalGlobalMem
    put<size_t>(properties, 296, 48 << 10);    // sharedMemPerBlock
    put<int>(properties, 304, 65536);          // regsPerBlock
    put<int>(properties, 308, 32);             // warpSize
    put<int>(properties, 320, 1024);           // maxThreadsPerBlock
    put<int>(properties, 360, self.capability / 100);
    put<int>(properties, 364, self.capability % 100 / 10);
    put<int>(properties, where.multiProcessorCount, 128);
    put<int>(properties, where.integrated, 0);
    put<int>(properties, where.pciBusID, device + 1);
    put<int>(properties, where.maxThreadsPerMultiProcessor, 1536);
    put<size_t>(properties, where.sharedMemPerMultiprocessor, 100 << 10);
    put<int>(properties, where.regsPerMultiprocessor, 65536);
    put<int>(properties, where.cooperativeLaunch, 1);
    put<size_t>(properties, where.sharedMemPerBlockOptin, 99 << 10);
    return success;
}

int reserve(void ** pointer, size_t size, int protection) {
    return reserved(pointer, size, protection) ? success : memory_allocation;
}

int free_range(void * pointer) {
    release(pointer);
    return success;
}

int make_handle(void ** out) {
    make(out);
    return success;
}

[[noreturn]] void trap(const char * name) {
    std::fprintf(stderr, "fitter: error: %s was called, but a virtual GPU computes nothing\n", name);
    std::abort();
}

}  // namespace

#pragma GCC visibility push(default)

extern "C" {

// ---- runtime: devices

int cudaGetDeviceCount(int * count) {
    *count = static_cast<int>(cards().size());
    return *count == 0 ? no_device : success;
}

int cudaGetDevice(int * device) {
    *device = current;
    return success;
}

int cudaSetDevice(int device) {
    if (!is_card(device)) {
        return invalid_device;
    }
    current = device;
    return success;
}

int cudaSetDeviceFlags(unsigned int) { return success; }

int cudaDeviceReset(void) { return success; }

// CUDA 12 calls it by this name, 11 and 13 by the one below.
int cudaGetDeviceProperties_v2(void * properties, int device) { return fill_properties(properties, device, before_13); }

int cudaGetDeviceProperties(void * properties, int device) {
    static const char * const version = std::getenv("FITTER_CUDART_VERSION");
    const int                 major   = version ? std::atoi(version) : FITTER_CUDART_DEFAULT_VERSION;
    return fill_properties(properties, device, major < 13 ? before_13 : since_13);
}

int cudaDeviceGetAttribute(int * value, int, int) {
    *value = 1;
    return success;
}

int cudaDeviceGetPCIBusId(char * out, int size, int device) {
    std::snprintf(out, static_cast<size_t>(size), "0000:%02x:00.0", device + 1);
    return success;
}

int cudaMemGetInfo(size_t * free, size_t * total) {
    if (!is_card(current)) {
        return no_device;
    }
    *free  = cards()[static_cast<size_t>(current)].free;
    *total = cards()[static_cast<size_t>(current)].total;
    return success;
}

int cudaDeviceCanAccessPeer(int * can, int, int) {
    *can = 0;
    return success;
}

int cudaDriverGetVersion(int * version) {
    *version = FITTER_CUDART_DEFAULT_VERSION * 1000;
    return success;
}

int cudaRuntimeGetVersion(int * version) { return cudaDriverGetVersion(version); }

// ---- runtime: errors

int cudaGetLastError(void) { return success; }

int cudaPeekAtLastError(void) { return success; }

const char * cudaGetErrorString(int error) {
    switch (error) {
        case memory_allocation: return "out of memory";
        case no_device: return "no CUDA-capable device is detected";
        case invalid_device: return "invalid device ordinal";
        default: return "unknown error";
    }
}

const char * cudaGetErrorName(int error) { return cudaGetErrorString(error); }

// ---- runtime: memory

int cudaMalloc(void ** pointer, size_t size) { return reserve(pointer, size, PROT_NONE); }

int cudaMallocManaged(void ** pointer, size_t size, unsigned int) { return reserve(pointer, size, PROT_NONE); }

int cudaFree(void * pointer) { return free_range(pointer); }

int cudaMallocHost(void ** pointer, size_t size) { return reserve(pointer, size, PROT_READ | PROT_WRITE); }

int cudaHostAlloc(void ** pointer, size_t size, unsigned int) { return cudaMallocHost(pointer, size); }

int cudaFreeHost(void * pointer) { return free_range(pointer); }

int cudaHostGetDevicePointer(void ** on_card, void * on_host, unsigned int) {
    *on_card = on_host;
    return success;
}

int cudaHostRegister(void *, size_t, unsigned int) { return success; }

int cudaHostUnregister(void *) { return success; }

// Its fourth argument was a device until CUDA 13 and is a structure since.
int cudaMemAdvise(const void *, size_t, int, ...) { return success; }

// A card keeps no data.
int cudaMemcpyAsync(void *, const void *, size_t, int, void *) { return success; }

int cudaMemcpy2DAsync(void *, size_t, const void *, size_t, size_t, size_t, int, void *) { return success; }

int cudaMemset(void *, int, size_t) { return success; }

int cudaMemsetAsync(void *, int, size_t, void *) { return success; }

// Not CUDA's: what a card holds.
size_t fitter_cudart_taken(int device) { return taken_of(device); }

// ---- runtime: streams and events

int cudaStreamCreate(void ** stream) { return make_handle(stream); }

int cudaStreamCreateWithFlags(void ** stream, unsigned int) { return make_handle(stream); }

int cudaStreamCreateWithPriority(void ** stream, unsigned int, int) { return make_handle(stream); }

int cudaStreamDestroy(void *) { return success; }

int cudaStreamSynchronize(void *) { return success; }

int cudaStreamWaitEvent(void *, void *, unsigned int) { return success; }

int cudaDeviceSynchronize(void) { return success; }

int cudaEventCreate(void ** event) { return make_handle(event); }

int cudaEventCreateWithFlags(void ** event, unsigned int) { return make_handle(event); }

int cudaEventDestroy(void *) { return success; }

int cudaEventRecord(void *, void *) { return success; }

int cudaEventSynchronize(void *) { return success; }

// ---- driver: asked whether it has virtual memory, for a pool that nothing is taken from

int cuDeviceGet(int * device, int ordinal) {
    *device = ordinal;
    return success;
}

int cuDeviceGetAttribute(int * value, int, int) {
    *value = 1;
    return success;
}

int cuMemGetAllocationGranularity(size_t * granularity, const void *, int) {
    *granularity = 2 << 20;
    return success;
}

int cuGetErrorString(int, const char ** text) {
    *text = "unknown error";
    return success;
}

// ---- cuBLAS and NCCL

int cublasDestroy_v2(void *) { return success; }

const char * cublasGetStatusString(int) { return "unknown error"; }

const char * ncclGetErrorString(int) { return "unknown error"; }

// ---- what code that holds kernels calls when it is loaded

void ** __cudaRegisterFatBinary(void *) {
    static void * handle = nullptr;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **) {}

void __cudaUnregisterFatBinary(void **) {}

char __cudaInitModule(void **) { return 1; }

// The arguments of these differ between versions, and none of them matters.
void __cudaRegisterFunction(...) {}

void __cudaRegisterVar(...) {}

void __cudaRegisterManagedVar(...) {}

void __cudaRegisterHostVar(...) {}

void __cudaRegisterUnifiedTable(...) {}

// ---- all else

#define FITTER_TRAP(name) \
    void name(void) { trap(#name); }
#include "cudart_traps.inc"

}  // extern "C"

#pragma GCC visibility pop
