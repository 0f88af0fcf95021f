// A HIP runtime without a GPU: what bindings/cuda_runtime/cudart.cpp is to CUDA, for ggml-cuda compiled for AMD's cards.
//
// FITTER_CUDART_DEVICES describes the devices as FITTER_DEVICES does; a compute capability is ggml's number of the architecture.

#include <hip/hip_runtime_api.h>
#include <hipblas/hipblas.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace {

struct card {
    int         architecture = 0;  // 0x1100 for gfx1100
    size_t      total        = 0;
    size_t      free         = 0;
    std::string name         = {};
};

std::vector<card> described() {
    std::vector<card> cards;
    const char *      text = std::getenv("FITTER_CUDART_DEVICES");
    std::stringstream devices(text ? text : "");
    for (std::string device; std::getline(devices, device, ';');) {
        std::stringstream fields(device);
        std::string       name, profile, number, total, free, description;
        std::getline(fields, name, ',');
        std::getline(fields, profile, ',');
        std::getline(fields, number, ',');
        std::getline(fields, total, ',');
        std::getline(fields, free, ',');
        std::getline(fields, description);
        if (description.empty()) {
            std::fprintf(stderr, "oracle: FITTER_CUDART_DEVICES: '%s' is no device\n", device.c_str());
            std::exit(2);
        }
        cards.push_back({std::stoi(number) & 0xffff, std::stoull(total), std::stoull(free), description});
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

hipError_t reserve(void ** pointer, size_t size, int protection) {
    void * base = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return hipErrorOutOfMemory;
    }
    std::lock_guard<std::mutex> lock(mutex);
    ranges()[base] = size;
    *pointer       = base;
    return hipSuccess;
}

hipError_t release(void * pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto                  found = ranges().find(pointer);
    if (found != ranges().end()) {
        munmap(pointer, found->second);
        ranges().erase(found);
    }
    return hipSuccess;
}

// Streams and events only have to differ from nothing.
template <typename handle> hipError_t make(handle * out) {
    static uintptr_t next = 1;
    *out                  = reinterpret_cast<handle>(next++);
    return hipSuccess;
}

}  // namespace

extern "C" {

hipError_t hipGetDeviceCount(int * count) {
    *count = static_cast<int>(cards().size());
    return *count == 0 ? hipErrorNoDevice : hipSuccess;
}

hipError_t hipGetDevice(int * device) {
    *device = current;
    return hipSuccess;
}

hipError_t hipSetDevice(int device) {
    if (!is_card(device)) {
        return hipErrorInvalidDevice;
    }
    current = device;
    return hipSuccess;
}

hipError_t hipGetDeviceProperties(hipDeviceProp_t * properties, int device) {
    if (!is_card(device)) {
        return hipErrorInvalidDevice;
    }
    const card & self = cards()[static_cast<size_t>(device)];
    *properties       = {};
    std::snprintf(properties->name, sizeof(properties->name), "%s", self.name.c_str());
    std::snprintf(properties->gcnArchName, sizeof(properties->gcnArchName), "gfx%x", self.architecture);
    properties->totalGlobalMem      = self.total;
    properties->major               = self.architecture >> 8;
    properties->multiProcessorCount = 64;
    properties->sharedMemPerBlock   = self.architecture == 0x950 ? 160 << 10 : 64 << 10;
    properties->warpSize            = self.architecture < 0x1000 ? 64 : 32;
    properties->regsPerBlock        = 65536;
    properties->maxThreadsPerBlock  = 1024;
    properties->pciBusID            = device + 1;
    return hipSuccess;
}

hipError_t hipDeviceGetAttribute(int * value, hipDeviceAttribute_t, int) {
    *value = 1;
    return hipSuccess;
}

hipError_t hipDeviceGetPCIBusId(char * out, int size, int device) {
    std::snprintf(out, static_cast<size_t>(size), "0000:%02x:00.0", device + 1);
    return hipSuccess;
}

hipError_t hipMemGetInfo(size_t * free, size_t * total) {
    *free  = cards()[static_cast<size_t>(current)].free;
    *total = cards()[static_cast<size_t>(current)].total;
    return hipSuccess;
}

hipError_t hipDeviceCanAccessPeer(int * can, int, int) {
    *can = 0;
    return hipSuccess;
}

hipError_t hipGetLastError(void) { return hipSuccess; }

const char * hipGetErrorString(hipError_t error) {
    return error == hipErrorOutOfMemory ? "out of memory" : error == hipErrorNoDevice ? "no ROCm-capable device is detected" : "unknown error";
}

hipError_t hipMalloc(void ** pointer, size_t size) { return reserve(pointer, size, PROT_NONE); }

hipError_t hipFree(void * pointer) { return release(pointer); }

hipError_t hipHostMalloc(void ** pointer, size_t size, unsigned int) { return reserve(pointer, size, PROT_READ | PROT_WRITE); }

hipError_t hipHostFree(void * pointer) { return release(pointer); }

hipError_t hipMemset(void *, int, size_t) { return hipSuccess; }

hipError_t hipMemsetAsync(void *, int, size_t, hipStream_t) { return hipSuccess; }

hipError_t hipStreamCreateWithFlags(hipStream_t * stream, unsigned int) { return make(stream); }

hipError_t hipStreamDestroy(hipStream_t) { return hipSuccess; }

hipError_t hipStreamSynchronize(hipStream_t) { return hipSuccess; }

hipError_t hipStreamWaitEvent(hipStream_t, hipEvent_t, unsigned int) { return hipSuccess; }

hipError_t hipDeviceSynchronize(void) { return hipSuccess; }

hipError_t hipEventCreateWithFlags(hipEvent_t * event, unsigned int) { return make(event); }

hipError_t hipEventDestroy(hipEvent_t) { return hipSuccess; }

hipError_t hipEventRecord(hipEvent_t, hipStream_t) { return hipSuccess; }

hipError_t hipEventSynchronize(hipEvent_t) { return hipSuccess; }

hipblasStatus_t hipblasDestroy(hipblasHandle_t) { return HIPBLAS_STATUS_SUCCESS; }

// Kernels register themselves when the library is loaded.
void ** __hipRegisterFatBinary(const void *) {
    static void * handle = nullptr;
    return &handle;
}

void __hipUnregisterFatBinary(void **) {}

void __hipRegisterFunction(void **, const void *, char *, const char *, unsigned int, void *, void *, void *, void *, int *) {}

void __hipRegisterVar(void **, void *, char *, char *, int, size_t, int, int) {}

}  // extern "C"

// ggml-cuda's way of summing over devices (split mode tensor), which its HIP build answers just like this.
struct ggml_cuda_ar_pipeline;

ggml_cuda_ar_pipeline * ggml_cuda_ar_pipeline_init(const int *, size_t) { return nullptr; }

void ggml_cuda_ar_pipeline_free(ggml_cuda_ar_pipeline *) {}
