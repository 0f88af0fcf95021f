// What each device takes of a model whose tensors are split over all of them (split mode tensor). llama.cpp's meta device
// stands for them, and reports what is one number for all.

#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "builds/buffer_type.h"
#include "ggml-backend.h"
#include "ggml.h"

namespace fitter {

// The devices behind a scheduler's meta device, in its order; none where it has no such device.
std::vector<ggml_backend_dev_t> split_devices(ggml_backend_sched_t sched);

// From begin to end, counts what is allocated in the default buffer types of ggml's devices for good: not the compute buffers
// of a meta device, whose buffer type is meta (nullptr where there is no model yet). What was counted belongs to owner, a model
// or a context: the bytes of each buffer.
void                split_watch_begin(ggml_backend_buffer_type_t meta);
void                split_watch_end(const void * owner);
std::vector<size_t> split_watched(const void * owner, ggml_backend_dev_t device);
bool                is_split_watched(const void * owner);

// Bytes that the devices' backend takes on each of them to add up what they have computed.
size_t sum_memory(std::vector<ggml_backend_dev_t> devices);

// Bytes that each device takes for sums of so many bytes at most where servers add them up, beside the room that ggml makes.
size_t sum_scratch(const std::vector<ggml_backend_dev_t> & devices, size_t largest);

// A copy that lives as long as the process; the same text is kept once.
const char * kept_text(const std::string & text);

// Bytes of one device.
struct split_size {
    size_t model   = 0;
    size_t context = 0;
};

// Writes down, as long as it lives, each tensor that the buffer type of a meta device over these devices is asked the size of.
class split_tensors {
  public:
    explicit split_tensors(const std::vector<ggml_backend_dev_t> & devices);
    ~split_tensors();
    split_tensors(const split_tensors &) = delete;
    split_tensors & operator=(const split_tensors &) = delete;

    // Has the meta device's buffer type place those that have only a buffer without memory, as it does for a load with
    // memory, and returns what it asks each device for. They are in its buffers from then on, as long as this lives.
    std::vector<split_size> sizes(ggml_backend_buffer_type_t meta);

    // Has the meta device split each operation of a graph that was just reserved, as it does before it computes. What it
    // cannot split is given up on. To be called after sizes().
    void check(ggml_cgraph * graph, ggml_backend_buffer_type_t meta);

    // Bytes of the largest sum over the devices in a graph that has these tensors: of a product with a weight of which each
    // device has some columns. To be called after sizes().
    size_t largest_sum(ggml_cgraph * graph) const;

  private:
    void place(const std::vector<const ggml_tensor *> & tensors, ggml_backend_buffer_type_t meta,
               ggml_backend_buffer_usage usage);
    // Those of a graph that have memory already, as recurrent states have.
    void place_allocated(ggml_cgraph * graph, ggml_backend_buffer_type_t meta);

    std::vector<ggml_backend_dev_t>                                    devices_;
    std::vector<std::pair<ggml_tensor *, ggml_backend_buffer_t>>       moved_;
    std::vector<ggml_backend_buffer_t>                                 buffers_;
    std::vector<std::pair<ggml_backend_buffer_type_t, decltype(buffer_type_functions::get_alloc_size)>> replaced_;
};

// As long as it lives, what ggml gives up on in this thread is thrown.
class throwing_aborts {
  public:
    throwing_aborts();
    ~throwing_aborts();
    throwing_aborts(const throwing_aborts &) = delete;
    throwing_aborts & operator=(const throwing_aborts &) = delete;

  private:
    ggml_abort_callback_t before_;
};

}  // namespace fitter
