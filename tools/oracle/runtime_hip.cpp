// A HIP runtime without a GPU: what bindings/cuda_runtime/cudart.cpp is to CUDA, for ggml-cuda compiled for AMD's cards.
//
// Its devices are described in FITTER_CUDART_DEVICES, a compute capability being ggml's number of the architecture.

#include <hip/hip_runtime_api.h>
#include <hipblas/hipblas.h>

#include "cards.h"

namespace {

hipError_t reserve(void ** pointer, size_t size, int protection) {
    return reserved(pointer, size, protection) ? hipSuccess : hipErrorOutOfMemory;
}

hipError_t free_range(void * pointer) {
    release(pointer);
    return hipSuccess;
}

template <typename handle> hipError_t make_handle(handle * out) {
    make(out);
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
    const card & self         = cards()[static_cast<size_t>(device)];
    const int    architecture = self.capability & 0xffff;  // 0x1100 for gfx1100
    *properties       = {};
    std::snprintf(properties->name, sizeof(properties->name), "%s", self.name.c_str());
    std::snprintf(properties->gcnArchName, sizeof(properties->gcnArchName), "gfx%x", architecture);
    properties->totalGlobalMem      = self.total;
    properties->major               = architecture >> 8;
    properties->multiProcessorCount = 64;
    properties->sharedMemPerBlock   = architecture == 0x950 ? 160 << 10 : 64 << 10;
    properties->warpSize            = architecture < 0x1000 ? 64 : 32;
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

hipError_t hipFree(void * pointer) { return free_range(pointer); }

hipError_t hipHostMalloc(void ** pointer, size_t size, unsigned int) { return reserve(pointer, size, PROT_READ | PROT_WRITE); }

hipError_t hipHostFree(void * pointer) { return free_range(pointer); }

hipError_t hipMemset(void *, int, size_t) { return hipSuccess; }

hipError_t hipMemsetAsync(void *, int, size_t, hipStream_t) { return hipSuccess; }

hipError_t hipStreamCreateWithFlags(hipStream_t * stream, unsigned int) { return make_handle(stream); }

hipError_t hipStreamDestroy(hipStream_t) { return hipSuccess; }

hipError_t hipStreamSynchronize(hipStream_t) { return hipSuccess; }

hipError_t hipStreamWaitEvent(hipStream_t, hipEvent_t, unsigned int) { return hipSuccess; }

hipError_t hipDeviceSynchronize(void) { return hipSuccess; }

hipError_t hipEventCreateWithFlags(hipEvent_t * event, unsigned int) { return make_handle(event); }

hipError_t hipEventDestroy(hipEvent_t) { return hipSuccess; }

hipError_t hipEventRecord(hipEvent_t, hipStream_t) { return hipSuccess; }

hipError_t hipEventSynchronize(hipEvent_t) { return hipSuccess; }

hipblasStatus_t hipblasDestroy(hipblasHandle_t) { return HIPBLAS_STATUS_SUCCESS; }

// Which rocBLAS there is, is not told; before version 4 ggml-cuda has it begin early.
int rocblas_get_version_string_size(size_t *) { return 1; }

void rocblas_initialize(void) {}

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
