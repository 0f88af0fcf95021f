// ggml-cuda's way of summing over devices (split mode tensor), set up with the context. It answers as on cards that cannot
// do it; what is used instead takes no memory of its own.

#include <cstddef>

struct ggml_cuda_ar_pipeline;

ggml_cuda_ar_pipeline * ggml_cuda_ar_pipeline_init(const int *, size_t) { return nullptr; }

void ggml_cuda_ar_pipeline_free(ggml_cuda_ar_pipeline *) {}
