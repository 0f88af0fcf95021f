/* What ggml-cuda names of HIP and HIP headers of before 5.6 lack. Declared so that the code compiles; the oracle never computes. */

#pragma once

struct __hip_bfloat16 {
    unsigned short bits;

    __hip_bfloat16() = default;
    __host__ __device__ __hip_bfloat16(float);
    __host__ __device__ operator float() const;
};

struct __hip_bfloat162 {
    __hip_bfloat16 x;
    __hip_bfloat16 y;
};

__host__ __device__ __hip_bfloat16  __float2bfloat16(float);
__host__ __device__ __hip_bfloat162 __float22bfloat162_rn(float2);
__host__ __device__ float           __bfloat162float(__hip_bfloat16);
__host__ __device__ float2          __bfloat1622float2(__hip_bfloat162);

__host__ __device__ __hip_bfloat16  __low2bfloat16(__hip_bfloat162);
__host__ __device__ __hip_bfloat16  __high2bfloat16(__hip_bfloat162);

__device__ __half  __hmax(__half, __half);
__device__ __half2 __hmax2(__half2, __half2);

__device__ __half2 __shfl(__half2, int lane, int width = 32);
__device__ __half2 __shfl_up(__half2, unsigned int delta, int width = 32);
__device__ __half2 __shfl_xor(__half2, int mask, int width = 32);

__device__ int __isnanf(float);
__device__ int __isinff(float);

#define hipHostRegisterReadOnly 0x8

static inline hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event) {
    return hipStreamWaitEvent(stream, event, 0);
}
