// A buffer type as the loaded build has it: version 3 of ggml's backend interface has two functions more in the middle of
// its struct. Its name and its allocation are in the same place in both, and may be read and replaced through ggml's header.

#pragma once

#include <cstddef>

#include "ggml-backend.h"

namespace fitter {

// What is the same in all versions. A function that is nullptr has ggml's own default.
struct buffer_type_functions {
    const char * (*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    size_t (*get_max_size)(ggml_backend_buffer_type_t);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const ggml_tensor *);
    bool (*is_host)(ggml_backend_buffer_type_t);
};

// A buffer type of our own. It must stay where it is: ggml keeps pointers to it.
class buffer_type {
  public:
    void set(const buffer_type_functions & functions, ggml_backend_dev_t device, void * context);
    void set_device(ggml_backend_dev_t device);

    ggml_backend_buffer_type_t get() { return reinterpret_cast<ggml_backend_buffer_type_t>(&memory_); }
    ggml_backend_dev_t         device();

  private:
    struct version_2 {
        buffer_type_functions functions;
        ggml_backend_dev_t    device;
        void *                context;
    };

    struct version_3 {
        decltype(buffer_type_functions::get_name)     get_name;
        decltype(buffer_type_functions::alloc_buffer) alloc_buffer;
        void *                                        alloc_buffer_n;
        decltype(buffer_type_functions::get_alignment)  get_alignment;
        decltype(buffer_type_functions::get_max_size)   get_max_size;
        decltype(buffer_type_functions::get_alloc_size) get_alloc_size;
        void *                                          get_alloc_size_n;
        decltype(buffer_type_functions::is_host)        is_host;
        ggml_backend_dev_t                              device;
        void *                                          context;
    };

    friend void * context_of(ggml_backend_buffer_type_t type);
    friend decltype(buffer_type_functions::get_alloc_size) & alloc_size_of(ggml_backend_buffer_type_t type);
    friend decltype(buffer_type_functions::get_max_size) & max_size_of(ggml_backend_buffer_type_t type);

    union {
        version_3 three;
        version_2 two;
    } memory_ = {};
};

// What set() was given.
void * context_of(ggml_backend_buffer_type_t type);

// Where any buffer type keeps its function for the size of a tensor and for that of a buffer, to be read and replaced.
decltype(buffer_type_functions::get_alloc_size) & alloc_size_of(ggml_backend_buffer_type_t type);
decltype(buffer_type_functions::get_max_size) &   max_size_of(ggml_backend_buffer_type_t type);

}  // namespace fitter
