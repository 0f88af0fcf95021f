// A CUDA runtime without a GPU: just enough for ggml-cuda's host code to list devices, answer questions about them and
// plan on them. Nothing is launched and no memory is taken; whatever else is called ends the process (see build.py).
//
// ORACLE_DEVICES describes the devices as FITTER_DEVICES does:
// name,profile,compute capability (major*100 + minor*10),total bytes,free bytes,description; separated by semicolons.

#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

std::vector<card> described() {
    std::vector<card> cards;
    const char *      text = std::getenv("ORACLE_DEVICES");
    std::stringstream devices(text ? text : "");
    for (std::string device; std::getline(devices, device, ';');) {
        std::stringstream fields(device);
        std::string       name, profile, capability, total, free, description;
        std::getline(fields, name, ',');
        std::getline(fields, profile, ',');
        std::getline(fields, capability, ',');
        std::getline(fields, total, ',');
        std::getline(fields, free, ',');
        std::getline(fields, description);
        if (description.empty()) {
            std::fprintf(stderr, "oracle: ORACLE_DEVICES: '%s' is no device\n", device.c_str());
            std::exit(2);
        }
        cards.push_back({std::stoi(capability), std::stoull(total), std::stoull(free), description});
    }
    return cards;
}

const std::vector<card> & cards() {
    static const std::vector<card> all = described();
    return all;
}

thread_local int current = 0;

bool is_card(int device) { return device >= 0 && static_cast<size_t>(device) < cards().size(); }

// Address ranges by their start: sizes are needed to give them back.
std::mutex                 mutex;
std::map<void *, size_t> & ranges() {
    static auto * all = new std::map<void *, size_t>;
    return *all;
}

cudaError_t reserve(void ** pointer, size_t size, int protection) {
    void * base = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return cudaErrorMemoryAllocation;
    }
    std::lock_guard<std::mutex> lock(mutex);
    ranges()[base] = size;
    *pointer       = base;
    return cudaSuccess;
}

cudaError_t release(void * pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto                  found = ranges().find(pointer);
    if (found != ranges().end()) {
        munmap(pointer, found->second);
        ranges().erase(found);
    }
    return cudaSuccess;
}

// Streams and events only have to differ from nothing.
template <typename handle> cudaError_t make(handle * out) {
    static uintptr_t next = 1;
    *out                  = reinterpret_cast<handle>(next++);
    return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int * count) {
    *count = static_cast<int>(cards().size());
    return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
}

cudaError_t cudaGetDevice(int * device) {
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (!is_card(device)) {
        return cudaErrorInvalidDevice;
    }
    current = device;
    return cudaSuccess;
}

cudaError_t cudaSetDeviceFlags(unsigned int) { return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp * properties, int device) {
    if (!is_card(device)) {
        return cudaErrorInvalidDevice;
    }
    const card & self = cards()[static_cast<size_t>(device)];
    *properties       = {};
    std::snprintf(properties->name, sizeof(properties->name), "%s", self.name.c_str());
    properties->totalGlobalMem          = self.total;
    properties->major                   = self.capability / 100;
    properties->minor                   = self.capability % 100 / 10;
    properties->multiProcessorCount     = 128;
    properties->sharedMemPerBlock       = 48 << 10;
    properties->sharedMemPerBlockOptin  = 99 << 10;
    properties->warpSize                = 32;
    properties->regsPerBlock            = 65536;
    properties->maxThreadsPerBlock      = 1024;
    properties->pciBusID                = device + 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int * value, cudaDeviceAttr, int) {
    *value = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char * out, int size, int device) {
    std::snprintf(out, static_cast<size_t>(size), "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t * free, size_t * total) {
    *free  = cards()[static_cast<size_t>(current)].free;
    *total = cards()[static_cast<size_t>(current)].total;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int * can, int, int) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void) { return cudaSuccess; }

const char * cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : error == cudaErrorNoDevice ? "no CUDA-capable device is detected" : "unknown error";
}

cudaError_t cudaMalloc(void ** pointer, size_t size) { return reserve(pointer, size, PROT_NONE); }

cudaError_t cudaFree(void * pointer) { return release(pointer); }

cudaError_t cudaMallocHost(void ** pointer, size_t size) { return reserve(pointer, size, PROT_READ | PROT_WRITE); }

cudaError_t cudaFreeHost(void * pointer) { return release(pointer); }

cudaError_t cudaMemset(void *, int, size_t) { return cudaSuccess; }

cudaError_t cudaMemsetAsync(void *, int, size_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t * stream, unsigned int) { return make(stream); }

cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int) { return cudaSuccess; }

cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t * event, unsigned int) { return make(event); }

cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

CUresult cuDeviceGet(CUdevice * device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int * value, CUdevice_attribute, CUdevice) {
    *value = 1;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t * granularity, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
    *granularity = 2 << 20;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char ** text) {
    *text = "unknown error";
    return CUDA_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t) { return CUBLAS_STATUS_SUCCESS; }

const char * cublasGetStatusString(cublasStatus_t) { return "unknown error"; }

// Kernels register themselves when the library is loaded.
void ** __cudaRegisterFatBinary(void *) {
    static void * handle = nullptr;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **) {}

void __cudaUnregisterFatBinary(void **) {}

void __cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {}

void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

}  // extern "C"

// ggml-cuda's way of summing over devices (split mode tensor), set up with the context. It answers as on cards that cannot
// do it; what is used instead takes no memory of its own.
struct ggml_cuda_ar_pipeline;

ggml_cuda_ar_pipeline * ggml_cuda_ar_pipeline_init(const int *, size_t) { return nullptr; }

void ggml_cuda_ar_pipeline_free(ggml_cuda_ar_pipeline *) {}
