// Tensor name patterns. llama.cpp reads them as std::regex in the default grammar and searches the name for a match.

#include <regex>

#include "fitter.h"
#include "guard.h"

void * fitter_regex_new(const char * pattern) {
    return fitter::guarded<void *>(nullptr, [&] { return new std::regex(pattern); });
}

void fitter_regex_free(void * regex) {
    fitter::guarded([&] { delete static_cast<std::regex *>(regex); });
}

int32_t fitter_regex_search(const void * regex, const char * text) {
    return fitter::guarded<int32_t>(-1, [&] {
        const std::string name(text);
        return std::regex_search(name, *static_cast<const std::regex *>(regex)) ? 1 : 0;
    });
}
