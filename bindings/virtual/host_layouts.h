// The layouts that a processor has of its own for weights in host memory (llama.cpp's extra buffer types: AMX, KleidiAI,
// CPU_REPACK). They are those of the processor that asks, and some are of other sizes than the weights. CPU_REPACK,
// whose sizes are those of the weights, is the common one.

#pragma once

namespace fitter {

// Whether the loads from now on are those of a described machine, which has the common layout alone.
void host_is_described(bool is_described);

// Whether this processor has other layouts than the common one.
bool has_own_layouts();

// Has every load of this process, real ones too, use the common layout alone from now on.
void leave_out_own_layouts();

}  // namespace fitter
