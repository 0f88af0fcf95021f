// How fast a device computes and how far away it is, by computing on it. Zeros all over: no product cares.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "fitter.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "guard.h"

namespace {

constexpr ggml_type type      = GGML_TYPE_Q8_0;
constexpr int64_t   width     = 4096;
constexpr int64_t   batch     = 512;
constexpr int64_t   max_nodes = 1024;
constexpr int64_t   max_sent  = 8 << 20;  // less than what makes ggml-rpc send a hash first

// Less cannot be told from what else happens on a machine or on a network.
constexpr double telling = 0.008;

using clock_type = std::chrono::steady_clock;

double seconds_since(clock_type::time_point start) {
    return std::chrono::duration<double>(clock_type::now() - start).count();
}

struct context_deleter {
    void operator()(ggml_context * context) const { ggml_free(context); }
};
struct backend_deleter {
    void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
};
struct buffer_deleter {
    void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); }
};

using context_ptr = std::unique_ptr<ggml_context, context_deleter>;
using backend_ptr = std::unique_ptr<ggml_backend, backend_deleter>;
using buffer_ptr  = std::unique_ptr<ggml_backend_buffer, buffer_deleter>;

context_ptr new_context(size_t size) {
    context_ptr context(ggml_init({size, nullptr, true}));
    if (!context) {
        throw std::runtime_error("ggml has no memory for a context");
    }
    return context;
}

