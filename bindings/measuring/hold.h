// A load that waits, once its tokenizer is read, to be told where its tensors go.

#pragma once

namespace fitter {

// Waits where this thread's load is one that is held and text is the line after which llama.cpp places tensors.
void wait_if_held(const char * text);

}  // namespace fitter
