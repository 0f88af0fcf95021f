/* What ggml-cuda names of hipBLAS, for a machine without it. Declared so that the host code compiles; the oracle never calls it. */

#pragma once

#include <hip/hip_runtime_api.h>

typedef void * hipblasHandle_t;

typedef enum {
    HIPBLAS_STATUS_SUCCESS,
    HIPBLAS_STATUS_NOT_INITIALIZED,
    HIPBLAS_STATUS_ALLOC_FAILED,
    HIPBLAS_STATUS_INVALID_VALUE,
    HIPBLAS_STATUS_MAPPING_ERROR,
    HIPBLAS_STATUS_EXECUTION_FAILED,
    HIPBLAS_STATUS_INTERNAL_ERROR,
    HIPBLAS_STATUS_NOT_SUPPORTED,
    HIPBLAS_STATUS_ARCH_MISMATCH,
} hipblasStatus_t;

typedef enum { HIPBLAS_OP_N = 111, HIPBLAS_OP_T = 112 } hipblasOperation_t;
typedef enum { HIPBLAS_SIDE_LEFT = 141, HIPBLAS_SIDE_RIGHT = 142 } hipblasSideMode_t;
typedef enum { HIPBLAS_FILL_MODE_UPPER = 121, HIPBLAS_FILL_MODE_LOWER = 122 } hipblasFillMode_t;
typedef enum { HIPBLAS_DIAG_NON_UNIT = 131, HIPBLAS_DIAG_UNIT = 132 } hipblasDiagType_t;
typedef enum { HIPBLAS_GEMM_DEFAULT = 160 } hipblasGemmAlgo_t;
typedef enum { HIPBLAS_R_16F = 150, HIPBLAS_R_32F = 151, HIPBLAS_R_16B = 168 } hipblasDatatype_t;

#ifdef __cplusplus
extern "C" {
#endif

hipblasStatus_t hipblasCreate(hipblasHandle_t * handle);
hipblasStatus_t hipblasDestroy(hipblasHandle_t handle);
hipblasStatus_t hipblasSetStream(hipblasHandle_t handle, hipStream_t stream);

hipblasStatus_t hipblasSgemm(hipblasHandle_t, hipblasOperation_t, hipblasOperation_t, int m, int n, int k,
                             const float * alpha, const float * A, int lda, const float * B, int ldb,
                             const float * beta, float * C, int ldc);
hipblasStatus_t hipblasSgemmBatched(hipblasHandle_t, hipblasOperation_t, hipblasOperation_t, int m, int n, int k,
                                    const float * alpha, const float * const A[], int lda, const float * const B[],
                                    int ldb, const float * beta, float * const C[], int ldc, int count);
hipblasStatus_t hipblasSgemmStridedBatched(hipblasHandle_t, hipblasOperation_t, hipblasOperation_t, int m, int n, int k,
                                           const float * alpha, const float * A, int lda, long long int stride_A,
                                           const float * B, int ldb, long long int stride_B, const float * beta,
                                           float * C, int ldc, long long int stride_C, int count);
hipblasStatus_t hipblasGemmEx(hipblasHandle_t, hipblasOperation_t, hipblasOperation_t, int m, int n, int k,
                              const void * alpha, const void * A, hipblasDatatype_t A_type, int lda, const void * B,
                              hipblasDatatype_t B_type, int ldb, const void * beta, void * C, hipblasDatatype_t C_type,
                              int ldc, hipblasDatatype_t compute_type, hipblasGemmAlgo_t);
hipblasStatus_t hipblasGemmBatchedEx(hipblasHandle_t, hipblasOperation_t, hipblasOperation_t, int m, int n, int k,
                                     const void * alpha, const void * A[], hipblasDatatype_t A_type, int lda,
                                     const void * B[], hipblasDatatype_t B_type, int ldb, const void * beta, void * C[],
                                     hipblasDatatype_t C_type, int ldc, int count, hipblasDatatype_t compute_type,
                                     hipblasGemmAlgo_t);
hipblasStatus_t hipblasGemmStridedBatchedEx(hipblasHandle_t, hipblasOperation_t, hipblasOperation_t, int m, int n,
                                            int k, const void * alpha, const void * A, hipblasDatatype_t A_type,
                                            int lda, long long int stride_A, const void * B, hipblasDatatype_t B_type,
                                            int ldb, long long int stride_B, const void * beta, void * C,
                                            hipblasDatatype_t C_type, int ldc, long long int stride_C, int count,
                                            hipblasDatatype_t compute_type, hipblasGemmAlgo_t);
hipblasStatus_t hipblasStrsmBatched(hipblasHandle_t, hipblasSideMode_t, hipblasFillMode_t, hipblasOperation_t,
                                    hipblasDiagType_t, int m, int n, const float * alpha, float * const A[], int lda,
                                    float * B[], int ldb, int count);

#ifdef __cplusplus
}
#endif
