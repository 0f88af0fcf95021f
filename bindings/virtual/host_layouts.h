// The layouts that a processor has of its own for weights in host memory (llama.cpp's extra buffer types: AMX, KleidiAI,
// CPU_REPACK). They are those of the processor that asks, and some are of other sizes than the weights.

#pragma once

namespace fitter {

// Whether the loads from now on are those of a described machine: it has CPU_REPACK alone, whose sizes are those of the
// weights, whatever the processor here has.
void host_is_described(bool is_described);

}  // namespace fitter
