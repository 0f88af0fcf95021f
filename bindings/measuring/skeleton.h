// What a skeleton lacks of the header that it is made of.

#pragma once

#include <cstdint>
#include <string>

#include "gguf.h"

namespace fitter {

constexpr const char * key_architecture = "general.architecture";
constexpr const char * key_tokens       = "tokenizer.ggml.tokens";

// Whether only a tokenizer reads what is at the key, for all that an array may be.
bool is_tokenizer_key(const std::string & key);

// Removes what only a tokenizer reads, and writes down how many tokens there are, unless n_tokens is below 0.
void strip(gguf_context * gguf, int64_t n_tokens);

}  // namespace fitter
