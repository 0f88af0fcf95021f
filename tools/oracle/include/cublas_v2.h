/* What ggml-cuda names of cuBLAS, for a toolkit without it. Declared so that the host code compiles; the oracle never calls it. */

#pragma once

#include <cuda_runtime.h>
#include <library_types.h>

#define CUBLAS_VER_MAJOR 13
#define CUBLAS_VER_MINOR 0
#define CUBLASAPI

typedef struct cublasContext * cublasHandle_t;

typedef enum {
    CUBLAS_STATUS_SUCCESS          = 0,
    CUBLAS_STATUS_NOT_INITIALIZED  = 1,
    CUBLAS_STATUS_ALLOC_FAILED     = 3,
    CUBLAS_STATUS_INVALID_VALUE    = 7,
    CUBLAS_STATUS_ARCH_MISMATCH    = 8,
    CUBLAS_STATUS_MAPPING_ERROR    = 11,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_INTERNAL_ERROR   = 14,
    CUBLAS_STATUS_NOT_SUPPORTED    = 15,
} cublasStatus_t;

typedef enum { CUBLAS_OP_N, CUBLAS_OP_T } cublasOperation_t;
typedef enum { CUBLAS_DEFAULT_MATH, CUBLAS_TENSOR_OP_MATH, CUBLAS_TF32_TENSOR_OP_MATH = 3 } cublasMath_t;
typedef enum { CUBLAS_COMPUTE_16F = 64, CUBLAS_COMPUTE_32F = 68 } cublasComputeType_t;
typedef enum { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 } cublasGemmAlgo_t;
typedef enum { CUBLAS_SIDE_LEFT, CUBLAS_SIDE_RIGHT } cublasSideMode_t;
typedef enum { CUBLAS_FILL_MODE_LOWER, CUBLAS_FILL_MODE_UPPER } cublasFillMode_t;
typedef enum { CUBLAS_DIAG_NON_UNIT, CUBLAS_DIAG_UNIT } cublasDiagType_t;

#ifdef __cplusplus
extern "C" {
#endif

const char *   cublasGetStatusString(cublasStatus_t status);
cublasStatus_t cublasCreate_v2(cublasHandle_t * handle);
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle);
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void * workspace, size_t size);

cublasStatus_t cublasSgemm_v2(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                              const float * alpha, const float * A, int lda, const float * B, int ldb,
                              const float * beta, float * C, int ldc);
cublasStatus_t cublasSgemmBatched(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                  const float * alpha, const float * const A[], int lda, const float * const B[],
                                  int ldb, const float * beta, float * const C[], int ldc, int count);
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                         const float * alpha, const float * A, int lda, long long int stride_A,
                                         const float * B, int ldb, long long int stride_B, const float * beta,
                                         float * C, int ldc, long long int stride_C, int count);
cublasStatus_t cublasGemmEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                            const void * alpha, const void * A, cudaDataType A_type, int lda, const void * B,
                            cudaDataType B_type, int ldb, const void * beta, void * C, cudaDataType C_type, int ldc,
                            cublasComputeType_t, cublasGemmAlgo_t);
cublasStatus_t cublasGemmBatchedEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                   const void * alpha, const void * const A[], cudaDataType A_type, int lda,
                                   const void * const B[], cudaDataType B_type, int ldb, const void * beta,
                                   void * const C[], cudaDataType C_type, int ldc, int count, cublasComputeType_t,
                                   cublasGemmAlgo_t);
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                          const void * alpha, const void * A, cudaDataType A_type, int lda,
                                          long long int stride_A, const void * B, cudaDataType B_type, int ldb,
                                          long long int stride_B, const void * beta, void * C, cudaDataType C_type,
                                          int ldc, long long int stride_C, int count, cublasComputeType_t,
                                          cublasGemmAlgo_t);
cublasStatus_t cublasStrsmBatched(cublasHandle_t, cublasSideMode_t, cublasFillMode_t, cublasOperation_t,
                                  cublasDiagType_t, int m, int n, const float * alpha, const float * const A[],
                                  int lda, float * const B[], int ldb, int count);

#ifdef __cplusplus
}
#endif

#define cublasCreate       cublasCreate_v2
#define cublasDestroy      cublasDestroy_v2
#define cublasSetStream    cublasSetStream_v2
#define cublasSetWorkspace cublasSetWorkspace_v2
#define cublasSgemm        cublasSgemm_v2