class bench {
  public:
    bench(ggml_backend_dev_t device, uint64_t memory, double limit) : start(clock_type::now()), limit(limit) {
        const size_t weight_size = ggml_row_size(type, width) * width;
        const size_t batch_size  = sizeof(float) * width * batch;
        if (memory < weight_size + 3 * batch_size) {
            throw std::runtime_error("there is too little free memory to measure with");
        }
        n_weights = std::min<int64_t>(16, (memory - 3 * batch_size) / weight_size);

        backend.reset(ggml_backend_dev_init(device, nullptr));
        if (!backend) {
            throw std::runtime_error("the device cannot be used");
        }
        ggml_backend_buffer_type_t buffer_type = ggml_backend_dev_buffer_type(device);
        // a batch more than there is, for what alignment takes
        buffer.reset(ggml_backend_buft_alloc_buffer(buffer_type, n_weights * weight_size + 3 * batch_size));
        if (!buffer) {
            throw std::runtime_error("the device has no memory to measure with");
        }
        ggml_backend_buffer_clear(buffer.get(), 0);

        context          = new_context(ggml_tensor_overhead() * (n_weights + 1));
        ggml_tallocr at  = ggml_tallocr_new(buffer.get());
        for (int64_t i = 0; i < n_weights; i++) {
            weights.push_back(place(at, ggml_new_tensor_2d(context.get(), type, width, width)));
        }
        input  = place(at, ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, width, batch));
        output = static_cast<char *>(ggml_backend_buffer_get_base(buffer.get())) + at.offset;
    }

    // Seconds there and back, the one in the middle.
    double round_trip() {
        synchronize();
        std::vector<double> times;
        const auto          begun = clock_type::now();
        while (times.size() < 3 || (times.size() < 21 && seconds_since(begun) < 0.05)) {
            times.push_back(timed([this] { synchronize(); }));
        }
        std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
        return times[times.size() / 2];
    }

    // Bytes per second from here to there.
    double link(double round_trip) {
        std::vector<uint8_t> data(max_sent);
        for (int64_t size = 64 << 10;; size *= 2) {
            const double seconds = std::min(send(data, size), send(data, size)) - round_trip;
            if (seconds > std::max(telling, round_trip) || size >= max_sent || is_over()) {
                return seconds > 0 ? size / seconds : 0;
            }
        }
    }

    // Bytes per second that products of weights with a single vector read.
    double bandwidth() {
        for (int64_t passes = 1;; passes *= 2) {
            const int64_t n_nodes = passes * n_weights;
            const double  seconds = difference(n_nodes, width, 1);
            if (seconds > telling || 2 * n_nodes > max_nodes || is_over()) {
                return seconds > 0 ? n_nodes * 0.875 * ggml_row_size(type, width) * width / seconds : 0;
            }
        }
    }

    // Floating-point operations per second of products with a batch.
    double compute() {
        int64_t rows = width / 8, n_nodes = 1;
        while (true) {
            const double seconds = difference(n_nodes, rows, batch);
            if (seconds > telling || n_nodes >= max_nodes / 8 || is_over()) {
                return seconds > 0 ? n_nodes * 0.875 * 2 * rows * width * batch / seconds : 0;
            }
            if (rows < width) {
                rows = width;
            } else {
                n_nodes *= 2;
            }
        }
    }

    bool is_over() const { return seconds_since(start) > limit; }

  private:
    ggml_tensor * place(ggml_tallocr & at, ggml_tensor * tensor) {
        if (ggml_tallocr_alloc(&at, tensor) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("the device has no place for a tensor");
        }
        return tensor;
    }

    template <typename Body> double timed(Body && body) {
        const auto begun = clock_type::now();
        body();
        return seconds_since(begun);
    }

    // Everything that was sent before is done when this is answered.
    void synchronize() {
        uint32_t answer;
        ggml_backend_tensor_get(input, &answer, 0, sizeof(answer));
    }

    double send(const std::vector<uint8_t> & data, int64_t size) {
        return timed([&] {
            ggml_backend_tensor_set(weights[0], data.data(), 0, static_cast<size_t>(size));
            synchronize();
        });
    }

    // Seconds that products of n_nodes weights of so many rows take longer than those of an eighth of the rows: messages,
    // and what a product costs whatever its size, are in both.
    double difference(int64_t n_nodes, int64_t rows, int64_t columns) {
        const double whole = product_seconds(n_nodes, rows, columns);
        return whole - product_seconds(n_nodes, rows / 8, columns);
    }

    double product_seconds(int64_t n_nodes, int64_t rows, int64_t columns) {
        const size_t  n_tensors = 3 * n_nodes + 1;
        context_ptr   own = new_context(ggml_tensor_overhead() * n_tensors + ggml_graph_overhead_custom(n_tensors, false));
        ggml_cgraph * graph = ggml_new_graph_custom(own.get(), n_tensors, false);
        ggml_tensor * right = view(own.get(), input, columns);
        for (int64_t i = 0; i < n_nodes; i++) {
            ggml_tensor * product = ggml_mul_mat(own.get(), view(own.get(), weights[i % n_weights], rows), right);
            // one place for all: nobody reads what is there
            if (ggml_backend_tensor_alloc(buffer.get(), product, output) != GGML_STATUS_SUCCESS) {
                throw std::runtime_error("the device has no place for a product");
            }
            ggml_build_forward_expand(graph, product);
        }
        double best = 0;
        // what is only done once is done the first time
        for (int i = 0; i < 3 && (i < 2 || !is_over()); i++) {
            const double seconds = timed([&] {
                if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
                    throw std::runtime_error("the device cannot compute a product");
                }
                synchronize();
            });
            best = i < 2 ? seconds : std::min(best, seconds);
        }
        return best;
    }

    ggml_tensor * view(ggml_context * in, ggml_tensor * tensor, int64_t rows) {
        ggml_tensor * made = ggml_view_2d(in, tensor, tensor->ne[0], rows, tensor->nb[1], 0);
        if (ggml_backend_view_init(made) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("the device has no view of a tensor");
        }
        return made;
    }

    clock_type::time_point     start;
    double                     limit;
    int64_t                    n_weights = 0;
    backend_ptr                backend;
    buffer_ptr                 buffer;
    context_ptr                context;
    std::vector<ggml_tensor *> weights;
    ggml_tensor *              input  = nullptr;
    void *                     output = nullptr;
};

}  // namespace

bool fitter_device_speed(void * device, uint64_t memory, double seconds, fitter_speed_t * out) {
    return fitter::guarded(false, [&] {
        bench measured(static_cast<ggml_backend_dev_t>(device), memory, seconds);
        *out            = {};
        out->round_trip = measured.round_trip();
        out->link       = measured.link(out->round_trip);
        out->bandwidth  = measured.bandwidth();
        out->compute    = measured.compute();
        return true;
    });
}
