// Sets of ggml's types, for rules that say which of them an operation is computed with.

#pragma once

#include <cstdint>
#include <initializer_list>

#include "ggml.h"

namespace fitter {

class types {
   public:
    constexpr types(std::initializer_list<ggml_type> list) {
        for (const ggml_type type : list) {
            bits_ |= uint64_t{1} << type;
        }
    }

    constexpr types operator+(const types & other) const {
        types sum = *this;
        sum.bits_ |= other.bits_;
        return sum;
    }

    constexpr bool hold(ggml_type type) const { return (bits_ >> type & 1) != 0; }

   private:
    uint64_t bits_ = 0;
};

static_assert(GGML_TYPE_COUNT <= 64);

constexpr types f32{GGML_TYPE_F32};
constexpr types f32_f16{GGML_TYPE_F32, GGML_TYPE_F16};
constexpr types floats{GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16};

}  // namespace fitter
